"""Errors of a run against FP64, emulations and another run. Nothing here imports JAX."""
