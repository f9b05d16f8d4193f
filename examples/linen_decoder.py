"""A Flax Linen decoder under audit, unedited: a module's apply is the program (needs flax).

precaudit trace examples/linen_decoder.py:program -o runs/linen && precaudit compare runs/linen
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from precaudit import Program

LAYERS, WIDTH, HEADS, VOCAB, TOKENS = 2, 32, 4, 128, 12


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        normed = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        seen = nn.make_causal_mask(jnp.ones(x.shape[:1]))
        attended = nn.MultiHeadDotProductAttention(HEADS, dtype=jnp.bfloat16)(normed, mask=seen)
        middle = x + attended
        second = nn.RMSNorm(dtype=jnp.bfloat16)(middle)
        gate = nn.Dense(2 * WIDTH, use_bias=False, dtype=jnp.bfloat16)(second)
        up = nn.Dense(2 * WIDTH, use_bias=False, dtype=jnp.bfloat16)(second)
        down = nn.Dense(WIDTH, dtype=jnp.bfloat16)(nn.silu(gate) * up)
        return middle + down


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embedding = nn.Embed(VOCAB, WIDTH, dtype=jnp.bfloat16)
        x = embedding(tokens)
        for _ in range(LAYERS):
            x = Block()(x)
        final = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        return embedding.attend(final)


def drawn(tree):
    """The model in bfloat16, norms and biases near their first values."""
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(x + 0.1 * draw.standard_normal(x.shape), jnp.bfloat16), tree)


model = Decoder()
tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, TOKENS), jnp.int32)
program = Program(
    call=model.apply,
    params=drawn(model.init(jax.random.key(0), tokens)),
    cases={"a": (tokens,)},
    outputs="logits",
)
