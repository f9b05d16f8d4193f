"""Dot products that round every product and every partial sum to a format, compiled by numba."""

from collections.abc import Callable

import numba
import numpy as np

from precaudit.errors import UserError
from precaudit.formats import Array, parse_format

# (bits of the FP32 word dropped, smallest normal, magic constant whose FP32 ulp is the subnormal quantum, largest)
# bfloat16's and float32's subnormals are what dropping bits of FP32's subnormals gives.
LAYOUTS = {
    "float16": (13, 2.0**-14, 0.75, 65504.0),
    "bfloat16": (16, 0.0, 0.0, np.inf),
    "float32": (0, 0.0, 0.0, np.inf),
}


@numba.njit(inline="always", error_model="numpy")
def _round(x, drop, odd, half, keep, tiny, magic, largest):
    bits = np.float32(x).view(np.int32)
    y = np.int32((bits + half + ((bits >> drop) & odd)) & keep).view(np.float32)
    size = abs(x)
    y = np.float32(np.float32(x + magic) - magic) if size < tiny and x >= 0 else y
    y = np.float32(np.float32(x - magic) + magic) if size < tiny and x < 0 else y
    y = np.float32(np.inf) if y > largest else y
    y = np.float32(-np.inf) if y < -largest else y
    return y if x == x else x


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _dot(a, b, out, block, drop, odd, half, keep, tiny, magic, largest):
    """out [M, N] = a [M, K] · b [K, N], all FP32; k ascending, so the loop over n vectorises."""
    rows, terms = a.shape
    columns = b.shape[1]
    total = np.empty(columns, np.float32)
    part = np.empty(columns, np.float32)
    for m in range(rows):
        total[:] = np.float32(0)
        if block == 1:
            for k in range(terms):
                x = a[m, k]
                for n in range(columns):
                    p = _round(x * b[k, n], drop, odd, half, keep, tiny, magic, largest)
                    total[n] = _round(total[n] + p, drop, odd, half, keep, tiny, magic, largest)
        else:
            for first in range(0, terms, block):
                part[:] = np.float32(0)
                for k in range(first, min(terms, first + block)):
                    x = a[m, k]
                    for n in range(columns):
                        part[n] += x * b[k, n]
                for n in range(columns):
                    total[n] = _round(total[n] + part[n], drop, odd, half, keep, tiny, magic, largest)
        out[m] = total


def parse_accumulation(text: str) -> tuple[str, int]:
    """Return (format, block) of ``float16`` (every step) or ``float16/128`` (once per 128 terms)."""
    name, slash, size = text.partition("/")
    name = parse_format(name).name
    if name not in LAYOUTS:
        raise UserError(f"--accum {text}: accumulation can be emulated in {', '.join(LAYOUTS)}")
    if slash and (not size.isdigit() or int(size) < 1):
        raise UserError(f"--accum {text}: after the slash comes how many terms a block has, for example float16/128")
    return name, int(size) if slash else 1


def accumulating(text: str) -> Callable[[Array, Array], Array]:
    """Return a matrix product [M, K] · [K, N] accumulated as ``text`` says; operands and result FP64.

    Operands are taken as FP32 (exact for recorded tensors up to 24 bits). Every step: the product and then the sum is
    rounded to nearest even. FP32 holds the sum or product of two values of at most 11 bits well enough that rounding
    it again is innocuous (Figueroa 1995: p ≥ 2p' + 2). In blocks: FP32 inside a block, the running sum rounded once
    per block, as a matrix unit with a narrow accumulator does.
    """
    name, block = parse_accumulation(text)
    drop, tiny, magic, largest = LAYOUTS[name]
    half = (1 << (drop - 1)) - 1 if drop else 0
    constants = (
        np.int32(drop), np.int32(drop > 0), np.int32(half), np.int32(-(1 << drop)),
        np.float32(tiny), np.float32(magic), np.float32(largest),
    )  # fmt: skip

    def dot(a: Array, b: Array) -> Array:
        with np.errstate(over="ignore"):
            left = np.ascontiguousarray(a, np.float32)
            right = np.ascontiguousarray(b, np.float32)
        out = np.empty((left.shape[0], right.shape[1]), np.float32)
        _dot(left, right, out, np.int64(block), *constants)
        return out.astype(np.float64)

    return dot
