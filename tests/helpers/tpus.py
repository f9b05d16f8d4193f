"""What tests of programs for a TPU need: libtpu, said by name where it is not here."""

import pytest

from precaudit.interpreters.tpu.target import EXTRA, compile_for, libtpu_version, parse_target

needs_libtpu = pytest.mark.skipif(libtpu_version() is None, reason=f"needs libtpu: {EXTRA}")


def text_for(function, *args, topology="v5e:2x2", donated=()):
    """Return the optimised HLO of a function of arrays of these shapes and formats, on one chip of a topology."""
    return compile_for(parse_target(topology), function, args, donated).text
