"""What of a program's values is another's, by FP64 values alone: in whole, or as far as the other has it."""

from collections import Counter

import numpy as np

from precaudit.diagnosis.sameness.observed import Observed
from precaudit.numbers.arrays import Array
from precaudit.references.alignment.vectors import NOWHERE, Found, Vectors, lines

ENOUGH = 0.98  # of the share of vectors that the rows held against each other are of


class Others:
    """Values of a program that another's are looked up among; ``covered``: the share of the latter's rows it has."""

    def __init__(self, of: Observed, covered: float) -> None:
        self.of, self.covered, self.sites = of, covered, of.sites()
        self.known = Vectors(of.value(s) for s in self.sites)

    def has(self, x: Array) -> bool:
        """Whether a value is the other's."""
        found = self.known.find(x)
        return found.share >= ENOUGH * self.covered or self._has_part(x, found)

    def _has_part(self, x: Array, found: Found) -> bool:
        """Whether the point of the other that holds most of a value's vectors is a part of it, as large as it may be.

        So are a decode's scores, over the keys so far, a part of those of a whole forward before its mask.
        """
        origins = self.known.origins[found.at[found.at != NOWHERE], 0]
        if not len(origins):
            return False
        groups = Counter((self.sites[i].point.name, self.sites[i].step) for i in origins)
        most = groups.most_common(1)[0][0]
        parts = [self.of.value(s) for s in self.sites if (s.point.name, s.step) == most]
        if sum(p.size for p in parts) < ENOUGH * self.covered**2 * x.size:  # of rows and keys
            return False
        mine = Vectors([x])
        return all(mine.share(p) >= ENOUGH for p in parts)

    def first_missing(self, x: Array) -> str:
        """Return the first vector of a value that is not the other's, as an index: [0, 4, :]; empty: of no axes."""
        found = self.known.find(x)
        missing = found.lines[found.at == NOWHERE]
        if not len(missing) or not x.ndim:
            return ""
        at = np.stack(np.unravel_index(_elements(x, found.axis)[missing[0]], x.shape))
        return f"[{', '.join(':' if (i != i[0]).any() else str(i[0]) for i in at)}]"


def replace_found(own: Array, found: Found, known: Vectors, values: dict[int, Array]) -> Array:
    """Return a value with its vectors taken from others' arrays, where ``found`` has them; the rest is as it was.

    ``values``: the arrays that they are taken from, by the numbers of those that are known.
    """
    out, at = own.astype(np.float64).ravel(), _elements(own, found.axis)
    origins, width = known.origins[found.at], at.shape[1]
    for array, axis in {(int(a), int(x)) for a, x, _ in origins[found.at != NOWHERE]}:
        its = (origins[:, 0] == array) & (origins[:, 1] == axis) & (found.at != NOWHERE)
        vectors = list(lines(values[array]))[axis][origins[its, 2], :width]
        out[at[found.lines[its]]] = np.pad(vectors, [(0, 0), (0, width - vectors.shape[1])])
    return out.reshape(own.shape)


def _elements(x: Array, axis: int) -> Array:
    """Return the numbers of an array's elements that each of its ``lines`` along an axis holds."""
    return list(lines(np.arange(x.size).reshape(x.shape)))[axis]
