"""How far tensors are apart, and how far the correct makings of one are: norms, and signed gains along it."""

from collections.abc import Sequence
from itertools import combinations
from math import isnan

import numpy as np

from precaudit.numbers.arrays import Array, widen
from precaudit.schema.metrics.sizes import norm
from precaudit.schema.records.base import Number, json_number

FLOOR = 2.0**-23  # of a tensor's size: what float32 does not tell apart


def difference(b: Array, a: Array) -> Array:
    """Return b − a in FP64, 0 where both are the same infinity or both are none; infinite where one side alone is."""
    x, y = widen(b), widen(a)
    with np.errstate(invalid="ignore", over="ignore"):
        found = np.asarray(x - y)
    if np.isfinite(found).all():
        return found
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    return np.where(same, 0.0, np.where(np.isfinite(found), found, np.inf))


def gain(off: Array, a: Array) -> float:
    """Return the part of a difference along A, relative to A: what a factor on all of it makes."""
    y = np.nan_to_num(widen(a), posinf=0.0, neginf=0.0)
    power = float(np.vdot(y, y))
    return float(np.vdot(off, y)) / power if power and np.isfinite(off).all() else 0.0


def relative_size(size: float, base: float) -> float:
    """Return a distance relative to a norm; of nothing infinite, unless it is nothing itself or NaN."""
    return size / base if base else size if size == 0 or isnan(size) else float("inf")


def spread_of(own: Array, drawn: Sequence[Array]) -> tuple[Number, Number, Number]:
    """Return A's norm, and the largest distance and difference of gains of any two of A's run and drawn members.

    Infinite where a value is finite in one of them and in another is not.
    """
    off = [np.zeros(own.shape), *(difference(x, own) for x in drawn)]
    size = norm(np.nan_to_num(widen(own), posinf=0.0, neginf=0.0))
    if not all(np.isfinite(x).all() for x in off):
        return json_number(size), "inf", "inf"
    gains = [gain(x, own) for x in off]
    spread = max((norm(np.asarray(x - y)) for x, y in combinations(off, 2)), default=0.0)
    return json_number(size), json_number(spread), json_number(max(gains) - min(gains))


def times_spread(off: Array, a: Array, size: float, spread: float, gains: float) -> float:
    """Return how many times the members' own spread a difference is, as a distance or as a gain.

    NaN where that is infinite: some are finite, others are not, and nothing can be told of a difference.
    """
    distance = norm(off) if np.isfinite(off).all() else float("inf")
    if distance == 0:
        return 0.0
    if np.isinf(spread):
        return float("nan")
    far = relative_size(distance, max(spread, FLOOR * size))
    return max(far, relative_size(abs(gain(off, a)), max(gains, FLOOR)))
