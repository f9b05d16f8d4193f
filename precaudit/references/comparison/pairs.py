"""Two runs against each other, tensor by tensor, where their tokens agree."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from precaudit.errors import UserError
from precaudit.numbers.arrays import Array, widen
from precaudit.numbers.executors import Executor
from precaudit.recording.runs.positions import unpack_positions
from precaudit.recording.runs.recorded import Recorded
from precaudit.schema.graphs.decoder import LOGITS, POINTS
from precaudit.schema.metrics.logits import distribution
from precaudit.schema.metrics.rows import measure_rows
from precaudit.schema.metrics.sizes import canonical, sizes
from precaudit.schema.places import Place
from precaudit.schema.records.errors import ErrorRecord, PairError
from precaudit.schema.records.manifests import Reported
from precaudit.schema.records.runs import RunRecord

NAMED = 5  # that a note lists
PIECES = 3  # for each slot: where one is slow, or dies, others have not long to wait
ALIKE = {
    "cases": "Name them alike: id in trace --prompts FILE, case in a dump's map, or cases of a Program",
    "points": "Name them alike: import --map FILE for a dump, points of a Program",
}
T = TypeVar("T")
Common = Mapping[str, frozenset[str]]  # by kind: the cases, points, layers and calls that both runs have
KINDS: dict[str, Callable[[Place], str]] = {
    "cases": lambda p: p.prompt,
    "points": lambda p: p.point,
    "layers": lambda p: str(p.layer),
    "calls": lambda p: f"{p.phase} {p.step}",
}


@dataclass(frozen=True)
class Side:
    """A run of any kind, or a case of it, as far as another is held against it.

    ``places``: what it holds, in its order. ``rows``: the positions of a tensor's rows, None where they are not known.
    ``tokens``: a case's token ids as they were fed, None where they are not known. ``skipped``: why a tensor holds
    nothing, where the program did not run it.
    """

    id: str
    folder: Path
    places: Mapping[Place, Any]
    tensor: Callable[[Place], Array]
    rows: Callable[[Place], Array | None]
    tokens: Callable[[str], Sequence[int] | None]
    skipped: Callable[[Place], str | None] = lambda _place: None


@dataclass(frozen=True)
class CaseSides:
    """A run of any kind, a case at a time: those it holds tensors of, and what gives one.

    ``calls``: which calls of a function these are, where that is what was run. Of a dump ``lacks``: what it has no
    tensors of, and ``reported``: numbers that it reports.
    """

    folder: Path
    cases: tuple[str, ...]
    of: Callable[[str], Side]
    calls: "Calls | None" = None
    lacks: tuple[str, ...] = ()
    reported: tuple[Reported, ...] = ()


class Calls(NamedTuple):
    """The calls of a function that a run holds: the number of the first one of each phase, and what gives inputs.

    ``first``: its number and how many there are, of the first phase; ``inputs``: leaves of a case and a call by number.
    """

    began: Mapping[str, int]
    first: range
    inputs: Callable[[str, int], Mapping[str, Array]]


class PairPiece(NamedTuple):
    """A part of a case of two runs: which of how many of about equal length."""

    case: str
    part: int
    parts: int

    @property
    def text(self) -> str:
        """What it is of, in words."""
        return f"part {self.part + 1} of {self.parts} of {self.case}"

    def of(self, every: Sequence[T]) -> Sequence[T]:
        """Return its part of all."""
        n = len(every)
        return every[n * self.part // self.parts : n * (self.part + 1) // self.parts]


def divide_cases(cases: Sequence[str], by: Executor) -> list[PairPiece]:
    """Return the pieces of cases, in their order: parts of each where cases alone are too few."""
    n = 1 if by.here else max(1, -(-PIECES * by.slots // max(1, len(cases))))
    return [PairPiece(case, part, n) for case in cases for part in range(n)]


def side_of(recorded: Recorded) -> Side:
    """Return a model's run as a side."""
    index = recorded.index
    return Side(
        recorded.run.record.id,
        recorded.run.folder,
        index,
        lambda place: recorded.run.tensor(index[place]),
        lambda place: unpack_positions(index[place]),
        recorded.fed_tokens,
    )


def agreeing(a: Side, b: Side, case: str) -> int | None:
    """Return how many leading tokens two runs of a case share; None where one does not say."""
    x, y = a.tokens(case), b.tokens(case)
    if x is None or y is None:
        return None
    n = 0
    while n < min(len(x), len(y)) and x[n] == y[n]:
        n += 1
    return n


def pair_errors(a: Recorded, b: Recorded, place: Place) -> Iterator[ErrorRecord]:
    """Yield a record for every step of a point of a model's run ``a`` against ``b``."""
    mine, other = side_of(a), side_of(b)
    same = agreeing(mine, other, place.prompt)
    for step in a.steps(place.phase):
        here = place._replace(step=step)
        if here in mine.places or here in other.places:
            yield pair_error(mine, other, here, same)


def pair_error(a: Side, b: Side, here: Place, same: int | None) -> ErrorRecord:
    """Return the record of a place of ``a`` against ``b``, whose tokens agree up to ``same``.

    Rows whose preceding tokens differ are unknown, tensors one of the two lacks missing. Where the positions of one are
    not known, whole tensors of one shape are held against each other.
    """
    if here not in a.places:
        return here.record(PairError, a.id, b.id, missing="in the reference run, not in this one")
    if here not in b.places:
        return here.record(PairError, a.id, b.id, missing="not in the reference run")
    if (why := a.skipped(here) or b.skipped(here)) is not None:
        return here.record(PairError, a.id, b.id, skipped=why)
    rows, others = a.rows(here), b.rows(here)
    keyed = here.point in POINTS and "S" in POINTS[here.point].axes
    if rows is None or others is None:
        known = rows if others is None else others
        return _numbers(a, b, here, a.tensor(here), b.tensor(here), known)
    both = np.intersect1d(rows, others)
    if not len(both):
        return here.record(PairError, a.id, b.id, unknown="these rows were not recorded in the reference run")
    both = both if same is None else both[both < same]
    if not len(both) or (keyed and len(both) < len(rows)):
        return here.record(PairError, a.id, b.id, unknown="the tokens of the two runs differ before this, or end")
    return _numbers(a, b, here, _rows(a, here, rows, both), _rows(b, here, others, both), both)


def _numbers(a: Side, b: Side, here: Place, x: Array, y: Array, rows: Array | None) -> ErrorRecord:
    x, y = (z[0] if z.ndim == other.ndim + 1 and len(z) == 1 else z for z, other in ((x, y), (y, x)))  # a batch of one
    if x.shape != y.shape:
        return here.record(PairError, a.id, b.id, unknown=f"shapes differ: {list(x.shape)} and {list(y.shape)}")
    known = here.point in POINTS and x.ndim == len(POINTS[here.point].axes)
    if known and rows is not None:
        numbers = measure_rows(x, widen(y), here.point, rows)[1]
    else:
        flat = [z.reshape(-1, z.shape[-1] if z.ndim else 1) for z in (x, y)]
        numbers = sizes(flat[0], canonical(flat[1], "TD"), "TD", np.arange(len(flat[0])))
    if here.point == LOGITS and known and rows is not None:
        numbers["distribution"] = distribution(widen(x), widen(y), rows, None)
    return here.record(PairError, a.id, b.id, **numbers)


def _rows(side: Side, place: Place, rows: Array, wanted: Array) -> Array:
    values = side.tensor(place)
    axis = POINTS[place.point].axes.find("T") if place.point in POINTS else 0
    if axis < 0 or len(rows) == len(wanted):
        return values
    return np.take(values, np.searchsorted(rows, wanted), axis=axis)


def differences(x: RunRecord, y: RunRecord) -> list[str]:
    """Return what differs between two runs that a reader should know."""
    notes = []
    if x.model.sha256 != y.model.sha256:
        notes.append(f"the runs are of different weights ({x.model.id} and {y.model.id})")
    differing = {k for k in x.policy if x.policy[k] != y.policy.get(k) and k != "name"}
    if differing:
        notes.append(
            "policies differ in " + ", ".join(f"{k}: {x.policy[k]} / {y.policy.get(k)}" for k in sorted(differing))
        )
    return notes


def tokens_note(a: Side, b: Side, case: str) -> str:
    """Return how far the tokens of a case agree, where they do not to the end."""
    same = agreeing(a, b, case)
    if same is None:
        lacking = a if a.tokens(case) is None else b
        return (
            f"{case}: {lacking.folder} does not say which tokens it was fed; that both were fed the same is not known"
        )
    if same == min(len(side.tokens(case) or ()) for side in (a, b)):
        return ""
    return (
        f"prompt {case}: token ids agree up to position {same - 1} and differ from there; to compare all, "
        f"trace with --tokens-from {b.folder}"
    )


def common_kinds(a: CaseSides, b: CaseSides) -> tuple[Common, list[str]]:
    """Return what two runs of any kinds have in common, and notes.

    Cases, calls, layers and points that only one has are named in the notes. Raises UserError where the runs have no
    case or no point in common.
    """
    notes: list[str] = []
    held = [_kinds(side) for side in (a, b)]
    for name in KINDS:
        mine, others = (kinds[name] for kinds in held)
        if name in ("cases", "points") and not mine.keys() & others.keys():
            raise UserError(f"{no_common_text((a.folder, [*mine]), (b.folder, [*others]), name)}. {ALIKE[name]}")
        for side, names, rest in ((a, mine, others), (b, others, mine)):
            lone = ["outside layers" if n == "None" else n for n in names if n not in rest]
            notes += [f"only {side.folder} has the {name} {_names_text(lone)}"] if lone else []
    both = {name: frozenset(held[0][name].keys() & held[1][name].keys()) for name in KINDS}
    if not all(both.values()):
        raise UserError(f"{a.folder} and {b.folder} have no tensor in common: {'; '.join(notes)}")
    return both, notes


def no_common_text(a: tuple[Path, Sequence[str]], b: tuple[Path, Sequence[str]], what: str) -> str:
    """Return that two runs share none of what they have; each is its folder and its names, ``what`` their plural."""
    each = "; ".join(f"{folder} has {_names_text(names)}" for folder, names in (a, b))
    return f"{a[0]} and {b[0]} have no {what.removesuffix('s')} in common: {each}"


def case_errors(a: CaseSides, b: CaseSides, both: Common, piece: PairPiece) -> list[ErrorRecord]:
    """Return the records of a part of a case of run ``a`` against run ``b``; what one of them lacks is missing."""
    mine, other = a.of(piece.case), b.of(piece.case)
    same, every = agreeing(mine, other, piece.case), dict.fromkeys((*mine.places, *other.places))
    wanted = (p for p in every if all(kind(p) in both[name] for name, kind in KINDS.items()))
    ordered = sorted(wanted, key=lambda p: (p.phase != "prefill", p.phase, p.step, p.order))
    return [pair_error(mine, other, here, same) for here in piece.of(ordered)]


def _kinds(side: CaseSides) -> dict[str, dict[str, None]]:
    """Return the cases, points, layers and calls that a run has, in its order."""
    found: dict[str, dict[str, None]] = {name: {} for name in KINDS}
    for case in side.cases:
        for p in side.of(case).places:
            for name, kind in KINDS.items():
                found[name][kind(p)] = None
    return found


def token_notes(a: CaseSides, b: CaseSides) -> list[str]:
    """Return how far the tokens of the cases that both have agree, where they do not to the end."""
    return [note for c in a.cases if c in b.cases and (note := tokens_note(a.of(c), b.of(c), c))]


def _names_text(names: Sequence[str] | Mapping[str, Any]) -> str:
    first = ", ".join(list(names)[:NAMED])
    return first + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
