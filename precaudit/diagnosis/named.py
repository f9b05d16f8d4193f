"""A cause by its name, and how far what it makes is from what was seen."""

from typing import NamedTuple

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.references.mapped import Pair

UNNAMED = "none reproduces it"


class NamedOperation(NamedTuple):
    """What makes a program's values of an operation in the textbook's place, and what that leaves of them.

    ``pair``: the part of the operation that shows it first, where that is not the operation itself.
    """

    cause: str
    says: str
    left: float
    kind: str = "semantics"
    pair: Pair | None = None


def row_distances(x: Array, seen: Array) -> Array:
    """Return the distance [T] of every row of values [T, …] from what was seen: relative, but where that is 0."""
    size = norms(seen)
    return np.where(size > 0, norms(x - seen) / np.where(size > 0, size, 1.0), norms(x))


def norms(x: Array) -> Array:
    """Return the 2-norm [T] of every row of values [T, …]: what a formula is held to at its worst token."""
    return np.sqrt(np.sum(x.reshape(len(x), -1) ** 2, axis=-1))
