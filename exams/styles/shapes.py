"""Sizes, weights and operations that these programs share."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BF = jnp.bfloat16
T, D, H, K = 24, 64, 4, 16  # tokens, width, heads, a head's width


def seed_weights(seed):
    """Return a generator and what makes weights of it: a theme's values do not depend on the themes before it."""
    draw = np.random.default_rng(seed)

    def weight(*shape, scale=None, dt=BF):
        """Return normal numbers; by default as large as keeps a product's variance."""
        return jnp.asarray(draw.normal(size=shape) * (scale if scale is not None else shape[0] ** -0.5), dt)

    return draw, weight


DRAW, weight = seed_weights(7)


def rms_norm(x, g, eps=1e-6):
    """Return a root-mean-square norm, in float32 inside."""
    f = x.astype(jnp.float32)
    return (f * lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + eps)).astype(x.dtype) * g


def attend(q, k, v, seen):
    """Return what a row's heads [H, K] read of keys and values [S, H, K]."""
    s = jnp.einsum("hk,shk->hs", q, k, preferred_element_type=jnp.float32) * K**-0.5
    return jnp.einsum("hs,shk->hk", jax.nn.softmax(jnp.where(seen, s, -jnp.inf)).astype(BF), v)


X = weight(T, D, scale=1.0)
SQUARE = {n: weight(D, D) for n in "abcgkmnoqvw"}
