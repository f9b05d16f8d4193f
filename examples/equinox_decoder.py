"""An Equinox decoder under audit, unedited: eqx.partition tells its arrays from the rest (needs equinox).

precaudit trace examples/equinox_decoder.py:program -o runs/equinox && precaudit compare runs/equinox
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from precaudit import Program

LAYERS, WIDTH, HEADS, VOCAB, TOKENS = 2, 32, 4, 128, 12


class Block(eqx.Module):
    norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    second: eqx.nn.RMSNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    rope: eqx.nn.RotaryPositionalEmbedding

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        self.norm, self.second = eqx.nn.RMSNorm(WIDTH), eqx.nn.RMSNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=a)
        self.up, self.down = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=b), eqx.nn.Linear(2 * WIDTH, WIDTH, key=c)
        self.rope = eqx.nn.RotaryPositionalEmbedding(WIDTH // HEADS)

    def turn(self, query, key, value):
        return jax.vmap(self.rope, 1, 1)(query), jax.vmap(self.rope, 1, 1)(key), value

    def __call__(self, x):
        normed = jax.vmap(self.norm)(x)
        seen = jnp.tril(jnp.ones((len(x), len(x)), bool))
        attended = self.attention(normed, normed, normed, mask=seen, process_heads=self.turn)
        middle = x + attended
        act = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.second)(middle)))
        return middle + jax.vmap(self.down)(act)


class Decoder(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: Block
    norm: eqx.nn.RMSNorm

    def __init__(self, key):
        first, *rest = jax.random.split(key, LAYERS + 1)
        self.embedding = eqx.nn.Embedding(VOCAB, WIDTH, key=first)
        self.blocks = eqx.filter_vmap(Block)(jnp.stack(rest))
        self.norm = eqx.nn.RMSNorm(WIDTH)

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, block: (eqx.combine(block, rest)(x), None), x, arrays)
        return jax.vmap(self.norm)(x) @ self.embedding.weight.T


def drawn(tree):
    """The model in bfloat16, norms and biases near their first values."""
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(x + 0.1 * draw.standard_normal(x.shape), jnp.bfloat16), tree)


params, static = eqx.partition(Decoder(jax.random.key(0)), eqx.is_array)
program = Program(
    call=lambda params, tokens: eqx.combine(params, static)(tokens),
    params=drawn(params),
    cases={"a": (jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, TOKENS), jnp.int32),)},
    outputs="logits",
)
