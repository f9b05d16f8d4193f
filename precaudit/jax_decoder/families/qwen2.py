"""Qwen2: Llama with biases on q, k and v (the configuration's ``qkv_bias``)."""

from precaudit.jax_decoder.families import Family
from precaudit.jax_decoder.families.llama import LAYER_TENSORS
from precaudit.jax_decoder.parts import Parts

FAMILY = Family(Parts(), LAYER_TENSORS)
