"""precaudit: a numerical precision audit for transformers in JAX."""

__version__ = "0.1.0"
