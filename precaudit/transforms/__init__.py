"""Interpreters of jaxprs on JAX's public extension API."""

from precaudit.transforms.reap import reap

__all__ = ["reap"]
