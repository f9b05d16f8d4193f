"""What happened to a cache that holds integers with scales, and does not give the rows that were written."""

from collections.abc import Iterator

import numpy as np

from precaudit.diagnosis.evidence.states import ENOUGH, State
from precaudit.numbers.arrays import Array, rounder, widen
from precaudit.numbers.integers import in_rows
from precaudit.schema.digits import digits


def explain_integers(found: Array, rows: Array, expected: Array) -> State | None:
    """Say how a cache read as ``found`` [S, G, K] was made of ``rows`` otherwise than as ``expected``, or None.

    The rows may never have been quantised, their zero may have moved by one, or their scale may be another row's or
    head's, the largest of all, times a factor, or in a narrow format.
    """
    integers, scales = in_rows(widen(rows))
    bad = np.flatnonzero((widen(found) != widen(expected)).any(axis=(1, 2)))
    if not len(bad):
        return None
    at = tuple(int(s) for s in bad)
    for cause, says, made in _ways(found, rows, integers, scales, bad):
        share = float(np.mean(widen(found)[bad] == made))
        if share >= ENOUGH:
            return State(
                cause, "state" if cause.startswith(("scale of", "scales of")) else "quantisation", says, share, at
            )
    return None


def _ways(found: Array, rows: Array, integers: Array, scales: Array, bad: Array) -> Iterator[tuple[str, str, Array]]:
    """Yield (cause, what it is, what it gives [S', G, K] at the rows that differ)."""
    stored = rounder(found.dtype.name)
    yield "cache not quantised", "the rows are read as they were written: nothing is in int8", widen(rows)[bad]
    q, s = integers[bad].astype(np.float64), scales[bad].astype(np.float64)
    for zero in (1, -1):
        says = f"the zero-point is wrong by {zero}: every integer is read {'more' if zero > 0 else 'less'} by one"
        yield f"zero-point wrong by {zero}", says, stored((q + zero) * s)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(np.abs(q) > 16, widen(found)[bad] / (q * s), np.nan)
    if np.isfinite(ratio).any():
        factor = float(np.nanmedian(ratio))
        yield (
            f"scales × {digits(factor, 4)}",
            f"every scale is multiplied by {digits(factor, 4)}",
            stored(q * s * factor),
        )
    heads = scales.shape[1]
    for by in range(1, heads):
        says = f"head h is read with the scale of head (h − {by}) mod {heads}"
        yield "scales of other heads", says, stored(q * np.roll(s, by, axis=1))
    for name in ("bfloat16", "float16"):
        yield f"scales in {name}", f"scales are rounded to {name}", stored(q * rounder(name)(s))
    yield "largest scale for all", "all rows are read with the largest of the scales", stored(q * scales.max())
    taken = [_nearest(widen(found)[t], integers[t].astype(np.float64), scales.astype(np.float64)) for t in bad]
    made = np.stack([stored(integers[t] * scales[u].astype(np.float64)) for t, u in zip(bad, taken, strict=True)])
    first = f"row {bad[0]} is read with the scale of row {taken[0]}"
    yield f"scale of row {taken[0]}", first if len(bad) == 1 else f"{first}; {len(bad)} rows differ", made


def _nearest(row: Array, integers: Array, scales: Array) -> int:
    """Return the row u whose scales [S, G, 1] make ``row`` [G, K] of its integers best."""
    left = np.abs(row - integers * scales).sum(axis=(1, 2))
    return int(np.argmin(np.where(np.isfinite(left), left, np.inf)))
