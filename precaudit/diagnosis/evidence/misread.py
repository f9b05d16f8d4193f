"""Which recorded tensor an operation read: another than its own, as a branch taken from the wrong place reads."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64, elisions, of_policy
from precaudit.numbers.arrays import Array, widen
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.textbook.closing import yardstick
from precaudit.references.textbook.operations import Operation
from precaudit.schema.graphs.decoder import POINTS, inputs_of
from precaudit.schema.metrics.sizes import canonical
from precaudit.schema.places import ORDER, Place
from precaudit.schema.policies import Policy


class Misread(NamedTuple):
    """``explained``, ``equal``: the share of the error that it reproduces, and of elements bit for bit."""

    cause: str
    says: str
    explained: float
    equal: float


def misread(recorded: Recorded, model: Model, o: Operation, policy: Policy, settled: bool = False) -> Misread | None:
    """Say which earlier tensor of the layer an operation read in place of an input; None where no such one closes."""
    base = of_policy(policy, o.place.phase == "decode").starting(o.start)
    roundings = [base.eliding(places) for places in elisions(o.place.point, model.config, policy)]
    stored, exact = (canonical(x, o.axes) for x in (widen(o.stored), o.evaluate([FP64])[0]))
    error = float(((stored - exact) ** 2).sum())
    for own, other, inputs in _others(recorded, o, model.config.sparse):
        read = replace(o, inputs=inputs)
        yard = yardstick(read, model, policy, settled)
        for y in (canonical(x, o.axes) for x in read.evaluate(roundings)):
            if yard.badness(y) <= 1.0 and error:
                left = float(((stored - y) ** 2).sum())
                says = f"it reads {other} in place of {own}"
                return Misread(f"reads {other}", says, 1.0 - left / error, float(np.mean(stored == y)))
    return None


def _others(recorded: Recorded, o: Operation, sparse: bool) -> Iterator[tuple[str, str, tuple[Array, ...]]]:
    """Yield (input, another point before it, inputs with its rows) of what has the same axes and was recorded."""
    place, names = o.place, inputs_of(o.place.point, sparse)
    if place.layer is None or o.row.attends or any("S" in POINTS[n].axes for n in names):
        return
    for i, name in enumerate(names):
        for p in POINTS.values():
            before = p.per_layer and ORDER[p.name] < ORDER[place.point]
            if not before or p.name in names or p.axes != POINTS[name].axes:
                continue
            there = Place(place.prompt, place.phase, place.step, place.layer, p.name)
            rows = recorded.rows(there.prompt, there.phase, there.layer, there.point)
            if rows is not None and np.isin(o.positions, rows.positions).all():
                yield name, p.name, (*o.inputs[:i], widen(rows.at(o.positions)), *o.inputs[i + 1 :])
