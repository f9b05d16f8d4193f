"""Which experts a token uses where rounding may exchange two: draws in which each near tie goes the other way.

A draw of rounding errors seldom turns just the tie that a run turned, and what a turn makes is no small error. So of
every tie that rounding can reach one draw in some turns it, and noise has what comes of it.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from precaudit.numbers.arrays import Array

REACH = 6.0  # rms errors of a row's router logits within which two logits are near: 4.2 σ of their difference


class Routing(Protocol):
    """Says which experts the rows of a layer use: ``chosen`` [T, K] by their router logits [T, E], or others.

    ``first``: the number of the first row among those of all sequences.
    """

    def choose(self, layer: int, first: int, router: Array, chosen: Array, /) -> Array:
        """Return the experts [T, K] that are used."""
        ...


@dataclass
class ExactRouting:
    """Keeps FP64's router logits [N, E] and experts [N, K] of the layer that was computed last."""

    rows: int
    router: Array = field(default_factory=lambda: np.zeros((0, 0)))
    chosen: Array = field(default_factory=lambda: np.zeros((0, 0), int))

    def prepare(self, experts: int, used: int) -> None:
        """Make room for all rows, before threads fill it."""
        self.router, self.chosen = np.zeros((self.rows, experts)), np.zeros((self.rows, used), int)

    def choose(self, _layer: int, first: int, router: Array, chosen: Array, /) -> Array:
        """Keep what FP64 has of these rows."""
        at = slice(first, first + len(router))
        self.router[at], self.chosen[at] = router, chosen
        return chosen


@dataclass
class TurnedRouting:
    """Exchanges the last expert that FP64 uses with the next where rounding reaches, in every ``of``-th layer.

    ``number``: of its draw, below ``of``. ``parted`` [N]: rows that used other experts than FP64 in an earlier layer:
    what their logits differ by is no rounding.
    """

    exact: ExactRouting
    number: int
    of: int
    parted: Array = field(init=False)

    def __post_init__(self) -> None:
        """Begin with rows that have used FP64's experts."""
        self.parted = np.zeros(self.exact.rows, bool)

    def choose(self, layer: int, first: int, router: Array, chosen: Array, /) -> Array:
        """Return the experts of these rows, exchanged where that is this draw's to do."""
        at = slice(first, first + len(router))
        exact, theirs = self.exact.router[at], self.exact.chosen[at]
        differ = (np.sort(chosen, axis=1) != np.sort(theirs, axis=1)).any(axis=1)
        turned = chosen.copy()
        if layer % self.of == self.number and theirs.shape[1] < exact.shape[1]:
            others = exact.copy()
            np.put_along_axis(others, theirs, -np.inf, axis=1)
            comes, last = others.argmax(axis=1), theirs[:, -1]  # the experts used stand in the order of their logits
            every = np.arange(len(exact))
            apart = exact[every, last] - exact[every, comes]
            off = np.sqrt(np.mean((router - exact) ** 2, axis=1))
            near = (apart <= REACH * off) & ~differ & ~self.parted[at]
            rows = np.flatnonzero(near)
            places = (turned[rows] == last[rows, None]).argmax(axis=1)
            turned[rows, places] = comes[rows]
            differ = differ | near
        self.parted[at] |= differ
        return turned
