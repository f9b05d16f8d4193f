"""Qwen3: Llama with a norm over every head of q and k (the configuration's ``qk_norm``)."""

from precaudit.jax_decoder.parts import Parts

PARTS = Parts()
