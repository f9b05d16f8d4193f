"""Values of two programs recognised by sums of their powers, whatever their layout and however devices hold them."""

from collections.abc import Iterator, Sequence
from itertools import chain, combinations

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.references.alignment.vectors import MASKING

FEW = 8  # elements: of fewer, two values are alike by chance
ALIKE = 1e-8  # of what two orders of sums in FP64 leave of a mark, at most
Marks = Array  # [N, 4]


def subsets(count: int) -> Iterator[tuple[int, ...]]:
    """Yield every choice of axes, the fewest first."""
    yield from chain.from_iterable(combinations(range(count), n) for n in range(count + 1))


def marks(x: Array, lead: int) -> Marks:
    """Return the marks of the arrays that a value [ranks of ``lead`` axes, …] may be shards of, or be on each rank.

    Of each choice of axes: the shards along these, if it is alike along all others. What is constant has none.
    """
    flat = x.reshape(*x.shape[:lead], -1).astype(np.float64)
    kept = np.where(np.abs(flat) < MASKING, flat, 0.0)  # NaN is none, too
    if kept.shape[-1] == 0 or kept.max() == kept.min():
        return np.zeros((0, 4))
    square = kept * kept
    cube = [np.einsum("...i,...i->...", square, y) for y in (kept, square)]
    powers = np.stack([square.sum(-1), kept.sum(-1), *cube])  # [4, ranks…]: of x², x, x³ and x⁴
    found = []
    for over in subsets(lead):
        sums = powers.sum(tuple(1 + i for i in over)).reshape(4, -1)
        count = kept.shape[-1] * int(np.prod([x.shape[i] for i in over], dtype=int))
        size = sums[0]
        if count < FEW or size.min() <= 0 or np.ptp(size) > ALIKE * size.max():
            continue
        near = np.stack([np.log(size), sums[1] / np.sqrt(count * size), sums[2] / size**1.5, sums[3] / size**2])
        if np.ptp(near, axis=1).max() <= ALIKE:
            found.append(near[:, 0])
    return np.unique(np.array(found).reshape(-1, 4), axis=0)


def in_order(every: Sequence[Marks]) -> Marks:
    """Return all of some marks, sorted, to look others up in."""
    found = np.concatenate([np.zeros((0, 4)), *every])
    return found[np.argsort(found[:, 0], kind="stable")]


def known(asked: Marks, among: Marks) -> Array:
    """Return which of some marks are among others, which are in order."""
    found = np.zeros(len(asked), bool)
    if not len(among):
        return found
    low = np.searchsorted(among[:, 0], asked[:, 0] - ALIKE, "left")
    high = np.searchsorted(among[:, 0], asked[:, 0] + ALIKE, "right")
    for i in range(int((high - low).max(initial=0))):
        at = np.flatnonzero(~found & (low + i < high))
        found[at] = np.abs(among[low[at] + i] - asked[at]).max(axis=1) <= ALIKE
    return found
