"""Two seeded sums of every row, its length and a hash: what is recorded of results that are not recorded themselves.

A sum of a row's elements with random signs has as large an error as the row: E (Σ ± e)² = ‖e‖². So what a sum of its
summands has to be is known to a rounding (checksums of Huang and Abraham, 1984), and 20 bytes stand for a row. The
signs and the hash's factors are made as those of ``row_hashes``; rows and keys count from the sequence's first. In JAX
the same words are taken inside the program (recording/tracing/programs.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from precaudit.numbers.arrays import Array, widen
from precaudit.numbers.row_hashes import SEEDS, multipliers, odd

LANES = 2  # sums of a row; its words (coverage.WORDS): these and ‖x‖ as float32, and two of a hash


@dataclass(frozen=True)
class RowSums:
    """Of rows at ``positions`` [T]: ``sums`` [T, lanes] and ``sizes`` ‖x‖ [T] in FP64, ``hashes`` [T, 2] uint32.

    Rows over keys have one sum and neither size nor hash; only the stream between layers is hashed. ``exact``: of rows
    that were recorded whole, so that the sums are FP64's and not of float32.
    """

    positions: Array
    sums: Array
    sizes: Array
    hashes: Array
    exact: bool = False

    def at(self, positions: Array) -> "RowSums | None":
        """Return those at ``positions``; None where some are not there."""
        found = np.searchsorted(self.positions, positions)
        if not np.isin(positions, self.positions).all():
            return None
        return RowSums(positions, self.sums[found], self.sizes[found], self.hashes[found], self.exact)


def row_factors(positions: Any) -> list[Any]:
    """Return odd factors of rows, uint32 [LANES] times the shape of their positions (NumPy's or JAX's).

    Each row has signs of its own: rows that are alike err alike, and with the same signs all of their sums would.
    """
    return [odd(positions.astype(np.uint32) + np.uint32(1 << 20), seed) for seed in SEEDS]


def grid_factors(heads: int, width: int) -> Array:
    """Return odd factors [LANES, heads, width], uint32, of a row that is a grid: of head and place, their product."""
    return multipliers(heads, first=1 << 24)[:, :, None] * multipliers(width)[:, None, :]


def signs(factors: Array) -> Array:
    """Return ±1 by the top bit of factors."""
    return np.where(factors >> np.uint32(31), -1.0, 1.0)


def sums_of(rows: Array, positions: Array) -> Array:
    """Return the sums, in FP64, of rows [T, D]: [T, LANES], or of rows over keys [T, H, S]: [T, 1]."""
    lanes, grid = (1, rows) if rows.ndim == 3 else (LANES, rows.reshape(len(rows), 1, -1))
    own = row_factors(positions)
    found = [
        (grid * signs(own[lane][:, None, None] * grid_factors(*grid.shape[1:])[lane])).sum(axis=(1, 2))
        for lane in range(lanes)
    ]
    return np.stack(found, axis=-1)


def hashes_of(rows: Array) -> Array:
    """Return the hashes [T, LANES], uint32, of rows [T, …] of a model's width, by their bits."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1)
    bits = flat.view(f"u{rows.dtype.itemsize}").astype(np.uint32)
    return np.stack([(bits * m).sum(axis=1, dtype=np.uint32) for m in multipliers(bits.shape[1])], axis=-1)


def of_rows(rows: Array, positions: Array) -> RowSums:
    """Return what a program records of rows [T, …] that were recorded whole."""
    wide = widen(rows).reshape(len(rows), -1)
    return RowSums(positions, sums_of(wide, positions), np.sqrt((wide**2).sum(axis=1)), hashes_of(rows), exact=True)


def concatenate_sums(parts: Sequence[RowSums]) -> RowSums:
    """Return rows of several calls as one."""
    positions, sums, sizes, hashes = (
        np.concatenate([getattr(x, name) for x in parts]) for name in ("positions", "sums", "sizes", "hashes")
    )
    return RowSums(positions, sums, sizes, hashes, exact=all(x.exact for x in parts))


def of_words(words: Array, positions: Array, keyed: bool) -> RowSums:
    """Return what recorded words [T, WORDS], uint32, hold; ``keyed``: of rows over keys."""
    floats = np.ascontiguousarray(words[:, : LANES + 1]).view(np.float32).astype(np.float64)
    return RowSums(positions, floats[:, : 1 if keyed else LANES], floats[:, LANES], words[:, LANES + 1 :])
