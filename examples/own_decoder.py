"""A decoder of one's own under audit, unedited: plain JAX, bfloat16, layers scanned, decoding with a cache.

precaudit points examples/own_decoder.py:program
precaudit trace examples/own_decoder.py:program -o runs/own && precaudit compare runs/own && precaudit gate runs/own

python examples/own_decoder.py && precaudit align examples/own_decoder.py:program examples/own_decoder
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit import Program

LAYERS, WIDTH, HEADS, HEAD, HIDDEN, VOCAB, SLOTS = 3, 64, 4, 16, 128, 256, 16


def norm(x, weight):
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype) * weight


def rotate(x, position):
    speed = 10000.0 ** (-jnp.arange(HEAD // 2, dtype=jnp.float32) / (HEAD // 2))
    angle = position.astype(jnp.float32) * speed
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def layer(x, weights, cache, position):
    normed = norm(x, weights["attn_norm"])
    query = rotate((normed @ weights["query"]).reshape(HEADS, HEAD), position)
    key = rotate((normed @ weights["key"]).reshape(HEADS, HEAD), position)
    value = (normed @ weights["value"]).reshape(HEADS, HEAD)
    keys = lax.dynamic_update_slice(cache["keys"], key[None], (position, 0, 0))
    values = lax.dynamic_update_slice(cache["values"], value[None], (position, 0, 0))
    scores = jnp.einsum("hk,shk->hs", query, keys, preferred_element_type=jnp.float32) * HEAD**-0.5
    seen = jnp.arange(SLOTS) <= position
    probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(x.dtype)
    attended = jnp.einsum("hs,shk->hk", probs, values).reshape(-1)
    mixed = attended @ weights["out"]
    x = x + mixed
    second = norm(x, weights["mlp_norm"])
    gate = second @ weights["gate"]
    up = second @ weights["up"]
    act = jax.nn.silu(gate) * up
    down = act @ weights["down"]
    return x + down, {"keys": keys, "values": values}


def step(params, token, position, cache):
    x = params["embed"][token]

    def one(x, given):
        weights, held = given
        return layer(x, weights, held, position)

    x, cache = lax.scan(one, x, (params["layers"], cache))
    final = norm(x, params["norm"])
    logits = jnp.dot(params["embed"], final, preferred_element_type=jnp.float32)
    return logits, cache


def advance(inputs, outputs):
    logits, cache = outputs
    return jnp.argmax(logits).astype(jnp.int32), inputs[1] + 1, cache


def drawn(*shape):
    values = DRAW.standard_normal(shape) / np.sqrt(shape[-2] if len(shape) > 2 else 1)
    return jnp.asarray(values, jnp.bfloat16)


DRAW = np.random.default_rng(0)
params = {
    "embed": 0.1 * drawn(VOCAB, WIDTH),  # so small that decoding does not repeat its first token
    "norm": 1 + 0.1 * drawn(WIDTH),
    "layers": {
        "attn_norm": 1 + 0.1 * drawn(LAYERS, WIDTH),
        "mlp_norm": 1 + 0.1 * drawn(LAYERS, WIDTH),
        "query": drawn(LAYERS, WIDTH, WIDTH),
        "key": drawn(LAYERS, WIDTH, WIDTH),
        "value": drawn(LAYERS, WIDTH, WIDTH),
        "out": drawn(LAYERS, WIDTH, WIDTH),
        "gate": drawn(LAYERS, WIDTH, HIDDEN),
        "up": drawn(LAYERS, WIDTH, HIDDEN),
        "down": drawn(LAYERS, HIDDEN, WIDTH),
    },
}
empty = {name: jnp.zeros((LAYERS, SLOTS, HEADS, HEAD), jnp.bfloat16) for name in ("keys", "values")}
program = Program(
    call=step,
    params=params,
    cases={"a": (jnp.int32(17), jnp.int32(0), empty), "b": (jnp.int32(201), jnp.int32(0), empty)},
    steps=7,
    advance=advance,
    outputs=("logits", "cache"),
)


def write_checkpoint(folder):
    """Write the parameters as the Llama that they are: safetensors under Hugging Face names, and config.json."""
    from safetensors.numpy import save_file

    held = params["layers"]
    names = {
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "gate": "mlp.gate_proj",
    }
    names |= {"out": "self_attn.o_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    names |= {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    tensors = {f"model.layers.{i}.{names[n]}.weight": x[i].T for n, x in held.items() for i in range(LAYERS)}
    tensors |= {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    folder.mkdir(exist_ok=True)
    save_file({n: np.ascontiguousarray(x) for n, x in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_bytes(folder.with_suffix(".json").read_bytes())


if __name__ == "__main__":
    write_checkpoint(Path(__file__).with_suffix(""))
