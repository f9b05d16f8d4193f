"""Qwen2: Llama with biases on q, k and v (the configuration's ``qkv_bias``)."""

from precaudit.jax_decoder.parts import Parts

PARTS = Parts()
