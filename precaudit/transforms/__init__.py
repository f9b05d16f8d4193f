"""Interpreters of jaxprs on JAX's public extension API."""

from precaudit.transforms.plant import plant
from precaudit.transforms.reap import reap
from precaudit.transforms.shadow import CannotLift, shadow

__all__ = ["CannotLift", "plant", "reap", "shadow"]
