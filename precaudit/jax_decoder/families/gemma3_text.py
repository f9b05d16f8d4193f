"""Gemma 3 (text): Gemma 2 with QK norm, and windowed layers with a RoPE of their own; no caps."""

from precaudit.jax_decoder.parts import Parts, rms_norm_once

PARTS = Parts(norm=rms_norm_once)
