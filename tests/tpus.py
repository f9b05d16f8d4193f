"""What tests of programs for a TPU need: libtpu, said by name where it is not here."""

import pytest

from precaudit.tpu.target import EXTRA, libtpu_version

needs_libtpu = pytest.mark.skipif(libtpu_version() is None, reason=f"needs libtpu: {EXTRA}")
