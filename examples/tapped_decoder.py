"""A decoder in plain JAX with two taps of its own: they are points beside the automatic ones (--taps own: alone).

precaudit trace examples/tapped_decoder.py:program -o runs/tapped && precaudit compare runs/tapped
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from precaudit import Program

LAYERS, WIDTH, HEADS, HEAD, HIDDEN, VOCAB, TOKENS = 2, 32, 4, 8, 64, 128, 12


def norm(x, weight):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype) * weight


def rotate(x):
    speed = 10000.0 ** (-jnp.arange(HEAD // 2, dtype=jnp.float32) / (HEAD // 2))
    angle = jnp.arange(x.shape[0], dtype=jnp.float32)[:, None, None] * speed
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def block(x, w):
    normed = norm(x, w["norm"])
    query, key, value = (jnp.reshape(normed @ w[name], (-1, HEADS, HEAD)) for name in ("query", "key", "value"))
    scores = jnp.einsum("thk,shk->hts", rotate(query), rotate(key), preferred_element_type=jnp.float32) * HEAD**-0.5
    seen = jnp.tril(jnp.ones(scores.shape[1:], bool))
    probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(x.dtype)
    attended = checkpoint_name(jnp.einsum("hts,shk->thk", probs, value), "attended")
    middle = x + attended.reshape(x.shape) @ w["out"]
    second = norm(middle, w["second"])
    act = jax.nn.silu(second @ w["gate"]) * (second @ w["up"])
    return checkpoint_name(middle + act @ w["down"], "stream"), None


def decoder(params, tokens):
    x, _ = jax.lax.scan(block, params["embed"][tokens], params["layers"])
    return jnp.dot(x, params["embed"].T, preferred_element_type=jnp.float32)


def drawn(*shape, around=0.0):
    values = DRAW.standard_normal(shape) / (np.sqrt(shape[-2]) if not around else 10)
    return jnp.asarray(around + values, jnp.bfloat16)


DRAW = np.random.default_rng(0)
SHAPES = {"query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH), "value": (WIDTH, WIDTH), "out": (WIDTH, WIDTH),
          "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}  # fmt: skip
layers = {name: drawn(LAYERS, *shape) for name, shape in SHAPES.items()}
layers |= {name: drawn(LAYERS, WIDTH, around=1.0) for name in ("norm", "second")}
program = Program(
    call=decoder,
    params={"embed": drawn(VOCAB, WIDTH), "layers": layers},
    cases={"a": (jnp.asarray(DRAW.integers(0, VOCAB, TOKENS), jnp.int32),)},
    outputs="logits",
)
