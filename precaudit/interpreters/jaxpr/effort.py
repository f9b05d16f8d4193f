"""How hard XLA is to optimise FP64 passes: their values depend on it in the last bit of a function at most (JAX)."""

from functools import cache
from typing import Any

import jax

# XLA:CPU's older way to make fusions compiles in less than half the time; JAX 0.12 has it no more
QUICKLY: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


def least_effort() -> dict[str, Any]:
    """Return the compiler's options of FP64 passes over so little that compiling takes most of the time."""
    return {"xla_backend_optimization_level": 0} | {k: v for k, v in QUICKLY.items() if _has_option(k, v)}


@cache
def _has_option(option: str, value: object) -> bool:
    """Whether this backend's compiler has an option."""
    try:
        jax.jit(lambda x: x, compiler_options={option: value}).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
