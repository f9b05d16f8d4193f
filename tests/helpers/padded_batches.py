"""A decoder that serves padded batches: prefill of sequences of three lengths, then decode of one token of each.

Right padding with lengths, or by a padding token; left padding with the number of rows before a sequence. Mistakes are
switched on by name.
"""

import jax
import jax.numpy as jnp
import numpy as np

from examples import own_decoder as own
from precaudit import Entry, Program

BATCH, TOKENS, SLOTS, STEPS, LAYERS = 3, 8, 12, 2, 2
LENGTHS = np.array([3, 8, 6])
LEAST = float(np.finfo(np.float32).min)
PARAMS = {**own.params, "layers": {name: x[:LAYERS] for name, x in own.params["layers"].items()}}
EMPTY = {n: jnp.zeros((LAYERS, BATCH, SLOTS, own.HEADS, own.HEAD), jnp.bfloat16) for n in ("keys", "values")}
IDS = np.random.default_rng(3).integers(1, own.VOCAB, (BATCH, TOKENS))
SLOT = jnp.arange(SLOTS)
ABSOLUTE = jnp.asarray(np.random.default_rng(4).normal(0, 0.1, (SLOTS, own.HEADS * own.HEAD)), jnp.bfloat16)


def rotate(x, position):
    """Turn queries or keys [B, T, H, K] by their positions [B, T]."""
    turn = jax.vmap(jax.vmap(own.rotate))
    return turn(x, position)


def layer(x, weights, cache, position, slots, seen):
    normed = own.norm(x, weights["attn_norm"])
    shape = (*x.shape[:2], own.HEADS, own.HEAD)
    query = rotate((normed @ weights["query"]).reshape(shape), position)
    key = rotate((normed @ weights["key"]).reshape(shape), position)
    value = (normed @ weights["value"]).reshape(shape)
    each = jnp.arange(BATCH)[:, None]
    keys, values = cache["keys"].at[each, slots].set(key), cache["values"].at[each, slots].set(value)
    scores = jnp.einsum("bthk,bshk->bhts", query, keys, preferred_element_type=jnp.float32) * own.HEAD**-0.5
    probs = jax.nn.softmax(jnp.where(seen[:, None], scores, LEAST)).astype(x.dtype)
    attended = jnp.einsum("bhts,bshk->bthk", probs, values).reshape(*x.shape[:2], -1)
    x = x + attended @ weights["out"]
    second = own.norm(x, weights["mlp_norm"])
    gate = second @ weights["gate"]
    act = jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype) * (second @ weights["up"])
    return x + act @ weights["down"], {"keys": keys, "values": values}


def model(params, tokens, cache, position, slots, seen, absolute=False):
    def one(x, given):
        return layer(x, *given, position, slots, seen)

    embedded = params["embed"][tokens]
    embedded = embedded + ABSOLUTE[position] if absolute else embedded
    x, cache = jax.lax.scan(one, embedded, (params["layers"], cache))
    final = own.norm(x, params["norm"])
    return jnp.einsum("btd,vd->btv", final, params["embed"], preferred_element_type=jnp.float32), cache


def right(mistake="", by_id=False, **given):
    """Return a program that pads at the end; ``given``: what it says of its inputs, else what is found must do."""
    tokens = jnp.asarray(np.where(np.arange(TOKENS) < LENGTHS[:, None], IDS, 0), jnp.int32)

    def prefill(params, tokens, lengths, cache):
        lengths = (tokens != 0).sum(axis=1) if by_id else lengths
        position = jnp.broadcast_to(jnp.arange(TOKENS), (BATCH, TOKENS))
        seen = (position[..., None] >= SLOT) & (lengths[:, None, None] > SLOT)
        logits, cache = model(params, tokens, cache, position, position, seen)
        last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return logits, cache, jnp.argmax(last, axis=-1).astype(jnp.int32), lengths

    def decode(params, token, position, cache):
        end = jnp.maximum(position, TOKENS) if mistake == "padding seen in decode" else position
        seen = end[:, None, None] >= SLOT
        logits, cache = model(params, token[:, None], cache, position[:, None], position[:, None], seen)
        return logits[:, 0], cache

    late = int(mistake == "one too far")
    then = Entry(
        decode,
        lambda _, out: (out[2], out[3] + late, out[1]),
        STEPS,
        lambda inputs, out: (jnp.argmax(out[0], axis=-1).astype(jnp.int32), inputs[1] + 1, out[1]),
        ("logits", "cache"),
        **({"tokens": 0, "start": 1} if given else {}),
    )
    lengths = jnp.asarray(0 * LENGTHS if by_id else LENGTHS, jnp.int32)
    return Program(
        prefill, PARAMS, {"a": (tokens, lengths, EMPTY)}, outputs=("logits", "cache", "token", "lengths"),
        entry="prefill", then={"decode": then}, **given,
    )  # fmt: skip


def left(mistake="", counted=False):
    """Return a program that pads before each sequence; ``counted``: a row's position is its slot, padding counted."""
    pads, absolute = TOKENS - LENGTHS, mistake == "absolute positions"
    real = np.arange(TOKENS) >= pads[:, None]
    tokens = jnp.asarray(np.where(real, [np.roll(r, p) for r, p in zip(IDS, pads, strict=True)], 0), jnp.int32)

    def prefill(params, tokens, pads, cache):
        slots = jnp.broadcast_to(jnp.arange(TOKENS), (BATCH, TOKENS))
        first = pads[:, None, None] * int(mistake != "padding seen")
        position = slots if counted else jnp.maximum(slots - pads[:, None], 0)
        seen = (slots[..., None] >= SLOT) & (first <= SLOT)
        logits, cache = model(params, tokens, cache, position, slots, seen, absolute)
        return logits, cache, jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32), pads

    def decode(params, token, slot, pads, cache):
        first = pads[:, None, None] * int(mistake != "padding seen in decode")
        position = (slot - pads * int(not counted))[:, None] + int(mistake == "one too far")
        slots = jnp.broadcast_to(slot, (BATCH, 1))
        seen = (slot >= SLOT) & (first <= SLOT)
        logits, cache = model(params, token[:, None], cache, position, slots, seen, absolute)
        return logits[:, 0], cache

    then = Entry(
        decode,
        lambda _, out: (out[2], jnp.int32(TOKENS), out[3], out[1]),
        STEPS,
        lambda inputs, out: (jnp.argmax(out[0], axis=-1).astype(jnp.int32), inputs[1] + 1, inputs[2], out[1]),
        ("logits", "cache"),
    )
    return Program(
        prefill, PARAMS, {"a": (tokens, jnp.asarray(pads, jnp.int32), EMPTY)},
        outputs=("logits", "cache", "token", "pads"), entry="prefill", then={"decode": then},
    )  # fmt: skip
