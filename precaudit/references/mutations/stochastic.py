"""Results rounded up or down at random: known by how often each neighbour was taken, since no emulation repeats it."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from precaudit.numbers.arrays import Array, cutter
from precaudit.references.mutations.forms import on_result
from precaudit.references.mutations.variants import NARROW, Variant

BINS = 8  # of the distance from the lower neighbour, over that between neighbours
FEWEST = 40  # elements a bin needs to tell a frequency; others are not looked at
DEVIATIONS = 4.0  # standard errors that a bin's frequency may be from its distance: one in 2,000 runs for 8 bins
APART = 0.15  # from 0 and 1, on both sides of 1/2: distances whose frequency is not that of rounding to nearest
BETWEEN = 0.99  # share of elements that have to be one of both neighbours: float32 sums move some past one


def stochastic_variants(axes: str, dtype: str, candidate: Array, unrounded: Array) -> Iterator[Variant]:
    """Yield stochastic rounding of a result [T, H, K] to its format, where the frequencies are its own.

    Of values at a distance f from their lower neighbour, over that between both, a share f is rounded up (Croci et al.
    2022, Stochastic rounding: implementation, error analysis and applications). Rounding to nearest takes none of f <
    1/2 and all of the others; cutting takes none.
    """
    if dtype not in NARROW:
        return
    low, high = neighbours(dtype, unrounded)
    taken = rounded_up(candidate, unrounded, low, high)
    if taken is not None:
        says = f"results are rounded to {dtype} up or down at random, each as often as it is near"
        form = on_result(partial(_chosen, np.where(candidate == high, high, low), axes), twice=False)
        yield Variant("stochastic rounding", "format", says, form, fitted=True, carries=False)


def neighbours(dtype: str, x: Array) -> tuple[Array, Array]:
    """Return the numbers of a format of 16 bits at or below, and above each of ``x``; both ``x`` where it has it."""
    toward = cutter(dtype)(x)
    with np.errstate(invalid="ignore"):
        away = np.where(toward == x, x, toward + np.where(x > 0, 1.0, -1.0) * _spacing(dtype, toward))
    return np.minimum(toward, away), np.maximum(toward, away)


def _spacing(dtype: str, x: Array) -> Array:
    """Return the distance to the next number of a format farther from zero."""
    bits, least = {"bfloat16": (8, -126), "float16": (11, -14)}[dtype]
    _, exponent = np.frexp(np.abs(x))
    return np.ldexp(1.0, np.where(x == 0, least, np.maximum(exponent - 1, least)) - (bits - 1))


def rounded_up(candidate: Array, x: Array, low: Array, high: Array) -> Array | None:
    """Return the elements that were rounded up, where each share is that of its distance; None where it is not."""
    between = (high > low) & np.isfinite(candidate) & np.isfinite(x)
    is_one = (candidate == low) | (candidate == high)
    if between.sum() < 2 * FEWEST or np.mean(is_one[between]) < BETWEEN:
        return None
    up = candidate == high
    f = ((x - low) / np.where(high > low, high - low, 1.0))[between]
    index = np.minimum((f * BINS).astype(int), BINS - 1)
    told = []
    for i in range(BINS):
        some = index == i
        if some.sum() >= FEWEST:
            mean, share = float(f[some].mean()), float(up[between][some].mean())
            if abs(share - mean) > DEVIATIONS * np.sqrt(mean * (1 - mean) / some.sum()):
                return None
            told.append(mean)
    return up if any(APART < x < 0.5 for x in told) and any(0.5 < x < 1 - APART for x in told) else None


def _chosen(values: Array, axes: str, out: Array) -> Array:
    """Return the values that were taken, in a result's own axes; of fewer rows the last."""
    own = values.transpose(1, 0, 2) if axes == "HTS" else values if out.ndim == 3 else values[:, 0]
    rows = 1 if axes == "HTS" else 0
    return np.asarray(np.take(own, range(own.shape[rows] - out.shape[rows], own.shape[rows]), axis=rows))
