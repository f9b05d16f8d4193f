"""TEST of a bisection, such as ``kl<1e-3``: what is good, by the figures of a trial."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan

from precaudit.diagnosis.bisection.records import Word
from precaudit.errors import UserError
from precaudit.schema.records.base import Number, value

NEAR = 1.25  # a figure within this factor of its limit is near it, and measured again
COUNTS = ("flips", "differing")
SHAPE = re.compile(
    r"(?P<name>kl|flips|logits|differing|(?:forward|local)@[\w.~#@*-]+)\s*(?P<sign><=|<|=)\s*"
    r"(?P<number>[0-9.]+(?:[eE][+-]?[0-9]+)?)(?P<times>x?)"
)
KNOWN = "kl<1e-3, flips=0, logits<1e-2, forward@attn_out<2x, bits, verdict"


@dataclass(frozen=True)
class Criterion:
    """A test: the figure ``name`` has to be below ``limit``, or equal to it; ``times``: in units of A's own figure."""

    text: str
    name: str
    sign: str
    limit: float
    times: bool = False

    @property
    def point(self) -> str | None:
        """The point that it is about; None of those of the whole."""
        return self.name.partition("@")[2] or None


def parse_criterion(text: str) -> Criterion:
    """Return the test that a text says; raises UserError."""
    if text == "bits":
        return Criterion(text, "differing", "=", 0.0)
    if text in ("verdict", "gate"):
        return Criterion(text, "verdict", "=", 0.0)
    match = SHAPE.fullmatch(text.strip())
    if match is None:
        raise UserError(f"--test {text!r} is no test; such as {KNOWN}")
    try:
        return Criterion(text, match["name"], match["sign"], float(match["number"]), bool(match["times"]))
    except ValueError:
        raise UserError(f"--test {text!r}: {match['number']} is no number") from None


def limited_figure(text: str) -> str | None:
    """Return the name of the figure that a test limits by a number; None where it is a word or a user's command."""
    match = SHAPE.fullmatch(text.strip())
    return None if match is None else match["name"]


def bound_of(test: Criterion, base: Mapping[str, Number]) -> float | None:
    """Return the limit in the figure's own units; ``base``: the figures of A. None where A has none of that name."""
    if not test.times:
        return test.limit
    return test.limit * value(base[test.name]) if test.name in base else None


def judge_figures(test: Criterion, figures: Mapping[str, Number], base: Mapping[str, Number]) -> tuple[Word, bool, str]:
    """Return what figures answer to a test, whether they are near its limit, and why it cannot be told."""
    limit = bound_of(test, base)
    if test.name not in figures or limit is None:
        return "unknown", False, f"{test.name} was not measured; there are {', '.join(sorted(figures)) or 'no figures'}"
    x = value(figures[test.name])
    if test.name == "verdict":
        return ("good" if x == 0 else "bad" if x == 1 else "unknown"), False, "" if x in (0, 1) else "nothing is judged"
    if isnan(x):
        return "bad", False, ""
    holds = {"<": x < limit, "<=": x <= limit, "=": x == limit}[test.sign]
    one_too_many = limit + (test.sign != "<")
    near = x == one_too_many if test.name in COUNTS else limit > 0 and limit / NEAR <= x <= limit * NEAR
    return ("good" if holds else "bad"), near, ""
