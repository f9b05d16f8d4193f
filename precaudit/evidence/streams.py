"""What happened to the stream between two layers."""

from collections.abc import Iterator

import numpy as np

from precaudit.arrays import Array, as_format, widen
from precaudit.evidence.caches import explain
from precaudit.evidence.states import ENOUGH, State
from precaudit.numpy_decoder.model import Model
from precaudit.places import Place
from precaudit.references.textbook.handover import expected_stream
from precaudit.runs.recorded import Recorded


def stream_state(recorded: Recorded, model: Model, place: Place) -> State:
    """Say what a layer read instead of what the layer before handed it."""
    rows = recorded.rows(place.prompt, place.phase, place.layer, place.point)
    assert rows is not None
    expected = expected_stream(recorded, model, True, place, rows)
    assert expected is not None
    found, wanted = rows.values[:, None], expected[:, None]
    state = explain(found, wanted, dict(_mates(recorded, model, place)), name="stream", says="handed on")
    if state.cause != "foreign rows":
        return state
    return _scaled(found, wanted, state) or state._replace(
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


def _scaled(found: Array, expected: Array, state: State) -> State | None:
    """Return that the rows which differ are the expected ones times a factor, if one factor makes most elements."""
    bad = list(state.rows)
    f, e = widen(found)[bad], widen(expected)[bad]
    power = float((e * e).sum())
    factor = float((f * e).sum()) / power if power and np.isfinite(f).all() else 1.0
    share = float(np.mean(widen(as_format(e * factor, found.dtype.name)) == f))
    if factor == 1.0 or share < ENOUGH:
        return None
    return State("stream scaled", "semantics", f"the rows handed on are multiplied by {factor:.4g}", share, state.rows)
