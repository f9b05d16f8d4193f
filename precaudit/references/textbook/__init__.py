"""The NumPy decoder as a reference, of families that are known. Nothing here imports JAX."""
