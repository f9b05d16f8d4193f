"""Which rows of a batch hold sequences and which are padding: what the map says, or what is found among the inputs.

Nobody reads padding, so what a program makes there is nobody's: it is in no formula record, and counted. A length is
only taken from an input that no map names where the values at the padding show that its keys are masked.
"""

from collections.abc import Mapping

import numpy as np

from precaudit.models.numpy_decoder.model import Model, attention
from precaudit.models.numpy_decoder.operators import AttentionRule
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array, widen
from precaudit.schema.graphs.decoder import KEYS, MIX, POINTS, QUERY, VALUES

Shown = Mapping[tuple[int | None, str], Array]


def as_rows(x: Array, batch: int, rows: int) -> Array | None:
    """Return which rows [B, T] are a sequence's by an input: lengths [B] of right-padded ones, or a mask [B, T].

    None where it is neither.
    """
    if x.shape == (batch, rows) and rows > 1:
        mask = x if x.dtype.kind in "iub" else widen(x)
        if ((mask == 0) | (mask == 1)).all():
            return np.asarray(mask != 0)
    if x.dtype.kind in "iu" and x.size == batch and x.ndim <= 2 and (x >= 0).all():
        return np.asarray(np.arange(rows) < x.reshape(-1, 1))
    return None


def padding(
    model: Model, shown: Shown, rows: slice, first: Mapping[str, Array], tokens: int, near: float
) -> int | None:
    """Return the input of the first call that says which of its rows are a sequence's; None where none does.

    ``shown``: [B, T, …] of all calls; ``near``: relative distance within which attention's output is the textbook's.
    """
    batch, n = len(next(iter(shown.values()))), rows.stop - rows.start
    best: tuple[int, int] | None = None
    for name, x in first.items():
        real = None if int(name) == tokens or x.ndim > 2 else as_rows(x, batch, n)
        if real is None or real.all() or not real[:, 0].all() or (real[:, 1:] > real[:, :-1]).any():
            continue
        ends = real.sum(axis=1)
        if best is not None and real.sum() >= best[0]:
            continue
        if all(_reads_no_padding(model, shown, rows, b, ends, near) for b in range(batch)):
            best = int(real.sum()), int(name)
    return None if best is None else best[1]


def _reads_no_padding(model: Model, shown: Shown, rows: slice, b: int, ends: Array, near: float) -> bool:
    """Whether the rows from ``ends[b]`` on read none of their own keys: as many as a sequence is long, or nothing."""
    last = int(ends[b])
    if last == rows.stop - rows.start:
        return True
    normed = POINTS[KEYS].inputs[0]
    if any((0, name) not in shown for name in (MIX, QUERY, normed)):
        return False
    read, q, seen = (widen(shown[0, name][b, rows]) for name in (normed, QUERY, MIX))
    if not seen[last:].any():
        return True
    at = np.arange(len(q))
    k, v = (model.apply(name, model.context(0, at, FP64), [read]) for name in (KEYS, VALUES))
    rule, size = AttentionRule.of(model.config, 0), np.linalg.norm(seen[last:])
    made = (
        attention(q[last:], k[:m], v[:m], at[last:], rule, FP64) for m in sorted({int(e) for e in ends if e <= last})
    )
    return any(np.linalg.norm(x - seen[last:]) <= near * size for x in made)
