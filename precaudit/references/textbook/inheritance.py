"""Whether attention's own error lies before its recorded scores or probabilities, and not after them."""

from collections.abc import Iterator

import numpy as np

from precaudit.models.numpy_decoder.model import all_probs
from precaudit.models.numpy_decoder.rounding import Rounding
from precaudit.numbers.arrays import Array, widen
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.textbook.operations import Operation, keys_of
from precaudit.schema.graphs.decoder import POINTS, parts_of


def from_between(recorded: Recorded, o: Operation, step: int, rounding: Rounding) -> Iterator[tuple[str, Array]]:
    """Yield (point, attn_out [T, H, K] made from what was recorded there) of one step, the last such point first.

    attn_out is judged from q, k and v; where scores or probs between them are wrong, so is it. If it closes from them
    it only inherits.
    """
    place = o.place
    if o.row.kind != "mix":
        return
    values = keys_of(recorded, place, o.row.inputs[-1])
    for name in parts_of(place.point):
        stored = recorded.tensor(place.prompt, place.phase, step, place.layer, name)
        rows = recorded.rows_of(place.prompt, place.phase, step, place.layer, name)
        if stored is None or rows is None or values is None:
            continue
        made, keys = widen(stored), stored.shape[2]
        source = values[-1] if len(values) > 1 and keys == len(values[-1]) else values[0]
        if POINTS[name].kind == "score":
            made = all_probs(made, rows, o.window, rounding)
        wide, group = widen(source)[:keys], made.shape[0] // source.shape[1]
        out = np.stack([rounding.dot(p, wide[:, h // group]) for h, p in enumerate(made)], axis=1)
        keep = np.isin(rows, o.positions)
        yield name, rounding.attn_out(out[keep])
