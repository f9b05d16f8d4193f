"""What may have been done instead of an RMS norm, alone or inside a projection's operation."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from precaudit.arrays import Array, rounder
from precaudit.configs import DecoderConfig
from precaudit.graphs.point import Point
from precaudit.mutations.forms import (
    Form,
    Inputs,
    Weight,
    configured,
    constant,
    fed,
    holding,
    normalised_by,
    normalising,
)
from precaudit.mutations.variants import NARROW, Variant, roundings_of
from precaudit.numpy_decoder.rounding import Rounding

semantics = partial(Variant, kind="semantics")


def norm_variants(row: Point, config: DecoderConfig) -> Iterator[Variant]:
    """Yield variants of the norm inside an operation."""
    name = row.norm(config)
    if name is None:
        return
    eps = config.norm_eps
    yield from _epsilons(eps)
    yield from _means(row)
    yield semantics("weight left out", says="the norm has no weight", form=without_weight(name))
    if config.norm_offset:
        yield semantics("1 not added", says="1 is not added to the norm's weight", form=constant(norm_offset=0.0))
    yield semantics(
        "weight plus one", says="1 is added to the weight",
        form=configured(lambda c, layer: {"norm_offset": c.norm_offset + 1.0}),
    )  # fmt: skip
    for narrow in NARROW:
        yield Variant(f"norm in {narrow}", "format", f"the norm is computed in {narrow}", _narrow(narrow, row))
        says = f"the norm's mean of squares and the root's reciprocal are rounded to {narrow}"
        yield Variant(f"norm's statistics in {narrow}", "format", says, _statistics(narrow))


def _epsilons(eps: float) -> Iterator[Variant]:
    yield semantics(
        "epsilon outside the root", says="epsilon is added to the root",
        form=normalising(lambda m, e, width: 1 / (np.sqrt(m) + e)),
    )  # fmt: skip
    yield semantics("epsilon left out", says="epsilon is left out", form=constant(norm_eps=0.0))
    yield from roundings_of("epsilon", eps, lambda x: constant(norm_eps=x))


def _means(row: Point) -> Iterator[Variant]:
    for by in (-1, 1):
        yield semantics(
            f"mean over D {by:+d}", says=f"the sum of squares is divided by D {by:+d}",
            form=normalising(partial(_mean_over, by)),
        )  # fmt: skip
    yield semantics(
        "sum for mean", says="the sum of squares is not divided by D",
        form=normalising(lambda m, e, width: 1 / np.sqrt(m * width + e)),
    )  # fmt: skip
    if row.kind != "norm":
        return
    made: dict[str, tuple[str, Callable[[Array, float], Array]]] = {
        "mean for mean square": ("the mean is taken for the mean square", lambda x, e: 1 / np.sqrt(x.mean(axis=1) + e)),
        "mean of sizes": (
            "the mean of |x| is taken for the root mean square", lambda x, e: 1 / (np.abs(x).mean(axis=1) + e),
        ),
    }  # fmt: skip
    for name, (says, scale) in made.items():
        yield semantics(name, says=says, form=normalised_by(scale))
    yield semantics("centred", says="the mean is removed, as layer norm does", form=fed(_centred))


def _mean_over(by: int, m: Array, e: float, width: int) -> Array:
    return np.asarray(1 / np.sqrt(m * width / (width + by) + e))


def _centred(o: Inputs, r: Rounding) -> tuple[Array, ...]:
    return tuple(x - x.mean(axis=-1, keepdims=True) for x in o.values)


def without_weight(norm: str) -> Form:
    """Return the operation with the weight of a norm left out, its offset too."""

    def tensors(o: Inputs, weight: Weight) -> Weight:
        def found(name: str) -> Array | None:
            x = weight(name)
            left_out = x is not None and name.removesuffix(".weight") == norm
            return np.full_like(x, 1.0 - o.config.norm_offset) if left_out else x

        return found

    return holding(tensors)


def _statistics(name: str) -> Form:
    """Return a norm whose mean and 1/root are rounded, its squares not: what XLA:CPU makes of a norm in bfloat16."""
    narrow = rounder(name)
    return normalising(lambda m, e, width: narrow(1 / np.sqrt(narrow(m) + e)))


def _narrow(name: str, row: Point) -> Form:
    """Return a norm whose input, mean of squares and root are rounded."""
    narrow = rounder(name)

    def scale(m: Array, e: float, width: int) -> Array:
        return narrow(1 / narrow(np.sqrt(narrow(m) + e)))

    inside = normalising(scale)
    if row.kind != "norm":
        return inside
    return lambda o, r: inside(replace(o, values=tuple(narrow(x) for x in o.values)), r)
