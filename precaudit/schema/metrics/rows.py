"""One difference as an ErrorRecord."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.metrics.sizes import Difference, canonical, sizes
from precaudit.schema.records.base import json_number, value


def measure_rows(
    stored: Array, reference: Array, point: str, positions: Sequence[int] | Array, window: int | None = None
) -> tuple[Difference, dict[str, Any]]:
    """Compare a recorded tensor with FP64 values of its shape; return the difference and the record's fields.

    Scores of keys after a row's position, or before its window, are masked: they are in no number, and counted as
    ``excluded``.
    """
    axes = POINTS[point].axes
    r, hidden = canonical(reference, axes), masked_elements(point, positions, reference.shape[-1], window)
    if hidden is not None:
        r, stored = zero_masked(r, hidden), zero_masked(stored, hidden.transpose(1, 0, 2))
    found = sizes(stored, r, axes, positions)
    if hidden is not None:
        found["excluded"] = int(hidden.sum()) * r.shape[1]
        seen_part = 1.0 - found["excluded"] / found["n"]
        found |= {k: json_number(value(found[k]) / seen_part) for k in ("mae", "mean")}
        found["n"] -= found["excluded"]
    return Difference.of(canonical(stored, axes), r), found


def masked_elements(point: str, positions: Sequence[int] | Array, keys: int, window: int | None = None) -> Array | None:
    """Return where [T, 1, S] a point's elements are masked and read by nothing; None where none are.

    Only scores: a probability after the mask is read, and has to be 0.
    """
    if POINTS[point].kind != "score":
        return None
    hidden = unseen(np.asarray(positions), keys, window)[:, None, :]
    return hidden if hidden.any() else None


def zero_masked(x: Array, hidden: Array | None) -> Array:
    """Return an array with 0 for what is masked: the one place where a mask is applied to values that are compared.

    ``hidden``: where, of shapes that broadcast; None: nowhere.
    """
    return x if hidden is None else np.where(hidden, np.zeros((), x.dtype), x)


def unseen(positions: Array, keys: int, window: int | None) -> Array:
    """Return where [T, S] a row at one of ``positions`` does not see a key: after it, or before its window."""
    at, s = positions[:, None], np.arange(keys)[None, :]
    return np.asarray(s > at if window is None else (s > at) | (s <= at - window))
