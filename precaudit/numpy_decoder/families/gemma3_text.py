"""Gemma 3 (text): Gemma 2 with a norm over every head of q and k, and local layers with a RoPE of their own."""

from precaudit.numpy_decoder.families.llama import table
from precaudit.numpy_decoder.operators import rms_norm_once

OPERATIONS = table(rms_norm_once)
