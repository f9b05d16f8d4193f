"""Two runs against each other, tensor by tensor, where their tokens agree."""

from collections.abc import Iterator

import numpy as np

from precaudit.arrays import Array, widen
from precaudit.comparison.recorded import Recorded
from precaudit.comparison.rows import measured
from precaudit.errors import UserError
from precaudit.graphs.decoder import POINTS
from precaudit.places import Place
from precaudit.records import ErrorRecord
from precaudit.store import unpack_positions


def agreeing(a: Recorded, b: Recorded, prompt: str) -> int:
    """Return how many leading tokens two runs of a prompt share."""
    x, y = a.fed_tokens(prompt), b.fed_tokens(prompt)
    n = 0
    while n < min(len(x), len(y)) and x[n] == y[n]:
        n += 1
    return n


def pair_errors(a: Recorded, b: Recorded, place: Place) -> Iterator[ErrorRecord]:
    """Yield a record for every step of a point of run ``a`` against run ``b``.

    Rows whose preceding tokens differ are unknown, tensors one of the two lacks missing.
    """
    same = agreeing(a, b, place.prompt)
    for step in a.steps(place.phase):
        here = place._replace(step=step)
        names = a.run.record.id, b.run.record.id
        if here not in a.index:
            if here in b.index:
                yield here.record("pair", *names, missing="in the reference run, not in this one")
            continue
        if here not in b.index:
            yield here.record("pair", *names, missing="not in the reference run")
            continue
        rows, others = unpack_positions(a.index[here]), unpack_positions(b.index[here])
        both = np.intersect1d(rows, others)
        if not len(both):
            yield here.record("pair", *names, unknown="these rows were not recorded in the reference run")
            continue
        both = both[both < same]
        if not len(both) or ("S" in POINTS[place.point].axes and len(both) < len(rows)):
            yield here.record("pair", *names, unknown="the tokens of the two runs differ before this")
            continue
        x, y = _rows(a, here, rows, both), _rows(b, here, others, both)
        if x.shape != y.shape:
            yield here.record("pair", *names, unknown=f"shapes differ: {list(x.shape)} and {list(y.shape)}")
            continue
        _, numbers = measured(x, widen(y), place.point, both)
        yield here.record("pair", *names, **numbers)


def _rows(recorded: Recorded, place: Place, rows: Array, wanted: Array) -> Array:
    values = recorded.run.tensor(recorded.index[place])
    axis = POINTS[place.point].axes.find("T")
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
    for prompt in shared:
        same = agreeing(a, b, prompt)
        longest = max(len(a.fed_tokens(prompt)), len(b.fed_tokens(prompt)))
        if same < longest:
            notes.append(
                f"prompt {prompt}: token ids agree up to position {same - 1} and differ from there; to compare all, "
                f"trace with --tokens-from {b.run.folder}"
            )
    return notes
