"""A softmax that has no FP64 meaning, and the one that is meant."""

import jax
import jax.numpy as jnp
import numpy as np


def opaque_softmax(s, mask, a):
    """A softmax only a callback knows."""
    shape = jax.ShapeDtypeStruct(s.shape, s.dtype)
    return jax.pure_callback(lambda x, m: np.asarray(in_callback(x, m), s.dtype), shape, s, mask).astype(a.probs)


def in_callback(x, m):
    x = np.where(m, np.asarray(x, np.float32), -np.inf)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def lifted_softmax(x, m):
    return jax.nn.softmax(jnp.where(m, x, -jnp.inf), axis=-1)
