"""Gemma 2: norms around attention and MLP with weights 1 + w, rounded once; capped scores and logits."""

from precaudit.numpy_decoder.families.llama import table
from precaudit.numpy_decoder.operators import rms_norm_once

OPERATIONS = table(rms_norm_once)
