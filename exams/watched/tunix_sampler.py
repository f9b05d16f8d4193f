"""google-tunix's sampler on a small random Gemma 3: a prompt is read, and six tokens are made."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.gemma3 import model

SMALL = {"num_layers": 3, "num_embed": 128, "embed_dim": 64, "hidden_dim": 128, "num_heads": 4, "head_dim": 16,
         "num_kv_heads": 1}  # fmt: skip


class Bytes:
    """A tokenizer of one token a character."""

    def encode(self, text, **_):
        return [2 + ord(c) % 120 for c in text]

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def bos_id(self):
        return 1

    def eos_id(self):
        return 127

    def pad_id(self):
        return 0


def random_model(config, seed):
    """Return Gemma 3 with weights in bfloat16, norms around 0 as they are stored."""
    made = model.Gemma3(config, rngs=nnx.Rngs(seed))
    keys = iter(jax.random.split(jax.random.key(seed), 1000))
    graph, state = nnx.split(made)
    draw = {True: 0.1, False: 0.2}
    state = jax.tree.map(
        lambda x: (draw[x.ndim <= 1] * jax.random.normal(next(keys), x.shape)).astype(jnp.bfloat16), state
    )
    return nnx.merge(graph, state)


def main():
    config = dataclasses.replace(model.ModelConfig.gemma3_270m(), **SMALL)
    cache = CacheConfig(cache_size=32, num_layers=3, num_kv_heads=1, head_dim=16)
    sampler = Sampler(random_model(config, 0), Bytes(), cache)
    out = sampler(["count to three", "say yes"], max_generation_steps=6, max_prompt_length=16, temperature=0.8,
                  top_p=0.9, seed=3)  # fmt: skip
    print(out.text)


if __name__ == "__main__":
    main()
