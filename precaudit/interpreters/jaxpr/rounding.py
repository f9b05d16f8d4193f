"""FP64 values rounded to a program's formats, on their own grids and on moved ones; which results need no rounding."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from precaudit.interpreters.jaxpr.sums import float_bits

# A result is an operand's value: in a format that holds the operand nothing is rounded.
EXACT = {
    "abs",
    "argsort",
    "broadcast_in_dim",
    "clamp",
    "concatenate",
    "copy",
    "copy_p",
    "cummax",
    "cummin",
    "device_put",
    "dynamic_slice",
    "dynamic_update_slice",
    "expand_dims",
    "gather",
    "max",
    "min",
    "name",
    "neg",
    "optimization_barrier",
    "pad",
    "real",
    "reduce_max",
    "reduce_min",
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
    "tile",
    "top_k",
    "transpose",
    "unstack",
}
# On a grid of its own a maximum would equal neither of what it is of, and a whole number would be none.
UNMOVED = EXACT | {
    "ceil",
    "complex",
    "conj",
    "floor",
    "imag",
    "reduce_window_max",
    "reduce_window_min",
    "round",
    "scatter-max",
    "scatter-min",
    "sign",
}


def round_once(x: ArrayLike, dtype: DTypeLike, factor: float = 1.0) -> Any:
    """Return FP64 ``x`` rounded once to a narrower format, ties to even, subnormals as the format has them.

    ``factor``: round(x · factor) / factor, the same rounding on another grid.
    """
    return _round_scaled(x, factor, dtype=dtype)


@partial(jax.jit, static_argnames="dtype")  # traced once for all equations of a shape
def _round_scaled(x: jax.Array, factor: jax.Array, dtype: DTypeLike) -> Any:
    info = jnp.finfo(dtype)
    if info.bits < 16:  # formats without infinities: the conversion knows them
        return (x * factor).astype(dtype).astype(np.float64) / factor
    y = x * factor
    near = lax.reduce_precision(y, info.nexp, info.nmant)
    step = 2.0 ** (int(info.minexp) - info.nmant)  # the smallest subnormal; adding and taking away, XLA leaves out
    whole = lax.round(y * (1.0 / step), lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return jnp.where(jnp.abs(y) < float(info.smallest_normal), whole, near) / factor


def round_on_moved_grid(x: ArrayLike, dtype: DTypeLike, factor: float, summed: bool = False) -> Any:
    """Return FP64 ``x`` as a draw rounds it: on a grid moved by ``factor``, but left alone where the format has it.

    No rounding error is made of what a format holds: of whole numbers, powers of two, masks. ``summed``: a sum was
    made in float32, which has all such values: whole numbers alone are left. What overflows does so on every grid, and
    nothing else does.
    """
    near = round_once(x, dtype)
    if isinstance(factor, float) and factor == 1.0:
        return near
    held = near == x
    if summed:  # to 2**23 every half is a number of float32, too
        held &= (jnp.round(x) == x) & (jnp.abs(x) < 2.0**23)
    within = factor_within(x, factor, float(jnp.finfo(dtype).max))
    return jnp.where(held | ~jnp.isfinite(near), near, round_once(x, dtype, within))


def reduce_on_moved_grid(x: ArrayLike, exponent: int, mantissa: int, factor: ArrayLike) -> Any:
    """Return the same where ``lax.reduce_precision`` rounds, to a format of so many bits of each."""
    near = lax.reduce_precision(x, exponent, mantissa)
    within = factor_within(x, factor, 2.0 ** (2 ** (exponent - 1) - 1))
    other = lax.reduce_precision(x * within, exponent, mantissa) / within
    return jnp.where((near == x) | ~jnp.isfinite(near), near, other)


def factor_within(x: ArrayLike, factor: ArrayLike, largest: float) -> Any:
    """Return a factor from 1 to 2, halved where it might bring values over the largest of a format: the same grid."""
    return jnp.where(jnp.abs(x) > largest / 4, 0.5 * factor, factor)


TO_BFLOAT16 = partial(round_once, dtype=jnp.bfloat16)


def holds(wide: DTypeLike, narrow: DTypeLike) -> bool:
    """Whether a float format has every value of another."""
    if not (float_bits(wide) and float_bits(narrow)):
        return False
    w, n = jnp.finfo(wide), jnp.finfo(narrow)
    smallest = [int(f.minexp) - f.nmant for f in (w, n)]
    return w.nmant >= n.nmant and w.maxexp >= n.maxexp and smallest[0] <= smallest[1]


def each_part(x: Any, function: Callable[[Any], Any]) -> Any:
    """Return a function of FP64 values, or of each part of complex ones."""
    return lax.complex(function(x.real), function(x.imag)) if jnp.iscomplexobj(x) else function(x)
