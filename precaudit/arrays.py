"""Arrays of number formats: exact widening, and exact rounding of FP64 values to a format."""

import mmap
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from precaudit.formats import EIGHT_BITS, FORMATS

Array = npt.NDArray[Any]


def wider(a: Any, b: Any) -> np.dtype[Any]:
    """Return the narrowest of our dtypes that holds the values of both (float16 and bfloat16: float32)."""
    x, y = sorted((np.dtype(a), np.dtype(b)), key=lambda d: FORMATS[d.name].precision)
    return FORMATS["float32"].dtype if x != y and {x.name, y.name} <= {"float16", "bfloat16", *EIGHT_BITS} else y


def widen(x: Array) -> npt.NDArray[np.float64]:
    """Return ``x`` in FP64, exactly. bfloat16 goes through its bits."""
    with np.errstate(invalid="ignore"):  # signalling NaNs warn
        return (single(x) if x.dtype == FORMATS["bfloat16"].dtype else x).astype(np.float64)


def single(x: Array) -> npt.NDArray[np.float32]:
    """Return ``x`` in FP32: exact for every format up to 24 bits; bfloat16 is the upper half of an FP32 word."""
    if x.dtype == FORMATS["bfloat16"].dtype:
        return (x.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.float32)


@cache
def rounder(name: str) -> Callable[[Array], Array]:
    """Return the function that rounds FP64 values to format ``name``, to nearest, ties to even, kept in FP64.

    Overflow gives an infinity (float8_e4m3fn has none: NaN), underflow the format's subnormals.
    """
    if name == "float64":
        return identity
    if name == "bfloat16":
        return _round_bfloat16
    dtype = FORMATS[name].dtype

    def round_to(x: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(dtype).astype(np.float64)

    return round_to


def identity(x: Array) -> Array:
    """Return ``x``: the rounding of FP64."""
    return x


# bfloat16 keeps 7 of FP64's 52 stored fraction bits. Its exponent range is FP32's: the smallest normal is 2^-126,
# the quantum below it 2^-133, and what rounds to 2^128 or more is infinite.
_DROP = 45
_HALF = np.int64((1 << (_DROP - 1)) - 1)
_KEEP = np.int64(~((1 << _DROP) - 1))


def _round_bfloat16(x: Array) -> Array:
    """Round in one step; going through FP32 first would round twice."""
    x = np.ascontiguousarray(x, np.float64)
    bits = x.view(np.int64)
    rounded = bits >> np.int64(_DROP)
    rounded &= np.int64(1)
    rounded += bits
    rounded += _HALF
    rounded &= _KEEP
    out = rounded.view(np.float64)
    magnitude = np.abs(x)
    top = magnitude.max(initial=0.0)
    if not top < 2.0**127:
        out[np.abs(out) >= 2.0**128] = np.inf
        out = np.copysign(out, x)
        out[np.isnan(x)] = np.nan
    tiny = magnitude < 2.0**-126
    if tiny.any():
        out[tiny] = np.rint(x[tiny] * 2.0**133) * 2.0**-133
    return out


def as_format(x: Array, name: str) -> Array:
    """Return FP64 ``x`` rounded once to format ``name`` and stored in its dtype."""
    with np.errstate(over="ignore", invalid="ignore"):
        return rounder(name)(x).astype(FORMATS[name].dtype)


def release(x: Array) -> None:
    """Let go of the pages of the file that ``x`` is a view of, if it is one; they are read again when asked for."""
    base: Any = x
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if isinstance(base, mmap.mmap) and hasattr(base, "madvise"):  # not on Windows
        base.madvise(mmap.MADV_DONTNEED)


def ordinals(x: Array) -> npt.NDArray[np.int64]:
    """Return integers that order the values of a floating dtype, one apart for neighbours; ±0 share ordinal 0.

    int64 because the distance of two int32 ordinals can wrap.
    """
    kind = {2: np.int16, 4: np.int32, 8: np.int64, 1: np.int8}[x.dtype.itemsize]
    bits = np.ascontiguousarray(x).view(kind).astype(np.int64)
    sign = np.int64(-(1 << (8 * x.dtype.itemsize - 1)))
    return np.where(bits < 0, sign - bits, bits)
