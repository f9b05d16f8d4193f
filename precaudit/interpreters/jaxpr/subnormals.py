"""Subnormal numbers on a device: whether its arithmetic flushes them to zero, and what it then makes of values (JAX).

XLA:CPU and TPUs set float32's flush-to-zero and denormals-are-zero modes; what only moves values keeps their bits.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

SMALLEST = float(np.finfo(np.float32).smallest_normal)
# They move bits and compute nothing: subnormal operands come through.
KEEPS = {
    "abs",
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "copy_p",
    "device_put",
    "dynamic_slice",
    "dynamic_update_slice",
    "expand_dims",
    "gather",
    "name",
    "neg",
    "optimization_barrier",
    "pad",
    "reduce_precision",
    "reshape",
    "rev",
    "scatter",
    "select_n",
    "sharding_constraint",
    "slice",
    "sort",
    "split",
    "squeeze",
    "stop_gradient",
    "transpose",
    "unstack",
}


@cache
def device_flushes() -> bool:
    """Whether JAX's default device makes 0 of float32 subnormals, as operands and as results; it is asked once."""
    small, tiny = np.float32(1e-20), np.float32(3e-39)
    with jax.enable_x64(False):
        as_result, as_operand = jax.jit(lambda x, y: (x * x, y * np.float32(4096)))(small, tiny)
    return float(as_result) == 0 and float(as_operand) == 0


def flushes(dtype: DTypeLike) -> bool:
    """Whether a format has float32's exponents: bfloat16 and itself; float16 is computed in float32, FP64 is ours."""
    return dtype in (np.float32, jnp.bfloat16)


def flush_subnormals(x: ArrayLike, dtype: DTypeLike) -> Any:
    """Return FP64 values of a format with 0 for those that are subnormal in it."""
    if not flushes(dtype) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return x
    return _flush_narrow(x)


@partial(jax.jit)  # traced once for all equations of a shape
def _flush_narrow(x: jax.Array) -> Any:
    return jnp.where(jnp.abs(x) < SMALLEST, 0.0, x)


def flush_operands(equation: jex.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Return an equation's operands as a device that flushes reads them."""
    return [flush_subnormals(x, getattr(v.aval, "dtype", None)) for v, x in zip(equation.invars, inputs, strict=True)]
