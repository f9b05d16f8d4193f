"""An Equinox training script that knows nothing of precaudit: a small causal transformer learns to count."""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

VOCAB, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 64, 32, 4, 2, 16, 8


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: list[eqx.nn.RMSNorm]

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=first)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=second)
        self.norms = [eqx.nn.RMSNorm(WIDTH), eqx.nn.RMSNorm(WIDTH)]

    def __call__(self, x):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Decoder(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        embed, head, *blocks = jax.random.split(key, 2 + LAYERS)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=embed)
        self.blocks = [Block(k) for k in blocks]
        self.head = eqx.nn.Linear(WIDTH, VOCAB, key=head)

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def loss_of(model, tokens):
    logits = jax.vmap(model)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    asked = parser.parse_args()
    model = Decoder(jax.random.key(0))
    optimiser = optax.adamw(3e-3)
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def train_step(model, state, tokens):
        loss, gradients = eqx.filter_value_and_grad(loss_of)(model, tokens)
        updates, state = optimiser.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, loss

    for step in range(asked.steps):
        start = jax.random.randint(jax.random.key(step), (BATCH, 1), 0, VOCAB)
        model, state, loss = train_step(model, state, (start + jnp.arange(LENGTH)) % VOCAB)
        print(f"step {step}: loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
