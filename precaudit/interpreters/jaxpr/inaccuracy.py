"""What a device's exp, tanh, 1/x and the like may be off by: errors that are the same for the same value."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

ULPS = 4.0  # of a device's exp, tanh, 1/x and 1/√x in float32, as the limits are made for (numpy_decoder/ensemble.py)
INACCURATE = {
    "cbrt",
    "cos",
    "div",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "logistic",
    "pow",
    "rsqrt",
    "sin",
    "sqrt",
    "tan",
    "tanh",
}


def mixed_bits(x: ArrayLike, mark: ArrayLike) -> Any:
    """Return 64 bits that look random and are the same for the same two, as a function's errors are for its value.

    Multiply, shift, exclusive or: the finaliser of splitmix64 (Steele, Lea & Flood 2014, fig. 7).
    """
    like = jnp if isinstance(x, jax.Array) or isinstance(mark, jax.Array) else np
    with np.errstate(over="ignore"):
        bits = like.asarray(x, np.uint64) + like.asarray(mark, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
        return bits ^ (bits >> np.uint64(31))


def unit_interval(bits: ArrayLike) -> Any:
    """Return numbers in [−1, 1) made of 64 bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0


@partial(jax.jit)
def inaccurate(x: jax.Array, mark: jax.Array) -> Any:
    """Return what a device's function in float32 may give for values of its."""
    return x * (1.0 + (ULPS - 0.5) * 2.0**-23 * unit_interval(mixed_bits(lax.bitcast_convert_type(x, np.uint64), mark)))
