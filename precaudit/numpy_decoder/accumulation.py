"""Dot products that round every product and every partial sum to a format, compiled by numba."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np

from precaudit.errors import UserError
from precaudit.formats import Array, parse_format, rounder

FORMATS = ("float16", "bfloat16", "float32")


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


@numba.njit(nogil=True, cache=True)
def _dot_float16(a, b, out):  # type: ignore[no-untyped-def]
    _dot_with(a, b, out, _float16)


@numba.njit(nogil=True, cache=True)
def _dot_bfloat16(a, b, out):  # type: ignore[no-untyped-def]
    _dot_with(a, b, out, _bfloat16)


@numba.njit(nogil=True, cache=True)
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


KERNELS: dict[str, Callable[..., Any]] = {
    "float16": _dot_float16,
    "bfloat16": _dot_bfloat16,
    "float32": _dot_float32,
}


def parse_accumulation(text: str) -> tuple[str, int]:
    """Return (format, block) of ``float16`` (every step) or ``float16/128`` (once per 128 terms)."""
    name, slash, size = text.partition("/")
    name = parse_format(name).name
    if name not in FORMATS:
        raise UserError(f"--accum {text}: accumulation can be emulated in {', '.join(FORMATS)}")
    if slash and (not size.isdigit() or int(size) < 1):
        raise UserError(f"--accum {text}: after the slash comes how many terms a block has, for example float16/128")
    return name, int(size) if slash else 1


@cache
def accumulating(text: str) -> Callable[[Array, Array], Array]:
    """Return a matrix product [M, K] · [K, N] accumulated as ``text`` says; operands and result FP64.

    Operands are taken as FP32 (exact for recorded tensors of up to 24 bits). Every step: the product, then the sum is
    rounded to nearest even. FP32 holds the sum or product of two values of at most 11 bits well enough that rounding
    it again is innocuous (Figueroa 1995: p ≥ 2p' + 2). In blocks: FP32 inside a block, the running sum rounded once
    per block, as a matrix unit with a narrow accumulator does.
    """
    name, block = parse_accumulation(text)

    def dot(a: Array, b: Array) -> Array:
        left, right = _single(a), _single(b)
        if block > 1:
            return _in_blocks(left, right, name, block)
        out = np.empty((left.shape[0], right.shape[1]), np.float32)
        KERNELS[name](left, right, out)
        return out.astype(np.float64)

    return dot


def _single(x: Array) -> Array:
    """FP32, contiguous, every NaN the canonical one (rounding by bits must not carry into the exponent)."""
    with np.errstate(over="ignore"):
        y = np.ascontiguousarray(x, np.float32)
    bad = np.isnan(y)
    return np.where(bad, np.float32(np.nan), y) if bad.any() else y


def _in_blocks(a: Array, b: Array, name: str, block: int) -> Array:
    round_to = rounder(name)
    total = np.zeros((a.shape[0], b.shape[1]))
    for first in range(0, a.shape[1], block):
        part = a[:, first : first + block] @ b[first : first + block]
        total = round_to((total.astype(np.float32) + part).astype(np.float64))
    return total
