"""State: what decode read from its cache against the rows earlier calls recorded, bit for bit."""

from collections.abc import Iterator
from itertools import product

import numpy as np

from precaudit.numbers.arrays import Array, widen
from precaudit.numbers.row_hashes import row_hashes
from precaudit.recording.runs.recorded import Recorded
from precaudit.schema.coverage import HASH_FORMAT
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.metrics.rows import measure_rows
from precaudit.schema.places import Place, row_spans
from precaudit.schema.records.errors import StateError

MOST_TIES = 10  # of a hashed row, each of which is tried both ways


def state_errors(recorded: Recorded, place: Place) -> Iterator[StateError]:
    """Yield one record for each recorded cache; ``mismatched`` counts the elements, or hashed rows, that differ."""
    for step in recorded.steps("decode"):
        found = recorded.tensor(place.prompt, "decode", step, place.layer, place.point)
        if found is not None:
            yield _whole(recorded, place._replace(step=step), found)
    keys = {s: (place.prompt, "decode", s, place.layer, place.point) for s in recorded.steps("decode")}
    if hashed := [s for s, key in keys.items() if key in recorded.hashed]:
        yield from _by_hashes(recorded, place, hashed)


def _whole(recorded: Recorded, here: Place, found: Array) -> StateError:
    """Compare a cache [S, G, K] with the rows that were written, element by element."""
    assert here.layer is not None
    run, rows = recorded.run.record.id, POINTS[here.point].inputs[0]
    expected = recorded.expected_cache(here.prompt, here.layer, here.point, here.step)
    if expected is None or expected.shape != found.shape:
        return here.record(StateError, run, rows, unknown=f"the {rows} rows were not recorded")
    different = bits_of(found) != bits_of(expected)
    if different.any() and (other := _otherwise(recorded, here, expected.dtype.name)) is not None:
        different &= ~(other[1] & (bits_of(found) == bits_of(other[0])))
    _, numbers = measure_rows(found, widen(expected), here.point, np.arange(len(found)))
    at = row_spans(np.flatnonzero(different.any(axis=(1, 2))))
    return here.record(StateError, run, rows, **numbers, mismatched=int(different.sum()), rows=at or None)


def _by_hashes(recorded: Recorded, place: Place, steps: list[int]) -> Iterator[StateError]:
    """Compare the hashes of a cache's rows with those of the rows that were written; ``n`` counts rows.

    Rows of equal hashes are equal: NaN in a row that was written is NaN in what was read.
    """
    assert place.layer is not None
    run, rows = recorded.run.record.id, POINTS[place.point].inputs[0]
    written = recorded.expected_rows(place.prompt, place.layer, place.point)
    known = None if written is None else row_hashes(written)
    broken = None if written is None else np.isnan(widen(written)).sum(axis=(1, 2))
    for step in steps:
        here, found = place._replace(step=step), recorded.hashes(place.prompt, step, place.layer, place.point)
        if found is None:
            yield here.record(StateError, run, rows, unknown="what was recorded are no hashes")
            continue
        if known is None or broken is None or len(known) < len(found):
            yield here.record(StateError, run, rows, unknown=f"the {rows} rows were not recorded")
            continue
        different = np.flatnonzero((found != known[: len(found)]).any(axis=1))
        if written is not None and len(different) and (other := _otherwise(recorded, here, written.dtype.name)):
            values, near = other
            different = different[[not at_ties(found[i], written[i], values[i], near[i]) for i in different]]
        yield here.record(
            StateError,
            run,
            rows,
            dtype=HASH_FORMAT,
            n=len(found),
            nonfinite=int(broken[: len(found)].sum()),
            mismatched=len(different),
            rows=row_spans(different) or None,
        )


def _otherwise(recorded: Recorded, here: Place, name: str) -> tuple[Array, Array] | None:
    """Return the rows of a cache with quotients at a tie rounded the other way, and which; None where none may be."""
    assert here.layer is not None
    rows = recorded.cached_rows(here.prompt, here.layer, here.point, here.step)
    return None if rows is None else recorded.other_cache(rows, name)


def at_ties(found: Array, written: Array, other: Array, near: Array) -> bool:
    """Whether a row's hash is that of the row that was written with some of its ties the other way."""
    at = np.flatnonzero(near)
    if not 0 < len(at) <= MOST_TIES:
        return False
    which = np.array(list(product((False, True), repeat=len(at))))
    rows = np.repeat(written.reshape(1, -1), len(which), 0)
    rows[:, at] = np.where(which, other.reshape(-1)[at], rows[:, at])
    return bool((row_hashes(rows.reshape(-1, *written.shape)) == found).all(axis=1).any())


def bits_of(x: Array) -> Array:
    """Return a tensor's bits as unsigned integers."""
    return np.ascontiguousarray(x).view(np.dtype(f"u{x.dtype.itemsize}"))
