"""Sums, largest values and distances in units in the last place of a block of rows in one pass, compiled by numba."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.numbers.compiling import nogil_njit

PIECE = 1024  # elements read twice while they are in the first-level cache, with their channels' sums
# No nnan, no ninf: elements that are not finite are told from the others by comparing with infinity.
ORDER = {"reassoc", "contract"}


class Totals(NamedTuple):
    """What is filled, or added to: cells of rows and heads, and channels; made in compiled code, where it is free."""

    cells: Array
    channels: Array


@numba.njit
def _difference(x, y):  # type: ignore[no-untyped-def]
    """FP64 x − y; a function of its own, so that no sum is reordered around the cancellation in it."""
    return x - y


@numba.njit(inline="always")
def _wide_bfloat16(x):  # type: ignore[no-untyped-def]
    """The value of bfloat16's bits: the upper half of an FP32 word."""
    return np.float64(np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32))


@numba.njit(inline="always")
def _wide(x):  # type: ignore[no-untyped-def]
    return np.float64(x)


@numba.njit(inline="always")
def _apart(a, b):  # type: ignore[no-untyped-def]
    """|a − b| of int64 ordinals: up to 2^64, the distance of two FP64 values wraps in int64."""
    u, v = np.uint64(a), np.uint64(b)
    return np.uint64(u - v) if a > b else np.uint64(v - u)


@numba.njit(inline="always")
def _ulps_float64(x, y):  # type: ignore[no-untyped-def]
    lowest = np.int64(-(2**63))
    a, b = np.float64(x).view(np.int64), np.float64(y).view(np.int64)
    return _apart(a if a >= 0 else np.int64(lowest - a), b if b >= 0 else np.int64(lowest - b))


@numba.njit(inline="always")
def _ulps_float32(x, y):  # type: ignore[no-untyped-def]
    lowest = np.int64(-(2**31))
    a, b = np.int64(np.float32(x).view(np.int32)), np.int64(np.float32(y).view(np.int32))
    return _apart(a if a >= 0 else np.int64(lowest - a), b if b >= 0 else np.int64(lowest - b))


@numba.njit(inline="always")
def _ulps_bfloat16(x, y):  # type: ignore[no-untyped-def]
    """Round FP64 y in one step, ties to even, to bfloat16's ordinal; x are bfloat16's bits.

    bfloat16 keeps 7 of FP64's 52 fraction bits. Below 2^-126 its quantum is 2^-133, which is the ulp of FP64's 2^-81:
    adding that rounds there, and the ordinal is what was added to the word.
    """
    size = abs(y)
    bits = np.float64(size).view(np.int64)
    odd = (bits >> np.int64(45)) & np.int64(1)
    normal = ((bits + np.int64((1 << 44) - 1) + odd) >> np.int64(45)) - np.int64((1023 - 127) << 7)
    quantum = np.float64(2.0**-81)
    tiny = np.float64(size + quantum).view(np.int64) - np.float64(quantum).view(np.int64)
    rounded = tiny if size < 2.0**-126 else min(normal, np.int64(0x7F80))
    kept = np.int64(x & np.uint16(0x7FFF))
    return _apart(-kept if x > np.uint16(0x7FFF) else kept, -rounded if y < 0 else rounded)


@numba.njit(inline="always")
def _rows(c, r, totals, first, wide, ulps):  # type: ignore[no-untyped-def]
    """Fill cells [8, T, H] from row ``first`` on and add to channels [3, H * K]; c, r are [rows, H, K], contiguous.

    Return how many elements are not finite, and the largest distance as ulps(element of c, FP64 reference) gives it.
    """
    rows, heads, width = c.shape
    cells, channels = totals.cells, totals.channels
    bad, far = np.int64(0), np.uint64(0)
    for t in range(rows):
        for h in range(heads):
            ee = rr = cc = er = cr = se = ae = 0.0
            top = np.int64(0)
            for start in range(0, width, PIECE):
                stop = min(start + PIECE, width)
                x, y = c[t, h, start:stop], r[t, h, start:stop]
                squares = channels[0, h * width + start : h * width + stop]
                sizes = channels[1, h * width + start : h * width + stop]
                tops = channels[2, h * width + start : h * width + stop]
                for j in range(stop - start):
                    e = _difference(wide(x[j]), np.float64(y[j]))
                    finite = abs(e) < np.inf
                    e = e if finite else 0.0
                    a = wide(x[j]) if finite else 0.0
                    b = np.float64(y[j]) if finite else 0.0
                    ee += e * e
                    rr += b * b
                    cc += a * a
                    er += e * b
                    cr += a * b
                    se += e
                    ae += abs(e)
                    squares[j] += e * e
                    sizes[j] += b * b
                for j in range(stop - start):
                    a, b = wide(x[j]), np.float64(y[j])
                    e = _difference(a, b)
                    finite = abs(e) < np.inf
                    bad += np.int64((not finite) & (a != b))
                    size = abs(e) if finite else 0.0
                    top = max(
                        top, np.float64(size).view(np.int64)
                    )  # FP64 ≥ 0 is ordered as its words; their maximum vectorises
                    tops[j] = size if size > tops[j] else tops[j]
                    distance = ulps(x[j], b if finite else 0.0)
                    far = max(far, distance if abs(a) < np.inf else np.uint64(0))
            row, largest = first + t, np.int64(top).view(np.float64)
            cells[0, row, h], cells[1, row, h], cells[2, row, h], cells[3, row, h] = ee, rr, cc, er
            cells[4, row, h], cells[5, row, h], cells[6, row, h], cells[7, row, h] = cr, se, ae, largest
    return bad, far


@nogil_njit(fastmath=ORDER)
def _float64(c, r, cells, channels, first):  # type: ignore[no-untyped-def]
    return _rows(c, r, Totals(cells, channels), first, _wide, _ulps_float64)


@nogil_njit(fastmath=ORDER)
def _float32(c, r, cells, channels, first):  # type: ignore[no-untyped-def]
    return _rows(c, r, Totals(cells, channels), first, _wide, _ulps_float32)


@nogil_njit(fastmath=ORDER)
def _bfloat16(c, r, cells, channels, first):  # type: ignore[no-untyped-def]
    return _rows(c, r, Totals(cells, channels), first, _wide_bfloat16, _ulps_bfloat16)


KERNELS: dict[str, Callable[..., Any]] = {"float64": _float64, "float32": _float32, "bfloat16": _bfloat16}
