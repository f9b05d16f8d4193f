"""A Flax NNX training script that knows nothing of precaudit: bfloat16 on float32 weights, with dropout."""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

VOCAB, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 64, 32, 4, 2, 16, 8
BF16 = {"dtype": jnp.bfloat16}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs, **BF16)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs, **BF16)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs, **BF16)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0])))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, **BF16)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x)).astype(jnp.float32)


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def train_step(model, optimiser, tokens):
    loss, gradients = nnx.value_and_grad(loss_of)(model, tokens)
    optimiser.update(model, gradients)
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    asked = parser.parse_args()
    model = Decoder(nnx.Rngs(0))
    optimiser = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    for step in range(asked.steps):
        start = jax.random.randint(jax.random.key(step), (BATCH, 1), 0, VOCAB)
        loss = train_step(model, optimiser, (start + jnp.arange(LENGTH)) % VOCAB)
        print(f"step {step}: loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
