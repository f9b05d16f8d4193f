"""Tensors that another framework wrote, as runs: read, named by a map, and held against ours. No JAX."""
