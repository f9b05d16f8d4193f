"""Generation in one call: a small decoder that ``lax.while_loop`` runs until it draws its last token, or is full.

precaudit trace examples/generation_loop.py:program -o runs/loop
precaudit compare runs/loop && precaudit gate runs/loop
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit import Program

LAYERS, WIDTH, HIDDEN, VOCAB, SLOTS, END = 2, 32, 64, 61, 12, 7


def norm(x):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype)


def layer(x, given, position):
    weights, keys, values = given
    normed = norm(x)
    query, key, value = normed @ weights["query"], normed @ weights["key"], normed @ weights["value"]
    keys = lax.dynamic_update_slice(keys, key[None], (position, 0))
    values = lax.dynamic_update_slice(values, value[None], (position, 0))
    scores = jnp.dot(keys, query, preferred_element_type=jnp.float32) * WIDTH**-0.5
    probs = jax.nn.softmax(jnp.where(jnp.arange(SLOTS) <= position, scores, -jnp.inf)).astype(x.dtype)
    attended = probs @ values
    x = x + attended @ weights["out"]
    act = jax.nn.silu(norm(x) @ weights["up"])
    down = act @ weights["down"]
    return x + down, (keys, values)


def generate(params, first):
    def goes_on(state):
        tokens, position, _, _ = state
        return (position < SLOTS - 1) & (tokens[position] != END)

    def step(state):
        tokens, position, cache, _ = state
        x = params["embed"][tokens[position]]
        x, cache = lax.scan(lambda x, given: layer(x, given, position), x, (params["layers"], *cache))
        logits = jnp.dot(params["embed"], norm(x), preferred_element_type=jnp.float32)
        tokens = tokens.at[position + 1].set(jnp.argmax(logits).astype(jnp.int32))
        return tokens, position + 1, cache, logits

    tokens = jnp.zeros(SLOTS, jnp.int32).at[0].set(first)
    cache = tuple(jnp.zeros((LAYERS, SLOTS, WIDTH), jnp.bfloat16) for _ in range(2))
    return lax.while_loop(goes_on, step, (tokens, 0, cache, jnp.zeros(VOCAB)))


def drawn(*shape):
    return jnp.asarray(DRAW.standard_normal(shape) / np.sqrt(shape[-2]), jnp.bfloat16)


DRAW = np.random.default_rng(0)
square, wide, long = (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH)
shapes = {"query": square, "key": square, "value": square, "out": square, "up": wide, "down": long}
params = {"embed": drawn(VOCAB, WIDTH), "layers": {name: drawn(*shape) for name, shape in shapes.items()}}
cases = {"a": (jnp.int32(45),), "b": (jnp.int32(43),)}
program = Program(generate, params, cases, outputs=("tokens", "steps", "cache", "logits"))
