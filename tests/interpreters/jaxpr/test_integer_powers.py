"""Integer powers of narrow formats: squares, each rounded, and one over them, as XLA:CPU makes them bit for bit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precaudit.interpreters.jaxpr.expanded import EXPANDED
from precaudit.interpreters.jaxpr.rounding import round_once
from precaudit.interpreters.jaxpr.wide import up


@pytest.mark.parametrize("y", [-4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_integer_powers_are_rounded_squares(dtype, y):
    x = jnp.asarray(np.random.default_rng(y + 4).uniform(0.6, 1.7, 4096), dtype)
    made = np.asarray(jax.jit(lambda x: jax.lax.integer_pow(x, y))(x), np.float64)
    with jax.enable_x64(True):
        stored = partial(round_once, dtype=x.dtype)
        found = stored(EXPANDED["integer_pow"](up(x), {"y": y}, stored))
    assert np.asarray(found).tolist() == made.tolist()
