"""budgets.toml: limits a team states, each with its reason, for runs, rollouts and probes."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import inf, isfinite
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec

from precaudit.errors import UserError, nearest
from precaudit.judging.metrics import METRICS, metrics_of
from precaudit.judging.verdicts import Status
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.records.base import Number, value
from precaudit.schema.selection import PHASES, parse_layers
from precaudit.schema.toml import of_table, toml_bytes, toml_table

SCOPES = ("tensor", "token", "head", "channel")
BudgetKind = Literal["local", "forward", "state", "formula", "policy", "product"]
TABLES = ("budget", "rollout")  # of runs, of rollouts
NOT_FROZEN: tuple[Status, str] = ("missing", "there is no baseline value to ratchet from: --baseline FILE gives one")


class TableEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every table says: ``why``, and a ``limit`` of ``metric`` or a ``ratchet``, a factor over the baseline's."""

    why: str
    metric: str | None = None
    limit: float | None = None
    ratchet: float | bool | None = None


class RunEntry(TableEntry, frozen=True, kw_only=True):
    """One [[budget]] table.

    ``unexplained``: of excess, instead of the default limit. ``ratchet`` true: 1.5. ``unknown = "allow"``: what cannot
    be judged passes.
    """

    points: str | list[str] = "*"
    phases: list[str] | None = None
    layers: str | None = None
    kind: BudgetKind = "local"
    scope: str = "tensor"
    unexplained: float | None = None
    unknown: Literal["allow"] | None = None


class LimitRange(NamedTuple):
    """What a limit may be, and that in words."""

    least: float
    most: float
    said: str


class Places(NamedTuple):
    """Which kinds, phases, layers and points a budget is of; None: of all."""

    kinds: frozenset[str]
    phases: frozenset[str] | None
    layers: frozenset[int] | None
    points: frozenset[str]


@dataclass(frozen=True)
class Terms:
    """What the entries of one kind may say.

    ``ratchets``: {metric that baselines hold and that can grow: its factor where an entry says true}; ``limits``: what
    a limit may be, and ``special``: that of some metrics; ``rules``: of which an entry gives one.
    """

    metrics: tuple[str, ...]
    ratchets: Mapping[str, float]
    limits: LimitRange
    special: Mapping[str, LimitRange] = field(default_factory=dict)
    rules: tuple[str, ...] = ("limit", "ratchet")


OF_RUNS = Terms(
    METRICS,
    dict.fromkeys(("rel_l2", "mae", "max_diff"), 1.5),
    LimitRange(0, inf, "a finite number, 0 or more"),
    {"cosine": LimitRange(-1, 1, "a cosine is between -1 and 1")},
    ("limit", "unexplained", "ratchet", "unknown"),
)

E = TypeVar("E", bound=TableEntry)
K = TypeVar("K", bound="tuple[frozenset[Any] | None, ...]")


@dataclass(frozen=True)
class Budget(Generic[E, K]):
    """An entry, the line it stands on, and what it is of: a set for each part of a key, None where every one is."""

    entry: E
    line: int
    of: K
    factor: float | None = None  # over the baseline's value; None of a limit

    def matches(self, *key: Any) -> bool:
        """Whether what has this key is under this budget."""
        return all(some is None or part in some for some, part in zip(self.of, key, strict=True))


RunBudget = Budget[RunEntry, Places]
B = TypeVar("B", bound=Budget[Any, Any])


def under(budgets: Sequence[B], *key: Any) -> list[B]:
    """Return the budgets that what has a key is under."""
    return [b for b in budgets if b.matches(*key)]


def ratchet(before: Number | None, factor: float, noise: float) -> float | None:
    """Return how large a value may be: ``factor`` × the baseline's, or what noise alone makes of it.

    None where the baseline has no finite value.
    """
    return None if before is None or not isfinite(value(before)) else max(factor * value(before), noise)


def stated_limit(
    b: Budget[Any, Any], stale: bool, allowed: Callable[[float], float | None]
) -> float | tuple[Status, str]:
    """Return a budget's limit, or the status of what has none and why; ``allowed``: what a ratchet's factor allows."""
    if b.factor is None:
        return float(b.entry.limit)
    if stale:
        return "stale", "the baseline to ratchet from is stale"
    found = allowed(b.factor)
    return NOT_FROZEN if found is None else found


def made_budget(entry: E, line: int, of: K, terms: Terms) -> Budget[E, K]:
    """Return the budget of an entry, with the factor of its ratchet."""
    r = entry.ratchet
    factor = None if r is None or r is False else terms.ratchets[entry.metric or ""] if r is True else float(r)
    return Budget(entry, line, of, factor)


def checked_entry(raw: Mapping[str, Any], kind: type[E], terms: Terms, where: str) -> E:
    """Return a table as an entry; raises UserError, which begins with ``where``, for what no entry can say."""
    e = of_table(raw, kind, where)
    if problem := entry_problem(e, terms):
        raise UserError(f"{where}: {problem}")
    return e


def entry_problem(e: TableEntry, terms: Terms) -> str | None:
    """Return what no entry of a kind can say, in words."""
    if not e.why.strip():
        return "why is empty: say what this budget is for"
    given = [r for r in terms.rules if (x := getattr(e, r)) is not None and x is not False]
    if len(given) != 1:
        return f"give one of {', '.join(terms.rules)}"
    for name in ("points", "phases", "policies"):
        if getattr(e, name, None) == []:
            return f"{name} is empty: leave it out to mean all"
    if given[0] in ("limit", "ratchet") and e.metric is None:
        return f'a limit or ratchet needs a metric, such as metric = "{terms.metrics[0]}"'
    if e.metric is not None and e.metric not in terms.metrics:
        return f"unknown metric {e.metric!r}{nearest(e.metric, terms.metrics)}"
    ranges = {"limit": terms.special.get(e.metric or "", terms.limits), "unexplained": terms.limits}
    for name, (least, most, said) in ranges.items():
        x = getattr(e, name, None)
        if x is not None and not (least <= x <= most and isfinite(x)):
            return f"{name} = {x} is impossible: {said}"
    if given[0] == "ratchet" and e.metric not in terms.ratchets:
        return f"a ratchet on {e.metric}, which is no size that baselines hold: {', '.join(terms.ratchets)} are"
    if not isinstance(e.ratchet, bool | None) and not 1 <= e.ratchet < inf:
        return f"ratchet = {e.ratchet} is impossible: a factor of 1 or more"
    return None


def match_globs(globs: str | list[str], every: Collection[str], what: str, none: str) -> dict[str, frozenset[str]]:
    """Return what each glob names; raises UserError for one that names ``none`` of them; ``what``: the glob's key."""
    found = {}
    for glob in [globs] if isinstance(globs, str) else globs:
        found[glob] = frozenset(name for name in every if fnmatchcase(name, glob))
        if not found[glob]:
            raise UserError(f"{what} {glob!r} names {none}{nearest(glob, every)}")
    return found


@dataclass(frozen=True)
class Known:
    """Points and phases that were recorded, and kinds of records where they are known."""

    points: frozenset[str]
    phases: frozenset[str]
    kinds: frozenset[str] = frozenset()


def read_budgets(path: Path, known: Known | None = None) -> tuple[RunBudget, ...]:
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


def _budget(path: Path, line: int, raw: dict[str, Any], known: Known | None) -> RunBudget:
    where = f"{path}:{line}"
    entry = checked_entry(raw, RunEntry, OF_RUNS, where)
    if problem := _placement_error(entry, PHASES if known is None else tuple(known.phases)):
        raise UserError(f"{where}: {problem}")
    named: set[str] = set()
    every = POINTS if known is None else known.points
    for glob, found in match_globs(entry.points, every, f"{where}: points", "no point").items():
        if known is not None and known.kinds and entry.kind not in known.kinds:
            kinds = ", ".join(sorted(known.kinds))
            raise UserError(f"{where}: kind = {entry.kind!r} matches nothing recorded: {kinds}")
        if not (judged := {p for p in found if (_has(p, entry.kind) if known is None else entry.kind != "state")}):
            raise UserError(f"{where}: points {glob!r} have no {entry.kind} errors")
        named |= judged
    if known is None and entry.layers is not None and not any(POINTS[p].per_layer for p in named):
        raise UserError(f"{where}: points {entry.points!r} are outside layers, and layers = {entry.layers!r}")
    phases = None if entry.phases is None else frozenset(entry.phases)
    return made_budget(entry, line, Places(frozenset((entry.kind,)), phases, None, frozenset(named)), OF_RUNS)


def _has(point: str, kind: str) -> bool:
    """Whether a point has errors of a kind."""
    p = POINTS[point]
    if kind == "product":
        return False
    if kind == "formula":
        return not p.over_keys
    return p.state if kind == "state" else not p.state and (kind == "forward" or bool(p.inputs))


def _placement_error(e: RunEntry, phases: Sequence[str]) -> str | None:
    """Return what is wrong with where an entry of runs holds."""
    for phase in e.phases or ():
        if phase not in phases:
            return f"unknown phase {phase!r}{nearest(phase, phases)}"
    if e.metric is not None and e.metric not in metrics_of(e.kind):
        others = [k for k in get_args(BudgetKind) if e.metric in metrics_of(k)]
        return f"{e.kind} errors have no {e.metric}; kind may be {' or '.join(map(repr, others))}"
    if e.scope not in SCOPES:
        return f"unknown scope {e.scope!r}{nearest(e.scope, SCOPES)}"
    if e.ratchet not in (None, False) and e.scope != "tensor":
        return "a ratchet holds at tensor scope"
    return None


def resolve_budgets(budgets: Iterable[RunBudget], path: Path, layers: int, known: Known) -> tuple[RunBudget, ...]:
    """Return the budgets with layer numbers; raises UserError where one names nothing that was recorded."""
    found = []
    for b in budgets:
        where = f"{path}:{b.line}"
        if not b.of.points & known.points:
            told = ", ".join(sorted(known.points))
            raise UserError(f"{where}: points {b.entry.points!r} match nothing recorded: {told}")
        if b.entry.phases is not None and not known.phases.intersection(b.entry.phases):
            told = ", ".join(sorted(known.phases))
            raise UserError(f"{where}: phases {b.entry.phases!r} match nothing recorded: {told}")
        try:
            chosen = None if b.entry.layers is None else frozenset(parse_layers(b.entry.layers, layers))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        found.append(replace(b, of=b.of._replace(layers=chosen)))
    return tuple(found)
