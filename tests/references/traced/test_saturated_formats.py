"""Values scaled to all of a format's range, as a tensor's largest element is 448 in float8: nothing overflows."""

import jax.numpy as jnp
import numpy as np
import pytest

import precaudit


def scaled(x):
    """The sum of what is scaled by its largest size to float8."""
    q = (x / jnp.max(jnp.abs(x)) * 448).astype(jnp.float8_e4m3fn)
    return jnp.sum(q.astype(jnp.float32))


def clipped(x):
    """The sum of what is clipped to float16."""
    return jnp.sum(jnp.clip(x * 60000, -65504, 65504).astype(jnp.float16).astype(jnp.float32))


@pytest.mark.parametrize("program", [scaled, clipped])
def test_it_passes(program):
    precaudit.assert_explained(program, jnp.asarray(np.random.default_rng(7).standard_normal((24, 64)), jnp.float32))
