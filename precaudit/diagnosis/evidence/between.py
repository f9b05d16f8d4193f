"""Attention's second product alone: where scores or softmax are wrong already, what comes after may be so too."""

import numpy as np

from precaudit.numbers.arrays import Array, widen
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.textbook.operations import Operation
from precaudit.schema.graphs.decoder import parts_of


def recorded_probs(recorded: Recorded, o: Operation) -> Array | None:
    """Return the recorded probabilities [H, T, S] of attn_out's rows, 0 where a step saw fewer keys; None of others."""
    place = o.place
    if o.row.kind != "mix":
        return None
    weighed = parts_of(place.point)[0]
    keys = max(len(o.inputs[1]), *(len(x) for x in o.last), 0) if o.last else len(o.inputs[1])
    found: dict[int, Array] = {}
    for step, _ in o.part.steps:
        stored = recorded.tensor(place.prompt, place.phase, step, place.layer, weighed)
        rows = recorded.rows_of(place.prompt, place.phase, step, place.layer, weighed)
        if stored is None or rows is None:
            return None
        wide = widen(stored)[:, :, :keys]
        padded = np.pad(wide, ((0, 0), (0, 0), (0, keys - wide.shape[2])))
        found |= {int(at): padded[:, i] for i, at in enumerate(rows)}
    if not all(int(at) in found for at in o.positions):
        return None
    return np.stack([found[int(at)] for at in o.positions], axis=1)
