"""Interpreters of jaxprs on JAX's public extension API."""

from precaudit.interpreters.jaxpr.plant import plant
from precaudit.interpreters.jaxpr.reap import reap
from precaudit.interpreters.jaxpr.shadow import CannotLift, shadow

__all__ = ["CannotLift", "plant", "reap", "shadow"]
