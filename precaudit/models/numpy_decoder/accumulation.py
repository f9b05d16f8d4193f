"""Accumulation formats: what a sum does when products and partial sums are rounded."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from precaudit.numbers.arrays import Array, rounder
from precaudit.numbers.formats import parse_accumulation


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
        from precaudit.models.numpy_decoder.stepwise import KERNELS  # numba takes a third of a second to import

        out = np.empty((left.shape[0], right.shape[1]), np.float32)
        KERNELS[name](left, right, out)
        return out.astype(np.float64)

    return dot


@cache
def fused_multiply_add(name: str) -> Callable[[Array, Array], Array]:
    """Return a matrix product [M, K] · [K, N] whose sum is rounded to a format after every term, its products never.

    Each term is added in FP32, which rounds first: what XLA makes on a CPU of a loop of multiply-adds in the format.
    """
    return lambda a, b: _in_blocks(_single(a), _single(b), name, 1)


@cache
def rounding_products(name: str) -> Callable[[Array, Array], Array]:
    """Return a matrix product [M, K] · [K, N] whose products are rounded to a format and summed in FP64.

    What XLA makes on a GPU of a product with one row of operands of that format, whose products are exact in FP32: a
    multiplication in the format and a float32 reduction (its dot strength reduction); seen on an H100, bit for bit.
    """

    def dot(a: Array, b: Array) -> Array:
        from precaudit.models.numpy_decoder.stepwise import PRODUCTS

        left, right = _single(a), _single(b)
        out = np.empty((left.shape[0], right.shape[1]))
        PRODUCTS[name](left, right, out)
        return out

    return dot


@cache
def pairwise_matmul(name: str) -> Callable[[Array, Array], Array]:
    """Return a matrix product [M, K] · [K, N] whose products, and sums of neighbours level by level, are rounded.

    The order of a tree of adders (Higham 2002, §4.1); one row of the result at a time.
    """
    round_to = rounder(name)

    def dot(a: Array, b: Array) -> Array:
        out = np.empty((a.shape[0], b.shape[1]))
        for i, row in enumerate(a):
            terms = round_to(row[:, None] * b)
            while len(terms) > 1:
                if len(terms) % 2:
                    terms = np.concatenate([terms, np.zeros((1, terms.shape[1]))])
                terms = round_to(terms[::2] + terms[1::2])
            out[i] = terms[0]
        return out

    return dot


@cache
def blocked_matmul(name: str, block: int) -> Callable[[Array, Array], Array]:
    """Return a matrix product whose sum of every ``block`` terms is rounded to a format, and so is the running sum.

    What partial sums stored in a narrow format make of it: of shards (an all-reduce), or of a kernel split over K.
    """
    round_to = rounder(name)

    def dot(a: Array, b: Array) -> Array:
        total = np.zeros((a.shape[0], b.shape[1]))
        for first in range(0, a.shape[1], block):
            part = _single(a[:, first : first + block]) @ _single(b[first : first + block])
            total = round_to(total + round_to(part.astype(np.float64)))
        return total

    return dot


@cache
def matmul_of_parts(name: str, parts: int) -> Callable[[Array, Array], Array]:
    """Return the same for ``parts`` equal parts of a sum, the last one shorter where they are not."""

    def dot(a: Array, b: Array) -> Array:
        return blocked_matmul(name, max(-(-a.shape[1] // parts), 1))(a, b)

    return dot


_KEPT: dict[Any, tuple[Array, Array]] = {}
MOST, KEEP = 16, 1 << 26  # converted operands remembered, a layer's matrices, and their bytes as they were


def _single(x: Array) -> Array:
    """FP32, contiguous; a transposed matrix is converted once while in use: the copy costs as much as the sums."""
    if x.flags.c_contiguous:
        return _canonical_single(x)
    key = (x.ctypes.data, x.shape, x.strides)
    if key not in _KEPT:
        if len(_KEPT) >= MOST or sum(a.nbytes for a, _ in list(_KEPT.values())) + x.nbytes > KEEP:
            _KEPT.clear()
        _KEPT[key] = (x, _canonical_single(x))  # holding x: its address stays its own
    kept = _KEPT.get(key)
    return kept[1] if kept is not None else _canonical_single(x)


def _canonical_single(x: Array) -> Array:
    """FP32 with every NaN the canonical one: rounding by bits must not carry into the exponent."""
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
