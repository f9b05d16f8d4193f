"""Strict JAX, and what several test files share."""

from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")

FIXTURES = Path(__file__).parent.parent / "refs" / "fixtures"


@pytest.fixture(autouse=True, scope="session")
def _own_caches(tmp_path_factory):
    """Keep references out of the working folder."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PRECAUDIT_REFS", str(tmp_path_factory.mktemp("refs")))
    yield
    patch.undo()
