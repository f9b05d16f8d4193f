"""A Flax NNX model under audit, unedited: nnx.split and nnx.merge in three lines (needs flax).

precaudit trace examples/nnx_decoder.py:program -o runs/nnx && precaudit compare runs/nnx
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from precaudit import Program

WIDTH, HEADS, VOCAB, TOKENS = 32, 4, 128, 12


class Block(nnx.Module):
    def __init__(self, rngs):
        how = {"param_dtype": jnp.bfloat16, "rngs": rngs}
        self.norm, self.second = nnx.RMSNorm(WIDTH, **how), nnx.RMSNorm(WIDTH, **how)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, dtype=jnp.bfloat16, **how)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, dtype=jnp.bfloat16, **how)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, dtype=jnp.bfloat16, **how)

    def __call__(self, x):
        seen = nnx.make_causal_mask(jnp.ones(x.shape[:1]))
        attended = self.attention(self.norm(x), mask=seen)
        middle = x + attended
        act = nnx.gelu(self.up(self.second(middle)))
        down = self.down(act)
        return middle + down


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Embed(VOCAB, WIDTH, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=rngs)
        self.first, self.last = Block(rngs), Block(rngs)

    def __call__(self, tokens):
        x = self.last(self.first(self.embedding(tokens)))
        return self.embedding.attend(x)


def drawn(tree):
    """The model in bfloat16, norms and biases near their first values."""
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(x + 0.1 * draw.standard_normal(x.shape), jnp.bfloat16), tree)


graph, params, rest = nnx.split(Decoder(nnx.Rngs(0)), nnx.Param, ...)
program = Program(
    call=lambda params, tokens: nnx.merge(graph, params, rest)(tokens),
    params=drawn(params),
    cases={"a": (jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, TOKENS), jnp.int32),)},
    outputs="logits",
)
