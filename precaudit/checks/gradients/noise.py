"""What honest realisations of a formula leave of an array: the deviations that both sides are judged by."""

from collections.abc import Sequence

import numpy as np

from precaudit.numbers.arrays import Array


def spread(apart: Sequence[Array], together: Sequence[Array], exact: Array) -> list[Array]:
    """Return realisations of algorithms that are accurate in the norm of a row alone, the last axis of two or more.

    ``apart``: made of inputs moved each by itself; ``together``: of inputs moved by one factor, so that equal ones stay
    equal, round alike, and what they leave of a sum that cancels is one factor of a whole row. An element's noise is
    that of the larger of both, and no less than would be if a row's were its largest realisation's: what is common to
    a row is drawn as often as there are realisations, not as there are elements. Terms of a row's size may cancel in an
    honest kernel's small elements: each realisation is off by as much there as in the row's noisiest element.
    """
    groups = [_off(x, exact) for x in (apart, together) if len(x)]
    if not groups:
        return []
    every = np.concatenate(groups)
    power = np.mean(every**2, axis=0)
    most = np.max([np.mean(g**2, axis=0) for g in groups], axis=0)
    every *= _root(most, power)
    if exact.ndim < 2:
        return [exact + d for d in every]
    rows = np.mean(every**2, axis=-1, keepdims=True)
    every *= _root(rows.max(axis=0), rows.mean(axis=0))
    largest = np.sqrt(np.mean(every**2, axis=0)).max(-1, keepdims=True)
    random = np.random.default_rng(20020801)
    return [exact + d + largest * random.uniform(-1.0, 1.0, exact.shape) for d in every]


def _off(draws: Sequence[Array], exact: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.stack(draws) - exact, nan=0.0, posinf=0.0, neginf=0.0)


def _root(a: Array, b: Array) -> Array:
    """√(a / b), 1 where b is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(b > 0, np.sqrt(a / b), 1.0)
