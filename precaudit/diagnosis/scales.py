"""Attention that reads some slots of a cache times a factor: pages or blocks whose scale is another from there on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from precaudit.diagnosis.named import NamedOperation, row_distances
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.references.mutations.forms import Inputs, evaluate_form, usual_form
from precaudit.references.mutations.minimising import logarithmic, minimise
from precaudit.schema.digits import digits
from precaudit.schema.limits.checks import SAME

OTHER = "another scale of slots"
GRID = logarithmic(1 / 64, 64, 97)
READ = {"keys and values": (True, True), "keys": (True, False), "values": (False, True)}


def other_scale(each: Sequence[Inputs], seen: Sequence[Array], slots: int | None = None) -> NamedOperation | None:
    """Return from which slot on keys or values are read times a factor; None where no such factor makes them.

    ``seen``: attention's output [T, H, K] of every row of the batch, in FP64; ``slots``: how many a cache has.
    """
    if each[0].row.kind != "mix":
        return None
    off = [
        np.flatnonzero(row_distances(evaluate_form(usual_form, o, FP64), x) > SAME)
        for o, x in zip(each, seen, strict=True)
    ]
    begun = [int(o.positions[rows[0]]) for o, rows in zip(each, off, strict=True) if len(rows)]
    if not begun or min(begun) == 0:
        return None
    first = min(begun)
    for read, which in READ.items():
        left = _distance_with_factor(each, seen, first, which)
        factor = minimise(left, GRID, whole=False)
        for places in range(8):
            short = float(f"{factor:.{places}e}")
            if left(short) <= SAME:
                return NamedOperation(
                    OTHER, f"{read} are read times {digits(short, 6)} from {from_slot(first, slots)}", left(short)
                )
    return None


def from_slot(first: int, slots: int | None) -> str:
    """Return from which slot on, and which page that is if pages are as long as they can be."""
    page = 1 if slots is None else gcd(first, slots)
    return f"slot {first} on" + (f", page {first // page} of {page} slots each" if page > 1 else "")


def _distance_with_factor(
    each: Sequence[Inputs], seen: Sequence[Array], first: int, which: tuple[bool, bool]
) -> Callable[[float], float]:
    """Return how far attention is from what was seen with keys or values from a slot on times a factor."""

    def distance(factor: float) -> float:
        worst = 0.0
        for o, x in zip(each, seen, strict=True):
            q, *cached = o.values
            factors = (factor if on else 1.0 for on in which)
            scaled = [np.concatenate([c[:first], c[first:] * f]) for c, f in zip(cached, factors, strict=True)]
            worst = max(
                worst, float(row_distances(evaluate_form(usual_form, replace(o, values=(q, *scaled)), FP64), x).max())
            )
        return worst

    return distance
