"""Verdicts on records: limits, budgets, baselines, and the gate. No tensors, no JAX."""
