"""Kernels and their references against FP64: outputs and vector-Jacobian products."""
