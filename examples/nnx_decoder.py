"""A Flax NNX decoder under audit, unedited: nnx.split and nnx.merge in three lines (needs flax).

precaudit trace examples/nnx_decoder.py:program -o runs/nnx
precaudit compare runs/nnx --map examples/nnx_decoder.toml
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from precaudit import Program

LAYERS, WIDTH, HEADS, GROUPS, HEAD, HIDDEN, VOCAB, SLOTS = 2, 32, 4, 2, 8, 64, 128, 12


def linear(inputs, outputs, rngs):
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)


def rotate(x, positions):
    speed = 10000.0 ** (-jnp.arange(HEAD // 2, dtype=jnp.float32) / (HEAD // 2))
    angle = positions.astype(jnp.float32)[:, None, None] * speed
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Norm(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(WIDTH, jnp.bfloat16))

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
        return (wide * scale).astype(x.dtype) * self.weight


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.query, self.out = linear(WIDTH, HEADS * HEAD, rngs), linear(HEADS * HEAD, WIDTH, rngs)
        self.key, self.value = linear(WIDTH, GROUPS * HEAD, rngs), linear(WIDTH, GROUPS * HEAD, rngs)

    def __call__(self, x, positions, cache):
        batch, rows, _ = x.shape
        queries = rotate(self.query(x).reshape(batch, rows, HEADS, HEAD), positions)
        key = rotate(self.key(x).reshape(batch, rows, GROUPS, HEAD), positions)
        value = self.value(x).reshape(batch, rows, GROUPS, HEAD)
        keys = lax.dynamic_update_slice(cache["keys"], key, (0, positions[0], 0, 0))
        values = lax.dynamic_update_slice(cache["values"], value, (0, positions[0], 0, 0))
        grouped = queries.reshape(batch, rows, GROUPS, HEADS // GROUPS, HEAD)
        scores = jnp.einsum("btgrk,bsgk->bgrts", grouped, keys, preferred_element_type=jnp.float32) * HEAD**-0.5
        seen = jnp.arange(SLOTS) <= positions[:, None]
        probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(x.dtype)
        attended = jnp.einsum("bgrts,bsgk->btgrk", probs, values).reshape(batch, rows, -1)
        return self.out(attended), {"keys": keys, "values": values}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.before, self.after, self.attention = Norm(), Norm(), Attention(rngs)
        self.gate, self.up, self.down = (linear(*shape, rngs) for shape in 2 * [(WIDTH, HIDDEN)] + [(HIDDEN, WIDTH)])

    def __call__(self, x, positions, cache):
        normed = self.before(x)
        mixed, cache = self.attention(normed, positions, cache)
        middle = x + mixed
        second = self.after(middle)
        act = nnx.silu(self.gate(second).astype(jnp.float32)).astype(x.dtype) * self.up(second)
        return middle + self.down(act), cache


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Embed(VOCAB, WIDTH, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm, self.head = Norm(), linear(WIDTH, VOCAB, rngs)

    def __call__(self, tokens, start, cache):
        x, positions, written = self.embedding(tokens), start + jnp.arange(tokens.shape[1]), []
        for block, held in zip(self.blocks, cache, strict=True):
            x, made = block(x, positions, held)
            written.append(made)
        return self.head(self.norm(x)), written


def drawn(tree):
    """The model in bfloat16, norms near one."""
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(x + 0.1 * draw.standard_normal(x.shape), jnp.bfloat16), tree)


def call(params, tokens, start, cache):
    return nnx.merge(graph, params)(tokens, start, cache)


def advance(inputs, outputs):
    logits, cache = outputs
    return jnp.argmax(logits[:, -1:], axis=-1).astype(jnp.int32), inputs[1] + 1, cache


graph, params = nnx.split(Decoder(nnx.Rngs(0)), nnx.Param)
params = drawn(params)
empty = [{n: jnp.zeros((2, SLOTS, GROUPS, HEAD), jnp.bfloat16) for n in ("keys", "values")} for _ in range(LAYERS)]
tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (2, 8)), jnp.int32)
outputs = ("logits", "cache")
program = Program(call, params, {"a": (tokens, jnp.int32(0), empty)}, outputs=outputs)
decode = Program(call, params, {"a": (tokens[:, :1], jnp.int32(0), empty)}, 5, advance, outputs)
