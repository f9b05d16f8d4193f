"""own_decoder.py as it is served: the prompt at once, then token by token, then the whole again in one call.

precaudit trace examples/served_decoder.py:program -o runs/served && precaudit compare runs/served
precaudit gate runs/served
"""

import jax
import jax.numpy as jnp
from jax import lax
from own_decoder import HEAD, HEADS, LAYERS, SLOTS, advance, norm, params, rotate, step

from precaudit import Entry, Program

LENGTH, STEPS = 6, 7  # of a prompt; tokens that are decoded after it


def attention(x, weights):
    rows = jnp.arange(len(x))
    normed = norm(x, weights["attn_norm"])
    query = jax.vmap(rotate)((normed @ weights["query"]).reshape(-1, HEADS, HEAD), rows)
    key = jax.vmap(rotate)((normed @ weights["key"]).reshape(-1, HEADS, HEAD), rows)
    value = (normed @ weights["value"]).reshape(-1, HEADS, HEAD)
    scores = jnp.einsum("thk,shk->hts", query, key, preferred_element_type=jnp.float32) * HEAD**-0.5
    seen = rows[None, :] <= rows[:, None]
    probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(x.dtype)
    attended = jnp.einsum("hts,shk->thk", probs, value).reshape(len(x), -1)
    return attended @ weights["out"], key, value


def layer(x, weights):
    mixed, key, value = attention(x, weights)
    x = x + mixed
    second = norm(x, weights["mlp_norm"])
    act = jax.nn.silu(second @ weights["gate"]) * (second @ weights["up"])
    return x + act @ weights["down"], {"keys": key, "values": value}


def prefill(params, tokens):
    x, made = lax.scan(layer, params["embed"][tokens], params["layers"])
    final = norm(x, params["norm"])
    logits = jnp.einsum("td,vd->tv", final, params["embed"], preferred_element_type=jnp.float32)
    empty = jnp.zeros((LAYERS, SLOTS, HEADS, HEAD), jnp.bfloat16)
    return logits, {name: lax.dynamic_update_slice(empty, rows, (0, 0, 0, 0)) for name, rows in made.items()}


def decode(params, token, position, cache, tokens):
    logits, cache = step(params, token, position, cache)
    return logits, cache, lax.dynamic_update_slice(tokens, token[None], (position,))


def begin_decode(inputs, outputs):
    """Feed the token that prefill says comes next."""
    logits, cache = outputs
    tokens = lax.dynamic_update_slice(jnp.zeros(SLOTS, jnp.int32), inputs[0], (0,))
    return jnp.argmax(logits[-1]).astype(jnp.int32), jnp.int32(LENGTH), cache, tokens


def next_step(inputs, outputs):
    return *advance(inputs[:3], outputs[:2]), outputs[2]


def begin_rescore(_inputs, outputs):
    return (outputs[2][: LENGTH + STEPS + 1],)


program = Program(
    call=prefill,
    params=params,
    cases={
        "a": (jnp.array([17, 3, 99, 201, 5, 64], jnp.int32),),
        "b": (jnp.array([201, 8, 7, 150, 33, 12], jnp.int32),),
    },
    outputs=("logits", "cache"),
    tokens=0,
    entry="prefill",
    then={
        "decode": Entry(decode, begin_decode, STEPS, next_step, ("logits", "cache", "tokens"), tokens=0, start=1),
        "rescore": Entry(prefill, begin_rescore, outputs=("logits", "cache"), tokens=0),
    },
)
