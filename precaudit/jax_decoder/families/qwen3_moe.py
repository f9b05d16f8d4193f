"""Qwen3 with a mixture of experts for an MLP."""

from precaudit.jax_decoder.parts import Parts

PARTS = Parts()
