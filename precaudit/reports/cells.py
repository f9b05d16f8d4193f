"""The cells of heat maps: of every layer and point the worst record, how bad it is, and its story in words."""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf, isfinite, isnan

from precaudit.judging.rules import judge
from precaudit.judging.verdicts import STATUSES, Status, Verdict
from precaudit.reports.headline import how_bad
from precaudit.schema.digits import apart, count_text, digits, roundoffs
from precaudit.schema.filed import of_kinds, without_collector
from precaudit.schema.limits import Limits, default_limits
from precaudit.schema.limits.checks import SAME, Check, farthest_formula, forward_checks, local_checks, sum_checks
from precaudit.schema.places import LAST, ORDER, Place
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import (
    EmulatedError,
    ErrorRecord,
    FormulaError,
    ForwardError,
    LocalError,
    PairError,
    PolicyError,
    ProductError,
    StateError,
    SumError,
)
from precaudit.schema.records.runs import is_call

KINDS: dict[str, tuple[type[ErrorRecord], ...]] = {  # what a map shows: kinds of records
    "local": (LocalError, PolicyError, StateError, SumError, ProductError),
    "forward": (ForwardError,),
    "formula": (FormulaError,),
}
MAP_OF: dict[str, str] = {kind.kind: name for name, kinds in KINDS.items() for kind in kinds}
MARKS = {"pass": "✓", "fail": "✗", "nonfinite": "✗", "input suspect": "~", "not run": "–"}  # of others: ?


@dataclass(frozen=True)
class Cell:
    """The worst record of a layer (None: outside layers) and point, and the statuses of all.

    ``size``: of a local error the worst number over its limit, so of a formula, of a forward error the largest ratio;
    None where there is none. ``says``: what the gate says of it beyond what the record does, such as that it is not
    there, or that two views of a position part.
    """

    layer: int | None
    point: str
    status: Status
    size: float | None
    worst: ErrorRecord
    counts: Mapping[str, int]
    says: str = ""

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
        size = inf if e.nonfinite else value(e.ratio) if isinstance(e, ForwardError) else found
        if e.numberless is None and not isnan(size):
            self.size = size if self.size is None else max(self.size, size)
        self.counts[status] += 1


class CellGroups:
    """The records of every map as they stream by, by layer and point.

    ``suspects``: (kind, place) of failures that something before them accounts for.
    """

    names = tuple(KINDS)

    def __init__(self, suspects: Container[tuple[str, Place]] = ()) -> None:
        self._suspects = suspects
        self._groups: dict[str, dict[tuple[int | None, str], _Group]] = {name: {} for name in KINDS}

    def add(self, e: ErrorRecord) -> None:
        """Judge a record by the default rule and put it where it belongs."""
        name = MAP_OF.get(e.kind)
        if name is None or (verdict := judge(e, default_limits())) is None:
            return
        failed = verdict.status in ("fail", "nonfinite")
        suspect = failed and (e.kind, Place.of(e)) in self._suspects
        status: Status = "input suspect" if suspect else verdict.status
        if isinstance(e, ProductError) and status == "pass":
            return  # it has no limit of its own
        groups, key = self._groups[name], (e.layer, e.point)
        group = groups.get(key) or groups.setdefault(key, _Group(status, e))
        group.add(status, e)

    def cells(self, name: str) -> list[Cell]:
        """Return the cells of a map so far, as their records came."""
        return [Cell(*key, g.status, g.size, g.worst, Counter(g.counts)) for key, g in self._groups[name].items()]


def cells(errors: Sequence[ErrorRecord], kind: str, suspects: Container[tuple[str, Place]] = ()) -> list[Cell]:
    """Return the cells of one map, ``local``, ``forward`` or ``formula``, as the records come.

    ``suspects``: (kind, place) of failures that something before them accounts for.
    """
    groups = CellGroups(suspects)
    for e in of_kinds(errors, *KINDS[kind]):
        groups.add(e)
    return groups.cells(kind)


def map_cells(
    errors: Sequence[ErrorRecord],
    suspects: Container[tuple[str, Place]] = (),
    verdicts: Iterable[Verdict] | None = None,
    keeps: Callable[[ErrorRecord], bool] = lambda _: True,
    told: Callable[[CellGroups], object] = lambda _: None,
    every: int = 1 << 10,
) -> dict[str, list[Cell]]:
    """Return the cells of all maps, in one pass over the records, every verdict of the gate in one of them.

    ``verdicts``: of the gate, all that are no pass; without, those of the records by the default rule. ``keeps``:
    whether a record is looked at; ``told`` is called with what there is after so many records (``every``).
    """
    groups = CellGroups(suspects)
    with without_collector():
        for n, e in enumerate(of_kinds(errors, *chain(*KINDS.values())), 1):
            if keeps(e):
                groups.add(e)
            if n % every == 0:
                told(groups)
    maps = {name: groups.cells(name) for name in KINDS}
    return maps if verdicts is None else with_verdicts(maps, verdicts)


def with_verdicts(maps: Mapping[str, Sequence[Cell]], verdicts: Iterable[Verdict]) -> dict[str, list[Cell]]:
    """Return maps that show every verdict: also those that are on no record, or on many together.

    A tensor that is missing, medians that are too far from FP64, and two views of a position that part. ``verdicts``:
    all that are no pass; each cell counts its own, and the records that pass.
    """
    heaviest: dict[tuple[str, int | None, str], Verdict] = {}
    counts: dict[tuple[str, int | None, str], Counter[str]] = {}
    for v in verdicts:
        name = "forward" if "/" in v.kind else MAP_OF.get(v.kind)
        if v.point and name is not None:
            key = (name, v.layer, v.point)
            counts.setdefault(key, Counter())[v.status] += 1
            if key not in heaviest or _rank(v) < _rank(heaviest[key]):
                heaviest[key] = v
    found = {name: [_counted(c, counts.get((name, c.layer, c.point))) for c in its] for name, its in maps.items()}
    at = {(name, c.layer, c.point): i for name, its in found.items() for i, c in enumerate(its)}
    for (name, layer, point), v in heaviest.items():
        i = at.get((name, layer, point))
        if i is None:
            worst = v.place.record(KINDS[name][0], "run", "fp64", unknown=v.text or v.status)
            found[name].append(Cell(layer, point, v.status, None, worst, counts[name, layer, point], _said(v)))
        elif _rank(v) < _rank(found[name][i]):
            found[name][i] = replace(found[name][i], status=v.status, says=_said(v))
    return found


def _counted(c: Cell, others: Mapping[str, int] | None) -> Cell:
    """Return a cell that counts the records that pass, and the verdicts on it that are none (``others``)."""
    passed = {"pass": c.counts["pass"]} if c.counts.get("pass") else {}
    return replace(c, counts=Counter({**passed, **(others or {})}))


def _said(v: Verdict) -> str:
    return how_bad(v) if v.status in ("fail", "nonfinite", "input suspect") else v.text or v.status


def _rank(x: Verdict | Cell) -> int:
    return STATUSES.index(x.status)


def weight(c: Cell) -> tuple[int, float]:
    """Return how much a cell deserves to be looked at first: what fails, and then what is largest."""
    return -_rank(c), -1.0 if c.size is None else c.size


def first_cell(shown: Sequence[Cell]) -> int:
    """Return which cell to look at first: the first in the program that fails, as the headline says, else the worst."""
    failing = [c for c in shown if c.status in ("fail", "nonfinite")]
    return shown.index(min(failing, key=_depth) if failing else max(shown, key=weight))


def _depth(c: Cell) -> int:
    return LAST if c.layer is None else c.layer


def first_map(maps: Mapping[str, Collection[Cell]]) -> str | None:
    """Return the map that holds the cell to look at first; None where no map has a cell."""
    worst = {name: max(map(_severity, its)) for name, its in maps.items() if its}
    return max(worst, key=lambda name: worst[name], default=None)  # of equal ones the first


def _severity(c: Cell) -> int:
    return -_rank(c)


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
    if isinstance(e, StateError) or (isinstance(e, PolicyError) and e.mismatched is not None):
        return float("nan") if e.mismatched is None else float("inf") if e.mismatched else 0.0
    found = worst_number(e, limits or default_limits())
    return found[2] / found[3] if found is not None else float("nan")


def worst_number(e: ErrorRecord, limits: Limits) -> Check | None:
    """Return the number of a record that is farthest over its limit, or nearest to it; what is NaN before any other."""
    if e.numberless is not None:
        return None
    return max(_checks(e, limits), key=lambda c: float("inf") if isnan(c[2]) else c[2] / c[3], default=None)


def _checks(e: ErrorRecord, limits: Limits) -> Iterable[Check]:
    """Return every number of a record beside its limit."""
    match e:
        case FormulaError():
            size, scope, index = farthest_formula(e)
            return [("rel_l2", scope, size, SAME, index)] if e.rel_l2 is not None else []
        case SumError():
            return sum_checks(e, limits)
        case EmulatedError():
            return local_checks(e, limits.local(e.dtype))
        case ForwardError():
            return forward_checks(e, limits)
    return []


def story(c: Cell, sources: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Return what there is to tell of a cell as (label, text): where, how bad, explained by whom, the worst element.

    ``sources``: the lines of a program that make its points.
    """
    return [(label, text) for label, text in _tooltip(c, sources or {}) if text]


def _tooltip(c: Cell, sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    e = c.worst
    yield "where", Place.of(e).text + _slices(e)
    yield "line", sources.get(c.point, "")
    yield "verdict", f"{c.status}: {c.says or e.numberless or _status_text(e)}"
    if e.numberless is None:
        yield "size", _sizes(e)
        yield "explained", _explanation(e)
        yield "worst element", _element(e)
    yield "records", ", ".join(f"{n} {status}" for status, n in c.counts.items())


def _slices(e: ErrorRecord) -> str:
    """Return the worst token and head."""
    names = (("token", "position"), ("head", "head"))
    found = [(word, (e.scopes or {}).get(scope, {}).get("rel_l2")) for scope, word in names]
    return "".join(f", {word} {at[1]}" for word, at in found if at is not None)


def _sizes(e: ErrorRecord) -> str:
    known = "" if e.rel_l2 is None else f"relative error {digits(e.rel_l2)}"
    known += "" if e.max_diff is None else f", largest difference {digits(e.max_diff)}"
    return known + (f"; {count_text(e.nonfinite, 'element')} NaN or infinite" if e.nonfinite else "")


def _status_text(e: ErrorRecord) -> str:
    if isinstance(e, StateError):
        return (
            f"{e.mismatched} elements or rows are not as they were written, bit for bit"
            if e.mismatched
            else ("bit for bit as it was written")
        )
    found = worst_number(e, default_limits())
    if found is None:
        return "there is nothing to judge it by"
    metric, scope, size, limit, index = found
    at = "" if index is None else f" {list(index) if isinstance(index, list | tuple) else index}"
    return f"{metric} of {scope}{at} is {digits(size)}, limit {digits(limit)}"


def _explanation(e: ErrorRecord) -> str:
    """Return who explains a local error and how much of it, or a forward error's size beside the policy's."""
    if isinstance(e, StateError | SumError | ProductError | PairError):
        return ""
    if isinstance(e, FormulaError):
        return "not by rounding: FP64 of the program against FP64 of its reference"
    if isinstance(e, ForwardError):
        return "" if e.ratio is None else f"{digits(e.ratio)} × the error of the declared policy's rounding"
    from precaudit.references.attribution import attribute  # NumPy, which a screen of cells needs not
    from precaudit.reports.summary import share_text

    a = attribute(e)
    if a is None:
        return "unknown"
    if a.name == "exact":
        return "exact: equal to FP64 rounded once"
    rest = f"{roundoffs(a.left_u)} u unexplained" if isfinite(a.left_u) else "the unexplained part is not finite"
    if a.name == "none of these":
        return f"by rounding, {rest}" if a.passes else f"by no emulation, {rest}"
    elided = e.elided if isinstance(e, EmulatedError) else None
    kept = [place for places in (elided or {}).values() for place in places]
    return f"{share_text(a)} by {a.name}, {rest}" + (f"; {' and '.join(kept)} unrounded" if kept else "")


def _element(e: ErrorRecord) -> str:
    if e.worst is None:
        return ""
    other = "the other run" if isinstance(e, PairError) else "FP64"
    mine, its = value(e.worst.candidate), value(e.worst.reference)
    return f"{list(e.worst.index)}: candidate {apart(mine, its)}, {other} {digits(its)}"
