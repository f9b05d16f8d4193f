"""A script that knows nothing of precaudit: a small decoder generates eight tokens.

precaudit watch -- python examples/serve.py
precaudit watch --gate --function next_token --calls 2:6 -o runs/w -- python examples/serve.py
"""

import jax
import jax.numpy as jnp
from jax import lax

WIDTH, HEADS, HEAD, VOCAB, LAYERS, SLOTS = 64, 4, 16, 200, 2, 32


def init(seed):
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 128), "down": (128, WIDTH)}
    keys = iter(jax.random.split(jax.random.key(seed), 2 + LAYERS * len(shapes)))
    layers = [
        {name: (jax.random.normal(next(keys), s) / s[0] ** 0.5).astype(jnp.bfloat16) for name, s in shapes.items()}
        for _ in range(LAYERS)
    ]
    embed, head = (jax.random.normal(next(keys), (VOCAB, WIDTH)).astype(jnp.bfloat16) for _ in range(2))
    return {"embed": embed, "head": head, "layers": layers}


def norm(x):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype)


def block(weights, cache, x, position):
    q, k, v = jnp.split(norm(x) @ weights["qkv"], 3)
    cache = {
        name: lax.dynamic_update_index_in_dim(cache[name], row.reshape(HEADS, HEAD), position, 0)
        for name, row in (("k", k), ("v", v))
    }
    scores = jnp.einsum("hk,shk->hs", q.reshape(HEADS, HEAD), cache["k"], preferred_element_type=jnp.float32) / 4
    probs = jax.nn.softmax(jnp.where(jnp.arange(SLOTS) <= position, scores, -jnp.inf)).astype(x.dtype)
    x = x + jnp.einsum("hs,shk->hk", probs, cache["v"]).reshape(-1) @ weights["out"]
    return x + jax.nn.silu(norm(x) @ weights["up"]) @ weights["down"], cache


@jax.jit
def next_token(params, token, position, cache):
    x, left = params["embed"][token], []
    for weights, held in zip(params["layers"], cache, strict=True):
        x, held = block(weights, held, x, position)
        left.append(held)
    logits = jnp.einsum("d,vd->v", norm(x), params["head"], preferred_element_type=jnp.float32)
    return logits, left


def main():
    params = init(0)
    cache = [{name: jnp.zeros((SLOTS, HEADS, HEAD), jnp.bfloat16) for name in "kv"} for _ in range(LAYERS)]
    token, said = jnp.int32(7), []
    for position in range(8):
        logits, cache = next_token(params, token, jnp.int32(position), cache)
        token = jnp.argmax(logits).astype(jnp.int32)
        said.append(int(token))
    print("generated", said)


if __name__ == "__main__":
    main()
