"""Orders of a tensor's rows: plain, heads interleaved for RoPE, repeated for query heads, and what else they may be."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import prod

import numpy as np

from precaudit.numbers.arrays import Array

MOST_AXES = 4


@dataclass(frozen=True)
class Order:
    """Which row of a tensor each vector is, of axes ``shape`` in C order.

    ``axes``: the tensor's rows go through these axes in this order. ``head``: rows of a head, whose halves are
    interleaved (0: they are not); ``back``: the other way round. ``repeats``: of every head, one after another;
    ``start``: the first row; ``turned``: the leading rows of a head that RoPE turns (0: all).
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    head: int = 0
    back: bool = False
    repeats: int = 1
    start: int = 0
    turned: int = 0

    @property
    def index(self) -> Array:
        """The row of each vector [N]."""
        sizes = [self.shape[a] for a in self.axes]
        index = np.arange(prod(sizes)).reshape(sizes).transpose(np.argsort(self.axes)).reshape(-1)
        if self.repeats > 1:
            block = self.head * self.repeats
            return np.asarray(index // block * self.head + index % self.head)
        if not self.head:
            return index + self.start
        return interleaved(index, self.head, self.back, turned=self.turned)


def interleaved(index: Array, head: int, back: bool = False, stride: int = 2, turned: int = 0) -> Array:
    """Return rows with those of each head in turn from its halves (``stride`` parts), or ``back`` from that.

    ``turned``: so many leading rows of a head alone (0: all).
    """
    inside, n = np.arange(head), turned or head
    inside[:n] = np.arange(n).reshape((n // stride, stride) if back else (stride, n // stride)).T.reshape(-1)
    return np.asarray(index // head * head + inside[index % head])


def known_orders(
    shape: tuple[int, ...], rows: int, heads: Iterable[int], start: int = 0, turned: int = 0
) -> Iterator[Order]:
    """Yield the orders that an honest program may have, of axes ``shape`` and a tensor of some rows."""
    shape = shape or (1,)
    axes = list(permutations(range(len(shape)))) if len(shape) <= MOST_AXES else [tuple(range(len(shape)))]
    heads = [h for h in heads if h >= 4 and h % 2 == 0 and rows % h == 0]
    yield from (Order(shape, order, start=start) for order in axes)
    if prod(shape) == rows:
        for back, head in product((False, True), heads):
            yield from (Order(shape, order, head, back, turned=turned if turned < head else 0) for order in axes)
    elif prod(shape) % rows == 0:
        yield from (Order(shape, axes[0], head, repeats=prod(shape) // rows) for head in heads)


def order_of(index: Array, shape: tuple[int, ...], rows: int, heads: Sequence[int], turned: int = 0) -> Order | None:
    """Return the honest order that rows are in, those that are not known (−1) left out; None where there is none."""
    told = index >= 0
    if 2 * told.sum() < len(index) or not told.any():
        return None
    start = int(index[told].min()) if len(index) < rows else 0
    fits = (o for o in known_orders(shape, rows, heads, start, turned) if np.array_equal(o.index[told], index[told]))
    return next(fits, None)


def head_sizes(rows: int, shape: Sequence[int], known: int = 0) -> list[int]:
    """Return the sizes that a head may have: the one that is known, else the last axis, else every even part."""
    if known:
        return [known]
    sizes = [d for d in range(4, min(rows, 1024) + 1, 2) if rows % d == 0]
    return [shape[-1], *sizes] if len(shape) > 1 else sizes
