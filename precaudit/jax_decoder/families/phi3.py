"""Phi-3: Llama with RoPE on part of a head; its fused projections are read as their parts."""

from precaudit.jax_decoder.parts import Parts

PARTS = Parts()
