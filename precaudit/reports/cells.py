"""The cells of a heat map: of every layer and point the worst record, how bad it is, and its story in words."""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, isnan
from typing import Any

from precaudit.judging.rules import judge
from precaudit.judging.verdicts import STATUSES, Status
from precaudit.references.attribution import attribute
from precaudit.reports.digits import short
from precaudit.reports.summary import share_text
from precaudit.schema.filed import of_kinds
from precaudit.schema.limits import Limits, default_limits
from precaudit.schema.limits.checks import Check, forward_checks, local_checks
from precaudit.schema.places import ORDER, Place
from precaudit.schema.records.base import Number, value
from precaudit.schema.records.errors import ErrorRecord
from precaudit.schema.records.runs import is_call

KINDS = {"local": ("local", "policy", "state"), "forward": ("forward",)}  # what a map shows: kinds of records
MARKS = {"pass": "✓", "fail": "✗", "nonfinite": "✗", "input suspect": "~", "not run": "–"}  # of others: ?


@dataclass(frozen=True)
class Cell:
    """The worst record of a layer (None: outside layers) and point, and the statuses of all.

    ``size``: of a local error the worst number over its limit, of a forward error the largest ratio; None where there
    is none.
    """

    layer: int | None
    point: str
    status: Status
    size: float | None
    worst: ErrorRecord
    counts: Mapping[str, int]

    @property
    def mark(self) -> str:
        """✓, ✗ or ? and the like, of the worst status."""
        return MARKS.get(self.status, "?")


@dataclass
class _Group:
    """The records of a layer and point as they stream by, by their worst."""

    status: Status
    worst: ErrorRecord
    size: float | None = None
    over: float = -inf
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, status: Status, e: ErrorRecord) -> None:
        found = over_limit(e)
        heavier = STATUSES.index(status) - STATUSES.index(self.status)
        if heavier < 0 or (heavier == 0 and _finite(found) > self.over):
            self.status, self.worst, self.over = status, e, _finite(found)
        size = inf if e.nonfinite else value(e.ratio) if e.kind == "forward" else found
        if e.numberless is None and not isnan(size):
            self.size = size if self.size is None else max(self.size, size)
        self.counts[status] += 1


def cells(errors: Sequence[ErrorRecord], kind: str, suspects: Container[tuple[str, Place]] = ()) -> list[Cell]:
    """Return the cells of one map, ``local`` (with what is state, bit for bit) or ``forward``, as the records come.

    ``suspects``: (kind, place) of failures that something before them accounts for.
    """
    groups: dict[tuple[int | None, str], _Group] = {}
    for e in of_kinds(errors, *KINDS[kind]):
        if (verdict := judge(e, default_limits())) is not None:
            failed = verdict.status in ("fail", "nonfinite")
            status: Status = "input suspect" if failed and (e.kind, Place.of(e)) in suspects else verdict.status
            key = (e.layer, e.point)
            group = groups.get(key) or groups.setdefault(key, _Group(status, e))
            group.add(status, e)
    return [Cell(*key, g.status, g.size, g.worst, g.counts) for key, g in groups.items()]


def program_order(found: Sequence[Cell]) -> list[str]:
    """Return the points of cells in the order of the program: of a model by the table, of others as they come."""
    points = list(dict.fromkeys(c.point for c in found))
    own = any(is_call(c.worst.phase) for c in found)
    return points if own else sorted(points, key=lambda p: ORDER.get(p, len(ORDER)))


def _finite(x: float) -> float:
    """Return a number that orders: what is none comes last but for what is larger than any."""
    return -1.0 if isnan(x) else x


def over_limit(e: ErrorRecord, limits: Limits | None = None) -> float:
    """Return the largest of a record's numbers over its limit; NaN where it has none."""
    if e.kind == "state" or e.mismatched is not None:
        return float("nan") if e.mismatched is None else float("inf") if e.mismatched else 0.0
    found = worst_number(e, limits or default_limits())
    return found[2] / found[3] if found is not None else float("nan")


def worst_number(e: ErrorRecord, limits: Limits) -> Check | None:
    """Return the number of a record that is farthest over its limit, or nearest to it; what is NaN before any other."""
    if e.numberless is not None:
        return None
    found = local_checks(e, limits.local(e.dtype)) if e.kind in ("local", "policy") else forward_checks(e, limits)
    return max(found, key=lambda c: float("inf") if isnan(c[2]) else c[2] / c[3], default=None)


def story(c: Cell, sources: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Return what there is to tell of a cell as (label, text): where, how bad, explained by whom, the worst element.

    ``sources``: the lines of a program that make its points.
    """
    return [(label, text) for label, text in _tooltip(c, sources or {}) if text]


def _tooltip(c: Cell, sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    e = c.worst
    yield "where", Place.of(e).text + _slices(e)
    yield "made by", sources.get(c.point, "")
    yield "verdict", f"{c.status}: {e.numberless or _status_text(e)}"
    if e.numberless is None:
        yield "size", _sizes(e)
        yield "explained", "" if e.kind == "state" else _explanation(e)
        yield "worst element", _element(e)
    yield "records", ", ".join(f"{n} {status}" for status, n in c.counts.items())


def _slices(e: ErrorRecord) -> str:
    """Return the worst token and head."""
    names = (("token", "position"), ("head", "head"))
    found = [(word, (e.scopes or {}).get(scope, {}).get("rel_l2")) for scope, word in names]
    return "".join(f", {word} {at[1]}" for word, at in found if at is not None)


def _sizes(e: ErrorRecord) -> str:
    known = "" if e.rel_l2 is None else f"relative error {short(e.rel_l2)}, largest difference {short(e.max_diff)}"
    return known + (f"; {e.nonfinite} elements are NaN or infinite" if e.nonfinite else "")


def _status_text(e: ErrorRecord) -> str:
    if e.kind == "state":
        return f"{e.mismatched} elements or rows are not as they were written, bit for bit" if e.mismatched else (
            "bit for bit as it was written"
        )  # fmt: skip
    found = worst_number(e, default_limits())
    if found is None:
        return "there is nothing to judge it by"
    metric, scope, size, limit, index = found
    at = "" if index is None else f" {list(index) if isinstance(index, list | tuple) else index}"
    return f"{metric} of {scope}{at} is {size:.3g}, limit {limit:.3g}"


def _explanation(e: ErrorRecord) -> str:
    """Return who explains a local error and how much of it, or a forward error's size beside the policy's."""
    if e.kind == "forward":
        return "" if e.ratio is None else f"{value(e.ratio):.2g} × what rounding by the declared policy makes"
    a = attribute(e)
    if a is None:
        return "unknown"
    if a.name == "exact":
        return "exact: equal to FP64 rounded once"
    left = f"{a.left_u:.2g} u left" if isfinite(a.left_u) else "what is left is not finite"
    if a.name == "none of these":
        return f"by rounding, {left}" if a.passes else f"by no emulation, {left}"
    kept = [place for places in (e.elided or {}).values() for place in places]
    return f"{share_text(a)} by {a.name}, {left}" + (f"; {' and '.join(kept)} unrounded" if kept else "")


def _element(e: ErrorRecord) -> str:
    if e.worst is None:
        return ""
    return f"{list(e.worst.index)}: candidate {_six(e.worst.candidate)}, FP64 {_six(e.worst.reference)}"


def _six(x: Number | Any) -> str:
    return f"{value(x):.6g}"
