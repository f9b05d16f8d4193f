"""Keras Hub's generate() on the JAX backend: a small random Gemma with top-k sampling."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import keras_hub
import numpy as np


def main():
    keras.utils.set_random_seed(0)
    keras.config.set_floatx("bfloat16")
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=128, num_layers=2, num_query_heads=4, num_key_value_heads=2, hidden_dim=64,
        intermediate_dim=256, head_dim=16,
    )  # fmt: skip
    model = keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)
    model.compile(sampler=keras_hub.samplers.TopKSampler(k=5, seed=1))
    prompts = np.zeros((2, 16), np.int32)
    prompts[:, :5] = [[2, 17, 5, 9, 30], [2, 44, 8, 1, 60]]
    mask = np.zeros((2, 16), bool)
    mask[:, :5] = True
    out = model.generate({"token_ids": prompts, "padding_mask": mask}, stop_token_ids=None)
    print(np.asarray(out["token_ids"]).tolist())


if __name__ == "__main__":
    main()
