"""A rounding that a program writes out and reads back, which XLA:CPU keeps beside sums that it hands on unrounded."""

import jax
import jax.numpy as jnp
import pytest

import precaudit
from precaudit.interpreters.jaxpr.realisations import converts_twice


def rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def residual(w, x):
    """Read a sum in float32, then what was rounded to bfloat16 on purpose."""
    return rounded((x @ w + x).astype(jnp.float32) * 3) ** 2


def norm(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def gradient(w, x):
    return jax.grad(lambda w: jnp.mean(norm(x + x @ w).astype(jnp.float32) ** 3))(w)


@pytest.fixture(scope="module")
def operands():
    keys = jax.random.split(jax.random.key(0))
    w, x = (jax.random.normal(key, shape) for key, shape in zip(keys, ((64, 64), (24, 64)), strict=True))
    return (w / 8).astype(jnp.bfloat16), x.astype(jnp.bfloat16)


@pytest.mark.parametrize("program", [residual, gradient])
def test_it_passes(program, operands):
    assert converts_twice(jax.make_jaxpr(program)(*operands).jaxpr)
    precaudit.assert_explained(program, *operands)


def test_one_conversion_is_not_two():
    assert not converts_twice(
        jax.make_jaxpr(lambda x: (x + x).astype(jnp.float32) ** 2)(jnp.ones(3, jnp.bfloat16)).jaxpr
    )
    assert not converts_twice(jax.make_jaxpr(lambda x: (x * 2).astype(jnp.bfloat16))(jnp.ones(3)).jaxpr)
