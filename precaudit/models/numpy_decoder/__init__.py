"""The textbook decoder in plain NumPy FP64, written apart from ``jax_decoder``: their difference finds a bug."""
