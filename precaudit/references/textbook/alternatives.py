"""What else honest programs make of an operation, tried where the textbook's way does not close."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from precaudit.models.numpy_decoder.honest import (
    FLOAT32_PRODUCTS,
    RowExecution,
    forms_of,
    on_single_rows,
)
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import Rounding, elisions, of_policy
from precaudit.numbers.arrays import Array, rounder
from precaudit.numbers.formats import FORMATS
from precaudit.recording.runs.recorded import Recorded, Rows
from precaudit.references.closing import TIES
from precaudit.references.textbook.operations import Operation, parts, prepare
from precaudit.references.textbook.units import policy_at, tpu_chooses
from precaudit.schema.graphs.decoder import POINTS, inputs_of
from precaudit.schema.metrics.sizes import canonical, half_ulp
from precaudit.schema.places import Place
from precaudit.schema.policies import Policy
from precaudit.schema.records.devices import device_kind

DEEPEST = 6  # operations of a layer, one after another, that may hand on what was not rounded
UNIT = FORMATS["float32"].unit_roundoff


class Alternative(NamedTuple):
    """What is done otherwise, what that makes [T, H, K], and the part of its error that is not known.

    ``borders``: through how many operations, one after another, it reads inputs as they were before they were rounded.
    """

    name: tuple[str, ...]
    emulated: Array
    doubt: float = 0.0
    borders: int = 0

    def rows(self, some: slice) -> "Alternative":
        """Return what it makes of some rows."""
        return self._replace(emulated=self.emulated[some])


class Alternatives(Iterable[Alternative]):
    """Other honest emulations of an operation, each made when first asked for and kept."""

    def __init__(self, recorded: Recorded, model: Model, o: Operation, policy: Policy) -> None:
        self._made: list[Alternative] = []
        self._more = _every(recorded, model, o, policy)

    def __iter__(self) -> Iterator[Alternative]:
        """Yield those made before, then more."""
        i = 0
        while True:
            if i == len(self._made):
                one = next(self._more, None)
                if one is None:
                    return
                self._made.append(one)
            yield self._made[i]
            i += 1

    def reading_unrounded(self) -> list[Alternative]:
        """Return those that read an input as it was before it was rounded, and what made it as recorded."""
        return list(takewhile(lambda other: other.borders == 1, self))


def _every(recorded: Recorded, model: Model, o: Operation, policy: Policy) -> Iterator[Alternative]:
    """Yield inputs as they were before they were rounded, then other ways to write the operation.

    A float32 sum whose second summand ends in a product may be one fused multiply-add: the summand is off by half a
    unit in the last place at most, which cancellation makes large.
    """
    point, row = o.place.point, o.row
    base, settled = rounding_at(recorded, policy, o.place), tpu_chooses(recorded, policy, o.place)
    sets = elisions(point, model.config, policy)
    device = device_kind(recorded.run.record.device)
    roundings = [base.eliding(places) for places in sets]
    if device == "tpu" and row.sums and base.dot is not np.matmul and not settled:
        roundings += [replace(r, dot=np.matmul) for r in roundings]
        sets = [*sets, *((*places, FLOAT32_PRODUCTS) for places in sets)]
    for name, inputs in unrounded_inputs(recorded, model, o, policy):
        for places, y in zip(sets, o.evaluate(roundings, inputs), strict=True):
            yield Alternative((*name, *places), canonical(y, o.axes), borders=1)
    for borders, name, inputs in chained_inputs(recorded, model, o, policy):
        for places, y in zip(sets, o.evaluate(roundings, inputs), strict=True):
            yield Alternative((*name, *places), canonical(y, o.axes), borders=borders)
    if device == "tpu" and row.kind == "norm":
        for name, scaled in statistics_before(recorded, model, o, policy):
            for places, y in zip(sets, o.evaluate([replace(r, norm_scale=scaled) for r in roundings]), strict=True):
                yield Alternative((*name, "in its statistics", *places), canonical(y, o.axes))
    if row.kind == "sum" and o.stored.dtype == np.float32:
        *first, added = o.inputs
        wide = added.astype(np.float64)
        off = wide + np.spacing(np.abs(wide).astype(np.float32)) / 2
        yield Alternative(("fused multiply-add",), canonical(o.evaluate([base], [*first, off])[0], o.axes), doubt=1.0)
    if device == "gpu":  # what XLA makes twice there
        if row.kind == "sum" and (both := rounded_again(recorded, model, o, base)) is not None:
            as_read, other = (canonical(y, o.axes) for x in both for y in o.evaluate([base], [*o.inputs[:-1], x]))
            seen = canonical(o.stored, o.axes)
            nearer = np.where(np.abs(seen - other) < np.abs(seen - as_read), other, as_read)
            yield Alternative((f"{inputs_of(point, model.config.sparse)[-1]} rounded again",), nearer)
        for again, inputs in inputs_summed_again(recorded, model, o):
            yield Alternative((again,), canonical(o.evaluate([base], inputs)[0], o.axes), doubt=1.0)
    for form in forms_of(row, o.stored.dtype.name, base if settled else None):
        for places, y in zip(sets, o.evaluate(roundings, None, form), strict=True):
            yield Alternative((form.name, *places), canonical(y, o.axes), form.doubt)


def rounding_at(recorded: Recorded, policy: Policy, place: Place) -> Rounding:
    """Return the roundings of a place under a policy, its products as the compiled program makes them."""
    return of_policy(policy_at(recorded, policy, place), place.phase == "decode")


def unrounded_inputs(
    recorded: Recorded, model: Model, o: Operation, policy: Policy
) -> Iterator[tuple[tuple[str, ...], Sequence[Array]]]:
    """Yield the operation's inputs with one as it was before it was rounded to be stored, made from its own inputs.

    A compiler that fuses an operation with the next, or widens what it has just rounded, hands the unrounded value on
    (docs/numerics.md, fact 2). Keys and values that come from a cache were stored.
    """
    if policy.excess_precision == "off":
        return
    for j, producer in producers(recorded, model, o):
        for name, rounding in _handed_unrounded(recorded, model, producer, policy):
            kept = _rows_of_producer(o, j, producer, producer.evaluate([rounding])[0])
            if kept is not None:
                yield name, [*o.inputs[:j], kept, *o.inputs[j + 1 :]]


def _handed_unrounded(
    recorded: Recorded, model: Model, producer: Operation, policy: Policy
) -> Iterator[tuple[tuple[str, ...], Rounding]]:
    """Yield the roundings of an operation whose result is handed on as it was before it was rounded."""
    place, device = producer.place, device_kind(recorded.run.record.device)
    base = rounding_at(recorded, policy, place)
    executed = RowExecution(device, place.phase == "decode", tpu_chooses(recorded, policy, place))
    sets = elisions(place.point, model.config, policy)
    for places in sets:
        unrounded = base.eliding((*places, producer.row.place))
        made = on_single_rows(unrounded, producer.row, producer.stored.dtype.name, policy.scores, executed)
        for how, rounding in made.items():
            yield (place.point, *places, *how), rounding
    if device == "tpu" and producer.row.kind == "norm":
        for name, scaled in statistics_before(recorded, model, producer, policy):
            for places in sets:
                unrounded = replace(base.eliding((*places, producer.row.place)), norm_scale=scaled)
                yield (place.point, *places, *name, "in its statistics"), unrounded


def chained_inputs(
    recorded: Recorded, model: Model, o: Operation, policy: Policy
) -> Iterator[tuple[int, tuple[str, ...], Sequence[Array]]]:
    """Yield (borders, points, inputs) where what made an input read its own unrounded too, and so on in the layer.

    Products that take float32 operands (a preset of their own, weights stored wider) leave a compiler no rounding
    between them: seen on a CPU with F32_F32_F32, where mlp_out is made of an unrounded residual.
    """
    if policy.excess_precision == "off":
        return
    base = rounding_at(recorded, policy, o.place)
    vector = device_kind(recorded.run.record.device) == "tpu" and base.dot is not np.matmul
    for rounding in (base, replace(base, dot=np.matmul)) if vector else (base,):
        known = 1
        for borders in range(2, DEEPEST + 1):
            points, inputs = unwound(recorded, model, o, rounding, borders)
            if len(points) == known:
                break
            known = len(points)
            yield borders, points, inputs


def statistics_before(
    recorded: Recorded, model: Model, o: Operation, policy: Policy
) -> Iterator[tuple[tuple[str, ...], Callable[[Array], Array]]]:
    """Yield what makes a norm's scale that of its input before that was rounded, where its values are of it after.

    Seen in what libtpu compiles: the sum of squares is fused with the sum it is of, the product with the scale is not.
    """
    base = rounding_at(recorded, policy, o.place)
    before = [(name, inputs) for name, inputs in unrounded_inputs(recorded, model, o, policy)]
    before += [(name, inputs) for _, name, inputs in chained_inputs(recorded, model, o, policy)]
    for name, inputs in before:
        scales: list[Array] = []

        def keep_scale(scale: Array, scales: list[Array] = scales) -> Array:
            scales.append(scale)
            return scale

        o.evaluate([replace(base, norm_scale=keep_scale)], inputs)
        yield name, partial(_another, base.norm_scale(scales[0]))


def _another(scale: Array, _given: Array) -> Array:
    """Return one scale whatever another is given."""
    return scale


def producers(recorded: Recorded, model: Model, o: Operation) -> Iterator[tuple[int, Operation]]:
    """Yield (which input, the operation that made it) of inputs that were rounded to be stored.

    Keys and values that come from a cache were stored, and so was what a layer hands the next.
    """
    place = o.place
    for j, name in enumerate(inputs_of(place.point, model.config.sparse)[: len(o.inputs)]):
        if place.phase == "decode" and j and o.row.reads_keys:
            return
        source = _source(place, name, model.config.layers)
        rows = None if source is None else _rows(recorded, source, o)
        if source is None or rows is None or rows.values.dtype == np.float32:
            continue
        producer = prepare(recorded, model, source, rows)
        if producer is not None and np.isin(o.positions, producer.positions).all():
            yield j, producer


def unwound(
    recorded: Recorded, model: Model, o: Operation, base: Rounding, borders: int
) -> tuple[tuple[str, ...], list[Array]]:
    """Return the points that were read unrounded, and the operation's inputs so, through ``borders`` operations."""
    points: tuple[str, ...] = ()
    inputs = list(o.inputs)
    for j, producer in producers(recorded, model, o) if borders else ():
        if producer.place.layer != o.place.layer:
            continue
        more, its = unwound(recorded, model, producer, base, borders - 1)
        made = producer.evaluate([base.eliding((producer.row.place,))], its)[0]
        kept = _rows_of_producer(o, j, producer, made)
        if kept is not None:
            inputs[j] = kept
            points += (producer.place.point, *more)
    return points, inputs


def _rows_of_producer(o: Operation, j: int, producer: Operation, made: Array) -> Array | None:
    """Return the rows of what a producer makes that are an operation's input ``j``, as near as what was recorded."""
    wanted = o.positions if j == 0 or "S" not in o.axes else producer.positions
    kept = made if producer.row.over_keys else made[np.searchsorted(producer.positions, wanted)]
    if kept.shape != o.inputs[j].shape:
        return None
    return consistent(kept, o.inputs[j], producer.stored.dtype.name)


def consistent(made: Array, read: Array, dtype: str) -> Array:
    """Return values that round to what was recorded: those made, or the end of its rounding's reach that is nearest.

    Float32 sums may move a rounding inside the producer across a tie, and the input with it. What was read lies in that
    reach, so that no value comes farther from it.
    """
    half = half_ulp(read, dtype)
    with np.errstate(invalid="ignore"):
        return np.clip(made, read - half, read + half)


def inputs_summed_again(recorded: Recorded, model: Model, o: Operation) -> Iterator[tuple[str, Sequence[Array]]]:
    """Yield the operation's inputs with one float32 sum off by what another order of its terms may change.

    XLA on a GPU splits the terms of a sum in parts, and each reader adds the parts up by itself: what is recorded and
    what is read may differ in the last places, of the terms' sizes and not the sum's (seen on an H100: a norm read a
    residual one unit in the last place of its summands off).
    """
    names = inputs_of(o.place.point, model.config.sparse)[: len(o.inputs)]
    for j, name in enumerate(names):
        off = _summed_again(recorded, model, o, name, o.inputs[j])
        if off is not None:
            sign = np.random.default_rng(j).choice([-1.0, 1.0], off.shape)
            yield f"{name} summed again", [*o.inputs[:j], o.inputs[j] + sign * off, *o.inputs[j + 1 :]]


def rounded_again(recorded: Recorded, model: Model, o: Operation, base: Rounding) -> tuple[Array, Array] | None:
    """Return what a residual adds as recorded, and rounded the other way where its float32 sums may cross the tie.

    XLA on a GPU may make a product twice, once to be recorded and once to be added, its terms in another order (seen on
    an H100: one element in 17,000, off by one unit in the last place of the summand). None where it is in float32.
    """
    name, read = inputs_of(o.place.point, model.config.sparse)[-1], o.inputs[-1]
    source = _source(o.place, name, model.config.layers)
    rows = None if source is None else _rows(recorded, source, o)
    producer = None if source is None or rows is None else prepare(recorded, model, source, rows)
    if source is None or rows is None or producer is None or rows.values.dtype == np.float32:
        return None
    if not np.array_equal(producer.positions, o.positions):
        return None
    made = producer.evaluate([base.eliding((producer.row.place,))])[0]
    dtype = rows.values.dtype.name
    other = rounder(dtype)(read + 2 * np.sign(made - read) * half_ulp(made, dtype))
    near = np.abs((read + other) / 2 - made) <= TIES * UNIT * np.asarray(producer.magnitude(UNIT))
    return read, np.where(near, other, read)


def _summed_again(recorded: Recorded, model: Model, o: Operation, name: str, read: Array) -> Array | None:
    """Return by how much another order of its terms may move a float32 input; None where it is no sum."""
    source = _source(o.place, name, model.config.layers)
    rows = None if source is None else _rows(recorded, source, o)
    if source is None or rows is None or rows.values.dtype != np.float32:
        return None
    producer = prepare(recorded, model, source, rows)
    if producer is None or not (producer.row.sums or producer.row.kind == "sum"):
        return None
    sizes = UNIT * np.asarray(producer.magnitude(UNIT))
    if producer.row.kind == "sum":
        added = inputs_of(source.point, model.config.sparse)[-1]
        more = _summed_again(recorded, model, producer, added, producer.inputs[-1])
        sizes = sizes if more is None else sizes + more
    wanted = o.positions if len(read) == len(o.positions) else producer.positions
    if producer.row.over_keys or not np.isin(wanted, producer.positions).all():
        return None
    kept = sizes[np.searchsorted(producer.positions, wanted)]
    return kept.reshape(read.shape) if kept.size == read.size else None


def _rows(recorded: Recorded, source: Place, o: Operation) -> Rows | None:
    """Return the rows of the point that made an input, all steps or (over keys) the operation's own."""
    steps = {step for step, _ in o.part.steps}
    return next((part for part in parts(recorded, source) if steps == {step for step, _ in part.steps}), None)


def _source(place: Place, name: str, layers: int) -> Place | None:
    """Return the place that made an input; None where no operation of the layers did."""
    layer = layers - 1 if place.layer is None else place.layer
    before = POINTS[name].handed
    if before is not None:
        if not layer:
            return None
        layer, name = layer - 1, before
    return Place(place.prompt, place.phase, 0, layer if POINTS[name].per_layer else None, name)
