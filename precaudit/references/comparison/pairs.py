"""Two runs against each other, tensor by tensor, where their tokens agree."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from precaudit.errors import UserError
from precaudit.numbers.arrays import Array, widen
from precaudit.recording.runs.positions import unpack_positions
from precaudit.recording.runs.recorded import Recorded
from precaudit.schema.graphs.decoder import LOGITS, POINTS
from precaudit.schema.metrics.logits import distribution
from precaudit.schema.metrics.rows import measured
from precaudit.schema.metrics.sizes import canonical, sizes
from precaudit.schema.places import Place
from precaudit.schema.records.errors import ErrorRecord

NAMED = 5  # that a note lists


@dataclass(frozen=True)
class Side:
    """A run of any kind, as far as another is held against it.

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

    @property
    def cases(self) -> tuple[str, ...]:
        """The cases it holds tensors of."""
        return tuple(dict.fromkeys(p.prompt for p in self.places))


def side_of(recorded: Recorded) -> Side:
    """Return a model's run as a side."""
    index = recorded.index
    return Side(
        recorded.run.record.id, recorded.run.folder, index, lambda place: recorded.run.tensor(index[place]),
        lambda place: unpack_positions(index[place]), recorded.fed_tokens,
    )  # fmt: skip


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
        return here.record("pair", a.id, b.id, missing="in the reference run, not in this one")
    if here not in b.places:
        return here.record("pair", a.id, b.id, missing="not in the reference run")
    if (why := a.skipped(here) or b.skipped(here)) is not None:
        return here.record("pair", a.id, b.id, skipped=why)
    rows, others = a.rows(here), b.rows(here)
    keyed = here.point in POINTS and "S" in POINTS[here.point].axes
    if rows is None or others is None:
        known = rows if others is None else others
        return _numbers(a, b, here, a.tensor(here), b.tensor(here), known)
    both = np.intersect1d(rows, others)
    if not len(both):
        return here.record("pair", a.id, b.id, unknown="these rows were not recorded in the reference run")
    both = both if same is None else both[both < same]
    if not len(both) or (keyed and len(both) < len(rows)):
        return here.record("pair", a.id, b.id, unknown="the tokens of the two runs differ before this, or end")
    return _numbers(a, b, here, _rows(a, here, rows, both), _rows(b, here, others, both), both)


def _numbers(a: Side, b: Side, here: Place, x: Array, y: Array, rows: Array | None) -> ErrorRecord:
    x, y = (z[0] if z.ndim == other.ndim + 1 and len(z) == 1 else z for z, other in ((x, y), (y, x)))  # a batch of one
    if x.shape != y.shape:
        return here.record("pair", a.id, b.id, unknown=f"shapes differ: {list(x.shape)} and {list(y.shape)}")
    known = here.point in POINTS and x.ndim == len(POINTS[here.point].axes)
    if known and rows is not None:
        numbers = measured(x, widen(y), here.point, rows)[1]
    else:
        flat = [z.reshape(-1, z.shape[-1] if z.ndim else 1) for z in (x, y)]
        numbers = sizes(flat[0], canonical(flat[1], "TD"), "TD", np.arange(len(flat[0])))
    if here.point == LOGITS and known and rows is not None:
        numbers["distribution"] = distribution(widen(x), widen(y), rows, None)
    return here.record("pair", a.id, b.id, **numbers)


def _rows(side: Side, place: Place, rows: Array, wanted: Array) -> Array:
    values = side.tensor(place)
    axis = POINTS[place.point].axes.find("T") if place.point in POINTS else 0
    if axis < 0 or len(rows) == len(wanted):
        return values
    return np.take(values, np.searchsorted(rows, wanted), axis=axis)


def check_comparable(a: Recorded, b: Recorded, prompts: tuple[str, ...]) -> list[str]:
    """Return what differs between two runs that a reader should know; raises UserError when nothing is comparable."""
    notes = []
    shared = [p for p in prompts if p in b.run.prompts]
    if not shared:
        raise UserError(f"{a.run.folder} and {b.run.folder} have no prompt in common")
    x, y = a.run.record, b.run.record
    if x.model.sha256 != y.model.sha256:
        notes.append(f"the runs are of different weights ({x.model.id} and {y.model.id})")
    differing = {k for k in x.policy if x.policy[k] != y.policy.get(k) and k != "name"}
    if differing:
        notes.append(
            "policies differ in " + ", ".join(f"{k}: {x.policy[k]} / {y.policy.get(k)}" for k in sorted(differing))
        )
    return [*notes, *(note for p in shared if (note := _tokens(side_of(a), side_of(b), p)))]


def _tokens(a: Side, b: Side, case: str) -> str:
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


def sides_errors(a: Side, b: Side, tell: Callable[[int, int, str], None]) -> tuple[list[ErrorRecord], list[str]]:
    """Return the records of run ``a`` against run ``b`` of any kinds, and notes.

    Cases, calls, layers and points that only one has are named in the notes; of the others what one lacks is missing.
    Raises UserError where the runs have no case or no point in common.
    """
    kinds: dict[str, Callable[[Place], str]] = {
        "cases": lambda p: p.prompt, "points": lambda p: p.point, "layers": lambda p: str(p.layer),
        "calls": lambda p: f"{p.phase} {p.step}",
    }  # fmt: skip
    notes: list[str] = []
    wanted = [*a.places, *(p for p in b.places if p not in a.places)]
    for name, kind in kinds.items():
        mine, others = (dict.fromkeys(map(kind, side.places)) for side in (a, b))
        if name in ("cases", "points") and not mine.keys() & others.keys():
            raise UserError(
                f"{a.folder} and {b.folder} have no {name} in common: {_listed(mine)}; and {_listed(others)}"
            )
        wanted = [p for p in wanted if kind(p) in mine and kind(p) in others]
        for side, names, rest in ((a, mine, others), (b, others, mine)):
            lone = ["outside layers" if n == "None" else n for n in names if n not in rest]
            notes += [f"only {side.folder} has the {name} {_listed(lone)}"] if lone else []
    if not wanted:
        raise UserError(f"{a.folder} and {b.folder} have no tensor in common: {'; '.join(notes)}")
    errors = []
    for i, here in enumerate(sorted(wanted, key=lambda p: (p.prompt, p.phase != "prefill", p.phase, p.step, p.order))):
        errors.append(pair_error(a, b, here, agreeing(a, b, here.prompt)))
        if i % 50 == 0:
            tell(i, len(wanted), "tensors of both runs")
    return errors, notes


def token_notes(a: Side, b: Side) -> list[str]:
    """Return how far the tokens of the cases that both have agree, where they do not to the end."""
    return [note for c in a.cases if c in b.cases and (note := _tokens(a, b, c))]


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    first = ", ".join(list(names)[:NAMED])
    return first + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
