"""Mistral: Llama's operations; its window is the configuration's."""

from precaudit.numpy_decoder.families.llama import OPERATIONS

__all__ = ["OPERATIONS"]
