"""Prefill (or rescore) against decode, point by point at the same position: where two views of one token part."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from precaudit.numbers.arrays import Array, widen
from precaudit.recording.runs.positions import unpack_positions
from precaudit.recording.runs.recorded import Recorded
from precaudit.schema.digits import digits
from precaudit.schema.graphs.decoder import LOGITS, POINTS
from precaudit.schema.lengths import view_of
from precaudit.schema.metrics.sizes import norm, ratio
from precaudit.schema.places import LAST, ORDER, Place, point_text


class Parting(NamedTuple):
    """Two views of one position at one point; ``distance``: relative to the one of ``against``, 0 bit for bit."""

    prompt: str
    against: str
    step: int
    position: int
    layer: int | None
    point: str
    distance: float


def partings(recorded: Recorded) -> Iterator[Parting]:
    """Yield, for every prompt and view, the first point in program order whose bits differ, and logits.

    Prefill sees the position of decode step 0, rescore those of all steps. Points either view lacks are left out.
    """
    asked = recorded.requested
    if "decode" not in asked.phases:
        return
    places = [(i, p) for p in POINTS if not POINTS[p].state for i in (asked.layers if POINTS[p].per_layer else (None,))]
    places.sort(key=lambda x: (LAST if x[0] is None else x[0], ORDER[x[1]]))
    for prompt, held in recorded.run.prompts.items():
        for against in [p for p in ("prefill", "rescore") if p in asked.phases]:
            for step in recorded.steps("decode") if against == "rescore" else (0,):
                position = len(held.tokens) - 1 + step
                first = False
                for layer, point in places:
                    if first and point != LOGITS:
                        continue
                    distance = _distance(recorded, Place(prompt, "decode", step, layer, point), against, position)
                    if distance is not None and (distance or point == LOGITS):
                        first = True
                        yield Parting(prompt, against, step, position, layer, point, distance)


def _distance(recorded: Recorded, place: Place, against: str, position: int) -> float | None:
    """Return how far decode's row is from the same position in another phase; None where either is not there."""
    prompt, _, _, layer, point = place
    decoded = recorded.tensor(*place)
    rows = recorded.rows(prompt, against, layer, point) if "S" not in POINTS[point].axes else None
    whole = recorded.tensor(prompt, against, 0, layer, point)
    if decoded is None or whole is None:
        return None
    if rows is None:  # [H, T, S]
        held = unpack_positions(recorded.index[Place(prompt, against, 0, layer, point)])
        at = np.flatnonzero(held == position)
        if not len(at):
            return None
        return _relative(decoded[:, 0], whole[:, int(at[0]), : decoded.shape[2]])
    if position not in rows.positions:
        return None
    return _relative(decoded[0], rows.at(np.asarray([position]))[0])


def _relative(a: Array, b: Array) -> float | None:
    x, y = widen(a), widen(b)
    finite = bool(np.isfinite(x).all()), bool(np.isfinite(y).all())
    if not all(finite):
        return float("inf") if any(finite) else None
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return 0.0
    return ratio(norm(x - y), norm(y))


def summary(recorded: Recorded, decode_found: bool, state_found: bool) -> str | None:
    """Return one sentence on the views, or None where only one was recorded; rows finite in neither are left out."""
    found = list(partings(recorded))
    logits = [p for p in found if p.point == LOGITS]
    if not logits:
        return None
    parted = [p for p in found if p.distance and p.point != LOGITS] or [p for p in logits if p.distance]
    if not parted:
        return "prefill and decode agree bit for bit wherever both were recorded"
    first = min(parted, key=lambda p: (LAST if p.layer is None else p.layer, ORDER[p.point]))
    where = point_text(first)
    policy, rope = recorded.run.record.policy, recorded.config.rope_scaling
    apart = view_of(recorded.config, first.against, len(recorded.fed_tokens(first.prompt))) == "rescore"
    kind = (
        "state: see the cache above"
        if state_found
        else "an error of decode, see above"
        if decode_found
        else f"formula: {rope.kind} RoPE turned them by other lengths"
        if rope is not None and apart
        else "format: decode attention runs in float32"
        if policy["decode_attention"] == "float32"
        else "rounding of another shape: both views' own errors are the policy's"
    )
    worst = max(p.distance for p in logits)
    return (
        f"{first.against} and decode first differ at {where} ({digits(first.distance, 2)}, "
        f"prompt {first.prompt}, position {first.position}), logits by up to {digits(worst, 2)}: {kind}"
    )
