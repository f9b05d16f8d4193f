"""Formats that a program declares inside an operation, named where the textbook with float32 inside does not close.

A segment is judged by its own equations, so statistics of a norm in bfloat16 are what they say. Beside the textbook
they are seen: the same replay as for the decoder's own runs, on what the program recorded.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import numpy as np

from precaudit.arrays import Array
from precaudit.evidence.records import Finding
from precaudit.evidence.replay import replay
from precaudit.formats import FORMATS
from precaudit.graphs.decoder import POINTS, inputs_of
from precaudit.metrics.sizes import canonical, norm, ratio
from precaudit.mutations.variants import Variant
from precaudit.numpy_decoder.rounding import elisions, of_policy
from precaudit.places import spans
from precaudit.policies import Policy, load_policy, on_device
from precaudit.records import device_kind, number
from precaudit.references.formula import own_sequences
from precaudit.references.mapped import Pair, Textbook
from precaudit.references.textbook.closing import yardstick
from precaudit.references.textbook.operations import Operation, of_arrays
from precaudit.runs.programs import Opened

SHOWN = 4  # points that a finding lists


class Declared(NamedTuple):
    """A format inside an operation: where, the variant, its error and what float32 inside would leave, relative."""

    pair: Pair
    variant: Variant
    error: float
    announced: float
    explained: float
    equal: float


def declared(opened: Opened, book: Textbook, skip: Collection[str]) -> Iterator[Finding]:
    """Yield one finding for every narrow format that makes an operation's values, and float32 inside does not.

    ``skip``: points whose formula is not the textbook's, of which no format is told. Judged are operations all of whose
    inputs are shown, stored in one format, of the first case.
    """
    found: dict[str, list[Declared]] = {}
    case = opened.record.cases[0]
    seen = own_sequences(opened, book, case)
    shown = {(p.layer, p.point): x for p, x in seen.items()}
    for pair, stored in seen.items():
        read = [shown.get((_layer(book, pair, name), name)) for name in inputs_of(pair.point, book.config.sparse)]
        inputs = [x for x in read if x is not None]
        if pair.shown.name in skip or len(inputs) < len(read) or any(x.dtype != stored.dtype for x in inputs):
            continue
        policy = on_device(_policy(stored.dtype.name), device_kind(opened.record.device))
        o = of_arrays(book.model, opened.record.id, pair.point, pair.layer, stored[0], [x[0] for x in inputs])
        if o is not None and (one := _narrow(o, book, policy, pair)) is not None:
            found.setdefault(one.variant.name, []).append(one)
    for cause, its in found.items():
        worst = max(its, key=lambda d: d.error)
        u = FORMATS[worst.pair.shown.dtype].unit_roundoff
        says = (
            f"{worst.variant.says}: {where([d.pair for d in its])}; {worst.error / u:.1f} u off at {worst.pair.point}, "
            f"with float32 inside {worst.announced / u:.1f} u"
        )
        yield Finding(
            kind="format", cause=cause, says=says, layer=its[0].pair.layer, point=its[0].pair.point,
            layers=tuple(sorted({d.pair.layer for d in its if d.pair.layer is not None})), phases=("call",),
            prompts=(case,), records=len(its), rel_l2=number(worst.error), explained=number(worst.explained),
            equal=number(worst.equal), second=None, worst=None,
        )  # fmt: skip


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


def _narrow(o: Operation, book: Textbook, policy: Policy, pair: Pair) -> Declared | None:
    """Return the narrow format inside that makes an operation's values; None where float32 inside does, or nothing."""
    yard = yardstick(o, book.model, policy)
    base = of_policy(policy)
    roundings = [base.eliding(places) for places in elisions(pair.point, book.config, policy)]
    if any(yard.badness(canonical(y, o.axes)) <= 1.0 for y in o.evaluate(roundings)):
        return None
    found = replay(o, book.model, policy)
    one = found.named
    if one is None or one.variant.kind != "format":
        return None
    size = norm(_finite(found.reference))
    error, announced = (ratio(norm(_finite(x - found.reference)), size) for x in (found.candidate, found.made))
    return Declared(pair, one.variant, error, announced, one.explained, one.equal)


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)


def where(pairs: Sequence[Pair]) -> str:
    """Return the textbook's points and layers of pairs, and the program's points (occurrences as one) and lines."""
    points, names, lines = (
        list(dict.fromkeys(x))
        for x in zip(*((p.point, p.shown.name.partition("#")[0], p.shown.source) for p in pairs), strict=True)
    )
    layers = sorted({p.layer for p in pairs if p.layer is not None})
    at = f" of layer{'s' if len(layers) > 1 else ''} {spans(layers)}" if layers else ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{' and '.join(points)}{at} ({', '.join(names[:SHOWN])}{more}, {', '.join(lines)})"
