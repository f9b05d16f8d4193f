"""Formulas with one free number, tried on a recorded operation with the number that fits best."""

from collections.abc import Iterator

import numpy as np

from precaudit.models.numpy_decoder.rounding import sharing_products
from precaudit.numbers.formats import INTEGERS
from precaudit.references.mutations.bench import Bench, Tried
from precaudit.references.mutations.fitting import AHEAD, Fit, fits
from precaudit.references.mutations.minimising import minimise, shortest
from precaudit.schema.policies import Policy

NEAR = 1e-3  # relative distance of a value that people take for a number
NEARLY = 2.0  # badness up to which a number is rounded further
CLOSE = 0.03  # badness more that it may have instead
ALIKE = 0.25  # share more that a number of fewer digits may leave, squared


def fitted_numbers(part: Bench, floor: float, policy: Policy, last: bool = False) -> Iterator[Tried]:
    """Yield formulas with the number that fits best; fitted without rounding, where what is left is smooth.

    ``last``: those that are looked for last, instead of the others.
    """
    if not np.isfinite(part.yardstick.candidate).any():  # every number leaves nothing
        return
    for fit in fits(part.inputs, INTEGERS.get(policy.weights), policy.activations):
        found = _nearest(part, fit) if fit.last is last else None
        if found is not None and found[0] != fit.announced:
            yield _rounder(part, fit, *found, floor)


def _rounder(part: Bench, fit: Fit, x: float, exact: float, floor: float) -> Tried:
    """Return the answer of the number of fewest digits that leaves as little as x does, but for ALIKE or CLOSE.

    x comes nearest without rounding: with it a rounder number may close where x, within NEARLY, does not. ``exact``:
    with all its digits. It and values known for it are tried where x, with as few digits as its errors allow, does not
    close.
    """
    best = part.try_variant(fit.variant(x), floor)
    near = [value for _, value in fit.known if abs(x - value) <= NEAR * abs(value)]
    for other in (*near, exact) if not best.closes and not fit.whole and best.explained > floor else ():
        best = max(best, part.try_variant(fit.variant(other), floor), key=lambda t: (t.closes, t.explained))
    for digits in range(5) if best.badness <= NEARLY and not fit.whole else ():
        short = part.try_variant(fit.variant(float(f"{x:.{digits}e}")), floor)
        alike = 1 - short.explained <= (1 + ALIKE) * (1 - best.explained)
        if short.closes and (alike or short.badness <= best.badness + CLOSE):
            return short
    return best


def fit_number(part: Bench, fit: Fit) -> float | None:
    """Return the number that leaves least without rounding; None where every number leaves what is not finite."""
    found = _nearest(part, fit)
    return None if found is None else found[0]


def _nearest(part: Bench, fit: Fit) -> tuple[float, float] | None:
    """Return the same of the fewest digits within its errors, and of six."""
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
    return (x, x) if fit.whole else (shortest(x, loss, c.size), float(f"{x:.5e}"))
