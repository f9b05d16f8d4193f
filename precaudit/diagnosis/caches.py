"""What happened to a cache that does not hold the rows that were written."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from precaudit.diagnosis.forms import quantised
from precaudit.diagnosis.variants import Class
from precaudit.formats import FORMATS, Array, widen

ENOUGH = 0.9  # share of elements an integer grid must give bit for bit: a scale in another format moves some


class State(NamedTuple):
    """``explained``: share of the rows that differ which the cause gives bit for bit; ``rows``: those rows."""

    cause: str
    kind: Class
    says: str
    explained: float
    rows: tuple[int, ...]


def explain(found: Array, expected: Array) -> State:
    """Say what a cache [S, G, K] holds instead of the expected rows.

    A row may be rounded to a narrower format, zero (never written), another position's, or nothing that was written.
    """
    f, e = widen(found), widen(expected)
    bad = np.flatnonzero(np.any((f != e) & ~(np.isnan(f) & np.isnan(e)), axis=(1, 2)))
    rows = tuple(int(s) for s in bad)
    if not rows:
        return State("not finite", "state", "the cache holds NaN or infinities, as the rows that were written", 1.0, ())
    for name in ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"):
        with np.errstate(over="ignore"):
            narrow = expected.astype(np.float32).astype(FORMATS[name].dtype).astype(np.float32)
        if np.array_equal(f[bad], narrow[bad].astype(np.float64)):
            return State(f"cache in {name}", "format", f"the cached rows are rounded to {name}", 1.0, rows)
    for bits in (8, 4):
        made = widen(quantised(bits)(e[bad]).astype(expected.dtype))
        share = float(np.mean(f[bad] == made)) if bad.size else 0.0
        if share >= ENOUGH:
            says = f"the cached rows are quantised to {bits} bits, one scale a head and row"
            return State(f"cache in int{bits}", "format", says, share, rows)
    holds = {s: _holds(f[s], e) for s in rows}
    zero = [s for s in rows if holds[s] == "zeros"]
    moved = {s: h for s, h in holds.items() if isinstance(h, int)}
    known = len(zero) + len(moved)
    share = known / len(rows) if rows else 1.0
    if moved and len(moved) >= len(zero):
        shifts = {h - s for s, h in moved.items()}
        first, source = next(iter(moved.items()))
        if len(shifts) == 1 and len(moved) > 1:
            by = shifts.pop()
            says = f"rows {_span(moved)} hold the rows {abs(by)} {'before' if by < 0 else 'after'}"
            return State("rows shifted", "state", says, share, rows)
        return State("stale row", "state", f"row {first} holds row {source}; {len(rows)} rows differ", share, rows)
    if zero:
        return State(
            "rows not written", "state", f"rows {_span(zero)} are zero: never written, or not read", share, rows
        )
    return State("foreign rows", "state", f"rows {_span(rows)} hold what no recorded call wrote", 0.0, rows)


def _holds(row: Array, expected: Array) -> str | int | None:
    """Return which expected row this is, ``zeros``, or None."""
    if not row.any():
        return "zeros"
    same = np.flatnonzero((expected == row).all(axis=(1, 2)))
    return int(same[0]) if len(same) else None


def _span(rows: Iterable[int]) -> str:
    found = sorted(rows)
    return f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]} ({len(found)})"
