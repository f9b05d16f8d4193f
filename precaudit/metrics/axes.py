"""Slices of an array whose axes nobody has named: lines along an axis, and planes across it, in any order of axes.

A line is all elements that differ in one index alone; a plane, all that have one index in common. Lines are along the
axes of at least LONG elements, or along the longest where there is none: of fewer a norm says little.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from precaudit.arrays import Array
from precaudit.metrics.residue import Noise, Slices
from precaudit.metrics.sizes import MIN_CHANNEL_ROWS
from precaudit.records import Number, number

LONG = 8


class Found(NamedTuple):
    """The worst excess of some slices, where its farthest element is, and how many slices there are.

    ``row``, ``last``: the element's row in the order of memory, and its last index.
    """

    excess: float
    row: int
    last: int
    slices: int


def line_axes(shape: Sequence[int]) -> list[int]:
    """Return the axes that lines are along."""
    return [i for i, n in enumerate(shape) if n >= min(LONG, max(shape))]


def plane_axes(shape: Sequence[int]) -> list[int]:
    """Return the axes that planes are across: of at least 8 elements each."""
    return [i for i, n in enumerate(shape) if n > 1 and prod(shape) // n >= MIN_CHANNEL_ROWS]


def worst_slices(left: Array, power: Array | None, reference: Array, noise: Noise) -> dict[str, Found]:
    """Return the worst line ("token"), and the worst plane ("channel") where there are any.

    ``left``: what an emulation leaves; ``power``: noise² (None: 0); ``reference``; all FP64 in the point's own shape.
    """
    shape = left.shape or (1,)
    spread = None if power is None else power.reshape(shape)
    values = _Values(left.reshape(shape), spread, reference.reshape(shape), noise)
    lines, planes = map(values.lines, line_axes(shape)), [*map(values.planes, plane_axes(shape))]
    return {"token": _worst([*lines])} | ({"channel": _worst(planes)} if planes else {})


def worst_line(top: Array, energy: Array) -> Found:
    """Return the line with the largest √(Σ top / Σ energy), of squares in the point's own shape; 0/0 is 0."""
    shape = top.shape or (1,)
    top, energy = top.reshape(shape), energy.reshape(shape)
    found = []
    for axis in line_axes(shape):
        size, noise = top.sum(axis=axis), energy.sum(axis=axis)
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.where(size == 0, 0.0, np.sqrt(size / noise))
        index = tuple(map(int, np.unravel_index(int(np.argmax(each)), each.shape))) if each.ndim else ()
        line = np.moveaxis(top, axis, -1)[index]
        at = (*index[:axis], int(np.argmax(line)), *index[axis:])
        row = int(np.ravel_multi_index(at[:-1], shape[:-1])) if len(shape) > 1 else 0
        found.append(Found(float(each.max(initial=0.0)), row, at[-1], each.size))
    return _worst(found)


def as_scopes(found: dict[str, Found]) -> tuple[dict[str, tuple[Number, int]], dict[str, int]]:
    """Return excesses with their index, a row's or a last one, and how many slices there are, as records hold them."""
    worst = {n: (number(x.excess), x.row if n == "token" else x.last) for n, x in found.items()}
    return worst, {n: x.slices for n, x in found.items()}


def along(x: Array) -> Array:
    """Return for every element the largest root mean square of the lines through it, in the array's shape."""
    x = x.reshape(x.shape or (1,))
    found = np.zeros(x.shape)
    for axis in line_axes(x.shape):
        np.maximum(found, np.sqrt(np.mean(x**2, axis=axis, keepdims=True)), out=found)
    return found


def clusters(deviation: Array, reference: Array) -> Iterator[tuple[Array, Array]]:
    """Yield Σ deviation · r and Σ deviation of every line, of one axis after another, of FP64 arrays."""
    deviation, reference = (x.reshape(x.shape or (1,)) for x in (deviation, reference))
    for axis in line_axes(deviation.shape):
        yield np.sum(deviation * reference, axis=axis).reshape(-1), np.sum(deviation, axis=axis).reshape(-1)


def _worst(found: Sequence[Found]) -> Found:
    return max(found, key=lambda x: x.excess)._replace(slices=sum(x.slices for x in found))


class _Values:
    """What is left of an array, noise² and reference; slices are summed where anything is left in them."""

    def __init__(self, left: Array, power: Array | None, reference: Array, noise: Noise) -> None:
        self.left, self.power, self.reference, self.noise = left, power, reference, noise
        self.at = np.nonzero(left)
        self.squares = left[self.at] ** 2

    def lines(self, axis: int) -> Found:
        """Return the worst of the lines along an axis."""
        shape = self.left.shape
        others = shape[:axis] + shape[axis + 1 :]
        if not self.squares.size:
            return Found(0.0, 0, 0, prod(others))
        place = np.ravel_multi_index(self.at[:axis] + self.at[axis + 1 :], others) if others else 0 * self.at[0]
        known, which = np.unique(place, return_inverse=True)
        index = np.unravel_index(known, others) if others else ()

        def cut(x: Array) -> Array:
            return np.asarray(np.moveaxis(x, axis, -1)[index]).reshape(len(known), -1)

        spread = np.zeros(len(known)) if self.power is None else cut(self.power).sum(axis=1)
        size = np.sum(cut(self.reference) ** 2, axis=1)
        return self._found(which, spread, size, shape[axis], prod(others))

    def planes(self, axis: int) -> Found:
        """Return the worst of the planes across an axis."""
        n, letters = self.left.shape[axis], list(range(self.left.ndim))
        if not self.squares.size:
            return Found(0.0, 0, 0, n)
        size = np.einsum(self.reference, letters, self.reference, letters, [axis])
        spread = np.zeros(n) if self.power is None else np.einsum(self.power, letters, [axis])
        return self._found(self.at[axis], spread, size, self.left.size // n, n)

    def _found(self, which: Array, spread: Array, size: Array, each: int, count: int) -> Found:
        """Return the worst of slices, each of ``each`` elements; ``which``: the slice of every element that is left."""
        kept = np.bincount(which, self.squares, minlength=len(size))
        excess = Slices(kept, spread, size).excess(self.noise, each)
        worst = int(np.argmax(excess))
        mine = np.flatnonzero(which == worst)
        farthest = [int(x[mine[np.argmax(self.squares[mine])]]) for x in self.at]
        row = int(np.ravel_multi_index(farthest[:-1], self.left.shape[:-1])) if self.left.ndim > 1 else 0
        return Found(float(excess[worst]), row, farthest[-1], count)
