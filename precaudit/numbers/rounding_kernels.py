"""Rounding of FP64 values to a format in one pass over memory, compiled by numba; used through ``arrays``."""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from precaudit.numbers.compiling import nogil_njit

# bfloat16 keeps 7 of FP64's 52 stored fraction bits. Its exponent range is FP32's: the smallest normal is 2^-126,
# the quantum below it 2^-133, and what rounds to 2^128 or more is infinite.
DROP = 45


@numba.njit(inline="always")
def _bfloat16(x):  # type: ignore[no-untyped-def]
    """FP64 to bfloat16 and back in one step (through FP32 it would round twice), ties to even; selects vectorise."""
    bits = np.float64(x).view(np.int64)
    odd = (bits >> np.int64(DROP)) & np.int64(1)
    kept = (bits + np.int64((1 << (DROP - 1)) - 1) + odd) & np.int64(~((1 << DROP) - 1))
    normal = np.int64(kept).view(np.float64)
    size = abs(x)
    found = np.rint(x * 2.0**133) * 2.0**-133 if size < 2.0**-126 else normal
    found = np.copysign(np.inf, x) if abs(normal) >= 2.0**128 else found
    return found if size <= np.inf else np.nan


@nogil_njit()
def bfloat16(x, out):  # type: ignore[no-untyped-def]
    """Fill ``out`` with ``x`` rounded; both FP64, contiguous, of one axis."""
    for i in range(x.size):
        out[i] = _bfloat16(x[i])


@nogil_njit()
def bfloat16_rescaled(x, out, factor):  # type: ignore[no-untyped-def]
    """Fill ``out`` with ``x`` · factor rounded, over factor."""
    for i in range(x.size):
        out[i] = _bfloat16(x[i] * factor) / factor


@nogil_njit()
def float32(x, out):  # type: ignore[no-untyped-def]
    """Fill ``out`` with ``x`` rounded."""
    for i in range(x.size):
        out[i] = np.float64(np.float32(x[i]))


@nogil_njit()
def float32_rescaled(x, out, factor):  # type: ignore[no-untyped-def]
    """Fill ``out`` with ``x`` · factor rounded, over factor."""
    for i in range(x.size):
        out[i] = np.float64(np.float32(x[i] * factor)) / factor


ROUND: dict[str, Callable[..., Any]] = {"bfloat16": bfloat16, "float32": float32}
RESCALED: dict[str, Callable[..., Any]] = {"bfloat16": bfloat16_rescaled, "float32": float32_rescaled}
