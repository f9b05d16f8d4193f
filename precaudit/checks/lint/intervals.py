"""Intervals of whole numbers: what an equation makes of those it reads, by its primitive."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from precaudit.checks.lint.flow import FLOATS, MOVES, Equation

ANY = float("inf")
LARGEST = 1 << 20  # elements of a constant that are looked at
SAME = (MOVES - {"concatenate", "stack", "pad"}) | {
    "convert_element_type",
    "reduce_precision",
    "round",
    "floor",
    "ceil",
    "real",
    "reduce_max",
    "reduce_min",
    "cummax",
    "cummin",
    "sort",
}
EITHER = ("concatenate", "stack", "pad", "select_n", "dynamic_update_slice", "scatter")
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
HELD = {name: 2.0 ** (ml_dtypes.finfo(name).nmant + 1) for name in FLOATS}  # every whole number up to this one


class WholeRange(NamedTuple):
    """Whole numbers from ``low`` to ``high``, all of them multiples of ``step``, a power of two."""

    low: float
    high: float
    step: float = 1.0

    @property
    def most(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))

    def exceeds(self, dtype: str) -> bool:
        """Whether a float format does not hold all of them exactly."""
        return self.most > HELD[dtype] * self.step

    def within(self, other: "WholeRange") -> bool:
        """Whether all of them lie in another range."""
        return self.low >= other.low and self.high <= other.high and self.step >= other.step


def default(dtype: str) -> WholeRange | None:
    """Return what a format alone says of a value: of eight bits and fewer the range, of more that it may be any."""
    if dtype == "bool":
        return WholeRange(0, 1)
    if not dtype.lstrip("u").startswith("int"):
        return None
    bits = int(dtype.lstrip("uint"))
    if bits > 8:
        return WholeRange(0 if dtype[0] == "u" else -ANY, ANY)
    return WholeRange(0, 2**bits - 1) if dtype[0] == "u" else WholeRange(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def of_constant(given: object) -> WholeRange | None:
    """Return the range of a number or an array of the text; None where it is not whole."""
    x = np.asarray(given) if hasattr(given, "dtype") or np.isscalar(given) else np.zeros(0)
    if not 0 < x.size <= LARGEST or not (x.dtype.kind in "biu" or str(x.dtype) in FLOATS):
        return None
    wide = x.astype(np.float64)
    if not (np.isfinite(wide).all() and (wide == np.round(wide)).all()):
        return None
    return WholeRange(float(wide.min()), float(wide.max()), _step(wide))


def _step(x: Any) -> float:
    """Return the largest power of two that divides all of these whole numbers, up to 2^30."""
    step = 2.0**30
    while step > 1 and np.fmod(x, step).any():
        step /= 2
    return step


def either(given: Sequence[WholeRange | None]) -> WholeRange | None:
    """Return the range of what may be one or the other; None where one is not known to be whole."""
    known = [r for r in given if r is not None]
    if not known or len(known) < len(given):
        return None
    return WholeRange(min(r.low for r in known), max(r.high for r in known), min(r.step for r in known))


def result_range(e: Equation, given: Sequence[WholeRange | None], k: int) -> WholeRange | None:
    """Return the range of result ``k`` of an equation that calls nothing."""
    name, params, dtype = e.primitive, e.made.params, str(getattr(e.made.outvars[k].aval, "dtype", ""))
    if name == "iota":
        return WholeRange(0, max(params["shape"][params["dimension"]] - 1, 0))
    if name in ("argmax", "argmin"):
        return WholeRange(0, prod(e.made.invars[0].aval.shape[axis] for axis in params["axes"]) - 1)
    if name in PRODUCTS:
        return None  # sums of quantised products are whole numbers, but count nothing
    if name in SAME and dtype != "bool":
        whole, most = given[k if name == "sort" else 0], default(dtype)
        if whole is None:
            return most if e.dtype() in FLOATS else None
        return whole if most is None or whole.within(most) else most  # what an integer does not hold wraps around
    if name in EITHER:
        return either(_chosen(name, given))
    known = [r for r in given if r is not None]
    if name in BY_SHAPE and known:
        return BY_SHAPE[name](e, known[0])
    if len(known) < len(given) or k or name not in ARITHMETIC:
        return default(dtype)
    if name == "div" and dtype in FLOATS:
        return None
    return ARITHMETIC[name](*known)


def _chosen(name: str, given: Sequence[WholeRange | None]) -> Sequence[WholeRange | None]:
    """Return what a result may be of; of a choice that is known, that alone."""
    if name in ("dynamic_update_slice", "scatter"):
        return given[0], given[1 if name == "dynamic_update_slice" else 2]  # what is there and what is put there
    if name != "select_n":
        return given
    which, rest = given[0], given[1:]
    return [rest[int(which.low)]] if which is not None and which.low == which.high else rest


def _cumulative(e: Equation, x: WholeRange) -> WholeRange:
    n = e.made.invars[0].aval.shape[e.made.params["axis"]]
    return WholeRange(min(x.low, n * x.low), max(x.high, n * x.high), x.step)


def _sum(e: Equation, x: WholeRange) -> WholeRange:
    n = prod(e.made.invars[0].aval.shape[axis] for axis in e.made.params["axes"])
    return WholeRange(product_range(n, x.low), product_range(n, x.high), x.step)


def _power(e: Equation, x: WholeRange) -> WholeRange | None:
    y = e.made.params["y"]
    return reduce(_product, [x] * y) if y > 0 else None


def product_range(a: float, b: float) -> float:
    """Return a product in which nothing times any number is nothing."""
    return a * b if a and b else 0.0


def _product(a: WholeRange, b: WholeRange) -> WholeRange:
    ends = [product_range(x, y) for x in a[:2] for y in b[:2]]
    return WholeRange(min(ends), max(ends), a.step * b.step)


def _remainder(a: WholeRange, b: WholeRange) -> WholeRange:
    most = max(min(b.most - 1, a.most), 0.0)
    return WholeRange(0 if a.low >= 0 else -most, 0 if a.high <= 0 else most)


def _quotient(a: WholeRange, b: WholeRange) -> WholeRange:
    """Return whole quotients, rounded to zero, of what is divided by a positive number; any of others."""
    if b.low < 1:
        return WholeRange(-a.most, a.most)
    ends = [np.trunc(x / y) if x and y < ANY else 0.0 for x in a[:2] for y in (b.low, b.high)]
    return WholeRange(min(ends), max(ends))


def _both(a: WholeRange, b: WholeRange) -> WholeRange:
    """Return what two numbers have in common, bit by bit; of truth values whether both are true."""
    if max(a.low, b.low) < 0:
        return WholeRange(-ANY, ANY)
    high = min(r.high for r in (a, b) if r.low >= 0)  # of two's complements, the signs of the others cut off
    return WholeRange(min(a.low, b.low) if max(a.high, b.high) <= 1 else 0, high)


def _where(yes: bool, no: bool) -> WholeRange:
    return WholeRange(float(yes), float(not no))


ARITHMETIC: Mapping[str, Callable[..., WholeRange]] = {
    "add": lambda a, b: WholeRange(a.low + b.low, a.high + b.high, min(a.step, b.step)),
    "sub": lambda a, b: WholeRange(a.low - b.high, a.high - b.low, min(a.step, b.step)),
    "mul": _product,
    "neg": lambda a: WholeRange(-a.high, -a.low, a.step),
    "abs": lambda a: WholeRange(max(a.low, -a.high, 0.0), a.most, a.step),
    "sign": lambda a: WholeRange(float(np.sign(a.low)), float(np.sign(a.high))),
    "max": lambda a, b: WholeRange(max(a.low, b.low), max(a.high, b.high), min(a.step, b.step)),
    "min": lambda a, b: WholeRange(min(a.low, b.low), min(a.high, b.high), min(a.step, b.step)),
    "clamp": lambda low, a, high: WholeRange(
        min(max(a.low, low.low), high.low), min(max(a.high, low.high), high.high), min(low.step, a.step, high.step)
    ),
    "square": lambda a: _product(a, a),
    "rem": _remainder,
    "div": _quotient,
    "and": _both,
    "lt": lambda a, b: _where(a.high < b.low, a.low >= b.high),
    "le": lambda a, b: _where(a.high <= b.low, a.low > b.high),
    "gt": lambda a, b: _where(a.low > b.high, a.high <= b.low),
    "ge": lambda a, b: _where(a.low >= b.high, a.high < b.low),
    "eq": lambda a, b: _where(a.low == a.high == b.low == b.high, a.high < b.low or a.low > b.high),
    "ne": lambda a, b: _where(a.high < b.low or a.low > b.high, a.low == a.high == b.low == b.high),
}
BY_SHAPE: Mapping[str, Callable[[Equation, WholeRange], WholeRange | None]] = {
    "cumsum": _cumulative,
    "reduce_sum": _sum,
    "integer_pow": _power,
}
