"""Numbers about the difference of two tensors."""
