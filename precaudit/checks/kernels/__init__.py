"""Kernels that ship with a plain reference and inputs each: ``kernel``, ``reference``, ``inputs``, ``ARGNUMS``."""
