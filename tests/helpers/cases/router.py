"""A mixture of two experts of eight: routing by probabilities that a cast rounds turns one near tie."""

import jax
import jax.numpy as jnp
import numpy as np

ARGNUMS = ()
ROWS, WIDTH, EXPERTS = 16, 32, 8


def choose(p):
    weights, chosen = jax.lax.top_k(p, 2)
    return weights.astype(jnp.float32), chosen


def mixed(x, w, weights, chosen):
    y = jnp.einsum("td,tkdf->tkf", x, w[chosen])
    y = y.astype(jnp.bfloat16).astype(jnp.float32)
    return (y * (weights / weights.sum(-1, keepdims=True))[..., None]).sum(1)


def kernel(x, r, w):
    p = jax.nn.softmax(x @ r, -1)
    p = p.astype(jnp.bfloat16)
    return mixed(x, w, *choose(p))


def reference(x, r, w):
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ r, -1), 2)
    y = jnp.einsum("td,tkdf->tkf", x, w[chosen])
    return (y * (weights / weights.sum(-1, keepdims=True))[..., None]).sum(1)


def inputs(seed):
    random = np.random.default_rng(seed)
    x = random.standard_normal((ROWS, WIDTH))
    r, w = random.standard_normal((WIDTH, EXPERTS)) / 6, random.standard_normal((EXPERTS, WIDTH, WIDTH)) / 6
    logits = np.sort(x @ r, -1)
    t = int(np.argmin(logits[:, -2] - logits[:, -3]))  # its second and third expert are made a near tie
    low, high = sorted(np.argsort(x[t] @ r)[-3:-1])
    r[:, high] += x[t] / (x[t] @ x[t]) * (x[t] @ (r[:, low] - r[:, high]) + 3e-4)
    return jnp.float32(x), jnp.float32(r), jnp.float32(w)
