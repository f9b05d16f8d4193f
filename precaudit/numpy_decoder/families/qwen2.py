"""Qwen2: Llama's operations; its biases on q, k and v come with the tensors."""

from precaudit.numpy_decoder.families.llama import OPERATIONS

__all__ = ["OPERATIONS"]
