"""How an error depends on where a token stands, as those of mistakes in RoPE, windows and caches do."""

import numpy as np

from precaudit.comparison.operations import Operation
from precaudit.formats import Array
from precaudit.metrics.sizes import canonical
from precaudit.numpy_decoder.rounding import Rounding

FEW = 8  # rows below which nothing is said
HIT = 0.1  # a row counts as hit when it has this share of the worst row's error
GROWS = 3.0  # last quarter's median over the first's
MONOTONE = 0.7  # Spearman's rank correlation of error and position


def by_position(o: Operation, announced: Rounding) -> str:
    """Say how what the announced policy leaves of an operation depends on the row's position; nothing of few rows."""
    at = np.asarray(o.positions)
    if len(at) < FEW:
        return ""
    made, stored = (canonical(x, o.axes) for x in (o.evaluate([announced])[0], o.stored))
    left = np.where(np.isfinite(stored), stored - made, np.inf)
    keys = np.arange(left.shape[2])[None, None, :] > at[:, None, None]
    left = np.where(keys, 0.0, left) if "S" in o.axes else left
    sizes = np.sqrt((left**2).sum(axis=(1, 2)) / np.maximum((made**2).sum(axis=(1, 2)), 1e-300))
    return shape(sizes, at)


def shape(sizes: Array, at: Array) -> str:
    """Say how sizes [T] of errors depend on positions [T]."""
    if not np.isfinite(sizes).all():
        bad = at[~np.isfinite(sizes)]
        return f"not finite at {len(bad)} of {len(at)} positions, first {bad[0]}"
    hit = sizes > HIT * sizes.max()
    if hit.sum() <= max(1, len(at) // 16):
        return f"only at position{'s' if hit.sum() > 1 else ''} {', '.join(str(p) for p in at[hit])}"
    first = int(np.argmax(hit))
    if first and hit[first:].mean() > 0.9 and sizes[:first].max() < 0.01 * sizes.max():
        return f"from position {at[first]} on, and nowhere before"
    quarter = len(at) // 4
    early, late = np.median(sizes[:quarter]), np.median(sizes[-quarter:])
    ranks = np.argsort(np.argsort(sizes))
    if late > GROWS * early and np.corrcoef(ranks, np.arange(len(at)))[0, 1] > MONOTONE:
        return f"grows with position: {early:.1e} in the first quarter, {late:.1e} in the last"
    return "at every position alike" if hit.mean() > 0.9 else ""
