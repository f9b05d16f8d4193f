"""Keras Hub's fit() on the JAX backend: one epoch of a small random Gemma in mixed_bfloat16."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import keras_hub
import numpy as np


def main():
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=128, num_layers=2, num_query_heads=4, num_key_value_heads=2, hidden_dim=64,
        intermediate_dim=256, head_dim=16, dtype="mixed_bfloat16",
    )  # fmt: skip
    model = keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer=keras.optimizers.AdamW(1e-3)
    )
    tokens = np.random.default_rng(0).integers(0, 128, (16, 17))
    x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((16, 16), bool)}
    model.fit(x, tokens[:, 1:], batch_size=4, epochs=1, verbose=2)


if __name__ == "__main__":
    main()
