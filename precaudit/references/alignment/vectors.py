"""FP64 vectors of one program found among another's, along any axis and in any layout (NumPy).

A vector is known by its norm and two projections on fixed random directions. Two correct programs agree in FP64 to
about twelve digits, and two vectors that are not one agree in neither projection to nine. What pads a row of scores
or probabilities, zeros at its end and what masks a key, adds nothing to a projection, however long the row is.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from precaudit.numbers.arrays import Array

SAME_VECTOR = 1e-9  # of a vector's norm, that two orders of sums in FP64 leave at most
ZERO = 1e-12  # of the largest vector's norm: a vector that cancels to less is no vector
MASKING = 1e9  # in size, and more: what masks a key
TRIED = 64  # vectors of one first projection
NOWHERE = -1  # of a vector that is none of those known


class Found(NamedTuple):
    """Where the vectors of an array are known, along the axis where most are.

    ``axis``: as ``lines`` counts them. ``at`` [M]: of its vectors that are not zero, ``lines`` [M], the numbers of the
    known ones, NOWHERE of the others.
    """

    share: float
    axis: int
    lines: Array
    at: Array


class Vectors:
    """All vectors of some arrays, to be looked up; ``origins`` [K, 3]: of each the array, the axis and the line."""

    def __init__(self, arrays: Iterable[Array]) -> None:
        every, origins = [np.zeros((0, 3))], [np.zeros((0, 3), np.int32)]
        self.has_zeros = False
        for i, x in enumerate(arrays):
            each = list(projections(x))
            self.has_zeros |= not any(len(p) for _, p in each)
            for axis, (at, p) in enumerate(each):
                every.append(p)
                origins.append(np.column_stack([np.full(len(at), i), np.full(len(at), axis), at]).astype(np.int32))
        known = np.concatenate(every)
        order = np.argsort(known[:, 0], kind="stable")
        self.known, self.origins = known[order], np.concatenate(origins)[order]

    def share(self, x: Array) -> float:
        """Return the share of an array's vectors that are known, along the axis where most are.

        Zeros alone are known where another array is zeros alone.
        """
        return self.find(x).share

    def find(self, x: Array) -> Found:
        """Return which of an array's vectors are known, along the axis where most are."""
        none = np.zeros(0, np.int64)
        found = Found(float(self.has_zeros), 0, none, none)
        for axis, (lines, looked_up) in enumerate(projections(x)):
            if len(lines):
                at = self.where(looked_up)
                share = float((at != NOWHERE).mean())
                if not len(found.lines) or share > found.share:
                    found = Found(share, axis, lines, at)
        return found

    def where(self, looked_up: Array) -> Array:
        """Return which known vector each of some [N, 3], as ``projections`` gives them, is; NOWHERE: none."""
        near = SAME_VECTOR * looked_up[:, 2]
        first = self.known[:, 0]
        low = np.searchsorted(first, looked_up[:, 0] - near, "left")
        high = np.searchsorted(first, looked_up[:, 0] + near, "right")
        found = np.full(len(looked_up), NOWHERE)
        for i in range(min(TRIED, int((high - low).max(initial=0)))):
            at = np.flatnonzero((found == NOWHERE) & (low + i < high))
            off = np.abs(self.known[low[at] + i] - looked_up[at]).max(axis=1)
            found[at] = np.where(off <= near[at], low[at] + i, NOWHERE)
        return found


def projections(x: Array) -> Iterator[tuple[Array, Array]]:
    """Yield which vectors of each of the ``lines`` of x are not zero, and of these two projections and the norm."""
    size = np.abs(x)
    kept = np.where(size < MASKING, x, 0.0)  # NaN is none, too
    for rows in lines(kept):
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))
        at = np.flatnonzero(norms > ZERO * norms.max(initial=0.0))
        yield at, np.column_stack([rows[at] @ directions(rows.shape[1]), norms[at]])


def lines(x: Array) -> Iterator[Array]:
    """Yield x as vectors [N, n] along each axis, and each two that lie side by side; an array of one element is one."""
    axes = [i for i, n in enumerate(x.shape) if n > 1]
    if not axes:
        yield x.reshape(1, -1)
    yield from (np.moveaxis(x, i, -1).reshape(-1, x.shape[i]) for i in axes)
    yield from (_merged(x, i) for i, j in pairwise(axes) if j == i + 1)


def _merged(x: Array, axis: int) -> Array:
    """Return the vectors along an axis and the next as one: rows of all heads, where another has the heads apart."""
    n = x.shape[axis] * x.shape[axis + 1]
    return np.moveaxis(x.reshape(*x.shape[:axis], n, *x.shape[axis + 2 :]), axis, -1).reshape(-1, n)


def directions(n: int) -> Array:
    """Return two fixed random directions [n, 2]; those of fewer elements begin those of more."""
    return np.random.default_rng(45).standard_normal((n, 2))
