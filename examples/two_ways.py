"""A decoder written twice, all rows at once and row by row with a cache: are they one formula.

precaudit same examples/two_ways.py:full examples/two_ways.py:cached
precaudit same examples/two_ways.py:full examples/two_ways.py:late
"""

import jax
import jax.numpy as jnp
from jax import lax

from precaudit import Program

WIDTH, HEADS, HEAD, HIDDEN, VOCAB, LAYERS, ROWS, SLOTS = 64, 4, 16, 128, 256, 2, 8, 12


def weights(seed: int = 0) -> dict:
    shapes = {
        "q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH),
        "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
    }  # fmt: skip
    keys = iter(jax.random.split(jax.random.key(seed), len(shapes) + 1))
    layers = {
        name: (jax.random.normal(next(keys), (LAYERS, *shape)) / shape[0] ** 0.5).astype(jnp.bfloat16)
        for name, shape in shapes.items()
    }
    return {"embed": jax.random.normal(next(keys), (VOCAB, WIDTH)).astype(jnp.bfloat16), "layers": layers}


def norm(x):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype)


def rotate(x, position):
    """Rotate x [..., HEAD] by the angles of a position."""
    angles = position * 10000.0 ** (-jnp.arange(HEAD // 2) / (HEAD // 2))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def mlp(x, w):
    normed = norm(x)
    return x + (jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"]


def forward(params, tokens):
    """Return logits [ROWS, VOCAB]."""
    rows = jnp.arange(len(tokens))

    def layer(x, w):
        normed = norm(x)
        query, key, value = ((normed @ w[name]).reshape(-1, HEADS, HEAD) for name in "qkv")
        query, key = (jax.vmap(rotate)(y, rows.astype(jnp.float32)) for y in (query, key))
        scores = jnp.einsum("thk,shk->hts", query, key, preferred_element_type=jnp.float32) * HEAD**-0.5
        probs = jax.nn.softmax(jnp.where(rows[None] <= rows[:, None], scores, -jnp.inf)).astype(x.dtype)
        mixed = jnp.einsum("hts,shk->thk", probs, value).reshape(len(tokens), -1) @ w["o"]
        return mlp(x + mixed, w), None

    x, _ = lax.scan(layer, params["embed"][tokens], params["layers"])
    return jnp.einsum("td,vd->tv", norm(x), params["embed"], preferred_element_type=jnp.float32)


def step(params, token, position, cache, last):
    """Return logits [VOCAB] of one token, and the cache with its row; ``last``: the slot up to which rows are read."""
    slots = jnp.arange(SLOTS)

    def layer(x, both):
        w, (keys, values) = both
        normed = norm(x)
        query, key, value = ((normed @ w[name]).reshape(HEADS, HEAD) for name in "qkv")
        query, key = (rotate(y, position.astype(jnp.float32)) for y in (query, key))
        keys, values = (
            lax.dynamic_update_index_in_dim(held, y, position, 0) for held, y in ((keys, key), (values, value))
        )
        scores = jnp.einsum("hk,shk->hs", query, keys, preferred_element_type=jnp.float32) * HEAD**-0.5
        probs = jax.nn.softmax(jnp.where(slots <= last, scores, -jnp.inf)).astype(x.dtype)
        mixed = jnp.einsum("hs,shk->hk", probs, values).reshape(-1) @ w["o"]
        return mlp(x + mixed, w), (keys, values)

    x, cache = lax.scan(layer, params["embed"][token], (params["layers"], cache))
    return jnp.einsum("d,vd->v", norm(x), params["embed"], preferred_element_type=jnp.float32), cache


def one_token(read):
    """Return a step that takes a call's token out of all; ``read``: how many slots beyond its own it reads."""

    def call(params, tokens, position, cache):
        return step(params, tokens[position], position, cache, position + read)

    return call


def advance(inputs, outputs):
    tokens, position, _ = inputs
    return tokens, position + 1, outputs[1]


tokens = jax.random.randint(jax.random.key(1), (ROWS,), 0, VOCAB)
empty = tuple(jnp.zeros((LAYERS, SLOTS, HEADS, HEAD), jnp.bfloat16) for _ in range(2))
full = Program(forward, weights(), {"a": (tokens,)}, outputs="logits")
cached = Program(
    one_token(0), weights(), {"a": (tokens, jnp.int32(0), empty)},
    steps=ROWS - 1, advance=advance, outputs=("logits", "cache"),
)  # fmt: skip
# the mistake: it reads one slot too many, which nothing was written to
late = Program(
    one_token(1), weights(), {"a": (tokens, jnp.int32(0), empty)},
    steps=ROWS - 1, advance=advance, outputs=("logits", "cache"),
)  # fmt: skip
