"""Symmetric integer quantisation: of weights once, by channel or group, and of rows as a program makes them.

A value is scale · integer, the scale max|x| / most in float32, so that nothing is clipped and zero is zero
(Jacob et al. 2018, §2.1, with zero-point 0).
"""

from dataclasses import dataclass, replace

import numpy as np

from precaudit.numbers.arrays import Array, rounder
from precaudit.numbers.formats import INTEGERS, Integers

ROWS = INTEGERS["int8"]  # of rows quantised while a program runs
# XLA turns a division by a constant into a product: written as one, a scale has the same bits on every device.
INVERSE = np.float32(1 / ROWS.most)


def quantise(w: Array, to: Integers) -> tuple[Array, Array]:
    """Return integers int8 [G, N, n] and scales float32 [G, N] of w [N, in]; G groups of n along its last axis.

    Scales are max|w| / most rounded to float32, quotients w / scale rounded to nearest, ties to even. The last group is
    filled with zeros. A row with NaN or infinities is NaN.
    """
    size = w.shape[1] if to.group is None else to.group
    groups = -(-w.shape[1] // size)
    padded = np.zeros((len(w), groups * size))
    padded[:, : w.shape[1]] = w
    parts = padded.reshape(len(w), groups, size).transpose(1, 0, 2)
    scales = (np.abs(parts).max(axis=2, initial=0.0) / to.most).astype(np.float32)
    with np.errstate(invalid="ignore"):
        ratio = np.divide(parts, scales[..., None], out=np.zeros(parts.shape), where=scales[..., None] > 0)
    return np.nan_to_num(np.rint(ratio), nan=0.0).clip(-to.most, to.most).astype(np.int8), scales


def dequantise(integers: Array, scales: Array, width: int) -> Array:
    """Return scale · integer in FP64 [N, width], exactly, of integers [G, N, n] and scales [G, N]."""
    with np.errstate(invalid="ignore"):
        values = integers * scales[..., None].astype(np.float64)
    return np.ascontiguousarray(values.transpose(1, 0, 2).reshape(integers.shape[1], -1)[:, :width])


DIVISION = 4  # units in the last place of float32 that a device's quotient may be off


@dataclass(frozen=True)
class InRows:
    """Rounds x [..., K] to int8 with one scale a row; returns scale · integer in FP64.

    ``exact``: scale and quotient in FP64: the formula; else in float32, as a program makes them. ``stored``: the
    format that the product is rounded to, through float32, None: neither. ``shift``: of the grid, in its steps.
    """

    exact: bool = False
    stored: str | None = None
    shift: float = 0.0

    def __call__(self, x: Array) -> Array:
        """Return the rows as they are read."""
        integers, scales = in_rows(x, np.float64 if self.exact else np.float32, self.shift)
        with np.errstate(invalid="ignore"):
            if self.stored is None:
                return (integers - self.shift) * scales.astype(np.float64)
            product = (integers - np.float32(self.shift)) * scales
        return rounder(self.stored)(product.astype(np.float64))

    def otherwise(self, x: Array) -> tuple[Array, Array]:
        """Return the rows with quotients near a tie rounded the other way, and which are (bool, like x).

        A device's division is some units in the last place off (``DIVISION``), and ratios of narrow values are at a
        tie more often than others.
        """
        wide = x.astype(np.float32)
        integers, scales = in_rows(wide)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            largest = np.abs(wide).max(axis=-1, keepdims=True)
            exact = wide.astype(np.float64) * np.where(largest > 0, ROWS.most / largest.astype(np.float64), 0.0)
        below = np.floor(exact)
        near = np.abs(exact - below - 0.5) <= DIVISION * 2.0**-23 * np.abs(exact)
        other = np.where(near, np.where(integers == below, below + 1, below), integers).astype(np.float32)
        with np.errstate(invalid="ignore"):
            if self.stored is None:
                return other * scales.astype(np.float64), near
            return rounder(self.stored)((other * scales).astype(np.float64)), near

    def on_moved_grid(self, by: float) -> "InRows":
        """Return the same on a grid moved ``by`` of its step: other rounding errors of the same size."""
        return replace(self, shift=by)


def in_rows(x: Array, kind: type[np.floating] = np.float32, shift: float = 0.0) -> tuple[Array, Array]:
    """Return integers in float32 [..., K] and scales [..., 1] of rows x: integers rint(x · (127 / max|x|) + shift).

    Computed in ``kind``; a row of zeros has the scale 0, one with NaN or infinities is NaN.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        wide = x.astype(kind)
        largest = np.abs(wide).max(axis=-1, keepdims=True)
        factor = np.where(largest > 0, kind(ROWS.most) / largest, kind(0))
        ratio = np.rint(wide * factor + kind(shift))
    # + 0: an integer has no −0
    return np.nan_to_num(ratio, nan=0.0).astype(np.float32) + np.float32(0), largest * kind(INVERSE)
