"""Qwen3 with a mixture of experts for an MLP."""

from precaudit.numpy_decoder.families.llama import OPERATIONS

__all__ = ["OPERATIONS"]
