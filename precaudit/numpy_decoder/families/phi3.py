"""Phi-3: Llama's operations, part of a head turned; its fused projections are read as their parts."""

from precaudit.numpy_decoder.families.llama import OPERATIONS

__all__ = ["OPERATIONS"]
