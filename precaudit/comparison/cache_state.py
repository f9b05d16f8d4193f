"""State: what decode read from its cache against the rows earlier calls recorded, bit for bit."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from precaudit.comparison.recorded import Recorded
from precaudit.comparison.rows import Place, measured
from precaudit.formats import widen
from precaudit.points import POINTS
from precaudit.records import ErrorRecord


def state_errors(recorded: Recorded, place: Place) -> Iterator[ErrorRecord]:
    """Yield one record for each recorded cache; ``mismatched`` counts the elements whose bits differ."""
    run = recorded.run.record.id
    assert place.layer is not None
    for step in recorded.steps("decode"):
        found = recorded.tensor(place.prompt, "decode", step, place.layer, place.point)
        if found is None:
            continue
        here = replace(place, step=step)
        rows = POINTS[place.point].inputs[0]
        expected = recorded.expected_cache(place.prompt, place.layer, place.point, step)
        if expected is None or expected.shape != found.shape:
            yield here.record("state", run, rows, unknown=f"the {rows} rows were not recorded")
            continue
        word = np.dtype(f"u{found.dtype.itemsize}")
        different = np.ascontiguousarray(found).view(word) != np.ascontiguousarray(expected).view(word)
        _, numbers = measured(found, widen(expected), place.point, np.arange(len(found)))
        yield here.record("state", run, rows, **numbers, mismatched=int(different.sum()))
