"""A 64-bit hash of every row of a cache, so that steps between the first and the last are checked without their bytes.

Two sums mod 2^32 of a row's bits times odd multipliers (Dietzfelbinger 1996; Lemire and Kaser 2014): one element that
differs always shows in both; rows that differ in more share both sums with a probability near 2^-64. In JAX the
same sums are taken inside the program (recording/tracing/programs.py).
"""

from typing import Any

import numpy as np

from precaudit.numbers.arrays import Array

SEEDS = (0x9E3779B9, 0x85EBCA6B)


def multipliers(n: int, first: int = 1) -> Array:
    """Return odd multipliers [LANES, n], uint32, of element number, from ``first``, and lane."""
    return np.stack([odd(np.arange(first, first + n, dtype=np.uint32), seed) for seed in SEEDS])


def odd(x: Any, seed: int) -> Any:
    """Return odd numbers for numbers x, uint32 arrays of NumPy or of JAX: MurmurHash3's finalizer."""
    x = x * np.uint32(seed)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return (x ^ (x >> np.uint32(16))) | np.uint32(1)


def row_hashes(rows: Array) -> Array:
    """Return the hashes [S, LANES], uint32, of rows [S, …] by their bits."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1)
    bits = flat.view(f"u{rows.dtype.itemsize}").astype(np.uint32)
    return np.stack([(bits * m).sum(axis=1, dtype=np.uint32) for m in multipliers(bits.shape[1])], axis=-1)
