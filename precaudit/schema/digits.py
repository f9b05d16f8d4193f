"""Numbers as people read them."""

from math import isnan

from precaudit.schema.records.base import Number, value

ALL = 0.99995  # a share from which nothing is lacking that four digits show
MOST = 99.9  # per cent: of what is not all


def digits(x: Number | None, places: int = 3) -> str:
    """Return a number in at most so many significant digits, 1.2e-5, NaN by name; nothing of what is not known."""
    if x is None or isnan(value(x)):
        return "" if x is None else "NaN"
    return f"{value(x):.{places}g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def rough(x: float) -> str:
    """Return a ratio in two significant digits, or its whole number."""
    return f"{x:.0f}" if 100 <= abs(x) < 1000 else digits(x, 2)


def ratio(x: Number) -> str:
    """Return a ratio in three digits, with the zeros at its end: 1.00, 12.3."""
    return f"{value(x):.2f}" if 0.1 <= abs(value(x)) < 9.995 else digits(x)


def tenths(x: float) -> str:
    """Return a number to a tenth, and in three digits from a hundred on: 0.1, 12.3, 100."""
    return f"{x:.1f}" if abs(x) < 99.95 else digits(x)


roundoffs = tenths  # a multiple of the unit roundoff


def short(x: Number | None, unknown: str = "") -> str:
    """Return a number in two digits, NaN by name, and what is not known as ``unknown``."""
    if x is None or not value(x):
        return unknown if x is None else "0"
    return "NaN" if isnan(value(x)) else f"{value(x):.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def beside(x: float, reference: float) -> str:
    """Return a value and its reference in three digits, and how far apart they are where those are the same."""
    shown, other = digits(x), digits(reference)
    return f"{shown}, reference {other}" + (
        f", {digits(x - reference)} apart" if shown == other != "NaN" and x != reference else ""
    )


def share_words(share: float) -> str:
    """Return how much of an error is explained: a percentage between 0 and 100, or ``none``, as where it grows."""
    return f"{100 * min(share, 1.0):.0f} %" if share >= 0.005 else "none"


def error_share(share: float) -> str:
    """Return a share of an error in three digits: 100 % is all of it, and what makes it larger explains none of it."""
    if share <= 0:
        return "none of it"
    return "100 %" if share >= ALL else f"{digits(min(100 * share, MOST))} %"


def apart(x: float, limit: float) -> str:
    """Return a number, and by how much it is above or below another that reads the same: ``0.1 (+2e-9)``."""
    shown, sign = digits(x), "+" if x > limit else ""
    return shown if shown != digits(limit) or x == limit else f"{shown} ({sign}{digits(x - limit)})"


def near_one(x: Number) -> str:
    """Return a number in three digits, and how far it is from 1 where it reads 1: ``1 (+0.00238)``."""
    return apart(value(x), 1.0)


def speed(x: float) -> str:
    """Return a number in three digits, as a whole number from 100 on: ``1,200``."""
    return f"{float(digits(x)):,.0f}" if x >= 100 else digits(x)


def percent(x: float) -> str:
    """Return a share in at most two significant digits: 73 %, 0.41 %, 1.2e-5 %."""
    return f"{digits(100 * x, 2)} %" if x < 1 else f"{100 * x:.0f} %"


def count_text(n: int, word: str) -> str:
    """Return how many there are of what a word names: ``1 layer``, ``1,000 layers``."""
    return f"{n:,} {word}{'' if n == 1 else 's'}"
