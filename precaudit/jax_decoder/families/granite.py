"""Granite: Llama with factors on embedding, scores, residual and logits (the configuration's)."""

from precaudit.jax_decoder.parts import Parts

PARTS = Parts()
