"""budgets.toml: limits a team states, each with its reason."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import msgspec

from precaudit.errors import UserError, nearest
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.limits.checks import narrow_checks
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord
from precaudit.schema.selection import PHASES, parse_layers
from precaudit.schema.toml import of_table, toml_bytes, toml_table

METRICS = (
    "rel_l2", "mae", "max_diff", "cosine", "max_ulp", "bits_lost", "snr", "gain", "mean", "ratio", "excess",
    "componentwise", "kl", "mismatched", "price",
)  # fmt: skip
AT_LEAST = ("cosine", "snr")  # larger is better
SCOPES = ("tensor", "token", "head", "channel")
FROZEN = ("rel_l2", "mae", "max_diff")  # what baselines hold
RATCHET = 1.5
TABLES = ("budget", "rollout")  # of runs, of rollouts


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One [[budget]] table.

    ``limit``: of ``metric``. ``unexplained``: of excess, instead of the default limit. ``ratchet``: factor over the
    baseline's value (true: 1.5). ``unknown = "allow"``: what cannot be judged passes.
    """

    why: str
    points: str | list[str] = "*"
    phases: list[str] | None = None
    layers: str | None = None
    kind: Literal["local", "forward", "state", "formula", "policy", "product"] = "local"
    metric: str | None = None
    scope: str = "tensor"
    limit: float | None = None
    unexplained: float | None = None
    ratchet: float | bool | None = None
    unknown: Literal["allow"] | None = None


@dataclass(frozen=True)
class Budget:
    """An entry, the line it stands on, and the points its globs name."""

    entry: Entry
    line: int
    points: frozenset[str]
    layers: frozenset[int] | None = None

    def matches(self, kind: str, phase: str, layer: int | None, point: str) -> bool:
        """Whether a record at this place is under this budget."""
        e = self.entry
        return (
            kind == e.kind
            and point in self.points
            and (e.phases is None or phase in e.phases)
            and (self.layers is None or layer in self.layers)
        )

    @property
    def factor(self) -> float | None:
        """The ratchet's factor."""
        r = self.entry.ratchet
        return None if r is None or r is False else RATCHET if r is True else float(r)


@dataclass(frozen=True)
class Known:
    """Points and phases that were recorded, and kinds of records where they are known."""

    points: frozenset[str]
    phases: frozenset[str]
    kinds: frozenset[str] = frozenset()


def read_budgets(path: Path, known: Known | None = None) -> tuple[Budget, ...]:
    """Read budgets.toml; raises UserError that names the line. ``known``: what a program's run has, of one."""
    return tuple(_budget(path, line, raw, known) for line, raw in entries(path, "budget"))


def entries(path: Path, name: str) -> list[tuple[int, dict[str, Any]]]:
    """Return (line, table) of every entry of a name in a budgets.toml; raises UserError that names the line.

    Budgets of runs and of rollouts may stand in one file; one with neither has no entries.
    """
    data = toml_bytes(path, f"no budgets at {path}")
    table, text = toml_table(data, str(path)), data.decode()
    for key in table:
        if key not in TABLES:
            raise UserError(f"{path}:{_line_of(text, key)}: unknown key {key!r}; entries are [[budget]]")
    if table and name not in table:
        other = next(iter(table))
        raise UserError(f"{path}:{_line_of(text, other)}: [[{other}]] budgets alone; [[{name}]] are wanted here")
    found = table.get(name, [])
    if not isinstance(found, list) or not all(isinstance(e, dict) for e in found):
        raise UserError(f"{path}:{_line_of(text, name)}: write every entry as [[{name}]]")
    heads = _lines_of(text, name)
    lines = heads if len(heads) == len(found) else [1] * len(found)
    return list(zip(lines, found, strict=True))


def _line_of(text: str, key: str) -> int:
    return next(iter(_lines_of(text, key)), 1)


def _lines_of(text: str, key: str) -> list[int]:
    """Return the lines on which a key or a table of that name begins."""
    begins = re.compile(rf"""\s*(\[\[?\s*)?["']?{re.escape(key)}["']?\s*[].=]""")
    return [i for i, line in enumerate(text.splitlines(), 1) if begins.match(line)]


def _budget(path: Path, line: int, raw: dict[str, Any], known: Known | None) -> Budget:
    where = f"{path}:{line}"
    entry = of_table(raw, Entry, where)
    if problem := _problem(entry, PHASES if known is None else tuple(known.phases)):
        raise UserError(f"{where}: {problem}")
    globs = [entry.points] if isinstance(entry.points, str) else entry.points
    named: set[str] = set()
    every = POINTS if known is None else known.points
    for glob in globs:
        found = {p for p in every if fnmatchcase(p, glob)}
        if not found:
            raise UserError(f"{where}: points {glob!r} names no point{nearest(glob, every)}")
        if known is not None and known.kinds and entry.kind not in known.kinds:
            kinds = ", ".join(sorted(known.kinds))
            raise UserError(f"{where}: kind = {entry.kind!r} matches nothing recorded: {kinds}")
        if not (judged := {p for p in found if (_has(p, entry.kind) if known is None else entry.kind != "state")}):
            raise UserError(f"{where}: points {glob!r} have no {entry.kind} errors")
        named |= judged
    if known is not None:
        return Budget(entry, line, frozenset(named))
    if entry.layers is not None and not any(POINTS[p].per_layer for p in named):
        raise UserError(f"{where}: points {entry.points!r} are outside layers, and layers = {entry.layers!r}")
    return Budget(entry, line, frozenset(named))


def _has(point: str, kind: str) -> bool:
    """Whether a point has errors of a kind."""
    p = POINTS[point]
    if kind == "product":
        return False
    if kind == "formula":
        return not p.keyed
    return p.state if kind == "state" else not p.state and (kind == "forward" or bool(p.inputs))


def _problem(e: Entry, phases: Sequence[str]) -> str | None:
    """Return what is wrong with an entry."""
    if not e.why.strip():
        return "why is empty: say what this budget is for"
    rules = [e.limit is not None, e.unexplained is not None, _ratchets(e), e.unknown is not None]
    if sum(rules) != 1:
        return "give one of limit, unexplained, ratchet, unknown"
    if e.points == []:
        return "points is empty: leave it out to mean all"
    if e.phases == []:
        return "phases is empty: leave it out to mean all"
    for phase in e.phases or ():
        if phase not in phases:
            return f"unknown phase {phase!r}{nearest(phase, phases)}"
    if e.scope not in SCOPES:
        return f"unknown scope {e.scope!r}{nearest(e.scope, SCOPES)}"
    if (e.limit is not None or _ratchets(e)) and e.metric is None:
        return 'a limit or ratchet needs a metric, such as metric = "rel_l2"'
    if e.metric is not None and e.metric not in METRICS:
        return f"unknown metric {e.metric!r}{nearest(e.metric, METRICS)}"
    for name in ("limit", "unexplained"):
        found = getattr(e, name)
        if found is not None and not 0 <= found < float("inf") and e.metric != "cosine":
            return f"{name} = {found} is impossible: a finite number, 0 or more"
    if e.metric == "cosine" and e.limit is not None and not -1 <= e.limit <= 1:
        return f"limit = {e.limit} is impossible: a cosine is between -1 and 1"
    if _ratchets(e) and e.metric not in FROZEN:
        return f"a ratchet on {e.metric}: baselines hold {', '.join(FROZEN)}"
    if not isinstance(e.ratchet, bool | None) and not 1 <= e.ratchet < float("inf"):
        return f"ratchet = {e.ratchet} is impossible: a factor of 1 or more"
    if _ratchets(e) and e.scope != "tensor":
        return "a ratchet holds at tensor scope"
    return None


def _ratchets(e: Entry) -> bool:
    return e.ratchet is not None and e.ratchet is not False


def resolve(budgets: Iterable[Budget], path: Path, layers: int, known: Known) -> tuple[Budget, ...]:
    """Return the budgets with layer numbers; raises UserError where one names nothing that was recorded."""
    found = []
    for b in budgets:
        where = f"{path}:{b.line}"
        if not b.points & known.points:
            told = ", ".join(sorted(known.points))
            raise UserError(f"{where}: points {b.entry.points!r} match nothing recorded: {told}")
        if b.entry.phases is not None and not known.phases.intersection(b.entry.phases):
            told = ", ".join(sorted(known.phases))
            raise UserError(f"{where}: phases {b.entry.phases!r} match nothing recorded: {told}")
        try:
            chosen = None if b.entry.layers is None else frozenset(parse_layers(b.entry.layers, layers))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        found.append(replace(b, layers=chosen))
    return tuple(found)


def metric_of(e: ErrorRecord, metric: str, scope: str) -> tuple[float, Any] | None:
    """Return (value, index) of a metric at a scope of a record; None where the record has none."""
    if scope != "tensor":
        found = (e.scopes or {}).get(scope, {}).get(metric)
        return None if found is None else (value(found[0]), found[1])
    if metric == "kl":
        return None if e.distribution is None else (max(map(value, e.distribution.kl), default=0.0), None)
    if metric in ("excess", "componentwise"):
        part = getattr(e.unexplained, metric, None)
        return None if part is None else (value(part[0]), part[1]) if metric == "componentwise" else (value(part), None)
    if metric == "price":
        return next(((found, index) for _, _, found, _, index in narrow_checks(e)), None)
    number = getattr(e, metric)
    size = None if number is None else value(number)
    return None if size is None else (abs(size) if metric in ("gain", "mean") else size, None)


def within(metric: str, found: float, limit: float) -> bool:
    """Whether a value keeps a limit; NaN keeps none."""
    return found >= limit if metric in AT_LEAST else found <= limit


def select(budgets: Sequence[Budget], e: ErrorRecord) -> list[Budget]:
    """Return the budgets a record is under."""
    return [b for b in budgets if b.matches(e.kind, e.phase, e.layer, e.point)]
