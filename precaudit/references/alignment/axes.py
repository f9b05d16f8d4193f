"""A program's value beside a textbook's: in which order of its axes it comes nearest, as a pattern that a map has."""

from collections.abc import Sequence
from itertools import permutations
from math import prod
from typing import NamedTuple

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.schema.graphs.decoder import POINTS

UNTOLD = "?"


class Fit(NamedTuple):
    """How far a value is from a point's, with its axes in the best order, and that as a pattern; "" of none."""

    off: float
    axes: str


NONE = Fit(np.inf, "")


class Wanted(NamedTuple):
    """A point of the textbook, its FP64 value in every layer, and how many key/value heads share the query heads."""

    point: str
    values: Sequence[Array]
    groups: int


def fit(x: Array, y: Array, wanted: Wanted) -> Fit:
    """Return how near a program's value x comes to a textbook's y, and how its axes go: heads whole, or in groups."""
    return _fitted(x, y, wanted)[0]


def arranged(x: Array, y: Array, wanted: Wanted) -> Array | None:
    """Return a program's value in the textbook's order and shape, as it comes nearest to y; None where none fits."""
    found = _fitted(x, y, wanted)[1]
    return None if found is None else np.where(np.isfinite(y), found.reshape(y.shape), y)


def _fitted(x: Array, y: Array, wanted: Wanted) -> tuple[Fit, Array | None]:
    axes = ["b", *POINTS[wanted.point].axes.lower()]
    if "h" in axes:
        at = axes.index("h")
        y = y.reshape(*y.shape[:at], wanted.groups, -1, *y.shape[at + 1 :])
        axes[at : at + 1] = ["g", "r"]
    if "s" not in axes:
        return nearest_order(x, y, axes)
    slots = y.shape[axes.index("s")]
    cuts = [np.take(x, range(slots), axis=i) for i, n in enumerate(x.shape) if n >= slots]
    each = [nearest_order(cut, y, axes) for cut in cuts if cut.size == y.size]
    return min(each, key=lambda f: f[0].off, default=(NONE, None))


def nearest_order(x: Array, y: Array, letters: Sequence[str]) -> tuple[Fit, Array | None]:
    """Return the best order of y's axes that has x's shape, "" where x has y's order, and x so."""
    if x.size != y.size:
        return NONE, None
    real = [i for i, n in enumerate(y.shape) if n > 1]
    shape = [n for n in x.shape if n > 1]
    known = np.isfinite(y)
    size = float(np.linalg.norm(y[known])) or 1.0
    best, turned = NONE, None
    for order in permutations(real):
        groups = _grouped(order, y.shape, shape)
        if groups is None:
            continue
        back = x.reshape([y.shape[i] for i in order]).transpose(np.argsort(order)).reshape(y.shape)
        far = float(np.linalg.norm((back - y)[known])) / size
        if far < best.off:
            best = Fit(far, "" if list(order) == sorted(order) else _pattern(x.shape, groups, letters))
            turned = back
    return best, turned


def _grouped(order: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> list[list[int]] | None:
    """Return which axes each axis of a shape holds, one after another; None where they do not fit."""
    groups: list[list[int]] = []
    rest = list(order)
    for n in shape:
        group: list[int] = []
        while rest and prod(sizes[i] for i in group) < n:
            group.append(rest.pop(0))
        if prod(sizes[i] for i in group) != n:
            return None
        groups.append(group)
    return None if rest else groups


def _pattern(shape: Sequence[int], groups: Sequence[Sequence[int]], letters: Sequence[str]) -> str:
    """Return the einops pattern that turns a value of a shape into the textbook's order.

    Axes of the textbook that one axis of the value holds, one after another, have one name. "?" where it holds others:
    a map cannot say that.
    """
    if any(list(g) != list(range(g[0], g[0] + len(g))) for g in groups):
        return UNTOLD
    each = iter(groups)
    held = [(next(each) if n > 1 else None) for n in shape]
    names = [f"one{i}" if g is None else "".join(letters[a] for a in g) for i, g in enumerate(held)]
    first = {name: -1 if g is None else g[0] for name, g in zip(names, held, strict=True)}
    return f"{' '.join(names)} -> {' '.join(sorted(names, key=lambda n: first[n]))}"
