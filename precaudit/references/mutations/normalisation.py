"""What may have been done instead of an RMS norm, alone or inside a projection's operation."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.rounding import Rounding
from precaudit.numbers.arrays import Array, rounder
from precaudit.references.mutations.forms import (
    Form,
    Inputs,
    Weight,
    constant,
    normalised_by,
    normalising,
    on_inputs,
    usual_form,
    with_config,
    with_tensors,
)
from precaudit.references.mutations.variants import NARROW, Variant, roundings_of
from precaudit.schema.digits import digits
from precaudit.schema.graphs.point import Point

USUAL = (1e-5, 1e-6, 1e-8)  # epsilons that models have

semantics = partial(Variant, kind="semantics")


def norm_variants(row: Point, config: DecoderConfig) -> Iterator[Variant]:
    """Yield variants of the norm inside an operation."""
    name = row.norm(config)
    if name is None:
        return
    eps = config.norm_eps
    yield from _epsilons(eps)
    yield from _means(row)
    yield semantics("weight omitted", says="the norm has no weight", form=without_weight(name))
    if config.norm_offset:
        yield semantics("1 not added", says="1 is not added to the norm's weight", form=constant(norm_offset=0.0))
    yield semantics(
        "weight plus one",
        says="1 is added to the weight",
        form=with_config(lambda c, _layer: {"norm_offset": c.norm_offset + 1.0}),
    )
    for narrow in NARROW:
        yield Variant(f"norm in {narrow}", "format", f"the norm is computed in {narrow}", _narrow(narrow, row))
        says = f"the norm's mean of squares and the root's reciprocal are rounded to {narrow}"
        yield Variant(f"norm's statistics in {narrow}", "format", says, _statistics(narrow))
        if row.kind == "norm":
            yield from _squares_in(narrow)
    for steps, how in ((0, "without a step"), (1, "with one step")):
        says = f"the root's reciprocal is that of the constant 0x5f3759df {how} of Newton's"
        form = normalising(partial(_fast_root, steps))
        yield semantics(f"root by its bits, {how} of Newton's", says=says, form=form, last=True)


def _squares_in(name: str) -> Iterator[Variant]:
    """Yield norms whose squares are rounded to a narrow format, and their mean, or their sum term by term."""
    narrow = rounder(name)
    ways: dict[str, tuple[str, Callable[[Array], Array]]] = {
        f"norm's squares in {name}": (
            f"squares and their mean are rounded to {name}",
            lambda y: narrow(y.mean(axis=1)),
        ),
        f"norm's squares summed in {name}": (
            f"squares are rounded to {name}, and their sum term by term",
            lambda y: _one_by_one(narrow, y) / y.shape[1],
        ),
    }
    for cause, (says, mean) in ways.items():
        scale = partial(_of_squares, narrow, mean)
        yield Variant(cause, "format", says, normalised_by(scale), last=True)


def _of_squares(narrow: Callable[[Array], Array], mean: Callable[[Array], Array], x: Array, e: float) -> Array:
    return np.asarray(1 / np.sqrt(mean(narrow(x * x)) + e))


def _one_by_one(narrow: Callable[[Array], Array], y: Array) -> Array:
    total = np.zeros(len(y))
    for i in range(y.shape[1]):
        total = narrow(total + y[:, i])
    return total


def _fast_root(steps: int, m: Array, e: float, _width: int) -> Array:
    """Return 1/√(m + e) as float32's bits halved under a constant make it, after steps of Newton's (Lomont 2003)."""
    x = (m + e).astype(np.float32)
    y = (np.int32(0x5F3759DF) - (x.view(np.int32) >> 1)).view(np.float32)
    for _ in range(steps):
        y = y * (np.float32(1.5) - np.float32(0.5) * x * y * y)
    return y.astype(np.float64)


def _epsilons(eps: float) -> Iterator[Variant]:
    yield semantics(
        "epsilon outside the root",
        says="epsilon is added to the root",
        form=normalising(lambda m, e, _width: 1 / (np.sqrt(m) + e)),
    )
    yield semantics("epsilon omitted", says="epsilon is omitted", form=constant(norm_eps=0.0), number=0.0)
    yield from roundings_of("epsilon", eps, lambda x: constant(norm_eps=x))
    for usual in USUAL:
        if usual != eps:
            says = f"epsilon is {digits(usual, 6)}, the configuration says {digits(eps, 6)}"
            yield semantics(f"epsilon {digits(usual, 6)}", says=says, form=constant(norm_eps=usual), number=usual)


def _means(row: Point) -> Iterator[Variant]:
    for by in (-1, 1):
        yield semantics(
            f"mean over D {by:+d}",
            says=f"the sum of squares is divided by D {by:+d}",
            form=normalising(partial(_mean_over, by)),
        )
    yield semantics(
        "sum for mean",
        says="the sum of squares is not divided by D",
        form=normalising(lambda m, e, width: 1 / np.sqrt(m * width + e)),
    )
    yield semantics("norm omitted", says="the norm is omitted, but for its weight", form=normalising(_none), last=True)
    if row.kind != "norm":
        return
    made: dict[str, tuple[str, Callable[[Array, float], Array]]] = {
        "mean for mean square": ("the mean is taken for the mean square", lambda x, e: 1 / np.sqrt(x.mean(axis=1) + e)),
        "mean of sizes": (
            "the mean of |x| is taken for the root mean square",
            lambda x, e: 1 / (np.abs(x).mean(axis=1) + e),
        ),
    }
    made["deviation for root mean square"] = (
        "the standard deviation is taken for the root mean square",
        lambda x, e: 1 / np.sqrt(x.var(axis=1) + e),
    )
    for name, (says, scale) in made.items():
        yield semantics(name, says=says, form=normalised_by(scale))
    for half in (2, 4):
        says = f"each of {half} parts of a row is normalised by itself"
        yield semantics(f"norm of {half} parts", says=says, form=partial(_in_parts, half), last=True)
    yield semantics("norm twice", says="the norm is applied twice", form=_twice, last=True)
    yield semantics("centred", says="the mean is removed, as layer norm does", form=on_inputs(_centre))


def _in_parts(count: int, o: Inputs, r: Rounding) -> Array:
    """Return a norm of each of the parts of a row by itself: of the row over its part's root mean square."""
    x, e = o.values[0], o.config.norm_eps
    if x.shape[-1] % count:
        return usual_form(o, r)
    parts = x.reshape(len(x), count, -1)
    own = 1 / np.sqrt((parts**2).mean(axis=-1, keepdims=True) + e)
    alike = (parts * own).reshape(x.shape)
    return usual_form(replace(o, values=(alike,)), replace(r, norm_scale=np.ones_like))


def _twice(o: Inputs, r: Rounding) -> Array:
    return usual_form(replace(o, values=(usual_form(o, r),)), r)


def other_weights(row: Point, config: DecoderConfig) -> Iterator[Variant]:
    """Yield a norm under another weight: twice, in another order, of another norm of the layer."""
    name = row.norm(config)
    if name is None or row.kind != "norm":
        return
    ways: dict[str, tuple[str, Callable[[Array], Array]]] = {
        "weight twice": ("the weight is multiplied twice", np.square),
        "weight reversed": ("the weight's channels are in reverse order", lambda w: w[::-1]),
        "weight shifted by one": ("every channel has the weight of the one before", partial(np.roll, shift=1)),
        "weight shifted by minus one": ("every channel has the weight of the next", partial(np.roll, shift=-1)),
    }
    for cause, (says, change) in ways.items():
        yield semantics(cause, says=says, form=_change_weight(name, change), last=True)
    for narrow in NARROW if config.norm_offset == 0.0 else ():
        form = _change_weight(name, partial(_square_weight, rounder(narrow)))
        says = f"the weight is multiplied twice, and its square stored in {narrow}"
        yield semantics(f"weight twice in {narrow}", says=says, form=form, last=True)
    for narrow in NARROW:
        rounds = rounder(narrow)
        yield Variant(
            f"weight less 1 in {narrow}",
            "format",
            f"the weight less 1 is stored in {narrow}, and 1 is added",
            _change_weight(name, partial(_less_one, rounds)),
            last=True,
        )
    if config.norm_offset == 0.0:
        for narrow in NARROW:
            says = f"1 is added to the weight, in {narrow}"
            form = _change_weight(name, partial(_plus_one, rounder(narrow)))
            yield semantics(f"weight plus one in {narrow}", says=says, form=form, last=True)
    yield semantics(
        "weight before the mean",
        says="the weight is multiplied before the mean is taken",
        form=_before_mean(name),
        last=True,
    )
    for other in dict.fromkeys(config.norm_names):
        if row.per_layer and other is not None and other != name:
            says = f"the weight is that of {other}"
            yield semantics(f"weight of {other}", says=says, form=_of_norm(name, other), last=True)


def _square_weight(rounds: Callable[[Array], Array], w: Array) -> Array:
    return rounds(w * w)


def _plus_one(rounds: Callable[[Array], Array], w: Array) -> Array:
    return rounds(w + 1)


def _less_one(rounds: Callable[[Array], Array], w: Array) -> Array:
    return rounds(rounds(w - 1) + 1)


def _change_weight(norm: str, change: Callable[[Array], Array]) -> Form:
    """Return the operation with another weight of a norm."""

    def tensors(weight: Weight) -> Weight:
        def lookup(name: str) -> Array | None:
            x = weight(name)
            return x if x is None or name.removesuffix(".weight") != norm else change(x)

        return lookup

    return with_tensors(tensors)


def _before_mean(norm: str) -> Form:
    def form(o: Inputs, r: Rounding) -> Array:
        w = o.context(r).weight(f"{norm}.weight")
        if w is None:
            return usual_form(o, r)
        return without_weight(norm)(replace(o, values=(o.values[0] * (w + o.config.norm_offset),)), r)

    return form


def _of_norm(norm: str, other: str) -> Form:
    def tensors(weight: Weight) -> Weight:
        return lambda name: weight(f"{other}.weight" if name.removesuffix(".weight") == norm else name)

    return with_tensors(tensors)


def _none(m: Array, _e: float, _width: int) -> Array:
    return np.ones_like(m)


def _mean_over(by: int, m: Array, e: float, width: int) -> Array:
    return np.asarray(1 / np.sqrt(m * width / (width + by) + e))


def _centre(o: Inputs) -> tuple[Array, ...]:
    return tuple(x - x.mean(axis=-1, keepdims=True) for x in o.values)


def without_weight(norm: str) -> Form:
    """Return the operation with the weight of a norm omitted, its offset too."""

    def form(o: Inputs, r: Rounding) -> Array:
        def tensors(weight: Weight) -> Weight:
            def lookup(name: str) -> Array | None:
                x = weight(name)
                left_out = x is not None and name.removesuffix(".weight") == norm
                return np.full_like(x, 1.0 - o.config.norm_offset) if left_out else x

            return lookup

        return with_tensors(tensors)(o, r)

    return form


def _statistics(name: str) -> Form:
    """Return a norm whose mean and 1/root are rounded, its squares not: what XLA:CPU makes of a norm in bfloat16."""
    narrow = rounder(name)
    return normalising(lambda m, e, _width: narrow(1 / np.sqrt(narrow(m) + e)))


def _narrow(name: str, row: Point) -> Form:
    """Return a norm whose input, mean of squares and root are rounded."""
    narrow = rounder(name)

    def scale(m: Array, e: float, _width: int) -> Array:
        return narrow(1 / narrow(np.sqrt(narrow(m) + e)))

    inside = normalising(scale)
    if row.kind != "norm":
        return inside
    return lambda o, r: inside(replace(o, values=tuple(narrow(x) for x in o.values)), r)
