"""What a gate says: one message a group of verdicts that start at the same place."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from math import isfinite
from typing import TypeVar

from precaudit.judging.baselines import Drift
from precaudit.judging.judgement import Judgement
from precaudit.judging.verdicts import OVERFLOW, Verdict
from precaudit.schema.digits import beside, digits, percent, ratio, share_words
from precaudit.schema.places import LAST
from precaudit.schema.records.base import value

P = TypeVar("P", bound=Hashable)
NOTHING = {
    "errors": "there are no local, forward or state records",
    "rollouts": "give --budgets or --baseline",
}


@dataclass
class Group:
    """Verdicts of one status, kind and point as they stream by: the earliest in the program, its worst token first.

    ``size``: how many they are; ``layers``: in which; ``prompts``: the hashes of theirs.
    """

    first: Verdict
    size: int = 0
    layers: set[int] = field(default_factory=set)
    prompts: set[int] = field(default_factory=set)
    _weight: tuple[int, float] = (LAST + 1, 0.0)  # of the first: its layer, and how far it is over its limit

    def add(self, v: Verdict) -> None:
        """Look at a verdict."""
        if (weight := (v.depth[0], -_over(v))) < self._weight:
            self.first, self._weight = v, weight
        self.size += 1
        self.prompts.add(hash(v.prompt))
        if v.layer is not None:
            self.layers.add(v.layer)


def groups(verdicts: Iterable[Verdict]) -> list[Group]:
    """Group verdicts by status, kind, point and metric, those that start first in the program first."""
    return next(iter(group_verdicts(verdicts, lambda _v: None).values()), [])


def group_verdicts(verdicts: Iterable[Verdict], place: Callable[[Verdict], P]) -> dict[P, list[Group]]:
    """Return the groups of verdicts of each place."""
    found: dict[P, dict[tuple[str, ...], Group]] = {}
    for v in verdicts:
        here, key = found.setdefault(place(v), {}), _key(v)
        if key not in here:
            here[key] = Group(v)
        here[key].add(v)
    order = {"fail": 0, "nonfinite": 0, "missing": 1, "stale": 1, "unknown": 2, "input suspect": 3, "not run": 4}

    def weight(g: Group) -> tuple[int, tuple[int, int]]:
        return order.get(g.first.status, 5), g.first.depth

    return {at: sorted((its[key] for key in sorted(its)), key=weight) for at, its in found.items()}


def _key(v: Verdict) -> tuple[str, str, str, str]:
    metric = v.metric if v.kind == "mismatch" else ""  # of a rollout: what is wrong with each, not at the first
    return (v.status, v.kind, v.point, v.text if v.status in ("stale", "unknown") else metric)


def _over(v: Verdict) -> float:
    return value(v.value) / value(v.limit) if v.value is not None and v.limit not in (None, 0.0) else 0.0


def not_finite(v: Verdict) -> str:
    """Return how much of a place is not finite: of sums rows, of all else elements; "" where that is not known."""
    if v.value is None:
        return ""
    n = value(v.value)
    one, many = ("row has", "rows have") if v.kind == "sums" else ("element is", "elements are")
    return f"{n:,.0f} {one if n == 1 else many} NaN or infinite" + (" values" if v.kind == "sums" else "")


def overflow_text(v: Verdict) -> str:
    """Return which operation overflows, and what that makes of a token."""
    return f"{v.text}; a token made of it is {percent(value(v.value))} away from FP64"


def verdict_message(v: Verdict) -> str:
    """Return what, where, how bad against what, and the worst place with both values."""
    where = place_text_of(v)
    text = f"{v.status}: {where}" if where else f"{v.status}:"
    if v.kind:
        text += f" [{v.kind}]"
    if v.metric == "nonfinite":
        text += f" {v.text};" if v.text else ""
        text += f" {not_finite(v)}"
    elif v.metric == OVERFLOW:
        text += f" {overflow_text(v)}, limit {percent(value(v.limit))}"
    elif v.metric and v.value is not None and v.limit is not None:
        at = f" at {_at(v)}" if v.scope else ""
        text += f" {v.metric} {digits(v.value)}{at}, limit {digits(v.limit)}"
    if v.rel_l2 is not None and value(v.rel_l2) and v.explained is not None and isfinite(value(v.explained)):
        text += f"; error {digits(v.rel_l2)}, policy {v.policy} explains {share_words(value(v.explained))} of it"
    w = v.worst  # of the finite elements: it is none of those that are not
    if w is not None and not (v.metric == "nonfinite" and isfinite(value(w.candidate))):
        text += f"; worst element {list(w.index)}: {beside(value(w.candidate), value(w.reference))}"
    return (
        text
        + (f"{_before_words(v)} {v.text}" if v.text and v.metric not in ("nonfinite", OVERFLOW) else "")
        + (f" (budget: {v.why})" if v.why else "")
    )


def _before_words(v: Verdict) -> str:
    """Return what parts a verdict's own words from its numbers, or from its place."""
    if v.worst is not None or (v.value is not None and v.limit is not None):
        return ";"
    return ":" if v.kind else ""


def place_text_of(v: Verdict) -> str:
    """Return where a verdict belongs; nothing for those on a whole run."""
    if not v.point:
        return f"prompt {v.prompt}" if v.prompt else ""
    return v.place.text


def _at(v: Verdict) -> str:
    if v.index is None:
        return v.scope
    return f"{v.scope} {list(v.index) if isinstance(v.index, list | tuple) else v.index}"


def rest(g: Group) -> str:
    """Return what the other members of a group are: how many, in which layers and prompts."""
    if g.size == 1:
        return ""
    span = f", layers {min(g.layers)} to {max(g.layers)}" if len(g.layers) > 1 else ""
    prompts = f", {len(g.prompts)} prompts" if len(g.prompts) > 1 else ""
    return f" ({g.size} such{span}{prompts})"


def tally(j: Judgement) -> str:
    """Return the counts as a sentence."""
    if not j.counts:
        return f"nothing was judged: {NOTHING[j.of]}"
    return ", ".join(f"{n:,} {status}" for status, n in j.counts.items())


def drift_lines(j: Judgement) -> list[str]:
    """Return the largest growth against the baseline, and against the first of its chain."""
    grown = [d for d in j.drift if d.now > 1.0 or d.first > 1.0][:3]
    return [f"drift: {d.what} {ratio(d.now)} × the baseline's{_since_first(d)}" for d in grown]


def _since_first(d: Drift) -> str:
    """Return the growth since the first of several baselines; nothing where that is the same."""
    return "" if d.first == d.now else f", {ratio(d.first)} × the first baseline's"
