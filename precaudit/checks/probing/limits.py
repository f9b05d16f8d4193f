"""``--fail-on``: budgets of one sentence, judged by the gate's own rules."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isfinite

from precaudit.checks.probing.shapes import FORMATS
from precaudit.checks.probing.ways import product_ways
from precaudit.errors import UserError, nearest
from precaudit.interpreters.tpu.target import parse_target
from precaudit.judging.budgets import Places, RunBudget, RunEntry
from precaudit.judging.gate import judge_records
from precaudit.judging.judgement import Judgement
from precaudit.judging.verdicts import Verdict
from precaudit.numbers.formats import ALIASES
from precaudit.schema.records.probe import ProbeRecord

METRICS = ("rel_l2", "mae", "max_diff", "max_ulp", "bits_lost", "cosine", "snr")
SENTENCE = re.compile(r"(?P<what>.+?) (?:worse than (?P<limit>\S+)(?: (?P<metric>\S+))?|(?P<replaced>replaced))")
WRITE = "write '[FORMAT] WAY worse than 1e-3 [METRIC]' or '[FORMAT] WAY replaced'"


@dataclass(frozen=True)
class FailOn:
    """One sentence as a budget of products, whose phases are formats; without a limit: what was asked is replaced.

    ``exactly``: a way is named, not a pattern: where the device refuses it, it cannot be judged.
    """

    budget: RunBudget
    exactly: bool

    @property
    def text(self) -> str:
        """The sentence."""
        return self.budget.entry.why

    @property
    def is_replacement(self) -> bool:
        """Whether it is of what was asked for and not made."""
        return self.budget.entry.limit is None

    def under(self, records: Sequence[ProbeRecord]) -> Iterator[ProbeRecord]:
        """Yield the records that it judges."""
        its = [r for r in records if self.budget.matches("product", r.operands, None, r.point)]
        its = [r for r in its if not self.is_replacement or r.asked is not None]
        taken = [r for r in its if r.unknown is None]
        yield from its if self.exactly or not taken else taken


def parse_sentences(texts: Sequence[str], points: Mapping[str, Iterable[str]]) -> tuple[FailOn, ...]:
    """Return what sentences say; raises UserError for one that says nothing, or names nothing that is probed.

    ``points``: of each format of operands that is probed.
    """
    return tuple(_parse_sentence(text, points) for text in dict.fromkeys(" ".join(text.split()) for text in texts))


def _parse_sentence(text: str, points: Mapping[str, Iterable[str]]) -> FailOn:
    found = SENTENCE.fullmatch(text)
    if found is None:
        raise UserError(f"--fail-on {text!r}: {WRITE}")
    first, _, rest = found["what"].partition(" ")
    form = ALIASES.get(first, first)
    one = form in FORMATS and rest != ""
    if one and form not in points:
        raise UserError(f"--fail-on {text!r}: {form} is not probed; it is of {', '.join(points)}")
    formats = (form,) if one else tuple(points)
    pattern, on, tpu = (rest if one else found["what"]).partition(" on ")
    pattern += f" on {parse_target(tpu).name}" if on else ""
    every = {p for f in formats for p in points[f]}
    named = frozenset(p for p in every if fnmatchcase(p, pattern))
    if not named:
        raise UserError(f"--fail-on {text!r}: no way {pattern!r}{nearest(pattern, every)}")
    if found["replaced"] and not any(w.asked and w.name in _ways(named) for f in formats for w in product_ways(f)):
        raise UserError(f"--fail-on {text!r}: {pattern} names no arithmetic: there is nothing to replace")
    metric = found["metric"] or "rel_l2"
    if metric not in METRICS:
        raise UserError(f"--fail-on {text!r}: no metric {metric!r}{nearest(metric, METRICS)}")
    limit = None if found["replaced"] else _limit(text, found["limit"])
    of = Places(frozenset(("product",)), frozenset(formats), None, named)
    return FailOn(RunBudget(RunEntry(why=text, metric=metric, limit=limit), 0, of), named == {pattern})


def _ways(points: Iterable[str]) -> set[str]:
    """Return the ways of points, those of a target without its name."""
    return {p.partition(" on ")[0] for p in points}


def _limit(text: str, written: str) -> float:
    try:
        limit = float(written)
    except ValueError:
        limit = float("nan")
    if not isfinite(limit) or limit < 0:
        raise UserError(f"--fail-on {text!r}: a number of 0 or more is wanted, such as 1e-3")
    return limit


def judge_sentences(name: str, records: Sequence[ProbeRecord], asked: Sequence[FailOn]) -> Judgement:
    """Return what every sentence says of the records, by the rules of ``gate``.

    What a device refuses is unknown where its way is named, and where a pattern names nothing that it takes.
    """
    stated = [f for f in asked if not f.is_replacement]
    mine = {id(r): r for f in stated for r in f.under(records)}
    verdicts = [_replacement_verdict(r, f) for f in asked if f.is_replacement for r in f.under(records)]
    return judge_records(name, (r.product() for r in mine.values()), [f.budget for f in stated], verdicts)


def _replacement_verdict(r: ProbeRecord, f: FailOn) -> Verdict:
    e = r.product()
    if r.unknown is not None or r.honoured == "undecided":
        return Verdict.of(e, "unknown", text=r.unknown or f"what {r.asked} was replaced by is not known", why=f.text)
    if r.honoured == "yes":
        return Verdict.of(e, "pass", why=f.text)
    return Verdict.of(e, "fail", text=f"asked for {r.asked}, computed in {' or '.join(r.made)}", why=f.text)
