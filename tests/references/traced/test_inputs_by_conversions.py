"""A recorded value that is read rounded, and where it is converted to a wider format as it was before."""

import jax
import jax.numpy as jnp
import pytest

import precaudit


def attention(q, k, v):
    """Divide after the product, with a maximum that has a gradient, as MaxText does."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, jnp.asarray(-1e30, scores.dtype))
    probs = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", probs, v) / jnp.moveaxis(jnp.sum(probs, -1, keepdims=True), 1, 2)


def loss(q, k, v, g):
    return jnp.sum((attention(q, k, v) * g).astype(jnp.float32))


@pytest.mark.turn  # 5 s
def test_the_gradient_of_a_softmax_passes():
    """Its exponentials are summed in float32 as they are made, and stored rounded for their product."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, g = (jax.random.normal(key, (2, 32, 4, 16)).astype(jnp.bfloat16) for key in keys)
    precaudit.assert_explained(jax.grad(loss, (0, 1, 2)), q * jnp.bfloat16(0.3), k, v, g)
