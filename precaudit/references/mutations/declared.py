"""Formats that a program declares inside an operation, named where the textbook with float32 inside does not close.

A segment is judged by its own equations, so statistics of a norm in bfloat16 are what they say. Beside the textbook
they are seen: the same replay as for the decoder's own runs, on what the program recorded.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from precaudit.models.numpy_decoder.rounding import FP64, elisions, of_policy
from precaudit.numbers.arrays import Array, rounder, widen
from precaudit.numbers.formats import FORMATS
from precaudit.recording.runs.programs import Opened
from precaudit.references.mapped import MappedTextbook, Pair
from precaudit.references.mutations.replay import Replay, replay
from precaudit.references.mutations.variants import NARROW
from precaudit.references.textbook.closing import yardstick
from precaudit.references.textbook.operations import Operation, parts, prepare
from precaudit.references.viewed import Viewed, view_case
from precaudit.schema.graphs.decoder import POINTS, inputs_of
from precaudit.schema.metrics.sizes import canonical, norm, ratio
from precaudit.schema.places import layers_text
from precaudit.schema.policies import Policy, recorded_policy
from precaudit.schema.records.base import json_number
from precaudit.schema.records.errors import Narrow

SHOWN = 4  # points that a finding lists
VALUES, FEW = 64, 0.25  # values of a float32 result at least, and the share of FP64's that a 16-bit format may hold
BITS = 0.98  # share of a 16-bit result's elements that its own formats give bit for bit: honest ones give all
APART = 8  # elements at least that float32 inside does not give
LEFT = 0.25  # of what float32 inside leaves, squared, that a format may leave: a declared one leaves next to nothing


def declared_formats(
    opened: Opened, book: MappedTextbook, case: str, skip: Collection[str]
) -> Iterator[tuple[int, Pair, Narrow]]:
    """Yield (call, pair, format) of every operation that a narrow format inside makes, and float32 inside does not.

    ``skip``: points whose formula is not the textbook's, of which no format is told. Judged are operations of the first
    sequence all of whose inputs are shown, stored in one format.
    """
    view = view_case(opened, book, case)
    policy = recorded_policy(view.run.record)
    for pair, place in view.places():
        if pair.shown.name in skip or not _in_one_format(view, pair, book):
            continue
        for part in parts(view, place):
            o = prepare(view, book.model, place, part)
            if o is not None and (name := _held_in(o)) is not None:
                for call, rows in view.calls(place, o.positions):
                    yield call, pair, _of_values(o, name, policy, rows)
                continue
            found = None if o is None or _makes(o, book, policy) else replay(o, book.model, policy)
            if o is not None and found is not None and _is_told_apart(found):
                for call, rows in view.calls(place, o.positions):
                    yield call, pair, _narrow(found, rows)


def _in_one_format(view: Viewed, pair: Pair, book: MappedTextbook) -> bool:
    """Whether an operation's inputs are shown in the format that its result is stored in, or in narrower ones."""
    row = POINTS[pair.point]
    if row.state or not row.inputs:
        return False
    read = [view.pairs.get((_layer(book, pair, name), name)) for name in inputs_of(pair.point, book.config.sparse)]
    own = FORMATS[pair.shown.dtype].unit_roundoff
    return all(x is not None and FORMATS[x.shown.dtype].unit_roundoff >= own for x in read)


def _layer(book: MappedTextbook, pair: Pair, name: str) -> int | None:
    last = book.config.layers - 1 if pair.layer is None else pair.layer
    return last if POINTS[name].per_layer else None


def _makes(o: Operation, book: MappedTextbook, policy: Policy) -> bool:
    """Whether the textbook with float32 inside makes an operation's values: within limits, and in 16 bits bit for bit.

    A format inside that is no more than rounding moves a share of a 16-bit result's bits, and float32 inside next to
    none: what an elision leaves out is tried.
    """
    yard = yardstick(o, book.model, policy)
    base = of_policy(policy, o.place.phase == "decode")
    roundings = [base.eliding(places) for places in elisions(o.place.point, book.config, policy)]
    outs = [canonical(y, o.axes) for y in o.evaluate(roundings)]
    apart = [int((y != yard.candidate).sum()) for y in outs if yard.badness(y) <= 1.0]
    most = max(APART, (1 - BITS) * yard.candidate.size)
    return bool(apart) and (o.stored.dtype.itemsize > 2 or min(apart) < most)


def _held_in(o: Operation) -> str | None:
    """Return the 16-bit format that holds every value of a float32 result, which FP64 does not; None where none does.

    It was rounded to that once, whatever its operation read: no replay of recorded inputs is needed to know it.
    """
    if o.stored.dtype != np.float32 or o.stored.size < VALUES:
        return None
    reference = o.evaluate([FP64])[0]
    for name in NARROW:
        narrow = rounder(name)
        if np.array_equal(narrow(widen(o.stored)), o.stored) and np.mean(narrow(reference) == reference) < FEW:
            return name
    return None


def _of_values(o: Operation, name: str, policy: Policy, rows: slice) -> Narrow:
    """Return a format that holds a float32 result, its error in some rows, and what float32 leaves there."""
    reference, made = (canonical(y, o.axes)[rows] for y in o.evaluate([FP64, of_policy(policy, False)]))
    size = norm(_finite(reference))
    error, wide = (ratio(norm(_finite(x - reference)), size) for x in (canonical(o.stored, o.axes)[rows], made))
    return Narrow(f"stored in {name}", f"results are rounded to {name}", json_number(error), json_number(wide))


def _is_told_apart(found: Replay) -> bool:
    """Whether a narrow format is what makes the values: it closes, and leaves far less than float32 inside."""
    one = found.named
    if one is None or one.variant.kind != "format" or one.variant.fitted:
        return False
    if found.announced.closes and one.equal < BITS:
        return False
    return 1 - one.explained <= LEFT * (1 - found.announced.explained)


def _narrow(found: Replay, rows: slice) -> Narrow:
    """Return the format that is named, its error in some rows, and what float32 inside leaves there."""
    assert found.named is not None
    candidate, made, reference = (x[rows] for x in (found.candidate, found.made, found.reference))
    size = norm(_finite(reference))
    error, wide = (ratio(norm(_finite(x - reference)), size) for x in (candidate, made))
    return Narrow(found.named.variant.name, found.named.variant.says, json_number(error), json_number(wide))


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)


def place_names(pairs: Sequence[Pair]) -> str:
    """Return the textbook's points and layers of pairs, and the program's points (occurrences as one) and lines."""
    points, names, lines = (
        list(dict.fromkeys(x))
        for x in zip(*((p.point, p.shown.name.partition("#")[0], p.shown.source) for p in pairs), strict=True)
    )
    layers = sorted({p.layer for p in pairs if p.layer is not None})
    at = f" of {layers_text(layers)}" if layers else ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{' and '.join(points)}{at} ({', '.join(names[:SHOWN])}{more}, {', '.join(lines)})"
