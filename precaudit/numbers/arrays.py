"""Arrays of number formats: exact widening, and exact rounding of FP64 values to a format."""

import mmap
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from precaudit.numbers.formats import EIGHT_BITS, FORMATS

Array = npt.NDArray[Any]

SMALL = 1 << 20  # elements that NumPy rounds to bfloat16 in the time it takes to import what compiles loops


def common_dtype(a: Any, b: Any) -> np.dtype[Any]:
    """Return the narrowest of our dtypes that holds the values of both (float16 and bfloat16: float32)."""
    x, y = sorted((np.dtype(a), np.dtype(b)), key=lambda d: FORMATS[d.name].precision)
    return FORMATS["float32"].dtype if x != y and {x.name, y.name} <= {"float16", "bfloat16", *EIGHT_BITS} else y


def widen(x: Array) -> npt.NDArray[np.float64]:
    """Return ``x`` in FP64, exactly."""
    with np.errstate(invalid="ignore"):  # signalling NaNs warn
        return x.astype(np.float64)


def to_single(x: Array) -> npt.NDArray[np.float32]:
    """Return ``x`` in FP32: exact for every format up to 24 bits."""
    with np.errstate(invalid="ignore"):  # signalling NaNs warn
        return x.astype(np.float32)


@cache
def rounder(name: str) -> Callable[[Array], Array]:
    """Return the function that rounds FP64 values to format ``name``, to nearest, ties to even, kept in FP64.

    Overflow gives an infinity (float8_e4m3fn has none: NaN), underflow the format's subnormals.
    """
    if name == "float64":
        return identity
    if name in ("bfloat16", "float32"):
        return partial(_in_one_pass, name)
    dtype = FORMATS[name].dtype

    def round_to(x: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(dtype).astype(np.float64)

    return round_to


def cutter(name: str) -> Callable[[Array], Array]:
    """Return the function that cuts FP64 values to a format of 8 or 16 bits toward zero, kept in FP64."""
    dtype = FORMATS[name].dtype
    word = np.dtype(f"u{FORMATS[name].itemsize}")

    def cut(x: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            nearest = np.ascontiguousarray(x).astype(dtype)
            beyond = np.abs(nearest.astype(np.float64)) > np.abs(x)
        bits = nearest.view(word)
        bits[beyond] -= 1  # of sign and magnitude: the next number toward zero
        return nearest.astype(np.float64)

    return cut


def rescale_rounding(place: Callable[[Array], Array], factor: float) -> Callable[[Array], Array]:
    """Return x ↦ place(x · factor) / factor, in one pass where ``place`` is a rounder that has one.

    ``factor``: from 1 to 2; it is halved, which is the same grid, for what overflows by it alone.
    """
    if isinstance(place, partial) and place.func is _in_one_pass:
        return partial(_in_one_pass, str(place.args[0]), factor=factor)

    def rescale(x: Array) -> Array:
        # What leaves FP64's range is infinite in every narrower format too, in one pass or in two.
        with np.errstate(over="ignore"):
            made = np.asarray(place(x * factor) / factor)
        over = ~np.isfinite(made) & np.isfinite(x)
        if over.any():
            some, half = np.asarray(x)[over], factor / 2
            near = place(some)
            made[over] = np.where(np.isfinite(near), place(some * half) / half, near)
        return made

    return rescale


def _in_one_pass(name: str, x: Array, factor: float | None = None) -> Array:
    from precaudit.numbers import rounding_kernels  # numba takes a third of a second to import

    x = np.asarray(x, np.float64, order="C")
    out = np.empty(x.shape)
    if factor is None:
        rounding_kernels.ROUND[name](x.reshape(-1), out.reshape(-1))
    else:
        rounding_kernels.RESCALED[name](x.reshape(-1), out.reshape(-1), factor)
    return out


def identity(x: Array) -> Array:
    """Return ``x``: the rounding of FP64."""
    return x


def as_format(x: Array, name: str) -> Array:
    """Return FP64 ``x`` rounded once to format ``name`` and stored in its dtype."""
    dtype = FORMATS[name].dtype
    with np.errstate(over="ignore", invalid="ignore"):
        if name == "float32":
            return np.asarray(x, dtype)
        if name == "bfloat16" and x.size <= SMALL:
            return _single_to_odd(x).astype(dtype)
        return rounder(name)(x).astype(dtype)


def _single_to_odd(x: Array) -> npt.NDArray[np.float32]:
    """Return FP64 ``x`` in FP32, to nearest where that is exact, else to the neighbour whose last bit is set.

    Rounded again to 22 bits or fewer it is what rounding once gives (Boldo and Melquiond 2008, theorem 2).
    """
    x = np.asarray(x, np.float64)
    y = np.asarray(x, np.float32)
    wide = y.astype(np.float64)
    bits = y.view(np.int32) - (np.abs(wide) > np.abs(x))
    return np.asarray(bits | (wide != x), np.int32).view(np.float32)


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
