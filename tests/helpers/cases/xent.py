"""Streaming softmax cross-entropy over vocabulary tiles.

hidden [T,D] bf16, head [D,V] bf16, labels [T]. Forward streams logits of tiles; backward recomputes them.
"""

import jax
import jax.numpy as jnp
import numpy as np

TILE = 128
ARGNUMS = (0, 1)


def _tile_logits(h, w, acc):
    return jnp.dot(h, w, preferred_element_type=acc)


def make(fwd_acc):
    @jax.custom_vjp
    def loss(h, w, y):
        return fwd(h, w, y)[0]

    def fwd(h, w, y):
        t, v = h.shape[0], w.shape[1]
        m = jnp.full((t,), -jnp.inf, jnp.float32)
        s = jnp.zeros((t,), jnp.float32)
        gold = jnp.zeros((t,), jnp.float32)
        for k in range(0, v, TILE):
            wt = w[:, k : k + TILE]
            z = _tile_logits(h, wt, fwd_acc).astype(jnp.float32)
            m2 = jnp.maximum(m, z.max(-1))
            s = s * jnp.exp(m - m2) + jnp.exp(z - m2[:, None]).sum(-1)
            m = m2
            hit = y[:, None] == (k + jnp.arange(wt.shape[1]))[None]
            gold = gold + jnp.where(hit, z, 0.0).sum(-1)
        lse = m + jnp.log(s)
        return jnp.mean(lse - gold), (h, w, y, lse)

    def bwd(res, g):
        h, w, y, lse = res
        t, v = h.shape[0], w.shape[1]
        dh = jnp.zeros(h.shape, jnp.float32)
        dws = []
        for k in range(0, v, TILE):
            wt = w[:, k : k + TILE]
            z = _tile_logits(h, wt, jnp.float32)
            p = jnp.exp(z - lse[:, None])
            hit = y[:, None] == (k + jnp.arange(wt.shape[1]))[None]
            dz = (p - hit) * (g / t)
            dh = dh + jnp.dot(dz, wt.astype(jnp.float32).T)
            dws.append(jnp.dot(h.astype(jnp.float32).T, dz))
        return dh.astype(h.dtype), jnp.concatenate(dws, 1).astype(w.dtype), None

    loss.defvjp(fwd, bwd)
    return loss


buggy = make(None)  # no preferred_element_type: bf16 inputs -> bf16 logits
fixed = make(jnp.float32)


def reference(h, w, y):
    z = jnp.dot(h, w, preferred_element_type=jnp.float32)
    lp = jax.nn.log_softmax(z.astype(jnp.float32), axis=-1)
    return -jnp.mean(jnp.take_along_axis(lp, y[:, None], axis=-1)[:, 0])


def _inputs(seed, scale, dtype=jnp.bfloat16):
    r = np.random.default_rng(seed)
    t, d, v = 16, 64, 512
    h = jnp.asarray(r.standard_normal((t, d)) * scale, dtype)
    w = jnp.asarray(r.standard_normal((d, v)) / np.sqrt(d), dtype)
    return h, w, jnp.asarray(r.integers(0, v, t), jnp.int32)


def inputs(seed, dtype=jnp.bfloat16):
    return _inputs(seed, 30.0, dtype)


def small(seed, dtype=jnp.bfloat16):
    return _inputs(seed, 1.0, dtype)
