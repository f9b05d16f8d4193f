"""The smallest of a function of one number, and the shortest number that does as well."""

from collections.abc import Callable, Sequence

import numpy as np

STEPS = 40  # of the golden section: a bracket shrinks to 1e-8 of itself
GOLDEN = (5**0.5 - 1) / 2
DEVIATIONS = 3.0  # standard errors within which a rounder number is taken

Loss = Callable[[float], float]


def minimise(loss: Loss, grid: Sequence[float], whole: bool) -> float:
    """Return where ``loss`` is smallest: the best of a grid, then golden section (Kiefer 1953) between its neighbours.

    On a grid of one sign the section goes by the logarithm.
    """
    values = [loss(x) for x in grid]
    i = int(np.argmin(values))
    low, high = grid[max(i - 1, 0)], grid[min(i + 1, len(grid) - 1)]
    if whole:
        inside = range(int(low), int(high) + 1)
        if len(inside) <= 2 * STEPS:
            return float(min(inside, key=loss))
        return minimise(loss, [float(x) for x in np.unique(np.linspace(low, high, STEPS).astype(int))], whole)
    if low <= 0:
        return grid[i]
    found = float(np.exp(_golden(lambda x: loss(float(np.exp(x))), float(np.log(low)), float(np.log(high)))))
    return found if loss(found) <= values[i] else grid[i]


def _golden(loss: Loss, low: float, high: float) -> float:
    a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_a, at_b = loss(a), loss(b)
    for _ in range(STEPS):
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - GOLDEN * (high - low)
            at_a = loss(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + GOLDEN * (high - low)
            at_b = loss(b)
    return (low + high) / 2


def shortest(x: float, loss: Loss, elements: int) -> float:
    """Return the number of fewest digits that is no worse than ``x`` within DEVIATIONS standard errors.

    Least squares: the loss rises by its mean square for one standard error.
    """
    bound = loss(x) * (1 + DEVIATIONS**2 / max(elements - 1, 1))
    for digits in range(6):
        rounder = float(f"{x:.{digits}e}")
        if loss(rounder) <= bound:
            return rounder
    return x


def logarithmic(low: float, high: float, n: int) -> tuple[float, ...]:
    """Return n numbers between, spaced by a factor."""
    return tuple(float(x) for x in np.geomspace(low, high, n))
