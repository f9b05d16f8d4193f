"""Honest float32: dz = softmax by exp(z - lse) of large logits, times weights."""

import jax.numpy as jnp
import numpy as np

from precaudit import Program


def step(w, h, y):
    z = jnp.dot(h, w)
    top = z.max(-1, keepdims=True)
    lse = top[:, 0] + jnp.log(jnp.exp(z - top).sum(-1))
    p = jnp.exp(z - lse[:, None])
    dz = (p - (y[:, None] == jnp.arange(z.shape[1]))) / len(h)
    return jnp.dot(dz, w.T)


def program_of(seed):
    r = np.random.default_rng(seed)
    h = jnp.asarray(r.standard_normal((16, 64)) * 30, jnp.float32)
    w = jnp.asarray(r.standard_normal((64, 512)) / 8, jnp.float32)
    return Program(call=step, params=w, cases={"a": (h, jnp.asarray(r.integers(0, 512, 16), jnp.int32))})


def _unused():
    pass


p0, p1, p2, p3, p4, p5 = map(program_of, range(6))
