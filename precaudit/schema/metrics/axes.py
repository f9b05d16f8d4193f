"""Slices of an array whose axes nobody has named: lines along an axis, and planes across it, in any order of axes.

A line is all elements that differ in one index alone; a plane, all that have one index in common. Lines are along the
axes of at least LONG elements, or along the longest where there is none: of fewer a norm says little.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.schema.metrics.residue import Noise, SliceSums, Sums
from precaudit.schema.metrics.sizes import MIN_CHANNEL_ROWS
from precaudit.schema.records.base import Number, json_number

LONG = 8


class WorstSlice(NamedTuple):
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


def worst_slices(
    left: Array, power: Array | None, reference: Array, noise: Noise, sums: Sums | None = None
) -> dict[str, WorstSlice]:
    """Return the worst line ("token"), and the worst plane ("channel") where there are any.

    ``left``: what an emulation leaves; ``power``: noise² (None: 0); ``reference``; all FP64 in the point's own shape.
    ``sums``: of the reference by rows and last indices, where they are known.
    """
    return _worst_of(_Everywhere(_Reference.of(reference, sums), noise, left, power))


def worst_of_rows(
    rows: Array, left: Array, reference: Array, shape: tuple[int, ...], noise: Noise, sums: Sums
) -> dict[str, WorstSlice]:
    """Return the same of an array [rows, N] of ``shape``, under no power: ``left`` [some, N] is of some ``rows``.

    In the others nothing is left.
    """
    if 2 * len(rows) > len(reference):
        every = np.zeros(reference.shape)
        every[rows] = left
        return worst_slices(every.reshape(shape), None, reference.reshape(shape), noise, sums)
    return _worst_of(_Few(_Reference.of(reference.reshape(shape), sums), noise, rows, left))


def _worst_of(values: "_Everywhere | _Few") -> dict[str, WorstSlice]:
    shape = values.reference.shape
    lines, planes = map(values.lines, line_axes(shape)), [*map(values.planes, plane_axes(shape))]
    return {"token": _worst([*lines])} | ({"channel": _worst(planes)} if planes else {})


def long(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without its axes of one element."""
    return tuple(n for n in shape if n != 1) or (1,)


def worst_line(top: Array, energy: Array) -> WorstSlice:
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
        found.append(WorstSlice(float(each.max(initial=0.0)), row, at[-1], each.size))
    return _worst(found)


def as_scopes(found: dict[str, WorstSlice]) -> tuple[dict[str, tuple[Number, int]], dict[str, int]]:
    """Return excesses with their index, a row's or a last one, and how many slices there are, as records hold them."""
    worst = {n: (json_number(x.excess), x.row if n == "token" else x.last) for n, x in found.items()}
    return worst, {n: x.slices for n, x in found.items()}


def largest_along(x: Array) -> Array:
    """Return for every element the largest root mean square of the lines through it, in the array's shape."""
    shape, x = x.shape, x.reshape(long(x.shape))
    found, letters = np.zeros(x.shape), list(range(x.ndim))
    for axis in line_axes(x.shape):
        size = np.asarray(np.einsum(x, letters, x, letters, [i for i in letters if i != axis])) / x.shape[axis]
        np.maximum(found, np.expand_dims(np.sqrt(size), axis), out=found)
    return found.reshape(shape)


def clusters(deviation: Array, reference: Array) -> Iterator[tuple[Array, Array]]:
    """Yield Σ deviation · r and Σ deviation of every line, of one axis after another, of FP64 arrays.

    Of the last axis of an array none: those of rows are known without.
    """
    width = (deviation.shape or (1,))[-1]
    deviation, reference = (x.reshape(long(x.shape)) for x in (deviation, reference))
    letters = list(range(deviation.ndim))
    known = len(letters) - 1 if width == deviation.shape[-1] else None
    for axis in (axis for axis in line_axes(deviation.shape) if axis != known):
        rest = [i for i in letters if i != axis]
        gains = np.einsum(deviation, letters, reference, letters, rest)
        yield np.asarray(gains).reshape(-1), np.asarray(np.einsum(deviation, letters, rest)).reshape(-1)


def _worst(found: Sequence[WorstSlice]) -> WorstSlice:
    return max(found, key=lambda x: x.excess)._replace(slices=sum(x.slices for x in found))


@dataclass(frozen=True)
class _Reference:
    """An array without its axes of one element, its last length with them, and Σ r² of rows and last indices."""

    values: Array
    width: int
    rows: Array | None
    columns: Array | None

    @classmethod
    def of(cls, values: Array, sums: Sums | None) -> "_Reference":
        shape, width = long(values.shape), (values.shape or (1,))[-1]
        known = sums is not None and width == shape[-1]
        rows, columns = (sums.cells[2].reshape(-1), sums.channels[2].reshape(-1)) if known and sums else (None, None)
        return cls(values.reshape(shape), width, rows, columns)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def lines(self, axis: int, known: Array | None = None) -> Array:
        """Return Σ r² of the lines along an axis, of some or of all."""
        last = len(self.shape) - 1
        by = self.rows if axis == last else self.columns if last == 1 else None
        if by is None and known is not None and 4 * len(known) < self.values.size // self.shape[axis]:
            others = [n for i, n in enumerate(self.shape) if i != axis]
            mine = np.moveaxis(self.values, axis, -1)[np.unravel_index(known, others) if others else ()]
            return np.asarray(np.sum(mine.reshape(len(known), -1) ** 2, axis=1))
        by = _along(self.values, axis, self.values) if by is None else by
        return by if known is None else by[known]

    def planes(self, axis: int) -> Array:
        """Return Σ r² of the planes across an axis."""
        letters = list(range(len(self.shape)))
        if self.rows is None or self.columns is None:
            return np.asarray(np.einsum(self.values, letters, self.values, letters, [axis]))
        if axis == letters[-1]:
            return self.columns
        return np.asarray(np.einsum(self.rows.reshape(self.shape[:-1]), letters[:-1], [axis]))

    def worst_slice(self, excess: Array, worst: int, element: int) -> WorstSlice:
        """Return the worst slice; ``element``: the number of its farthest element."""
        return WorstSlice(float(excess[worst]), *divmod(element, self.width), len(excess))


def _along(x: Array, axis: int, y: Array | None = None) -> Array:
    """Return Σ x, or Σ x · y, of every line along an axis."""
    letters = list(range(x.ndim))
    given = (x, letters) if y is None else (x, letters, y, letters)
    return np.asarray(np.einsum(*given, [i for i in letters if i != axis])).reshape(-1)


class _Everywhere:
    """What is left of an array in most of its rows."""

    def __init__(self, reference: _Reference, noise: Noise, left: Array, power: Array | None) -> None:
        self.reference, self.noise, self.left = reference, noise, left.reshape(reference.shape)
        self.power = None if power is None else power.reshape(reference.shape)

    def lines(self, axis: int) -> WorstSlice:
        """Return the worst of the lines along an axis."""
        spread = 0.0 if self.power is None else _along(self.power, axis)
        kept = SliceSums(_along(self.left, axis, self.left), np.asarray(spread), self.reference.lines(axis))
        excess = kept.excess(self.noise, self.reference.shape[axis])
        worst = int(np.argmax(excess))
        others = [n for i, n in enumerate(self.reference.shape) if i != axis]
        index = np.unravel_index(worst, others) if others else ()
        inside = int(np.argmax(np.abs(np.moveaxis(self.left, axis, -1)[index])))
        return self._worst_slice(excess, worst, (*index[:axis], inside, *index[axis:]))

    def planes(self, axis: int) -> WorstSlice:
        """Return the worst of the planes across an axis."""
        letters, n = list(range(self.left.ndim)), self.reference.shape[axis]
        kept = np.einsum(self.left, letters, self.left, letters, [axis])
        spread = 0.0 if self.power is None else np.einsum(self.power, letters, [axis])
        slices = SliceSums(kept, np.asarray(spread), self.reference.planes(axis))
        excess = slices.excess(self.noise, self.left.size // n)
        worst = int(np.argmax(excess))
        plane = np.moveaxis(self.left, axis, 0)[worst]
        index = np.unravel_index(int(np.argmax(np.abs(plane))), plane.shape) if plane.ndim else ()
        return self._worst_slice(excess, worst, (*index[:axis], worst, *index[axis:]))

    def _worst_slice(self, excess: Array, worst: int, at: tuple[Any, ...]) -> WorstSlice:
        return self.reference.worst_slice(excess, worst, int(np.ravel_multi_index(at, self.reference.shape)))


class _Few:
    """What is left of an array in some of its rows, in few elements of them, under no power."""

    def __init__(self, reference: _Reference, noise: Noise, rows: Array, left: Array) -> None:
        self.reference, self.noise = reference, noise
        inside = np.nonzero(left)
        self.places = rows[inside[0]] * reference.width + inside[1]
        self.at, self.squares = np.unravel_index(self.places, reference.shape), left[inside] ** 2

    def lines(self, axis: int) -> WorstSlice:
        """Return the worst of the lines along an axis; those alone are summed that hold anything."""
        others = [n for i, n in enumerate(self.reference.shape) if i != axis]
        mine = self.at[:axis] + self.at[axis + 1 :]
        which = np.ravel_multi_index(mine, others) if others else np.zeros(len(self.places), np.intp)
        known = np.unique(which)
        size = np.zeros(prod(others))
        if len(known):
            size[known] = self.reference.lines(axis, known)
        return self._worst_slice(np.asarray(which), size, self.reference.shape[axis])

    def planes(self, axis: int) -> WorstSlice:
        """Return the worst of the planes across an axis."""
        n = self.reference.shape[axis]
        size = self.reference.planes(axis) if len(self.squares) else np.zeros(n)
        return self._worst_slice(self.at[axis], size, self.reference.values.size // len(size))

    def _worst_slice(self, which: Array, size: Array, each: int) -> WorstSlice:
        if not len(which):
            return WorstSlice(0.0, 0, 0, len(size))
        kept = np.bincount(which, self.squares, minlength=len(size))
        excess = SliceSums(kept, np.zeros(()), size).excess(self.noise, each)
        worst = int(np.argmax(excess))
        mine = np.flatnonzero(which == worst)
        return self.reference.worst_slice(excess, worst, int(self.places[mine[np.argmax(self.squares[mine])]]))
