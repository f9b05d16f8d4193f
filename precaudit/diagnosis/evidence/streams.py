"""What happened to the stream between two layers."""

from collections.abc import Iterator

import numpy as np

from precaudit.diagnosis.evidence.caches import explain
from precaudit.diagnosis.evidence.states import ENOUGH, State
from precaudit.models.configs import EMBEDDING
from precaudit.models.numpy_decoder.model import Model
from precaudit.numbers.arrays import Array, as_format, to_single, widen
from precaudit.recording.runs.recorded import Recorded, Rows
from precaudit.references.mutations.variants import Class
from precaudit.references.textbook.handover import expected_stream
from precaudit.schema.digits import digits
from precaudit.schema.places import Place, spans
from precaudit.schema.records.errors import StateError


def stream_state(recorded: Recorded, model: Model, e: StateError) -> State:
    """Say what a layer read instead of what the layer before handed it; of hashed rows, which ones differ."""
    place = Place.of(e)
    rows = recorded.rows(place.prompt, place.phase, place.layer, place.point)
    expected = None if rows is None else expected_stream(recorded, model, True, place, rows)
    if rows is None or expected is None:
        at = [i for first, end in e.rows or () for i in range(first, end)]
        says = f"rows {spans(at)} are not what the layer before handed on"
        return State("stream changed", "state", says, 0.0, tuple(at))
    found, wanted = rows.values[:, None], expected[:, None]
    if place.layer == 0 and (told := _embedding_state(recorded, model, place, rows)) is not None:
        return told
    state = explain(found, wanted, dict(_mates(recorded, model, place)), name="stream", says="handed on")
    if state.cause != "foreign rows":
        return state
    return _scale_state(found, wanted, state) or state._replace(
        cause="stream changed", says=f"{state.says[: state.says.index('hold')]}are not what the layer before handed on"
    )


def _mates(recorded: Recorded, model: Model, place: Place) -> Iterator[tuple[str, Array]]:
    """Yield the prompts of the same batch, each with the rows [T, 1, D] that it was handed."""
    for mate in recorded.batch_of(place.prompt):
        there = place._replace(prompt=mate)
        rows = recorded.rows(mate, place.phase, place.layer, place.point)
        handed = None if rows is None else expected_stream(recorded, model, True, there, rows)
        if mate != place.prompt and handed is not None:
            yield mate, handed[:, None]


def _embedding_state(recorded: Recorded, model: Model, place: Place, rows: Rows) -> State | None:
    """Say how else rows of the embedding were made into the stream: times another factor, of others, normalised."""
    tokens = np.asarray(recorded.fed_tokens(place.prompt))[rows.positions]
    table, found = model.read(EMBEDDING), widen(rows.values)
    each = to_single(np.ascontiguousarray(table[tokens])).astype(np.float64)
    should, power = model.config.embed_scale, float((each * each).sum())
    x = float((found * each).sum()) / power if power and np.isfinite(found).all() else 0.0
    ways: list[tuple[str, Class, str, Array]] = []
    for d in range(6) if x else ():
        short = float(f"{x:.{d}e}")
        if short != should:
            says = "are not scaled" if short == 1 else f"are times {digits(short, 6)}"
            told = f"embedding rows {says}, the configuration says × {digits(should, 6)}"
            name = "embedding's factor omitted" if short == 1 else f"embedding × {digits(short, 6)}"
            ways.append((name, "semantics", told, each * short))
    root = np.sqrt((each * each).mean(axis=1, keepdims=True))
    ways.append(
        (
            "embedding normalised",
            "semantics",
            "rows of the embedding are divided by their root mean square",
            each / np.where(root > 0, root, 1.0),
        )
    )
    for by, side in ((-1, "before"), (1, "after")):
        others = to_single(np.ascontiguousarray(table[(tokens + by) % len(table)])).astype(np.float64) * should
        says = f"every token has the embedding's row of the token {side} it in the vocabulary"
        ways.append((f"embedding rows shifted by {by:+d}", "state", says, others))
    for cause, kind, says, made in ways:
        share = float(np.mean(widen(as_format(made, rows.values.dtype.name)) == found))
        if share >= ENOUGH:
            return State(cause, kind, says, share, tuple(range(len(rows.positions))))
    return None


def _scale_state(found: Array, expected: Array, state: State) -> State | None:
    """Return that the rows which differ are the expected ones times a factor, if one factor makes most elements."""
    bad = list(state.rows)
    f, e = widen(found)[bad], widen(expected)[bad]
    power = float((e * e).sum())
    factor = float((f * e).sum()) / power if power and np.isfinite(f).all() else 1.0
    share = float(np.mean(widen(as_format(e * factor, found.dtype.name)) == f))
    if factor == 1.0 or share < ENOUGH:
        return None
    return State(
        "stream scaled", "semantics", f"the rows handed on are multiplied by {digits(factor, 4)}", share, state.rows
    )
