"""Whose row is it: a recorded row that is another prompt's, position's or head's, where no variant makes it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.mutations.bench import ENOUGH
from precaudit.references.mutations.replay import ROWS
from precaudit.references.textbook.operations import Operation, parts, prepare
from precaudit.schema.metrics.sizes import canonical
from precaudit.schema.places import Place, spans

CLOSES = 16  # unit roundoffs of the format, of a row's norm: what rounding leaves at most
CLOSES_SINGLE = 1024  # the same in float32, whose sums round too
NEARER = 4.0  # times a row must be nearer to another's than to its own


class Whose(NamedTuple):
    """``explained``: the share of the rows' error that the other rows reproduce."""

    cause: str
    says: str
    explained: float


class ExpectedRows(NamedTuple):
    """What an operation recorded and should have made, both [T, H, K], and where: expected in FP64."""

    stored: Array
    expected: Array
    positions: Array


def whose(recorded: Recorded, model: Model, operation: Operation) -> Whose | None:
    """Say whose rows an operation's wrong rows are, to within rounding: a batch mate's, or its own elsewhere."""
    place, own = operation.place, _rows(operation)
    unit = FORMATS[operation.stored.dtype.name].unit_roundoff
    limit = unit * (CLOSES_SINGLE if operation.stored.dtype == np.float32 else CLOSES)
    far = _distance(own.stored, own.expected)
    wrong = np.flatnonzero(far > limit)[-ROWS:]
    if not len(wrong):
        return None
    for mate in recorded.batch_of(place.prompt):
        if mate != place.prompt and (
            found := _of_prompt(own, wrong, limit, mate, _other(recorded, model, place, mate))
        ):
            return found
    return _of_position(own, wrong, limit) or _of_head(own, wrong, limit)


def _rows(o: Operation) -> ExpectedRows:
    return ExpectedRows(canonical(o.stored, o.axes), canonical(o.evaluate([FP64])[0], o.axes), np.asarray(o.positions))


def _other(recorded: Recorded, model: Model, place: Place, prompt: str) -> Iterator[ExpectedRows]:
    """Yield the rows of the same point of another prompt."""
    there = Place(prompt, place.phase, place.step, place.layer, place.point)
    for part in parts(recorded, there):
        if place.step in [step for step, _ in part.steps]:
            operation = prepare(recorded, model, there, part)
            if operation is not None:
                yield _rows(operation)


def _distance(x: Array, y: Array) -> Array:
    """Return ‖x − y‖ / ‖y‖ of every row over its last two axes, infinite where it is not finite."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        d = np.sqrt(((x - y) ** 2).sum(axis=(-2, -1)) / (y**2).sum(axis=(-2, -1)))
    return np.where(np.isfinite(d), d, np.inf)


def _nearest(row: Array, pool: Array, limit: float, own: float, prefer: int | None) -> int | None:
    """Return which row of a pool a row is, ``prefer`` first; None where none closes or its own is as near."""
    d = _distance(row[None], pool)
    most = min(limit, own / NEARER)
    if prefer is not None and 0 <= prefer < len(d) and d[prefer] <= most:
        return prefer
    at = int(np.argmin(d)) if len(d) else -1
    return at if at >= 0 and d[at] <= most else None


def _explained_share(own: ExpectedRows, made: Mapping[int, Array]) -> float:
    """1 − Σ‖c − other‖² / Σ‖c − r‖² over the rows that are another's."""
    left = sum(float(((own.stored[t] - y) ** 2).sum()) for t, y in made.items())
    error = sum(float(((own.stored[t] - own.expected[t]) ** 2).sum()) for t in made)
    return 1.0 - left / error if error else 0.0


def _of_prompt(
    own: ExpectedRows, wrong: Array, limit: float, mate: str, others: Iterator[ExpectedRows]
) -> Whose | None:
    """Name a prompt whose rows they are; rows past its end hold its padding and tell nothing."""
    for other in others:
        if other.expected.shape[1:] != own.expected.shape[1:]:
            continue
        seen = [t for t in wrong if own.positions[t] in other.positions] if len(other.positions) > 1 else list(wrong)
        far = _distance(own.stored, own.expected)
        made: dict[int, Array] = {}
        for t in seen:
            same = np.flatnonzero(other.positions == own.positions[t])
            prefer = int(same[0]) if len(same) else None
            if (j := _nearest(own.stored[t], other.expected, limit, far[t], prefer)) is not None:
                made[int(t)] = other.expected[j]
        if seen and len(made) >= ENOUGH * len(seen) and 2 * len(seen) >= len(wrong):
            at = spans(int(own.positions[t]) for t in made)
            says = f"its rows at positions {at} are those of prompt {mate}, which ran in the same batch"
            return Whose(f"row of prompt {mate}", says, _explained_share(own, made))
    return None


def _of_position(own: ExpectedRows, wrong: Array, limit: float) -> Whose | None:
    far = _distance(own.stored, own.expected)
    came = {int(t): _nearest(own.stored[t], own.expected, limit, far[t], None) for t in wrong}
    found = {t: j for t, j in came.items() if j is not None}
    if len(found) < ENOUGH * len(wrong):
        return None
    pairs = [(int(own.positions[t]), int(own.positions[j])) for t, j in found.items()]
    sources = {j for _, j in pairs}
    cause = f"row of position {pairs[0][1]}" if len(sources) == 1 else "rows of other positions"
    told = ", ".join(f"{t} is that of {j}" for t, j in pairs[:3]) + (" …" if len(pairs) > 3 else "")
    return Whose(cause, f"row {told}", _explained_share(own, {t: own.expected[j] for t, j in found.items()}))


def _of_head(own: ExpectedRows, wrong: Array, limit: float) -> Whose | None:
    if own.stored.shape[1] < 2:
        return None
    far = _distance(own.stored[:, :, None], own.expected[:, :, None])
    holds: dict[int, Counter[int]] = {}
    places = [(int(t), int(h)) for t in wrong for h in np.flatnonzero(far[t] > limit)]
    for t, h in places:  # the first rows of heads that share their keys are equal: what most rows say decides
        d = _distance(own.stored[t, h][None, None], own.expected[t][:, None])
        near = np.flatnonzero(d <= min(limit, far[t, h] / NEARER))
        holds.setdefault(h, Counter()).update(int(g) for g in near)
    named = {h: found.most_common(1)[0] for h, found in holds.items() if found}
    if not places or sum(n for _, n in named.values()) < ENOUGH * len(places):
        return None
    made = {int(t): own.expected[t].copy() for t in wrong}
    for t, h in places:
        made[t][h] = own.expected[t, named[h][0]] if h in named else own.expected[t, h]
    sources = {g for g, _ in named.values()}
    cause = f"row of head {next(iter(sources))}" if len(sources) == 1 else "rows of other heads"
    told = ", ".join(f"head {h} holds head {g}" for h, (g, _) in sorted(named.items()))
    return Whose(cause, f"{told}, at {len(made)} positions", _explained_share(own, made))
