"""Formulas with one free number, tried on a recorded operation with the number that fits best."""

from collections.abc import Iterator

import numpy as np

from precaudit.mutations.bench import Bench, Tried
from precaudit.mutations.fitting import AHEAD, Fit, fits, minimise, shortest
from precaudit.numpy_decoder.rounding import sharing_products

NEARLY = 2.0  # badness up to which a number is rounded further
CLOSE = 0.03  # badness more that it may have instead
ALIKE = 0.25  # share more that a number of fewer digits may leave, squared


def numbers(part: Bench, floor: float) -> Iterator[Tried]:
    """Yield formulas with the number that fits best; fitted without rounding, where what is left is smooth."""
    for fit in fits(part.inputs):
        x = fitted(part, fit)
        if x is not None and x != fit.announced:
            yield _rounder(part, fit, x, floor)


def _rounder(part: Bench, fit: Fit, x: float, floor: float) -> Tried:
    """Return the answer of the number of fewest digits that leaves as little as x does, but for ALIKE or CLOSE.

    x comes nearest without rounding: with it a rounder number may close where x, within NEARLY, does not.
    """
    best = part.tried(fit.variant(x), floor)
    for digits in range(5) if best.badness <= NEARLY and not fit.whole else ():
        short = part.tried(fit.variant(float(f"{x:.{digits}e}")), floor)
        alike = 1 - short.explained <= (1 + ALIKE) * (1 - best.explained)
        if short.closes and (alike or short.badness <= best.badness + CLOSE):
            return short
    return best


def fitted(part: Bench, fit: Fit) -> float | None:
    """Return the number that leaves least without rounding; None where every number leaves what is not finite."""
    r = sharing_products([part.formula])[0]
    c = part.yardstick.candidate

    def loss(x: float) -> float:
        with np.errstate(all="ignore"):
            y = part.make(fit.form(x), r, int(x) if fit.what == AHEAD else 0)
        left = np.where(np.isfinite(c), c - y, 0.0)
        return float(np.sum(left**2)) if np.isfinite(left).all() else float("inf")

    x = minimise(loss, fit.grid, fit.whole)
    if not np.isfinite(loss(x)):
        return None
    return x if fit.whole else shortest(x, loss, c.size)
