"""State: what decode read from its cache against the rows earlier calls recorded, bit for bit."""

from collections.abc import Iterator

import numpy as np

from precaudit.arrays import Array, widen
from precaudit.coverage import HASH_FORMAT
from precaudit.graphs.decoder import POINTS
from precaudit.metrics.rows import measured
from precaudit.places import Place
from precaudit.records import ErrorRecord
from precaudit.row_hashes import row_hashes
from precaudit.runs.recorded import Recorded


def state_errors(recorded: Recorded, place: Place) -> Iterator[ErrorRecord]:
    """Yield one record for each recorded cache; ``mismatched`` counts the elements, or hashed rows, that differ."""
    for step in recorded.steps("decode"):
        found = recorded.tensor(place.prompt, "decode", step, place.layer, place.point)
        if found is not None:
            yield _whole(recorded, place._replace(step=step), found)
    keys = {s: (place.prompt, "decode", s, place.layer, place.point) for s in recorded.steps("decode")}
    if hashed := [s for s, key in keys.items() if key in recorded.hashed]:
        yield from _by_hashes(recorded, place, hashed)


def _whole(recorded: Recorded, here: Place, found: Array) -> ErrorRecord:
    """Compare a cache [S, G, K] with the rows that were written, element by element."""
    assert here.layer is not None
    run, rows = recorded.run.record.id, POINTS[here.point].inputs[0]
    expected = recorded.expected_cache(here.prompt, here.layer, here.point, here.step)
    if expected is None or expected.shape != found.shape:
        return here.record("state", run, rows, unknown=f"the {rows} rows were not recorded")
    different = bits(found) != bits(expected)
    _, numbers = measured(found, widen(expected), here.point, np.arange(len(found)))
    at = spans(np.flatnonzero(different.any(axis=(1, 2))))
    return here.record("state", run, rows, **numbers, mismatched=int(different.sum()), rows=at or None)


def _by_hashes(recorded: Recorded, place: Place, steps: list[int]) -> Iterator[ErrorRecord]:
    """Compare the hashes of a cache's rows with those of the rows that were written; ``n`` counts rows.

    Rows of equal hashes are equal: NaN in a row that was written is NaN in what was read.
    """
    assert place.layer is not None
    run, rows = recorded.run.record.id, POINTS[place.point].inputs[0]
    written = recorded.written(place.prompt, place.layer, place.point)
    known = None if written is None else row_hashes(written)
    broken = None if written is None else np.isnan(widen(written)).sum(axis=(1, 2))
    for step in steps:
        here, found = place._replace(step=step), recorded.hashes(place.prompt, step, place.layer, place.point)
        if found is None:
            yield here.record("state", run, rows, unknown="what was recorded are no hashes")
            continue
        if known is None or broken is None or len(known) < len(found):
            yield here.record("state", run, rows, unknown=f"the {rows} rows were not recorded")
            continue
        different = np.flatnonzero((found != known[: len(found)]).any(axis=1))
        yield here.record(
            "state", run, rows, dtype=HASH_FORMAT, n=len(found), nonfinite=int(broken[: len(found)].sum()),
            mismatched=len(different), rows=spans(different) or None,
        )  # fmt: skip


def bits(x: Array) -> Array:
    """Return a tensor's bits as unsigned integers."""
    return np.ascontiguousarray(x).view(np.dtype(f"u{x.dtype.itemsize}"))


def spans(rows: Array) -> tuple[tuple[int, int], ...]:
    """Return ascending row numbers as [first, end) of consecutive ones."""
    cuts = np.flatnonzero(np.diff(rows) > 1) + 1
    return tuple((int(part[0]), int(part[-1]) + 1) for part in np.split(rows, cuts) if len(part))
