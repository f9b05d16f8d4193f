"""Granite: Llama's operations with the configuration's factors on embedding, scores, residual and logits."""

from precaudit.numpy_decoder.families.llama import OPERATIONS

__all__ = ["OPERATIONS"]
