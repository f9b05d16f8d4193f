"""What is said of a finding, from the finding's own record: what it fails by, its worst element, where its error is."""

from typing import Any

import numpy as np

from precaudit.diagnosis.evidence.positions import describe_positions
from precaudit.judging.verdicts import Verdict
from precaudit.numbers.arrays import Array
from precaudit.references.mutations.replay import Replay
from precaudit.schema.digits import count_text, digits
from precaudit.schema.metrics.sizes import own_index
from precaudit.schema.records.base import json_number
from precaudit.schema.records.errors import Worst


def broken_limit(v: Verdict) -> str:
    """Return the number that is over its limit, and of which part."""
    if not v.metric or v.value is None or v.limit is None:
        return ""
    if v.metric == "nonfinite":
        return f"{count_text(int(v.value), 'element')} NaN or infinite"
    index = "" if v.index is None else f" {list(v.index) if isinstance(v.index, tuple | list) else v.index}"
    return f"{v.metric} of {v.scope or 'the tensor'}{index} is {digits(v.value)}, the limit {digits(v.limit)}"


def worst_inside(found: Replay, axes: str, at: Array, rows: Array, v: Verdict) -> Worst | None:
    """Return the element farthest from FP64 in the part of ``rows`` that failed; None where all of it is FP64's."""
    candidate, reference, at = found.candidate[rows], found.reference[rows], at[rows]
    with np.errstate(invalid="ignore"):
        size = np.abs(candidate - reference)
    size = np.where(np.isfinite(size), size, np.where(candidate == reference, 0.0, np.inf))
    scope, index = v.scope, v.index
    size = np.where(_inside(size.shape, axes, at, scope, index), size, -1.0)
    t, h, k = (int(i) for i in np.unravel_index(int(size.argmax()), size.shape))
    if size[t, h, k] <= 0:
        return None
    values = json_number(candidate[t, h, k]), json_number(reference[t, h, k])
    return Worst(index=own_index((t, h, k), axes), candidate=values[0], reference=values[1])


def _inside(shape: tuple[int, ...], axes: str, at: Array, scope: str, index: Any) -> Array:
    """Return which elements [T, H, K] belong to a scope's slice."""
    inside = np.ones(shape, bool)
    if index is None:
        return inside
    t, h, k = np.indices(shape, sparse=True)
    if scope == "token":
        return np.broadcast_to(at[t] == index, shape)
    if scope == "head":
        return np.broadcast_to(h == index, shape)
    if scope == "channel":
        return np.broadcast_to(h * shape[2] + k == index, shape)
    own = tuple(index)
    if scope == "element" and len(own) in (2, 3):
        row, head, last = (
            (own[1], own[0], own[2]) if axes == "HTS" else (own[0], own[1] if len(own) == 3 else 0, own[-1])
        )
        return np.asarray((t == row) & (h == head) & (k == last))
    return inside


def describe_unrecognised(found: Replay, axes: str, at: Array) -> str:
    """Return what is known of an operation that no variant reproduces: the nearest, and where the error is."""
    nearest = found.best
    says = "none of the variants tried reproduces it within the limits"
    if nearest.explained > 0 and nearest.variant is not found.announced.variant:
        rest = digits(100 * (1 - nearest.explained), 2)
        says += f"; the nearest explains all but {rest} % of the error: {nearest.variant.says}"
    shown = describe_positions(found.left, found.made, axes, at)
    return f"{says}; {shown}" if shown else says
