"""Which numbers a program's owners of tensors have on the other side: a rule that most of them keep."""

from collections.abc import Sequence
from itertools import combinations, permutations

import numpy as np

from precaudit.numbers.arrays import Array


def most_common(x: Array) -> int | None:
    """Return the most common value; None of none."""
    if not x.size:
        return None
    values, counts = np.unique(x, return_counts=True)
    return int(values[counts.argmax()])


def predict_numbers(
    coordinates: Sequence[tuple[int, ...]], keys: Sequence[tuple[int, ...] | None]
) -> list[tuple[int, ...]]:
    """Return the tensor's numbers of each owner, by the rule that most owners keep.

    A number is an owner's coordinate, or several of them counted through, plus a constant.
    """
    told = [k for k in keys if k is not None]
    if not told or not told[0]:
        return [()] * len(coordinates)
    places = np.array(coordinates, np.int64).reshape(len(coordinates), -1)
    columns = []
    for j in range(len(told[0])):
        given = np.array([-(1 << 40) if k is None else k[j] for k in keys])
        rules = [
            np.zeros(len(places), np.int64),
            *(_counted(places[:, list(axes)]) for axes in _subsets(places.shape[1])),
        ]
        shifted = [r + int(most_common((given - r)[given >= 0]) or 0) for r in rules]
        columns.append(max(shifted[::-1], key=lambda r: int((r == given).sum())) if len(places) > 1 else given)
    return [tuple(int(n) for n in row) for row in np.stack(columns, axis=1)]


def _subsets(n: int) -> list[tuple[int, ...]]:
    return [p for size in range(1, n + 1) for c in combinations(range(n), size) for p in permutations(c)][::-1]


def _counted(places: Array) -> Array:
    """Return the number of each place, counted through its coordinates [N, n], the last one fastest."""
    ranks = [np.unique(column, return_inverse=True) for column in places.T]
    if len(ranks) == 1:
        return places[:, 0]
    found = np.zeros(len(places), np.int64)
    for values, inverse in ranks:
        found = found * len(values) + inverse
    return found
