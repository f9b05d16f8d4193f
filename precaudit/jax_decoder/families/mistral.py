"""Mistral: Llama with a window (the configuration's)."""

from precaudit.jax_decoder.parts import Parts

PARTS = Parts()
