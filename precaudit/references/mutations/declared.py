"""Formats that a program declares inside an operation, named where the textbook with float32 inside does not close.

A segment is judged by its own equations, so statistics of a norm in bfloat16 are what they say. Beside the textbook
they are seen: the same replay as for the decoder's own runs, on what the program recorded.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from precaudit.models.numpy_decoder.rounding import elisions, of_policy
from precaudit.numbers.arrays import Array
from precaudit.recording.runs.programs import Opened
from precaudit.references.formula import calls_of, own_sequences
from precaudit.references.mapped import Pair, Textbook
from precaudit.references.mutations.replay import Replay, replay
from precaudit.references.sequences import Tokens
from precaudit.references.textbook.closing import yardstick
from precaudit.references.textbook.operations import Operation, of_arrays
from precaudit.schema.graphs.decoder import POINTS, inputs_of
from precaudit.schema.metrics.sizes import canonical, norm, ratio
from precaudit.schema.places import layers_text
from precaudit.schema.policies import Policy, load_policy, on_device
from precaudit.schema.records import Narrow, device_kind, number

SHOWN = 4  # points that a finding lists
LEFT = 0.25  # of what float32 inside leaves, squared, that a format may leave: a declared one leaves next to nothing


def declared(opened: Opened, book: Textbook, case: str, skip: Collection[str]) -> Iterator[tuple[int, Pair, Narrow]]:
    """Yield (call, pair, format) of every operation that a narrow format inside makes, and float32 inside does not.

    ``skip``: points whose formula is not the textbook's, of which no format is told. Judged are operations all of whose
    inputs are shown, stored in one format.
    """
    seen, (sequence, *_) = own_sequences(opened, book, case)
    edges = ((rows.start, rows.stop) for rows in calls_of(opened, book, case))
    rows = [slice(*(int(i) for i in np.searchsorted(sequence.rows, ends))) for ends in edges]
    for pair, o, policy in _operations(opened, book, seen, sequence, skip):
        found = None if _closes(o, book, policy) else replay(o, book.model, policy)
        if found is not None and _told(found):
            for call, some in enumerate(rows):
                yield call, pair, _narrow(found, some)


def _operations(
    opened: Opened, book: Textbook, seen: Mapping[Pair, Array], sequence: Tokens, skip: Collection[str]
) -> Iterator[tuple[Pair, Operation, Policy]]:
    """Yield the operations of a case's first sequence that can be judged, each with the policy of its format."""
    shown = {(p.layer, p.point): x for p, x in seen.items()}
    for pair, stored in seen.items():
        read = [shown.get((_layer(book, pair, name), name)) for name in inputs_of(pair.point, book.config.sparse)]
        inputs = [x for x in read if x is not None]
        if pair.shown.name in skip or len(inputs) < len(read) or any(x.dtype != stored.dtype for x in inputs):
            continue
        policy = on_device(_policy(stored.dtype.name), device_kind(opened.record.device))
        mine = [x[0, sequence.rows] for x in (stored, *inputs)]
        o = of_arrays(book.model, opened.record.id, pair.point, pair.layer, mine[0], mine[1:], sequence.earlier)
        if o is not None:
            yield pair, o, policy


def _layer(book: Textbook, pair: Pair, name: str) -> int | None:
    last = book.config.layers - 1 if pair.layer is None else pair.layer
    return last if POINTS[name].per_layer else None


def _policy(dtype: str) -> Policy:
    """Return the policy that stores everything in a format, with float32 inside operations."""
    if dtype in ("float32", "float64"):
        return load_policy("fp32-highest")
    bf16 = load_policy("bf16")
    changed = {key: dtype for key, name in asdict(bf16).items() if name == "bfloat16"}
    return replace(bf16, **changed)


def _closes(o: Operation, book: Textbook, policy: Policy) -> bool:
    """Whether the textbook with float32 inside makes an operation's values."""
    yard = yardstick(o, book.model, policy)
    base = of_policy(policy)
    roundings = [base.eliding(places) for places in elisions(o.place.point, book.config, policy)]
    return any(yard.badness(canonical(y, o.axes)) <= 1.0 for y in o.evaluate(roundings))


def _told(found: Replay) -> bool:
    """Whether a narrow format is what makes the values: it closes, and leaves far less than float32 inside."""
    one = found.named
    if one is None or one.variant.kind != "format" or one.variant.fitted:
        return False
    return 1 - one.explained <= LEFT * (1 - found.announced.explained)


def _narrow(found: Replay, rows: slice) -> Narrow:
    """Return the format that is named, its error in some rows, and what float32 inside leaves there."""
    assert found.named is not None
    candidate, made, reference = (x[rows] for x in (found.candidate, found.made, found.reference))
    size = norm(_finite(reference))
    error, wide = (ratio(norm(_finite(x - reference)), size) for x in (candidate, made))
    return Narrow(found.named.variant.name, found.named.variant.says, number(error), number(wide))


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)


def where(pairs: Sequence[Pair]) -> str:
    """Return the textbook's points and layers of pairs, and the program's points (occurrences as one) and lines."""
    points, names, lines = (
        list(dict.fromkeys(x))
        for x in zip(*((p.point, p.shown.name.partition("#")[0], p.shown.source) for p in pairs), strict=True)
    )
    layers = sorted({p.layer for p in pairs if p.layer is not None})
    at = f" of {layers_text(layers)}" if layers else ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{' and '.join(points)}{at} ({', '.join(names[:SHOWN])}{more}, {', '.join(lines)})"
