"""A 64-bit hash of every vector along an axis of an array, by values: equal in whatever layout and format they lie.

A sum mod 2^64 of the bits of float32 values times random odd multipliers (Dietzfelbinger 1996): exact, so that the
order of the sum and the strides of the array do not matter. Zeros of both signs are one.
"""

from functools import cache
from math import prod

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.numbers.compiling import nogil_njit
from precaudit.numbers.threads import each, row_ranges


@cache
def _multipliers(n: int) -> Array:
    return np.random.default_rng(n).integers(0, 1 << 63, n, np.uint64) * np.uint64(2) + np.uint64(1)


def vector_hashes(x: Array, axis: int) -> Array:
    """Return the hashes, uint64, of the vectors of floats along an axis: an array of the other axes."""
    n, before = x.shape[axis], prod(x.shape[:axis])
    out = np.zeros((before, prod(x.shape[axis + 1 :])), np.uint64)
    bits, shift = _bits(np.ascontiguousarray(x).reshape(before, n, out.shape[1]))
    factors = _multipliers(n)
    if out.shape[1] == 1:
        rows = [(bits[a:b, :, 0], shift, factors, out[a:b, 0]) for a, b in row_ranges(before, n)]
        each(_add_rows, rows, x.size)
    elif before > 1:
        parts = [(bits[a:b], shift, factors, out[a:b]) for a, b in row_ranges(before, bits[:1].size)]
        each(_add_columns, parts, x.size)
    else:
        columns = [(bits[:, :, a:b], shift, factors, out[:, a:b]) for a, b in row_ranges(out.shape[1], n)]
        each(_add_columns, columns, x.size)
    return out.reshape(x.shape[:axis] + x.shape[axis + 1 :])


def _bits(x: Array) -> tuple[Array, np.uint32]:
    """Return float32 bits, or the upper 16 of them with how far they are to be moved."""
    if x.dtype.name == "bfloat16":
        return x.view(np.uint16), np.uint32(16)
    return x.astype(np.float32, copy=False).view(np.uint32), np.uint32(0)


@nogil_njit()
def _add_columns(bits, shift, factors, out):  # type: ignore[no-untyped-def]  # pragma: no cover
    for p in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            factor = factors[j]
            for q in range(bits.shape[2]):
                b = np.uint32(bits[p, j, q]) << shift
                b = np.uint32(0) if b == np.uint32(0x80000000) else b
                out[p, q] += np.uint64(b ^ (b >> np.uint32(16))) * factor


@nogil_njit()
def _add_rows(bits, shift, factors, out):  # type: ignore[no-untyped-def]  # pragma: no cover
    for p in range(bits.shape[0]):
        total = np.uint64(0)
        for j in range(bits.shape[1]):
            b = np.uint32(bits[p, j]) << shift
            b = np.uint32(0) if b == np.uint32(0x80000000) else b
            total += np.uint64(b ^ (b >> np.uint32(16))) * factors[j]
        out[p] += total
