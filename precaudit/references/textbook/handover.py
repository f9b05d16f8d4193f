"""What one layer hands the next, bit for bit: the stream entering a layer is the one that left the layer before."""

from collections.abc import Iterator

import numpy as np

from precaudit.models.configs import EMBEDDING
from precaudit.models.numpy_decoder.model import Model
from precaudit.numbers.arrays import Array, as_format, to_single, widen
from precaudit.recording.runs.recorded import Recorded, Rows
from precaudit.schema.coverage import is_handed_on
from precaudit.schema.graphs.decoder import POINTS, STREAM
from precaudit.schema.metrics.rows import measure_rows
from precaudit.schema.places import Place
from precaudit.schema.records.errors import ErrorRecord, StateError

POINT, BEFORE = next(p.name for p in POINTS.values() if p.handed is not None), STREAM


def handover_errors(recorded: Recorded, model: Model, weights: bool, place: Place) -> Iterator[ErrorRecord]:
    """Yield one state record for each recorded ``resid_in`` of a phase; ``mismatched`` counts elements that differ.

    Of layer 0 against the embedding rows of the tokens, times the family's factor; none where the layer before was not
    asked for.
    """
    rows = recorded.rows(place.prompt, place.phase, place.layer, POINT)
    if rows is None or not is_handed_on(recorded.requested, place.phase, rows.steps[0][0], place.layer):
        return
    run, reference = recorded.run.record.id, BEFORE if place.layer else "embedding"
    expected = expected_stream(recorded, model, weights, place, rows)
    for step, some in rows.steps:
        here = place._replace(step=step)
        if expected is None:
            why = f"the {BEFORE} rows were not recorded" if place.layer else "weights"
            yield here.record(StateError, run, reference, unknown=why)
            continue
        found, wanted = rows.values[some], expected[some]
        _, numbers = measure_rows(found, widen(wanted), POINT, rows.positions[some])
        yield here.record(StateError, run, reference, **numbers, mismatched=differing(found, wanted))


def expected_stream(recorded: Recorded, model: Model, weights: bool, place: Place, rows: Rows) -> Array | None:
    """Return what ``resid_in`` [T, D] has to hold, in its own format; None where that is not known."""
    assert place.layer is not None
    if place.layer == 0:
        if not weights:
            return None
        tokens = np.asarray(recorded.fed_tokens(place.prompt))
        if not len(rows.positions) or rows.positions.max() >= len(tokens):
            return None
        return embed_rows(model, tokens[rows.positions], rows.values.dtype.name)
    before = recorded.rows(place.prompt, place.phase, place.layer - 1, BEFORE)
    if before is None or not np.isin(rows.positions, before.positions).all():
        return None
    return before.at(rows.positions) if before.values.dtype == rows.values.dtype else None


def embed_rows(model: Model, tokens: Array, dtype: str) -> Array:
    """Return embedding rows times the factor [T, D], the product in float32, rounded to ``dtype`` once."""
    table, scale = model.read(EMBEDDING), np.float32(model.config.embed_scale)
    stored = to_single(np.ascontiguousarray(table[tokens]))
    return as_format((stored if scale == 1 else stored * scale).astype(np.float64), dtype)


def differing(a: Array, b: Array) -> int:
    """Return how many elements of two arrays of one format differ in a bit."""
    word = np.dtype(f"u{a.dtype.itemsize}")
    return int((np.ascontiguousarray(a).view(word) != np.ascontiguousarray(b).view(word)).sum())
