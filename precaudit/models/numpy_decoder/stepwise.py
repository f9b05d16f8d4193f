"""Dot products in FP32 words with every product and every partial sum rounded to a format, compiled by numba."""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from precaudit.numbers.compiling import nogil_njit


@numba.njit(inline="always")
def _bfloat16(x):  # type: ignore[no-untyped-def]
    """FP32 to bfloat16 and back, ties to even: bfloat16 is the upper half of the word, subnormals included."""
    bits = np.float32(x).view(np.int32)
    odd = (bits >> np.int32(16)) & np.int32(1)
    return np.int32((bits + np.int32(0x7FFF) + odd) & np.int32(-65536)).view(np.float32)


@numba.njit(inline="always")
def _float16(x):  # type: ignore[no-untyped-def]
    """FP32 to float16 and back, ties to even; integer selects, so that the loop over it vectorises."""
    bits = np.float32(x).view(np.int32)
    sign, size = np.int32(bits & np.int32(-2147483648)), np.int32(bits & np.int32(0x7FFFFFFF))
    odd = (size >> np.int32(13)) & np.int32(1)
    normal = np.int32((size + np.int32(0xFFF) + odd) & np.int32(-8192))  # numba widens int32 sums
    # 0.75 has the ulp 2^-24, float16's subnormal quantum: adding it rounds there, subtracting it is exact.
    tiny = np.float32(np.float32(np.int32(size).view(np.float32) + np.float32(0.75)) - np.float32(0.75))
    found = np.int32(np.float32(tiny).view(np.int32)) if size < np.int32(0x38800000) else normal
    overflow = (normal > np.int32(0x477FE000)) & (size <= np.int32(0x7F800000))
    found = np.int32(0x7F800000) if overflow else found
    return np.int32(sign | found).view(np.float32)


@numba.njit(inline="always")
def _float32(x):  # type: ignore[no-untyped-def]
    """FP32 stays."""
    return np.float32(x)


@nogil_njit()
def _dot_float16(a, b, out):  # type: ignore[no-untyped-def]
    _dot_with(a, b, out, _float16)


@nogil_njit()
def _dot_bfloat16(a, b, out):  # type: ignore[no-untyped-def]
    _dot_with(a, b, out, _bfloat16)


@nogil_njit()
def _dot_float32(a, b, out):  # type: ignore[no-untyped-def]
    _dot_with(a, b, out, _float32)


@numba.njit(inline="always")
def _dot_with(a, b, out, rounding):  # type: ignore[no-untyped-def]
    """Out [M, N] = a [M, K] · b [K, N], all FP32, k ascending."""
    rows, terms = a.shape
    columns = b.shape[1]
    total = np.empty(columns, np.float32)
    for m in range(rows):
        total[:] = np.float32(0)
        for k in range(terms):
            x = a[m, k]
            for n in range(columns):
                total[n] = rounding(total[n] + rounding(x * b[k, n]))
        out[m] = total


@numba.njit(inline="always")
def _products_with(a, b, out, rounding):  # type: ignore[no-untyped-def]
    """Out [M, N] in FP64 = a [M, K] · b [K, N], both FP32, products rounded and summed in FP64."""
    rows, terms = a.shape
    columns = b.shape[1]
    out[:] = 0.0
    for m in range(rows):
        for k in range(terms):
            x = a[m, k]
            for n in range(columns):
                out[m, n] += rounding(x * b[k, n])


@nogil_njit()
def _products_float16(a, b, out):  # type: ignore[no-untyped-def]
    _products_with(a, b, out, _float16)


@nogil_njit()
def _products_bfloat16(a, b, out):  # type: ignore[no-untyped-def]
    _products_with(a, b, out, _bfloat16)


PRODUCTS: dict[str, Callable[..., Any]] = {"float16": _products_float16, "bfloat16": _products_bfloat16}
KERNELS: dict[str, Callable[..., Any]] = {
    "float16": _dot_float16,
    "bfloat16": _dot_bfloat16,
    "float32": _dot_float32,
}
