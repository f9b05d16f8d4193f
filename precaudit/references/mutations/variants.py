"""A variant of an operation: a form under a rounding, and the class it stands for."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from precaudit.models.numpy_decoder.accumulation import (
    accumulating,
    blocked_matmul,
    fused_multiply_add,
    matmul_of_parts,
    pairwise_matmul,
)
from precaudit.models.numpy_decoder.rounding import Cast, Rounding
from precaudit.numbers.arrays import Array, cutter, rounder
from precaudit.numbers.formats import FORMATS
from precaudit.references.mutations.flash import Flash
from precaudit.references.mutations.forms import Form, usual_form
from precaudit.schema.digits import digits
from precaudit.schema.graphs.point import Point

Class = Literal["rounding", "format", "quantisation", "semantics", "state"]
NARROW = ("bfloat16", "float16")
STORED = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")

Change = Callable[[Rounding], Rounding]


def same_rounding(r: Rounding) -> Rounding:
    """Return a rounding as it is."""
    return r


@dataclass(frozen=True)
class Variant:
    """``form`` of an operation under ``change`` of the policy's rounding; ``says``: what it means in words.

    ``fitted``: a number, or a part of the tensor, was taken from the recorded values; ``carries``: it may be tried
    elsewhere with the same; ``ahead``: keys past their own that its rows see, which may not have been recorded.
    ``describes``: it has a number of its own for every slice: it says what is left and is no cause. ``last``: tried
    only where nothing has closed so far. ``number``: what it has in the place of a number of the configuration's.
    """

    name: str
    kind: Class
    says: str
    form: Form = usual_form
    change: Change = same_rounding
    fitted: bool = False
    carries: bool = True
    ahead: int = 0
    describes: bool = False
    last: bool = False
    number: float | None = None


def rounded_to(name: str, x: float) -> float:
    """Return a number rounded to a format."""
    return float(rounder(name)(np.asarray([x], np.float64))[0])


def roundings_of(what: str, x: float, form: Callable[[float], Form]) -> Iterator[Variant]:
    """Yield an operation with a constant rounded to narrower formats, each value once."""
    seen = {x}
    for name in NARROW:
        narrow = rounded_to(name, x)
        if narrow not in seen:
            seen.add(narrow)
            says = f"the {what} {digits(x, 6)} is rounded to {name}: {digits(narrow, 6)}"
            yield Variant(f"{what} rounded to {name}", "format", says, form(narrow), number=narrow)


def at(**places: Any) -> Change:
    """Return the change that replaces what some places do."""
    return lambda r: replace(r, **places)


def first(place: str, name: str) -> Change:
    """Round to ``name`` before a place rounds as it does."""
    narrow = rounder(name)
    return _around(place, lambda usual: lambda x: usual(narrow(x)))


def then(place: str, name: str) -> Change:
    """Round to ``name`` after a place rounds as it does."""
    narrow = rounder(name)
    return _around(place, lambda usual: lambda x: narrow(usual(x)))


def _around(place: str, make: Callable[[Cast], Cast]) -> Change:
    """Return the change that makes a place's cast another out of its own."""

    def change(r: Rounding) -> Rounding:
        changed: dict[str, Any] = {place: make(getattr(r, place))}
        return replace(r, **changed)

    return change


def stored(place: str, announced: str, names: Sequence[str] = STORED) -> Iterator[Variant]:
    """Yield results rounded to a narrower format than announced, once or as announced before."""
    for name in names:
        if FORMATS[name].unit_roundoff > FORMATS[announced].unit_roundoff:
            yield Variant(
                f"stored in {name}", "format", f"results are rounded to {name}", usual_form, first(place, name)
            )
            if announced != "float32":
                says = f"results are rounded to {announced}, and then to {name}"
                yield Variant(f"stored again in {name}", "format", says, usual_form, then(place, name), last=True)


def cut(place: str, announced: str) -> Iterator[Variant]:
    """Yield results that are cut to 16 bits toward zero, as by dropping a float32's lower bits, in place of rounded."""
    for name in NARROW:
        if FORMATS[name].unit_roundoff >= FORMATS[announced].unit_roundoff:
            places: dict[str, Any] = {place: cutter(name)}
            yield Variant(f"cut to {name}", "format", f"results are cut to {name} toward zero", change=at(**places))
            odd: dict[str, Any] = {place: to_odd(name)}
            says = f"results are rounded to {name} to odd: cut, and the last bit set where that was not exact"
            yield Variant(f"rounded to odd in {name}", "format", says, change=at(**odd), last=True)


def to_odd(name: str) -> Cast:
    """Return the function that cuts to a format of 16 bits, and sets the last bit where that was not exact."""
    toward, dtype = cutter(name), FORMATS[name].dtype

    def odd(x: Array) -> Array:
        cut_ = toward(x)
        bits = cut_.astype(dtype).view(np.uint16)
        return np.where(np.isfinite(x), (bits | (cut_ != x)).view(dtype).astype(np.float64), cut_)

    return odd


def sums(row: Point) -> Iterator[Variant]:
    """Yield sums in narrow formats and other orders; float32's are honest, and no failing record closes by them."""
    kind: Class = "format"
    for name in NARROW:
        orders = {
            f"sums in {name}": (f"sums are rounded to {name} term by term", accumulating(name)),
            f"sums in {name}, pairwise": (f"sums are rounded to {name}, pair by pair", pairwise_matmul(name)),
            f"sums in {name}, blocks of 128": (
                f"sums are rounded to {name} every 128 terms",
                accumulating(f"{name}/128"),
            ),
        }
        for order, (says, dot) in orders.items():
            yield Variant(order, kind, says, usual_form, at(dot=dot))
        says = f"sums are rounded to {name} term by term, products are not: fused multiply-adds"
        yield Variant(f"sums in {name}, fused", kind, says, usual_form, at(dot=fused_multiply_add(name)), last=True)
        for parts in (2, 4, 8):
            says = f"each of {parts} parts of a sum is rounded to {name}, and so are their sums"
            yield Variant(
                f"sums of {parts} parts in {name}",
                kind,
                says,
                usual_form,
                at(dot=matmul_of_parts(name, parts)),
                last=True,
            )
        for block in (16, 32, 64):
            says = f"sums of {block} terms are rounded to {name}, and so are their sums"
            yield Variant(
                f"sums of {block} terms in {name}",
                kind,
                says,
                usual_form,
                at(dot=blocked_matmul(name, block)),
                last=True,
            )
        if row.kind == "mix":
            for block in (64, 128):
                yield Variant(
                    f"flash, blocks of {block}, in {name}",
                    kind,
                    f"blocks of {block} keys under a running maximum, their sums kept in {name}",
                    Flash(block=block, total=rounder(name)),
                )
