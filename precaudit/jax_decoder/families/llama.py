"""Llama: RMSNorm before attention and MLP, RoPE, grouped heads, SwiGLU; biases where the configuration says so."""

from precaudit.jax_decoder.parts import Parts

PARTS = Parts()
