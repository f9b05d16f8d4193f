"""The ensemble of honest programs: what a compiler may leave unrounded, other rounding errors, orders of sums, devices.

One realisation of one way to write an operation is no noise: a slice's may be small by luck. What a float32 result
leaves is made by the order of its sums and by the device's exp, tanh, 1/x and 1/√x.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.accumulation import accumulating
from precaudit.models.numpy_decoder.passes import with_sums
from precaudit.models.numpy_decoder.rounding import (
    Rounding,
    elisions,
    redrawn,
    single_precision_dot,
)
from precaudit.numbers.arrays import Array, rounder
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.policies import Policy

DRAWS = 3  # of the policy's rounding errors, beside every elision
FEW = 16  # results of a head, of which three realisations may all be small by luck (Student's t of three)
SHUFFLES = 9  # orders more for those
# What the limits are made for: exp, tanh and 1/√x of a device are within ULPS units in the last place, and a
# reciprocal or root is off by RECIPROCAL for all elements alike at most.
ULPS = 4.0
RECIPROCAL = 2.0**-22
SAMPLED = 8  # rows of a product that are summed term by term


@cache
def ensemble(
    point: str, config: DecoderConfig, policy: Policy, base: Rounding, dtype: str, few: bool = False
) -> tuple[Rounding, ...]:
    """Return roundings that honest programs may have at ``point``, whose result has format ``dtype``.

    Below float32: every elision, and DRAWS other draws of the rounding errors and of those of exp, tanh, 1/√x. Float32:
    three orders of the sums, with three draws of both; more where a head has ``few`` results.
    """
    if dtype in ("float32", "float64"):
        more = SHUFFLES if few else 0
        orders = (one_by_one, backwards, single_precision_dot, *(shuffled_product(i) for i in range(more)))
        return tuple(
            replace(with_single_inside(_draw_rounding(base, i), i), dot=with_sums(base.dot, dot))
            for i, dot in enumerate(orders)
        )
    kept = [base.eliding(places) for places in elisions(point, config, policy)]
    return (*kept, *(with_single_inside(_draw_rounding(base, seed), seed) for seed in range(1, 1 + DRAWS)))


def _draw_rounding(base: Rounding, seed: int) -> Rounding:
    """Return other rounding errors on the same operand: integers made of recorded rows are known."""
    return replace(redrawn(base, seed), operand=base.operand)


def weights(members: int, dtype: str) -> list[float]:
    """Return the weight of each of an ensemble's members: below float32, half for the elisions, half for the draws."""
    if dtype in ("float32", "float64"):
        return [1 / members] * members
    kept = members - DRAWS
    return [0.5 / kept] * kept + [0.5 / DRAWS] * DRAWS


def common(point: str, config: DecoderConfig) -> float:
    """Return the relative error that all elements of a result may share: that of a reciprocal, a root, or a cap's tanh.

    A tanh of small values is off by nearly the same factor for all.
    """
    row = POINTS[point]
    inside = any("norm_inner" in group for group in row.inner_places(config))
    return RECIPROCAL if inside or row.has_cap(config) or row.inexact else 0.0


def with_single_inside(rounding: Rounding, seed: int) -> Rounding:
    """Return ``rounding`` with float32 inside norm, softmax and activation; but for seed 0, ULPS off at random."""
    place = rounder("float32") if seed == 0 else _inaccurate(seed)
    single = rounder("float32")
    return replace(rounding, norm_scale=place, shifted=single, running=single, exponential=place, curve=place)


def _inaccurate(seed: int) -> Callable[[Array], Array]:
    """Return rounding to float32 of values off by up to ULPS − ½ units in the last place; of equal values alike."""
    single = rounder("float32")

    def place(x: Array) -> Array:
        mark = int(np.ascontiguousarray(x).reshape(-1)[:1].view(np.uint64).sum())
        off = np.random.default_rng((seed, mark)).uniform(-1.0, 1.0, x.shape)
        return single(x + off * (ULPS - 0.5) * np.spacing(np.abs(x).astype(np.float32)))

    return place


def backwards(a: Array, b: Array) -> Array:
    """Return a · b summed in float32 from the last term on, in BLAS's order."""
    return single_precision_dot(a[:, ::-1], b[::-1])


@cache
def shuffled_product(seed: int) -> Callable[[Array, Array], Array]:
    """Return a product of few results in float32, its terms rounded and summed in some order; one function a seed."""

    def product(a: Array, b: Array) -> Array:
        order = np.random.default_rng(seed).permutation(a.shape[1])
        terms = (a[:, order, None] * b[order]).astype(np.float32)
        return np.asarray(np.cumsum(terms, axis=1, dtype=np.float32)[:, -1], np.float64)

    return product


def one_by_one(a: Array, b: Array) -> Array:
    """Return a · b with errors as large as those of float32 sums one term after another (Higham 2002, §4.2).

    BLAS adds in 16 and more lanes; its errors are taken times the ratio of both on SAMPLED rows.
    """
    exact, fast = a @ b, single_precision_dot(a, b)
    some = np.unique(np.linspace(0, len(a) - 1, SAMPLED).astype(int))
    slow = accumulating("float32")(np.ascontiguousarray(a[some]), b)
    errors = [float(np.linalg.norm(x - exact[some])) for x in (slow, fast[some])]
    if not errors[1]:
        return fast
    return np.asarray(exact + (fast - exact) * max(1.0, errors[0] / errors[1]))
