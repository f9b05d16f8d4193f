"""Qwen3: Llama's operations with a norm over every head of q and k (the configuration's ``qk_norm``)."""

from precaudit.numpy_decoder.families.llama import OPERATIONS

__all__ = ["OPERATIONS"]
