"""Gemma 2: norms around attention and MLP, rounded once; GELU; capped scores and logits, alternating windows."""

from precaudit.jax_decoder.parts import Parts, rms_norm_once

PARTS = Parts(norm=rms_norm_once)
