"""What is known of an epsilon that is not the configuration's: formats hide small numbers, and then several fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, floor, log10

from precaudit.references.mutations.bench import Bench, Tried
from precaudit.references.mutations.fitting import Fit, fits
from precaudit.references.mutations.numbers import fit_number
from precaudit.references.mutations.variants import Variant
from precaudit.schema.digits import digits

EPSILON = "epsilon"
OUTSIDE = "epsilon outside the root"
FAR = 1e6  # times an epsilon, and below it, up to which others are looked for
HALVINGS = 9  # of the logarithm of FAR: an end to 3 %
DECADES = 3  # of numbers of one digit
SURE = 2.0  # times the least that fits, up to which what fits is one number
NOTHING = 0.1  # of the configuration's, up to which what fits from 0 on is none
APART = 2.0  # times the share that the best leaves, from which a number is told apart from it
TOLD = 1.1  # times the least that fits, from which all that fit are told beside the number

Fits = Callable[[Tried], bool]


@dataclass(frozen=True)
class Span:
    """The epsilons from ``low`` to ``high`` that fit in place of the ``announced`` one, which does not."""

    low: float
    high: float
    announced: float

    def __contains__(self, x: float) -> bool:
        """Whether an epsilon is one of them."""
        return self.low <= x <= self.high

    def __str__(self) -> str:
        """Return two numbers of two digits that hold all between."""
        return f"{digits(_cut_to(self.low, floor), 6)} to {digits(_cut_to(self.high, ceil), 6)}"

    @property
    def narrow(self) -> bool:
        """Whether they are as good as one number."""
        return self.high <= SURE * self.low

    @property
    def nothing(self) -> bool:
        """Whether they are as good as none."""
        return self.low == 0.0 and self.high <= NOTHING * self.announced


def known_of_epsilon(part: Bench, named: Tried, tried: Sequence[Tried]) -> Tried:
    """Return an epsilon that closes as what is known of it: by a number only where no other fits.

    Where one makes every element bit for bit, those fit that do; otherwise all that close and leave about as little as
    the one that leaves least.
    """
    fit = next(f for f in fits(part.inputs) if f.what == EPSILON)
    family = [t for t in tried if t.closes and t.variant.name.startswith(EPSILON)]
    x = fit_number(part, fit)
    if x is not None and x != fit.announced:
        family += [t for t in (_try(part, fit, x),) if t.closes]
    if not (numbers := _numbers(family)):
        return named
    short = _one_digit(_span(part, fit, _best(numbers), _closes))
    family += [t for x in short if (t := _try(part, fit, x)).closes]
    fitting = _bit_for_bit if any(map(_bit_for_bit, family)) else partial(_near, min(map(_share_left, family)))
    family = [t for t in family if fitting(t)]
    outside = next((t for t in family if t.variant.name == OUTSIDE), None)
    if not (numbers := _numbers(family)):
        return named if outside is None else outside
    best = _best(numbers)
    span = _span(part, fit, best, fitting)
    alone = _of_ten(best.variant.number or 0.0) or len({t.variant.number for t in numbers} & set(_one_digit(span))) < 2
    return replace(best, variant=_name_fit(span, best.variant, alone, outside is not None))


def _name_fit(span: Span, best: Variant, alone: bool, outside: bool) -> Variant:
    """Return the best variant by the name of what fits.

    ``alone``: no other number is as short; ``outside``: the announced one fits, too, where it is added to the root.
    """
    x, announced = best.number, f"the configuration says {digits(span.announced, 6)}"
    if not outside and span.nothing:
        return replace(best, name="epsilon omitted", says=f"epsilon is omitted, or at most {_top(span)}, {announced}")
    if not outside and alone and span.narrow:
        if best.kind == "format":
            return best
        all_of_them = f" ({span} fit)" if span.high > TOLD * span.low else ""
        return replace(
            best, name=f"epsilon {digits(x, 6)}", says=f"epsilon is {digits(x, 6)}{all_of_them}, {announced}"
        )
    low = span.high < span.announced
    name = f"epsilon {'below' if low else 'above'} the configuration's{', or outside the root' if outside else ''}"
    also = "; so does the configuration's, added to the root" if outside else ""
    than = f"{'smaller' if low else 'larger'} than the configuration's {digits(span.announced, 6)}"
    says = f"epsilon is {than}: {span} fit{also}"
    return replace(best, name=name, says=says)


def _closes(t: Tried) -> bool:
    return t.closes


def _share_left(t: Tried) -> float:
    """Return the share of an error that a variant leaves."""
    return 1.0 - t.explained


def _near(least: float, t: Tried) -> bool:
    return t.closes and _share_left(t) <= APART * least


def _bit_for_bit(t: Tried) -> bool:
    return t.closes and t.equal == 1.0


def _numbers(family: Sequence[Tried]) -> list[Tried]:
    return [t for t in family if t.variant.number is not None]


def _best(numbers: Sequence[Tried]) -> Tried:
    """Return the number that is best: a power of ten, as models have, of one digit, or that leaves least."""

    def rank(t: Tried) -> tuple[bool, int, float]:
        x = t.variant.number or 0.0
        return (t.equal == 1.0, _of_ten(x) + (x == _cut_to(x, round, 1)), t.explained)

    return max(numbers, key=rank)


def _try(part: Bench, fit: Fit, x: float) -> Tried:
    return part.try_variant(fit.variant(x), 0.0)


def _span(part: Bench, fit: Fit, best: Tried, fitting: Fits) -> Span:
    """Return the numbers about the best that fit."""
    x, announced = best.variant.number or 0.0, fit.announced or 0.0

    def is_fit(x: float) -> bool:
        return fitting(_try(part, fit, x))

    if x > announced:
        return Span(_end(x, max(announced, x / FAR), is_fit), _end(x, FAR * x, is_fit), announced)
    least = x or announced / FAR
    high = _end(least, announced, is_fit)
    return Span(0.0 if x == 0.0 or is_fit(0.0) else _end(x, x / FAR, is_fit), high, announced)


def _end(inner: float, outer: float, is_fit: Callable[[float], bool]) -> float:
    """Return the number farthest from one that fits toward one that does not, that fits."""
    for _ in range(HALVINGS):
        middle = (outer * inner) ** 0.5
        outer, inner = (outer, middle) if is_fit(middle) else (middle, inner)
    return inner


def _one_digit(span: Span) -> list[float]:
    """Return the largest numbers of one digit in a span."""
    top = floor(log10(span.high))
    every = (float(f"{digit}e{decade}") for decade in range(top - DECADES + 1, top + 1) for digit in range(1, 10))
    return [x for x in every if x in span]


def _of_ten(x: float) -> bool:
    """Whether a number is a power of ten."""
    return f"{x:.6e}".startswith("1.000000e")


def _cut_to(x: float, towards: Callable[[float], int], places: int = 2) -> float:
    """Return a number to so many digits."""
    if x == 0.0:
        return 0.0
    unit = 10.0 ** (floor(log10(x)) - places + 1)
    return float(f"{towards(round(x / unit, 6)) * unit:.6g}")


def _top(span: Span) -> str:
    return digits(_cut_to(span.high, ceil), 6)
