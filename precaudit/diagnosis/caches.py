"""What is in a cache that is not the textbook's rows: from which slot on, and times what, or nothing at all."""

import numpy as np

from precaudit.diagnosis.evidence.caches import FOREIGN, explain
from precaudit.diagnosis.evidence.states import State
from precaudit.diagnosis.named import UNNAMED, NamedOperation, norms, row_distances
from precaudit.diagnosis.naming import name_formula, read_operands
from precaudit.diagnosis.scales import OTHER, from_slot
from precaudit.numbers.arrays import Array
from precaudit.references.cached import MADE, CachePair
from precaudit.references.formula import Shown
from precaudit.references.mapped import MappedTextbook, Pair
from precaudit.references.mutations.forms import quantiser
from precaudit.schema.digits import digits
from precaudit.schema.limits.checks import SAME
from precaudit.schema.places import spans


def name_cache(
    book: MappedTextbook, beside: Shown, pair: Pair, suspect: bool = False, case: str = ""
) -> NamedOperation | None:
    """Return what the slots of a cache hold after the last call; None where the textbook's rows.

    ``suspect``: what the rows are made from is not the textbook's either; then rows made from what the program shows.
    """
    last = beside.caches[pair][-1]
    if suspect:
        own = read_operands(book, beside, pair, MADE[pair.point], suspect)
        if own is None:
            return None
        last = _made_of(last, beside, own.values)
    real = last.positions >= 0
    seen, wanted, slots = last.seen[real], last.expected[real], last.positions[real]
    off = row_distances(seen, wanted) > SAME if len(seen) else np.zeros(0, bool)
    if not off.any():
        return None
    at = sorted({int(s) for s in slots[off]})
    where = f"slot{'s' if len(at) > 1 else ''} {spans(at)}"
    factor = float((seen[off] * wanted[off]).sum() / (wanted[off] ** 2).sum()) if wanted[off].any() else 0.0
    left = float(row_distances(seen[off], factor * wanted[off]).max()) if factor else np.inf
    if left <= SAME and at == list(range(at[0], int(slots.max()) + 1)):
        short = next(x for d in range(17) if abs((x := float(f"{factor:.{d}e}")) / factor - 1) <= SAME)
        return NamedOperation(
            OTHER, f"it is times {digits(short, 6)} from {from_slot(at[0], last.seen.shape[1])}", left
        )
    if (state := _held_instead(last, case)).cause != FOREIGN:
        return NamedOperation(state.cause, state.says, 0.0, state.kind)
    formula = _formula_of_rows(book, beside, pair, suspect)
    return formula or NamedOperation(
        UNNAMED, f"{where} of the cache {'have' if len(at) > 1 else 'has'} other rows than were written", 1.0
    )


def _formula_of_rows(book: MappedTextbook, beside: Shown, pair: Pair, suspect: bool) -> NamedOperation | None:
    """Return the formula that makes the rows that a cache holds from what they read; None where none is known."""
    last, source = beside.caches[pair][-1], pair._replace(point=MADE[pair.point])
    rows = np.zeros((len(beside.sequences), beside.calls[-1].stop, *last.seen.shape[2:]))
    for b, s in enumerate(beside.sequences):
        slots = [np.flatnonzero(last.positions[b] == position) for position in s.positions]
        if not all(len(x) for x in slots):
            return None
        rows[b, s.rows] = last.seen[b, [int(x[0]) for x in slots]]
    found = name_formula(book, beside._replace(seen={**beside.seen, source: rows}), source, suspect)
    return None if found is None or found.cause == UNNAMED else found


def _held_instead(held: CachePair, case: str) -> State:
    """Return what the first sequence of a batch that differs has in its cache: other rows, none, or in few bits.

    FP64 sums in another order: a row that is a known one to 1e-6 is taken for it.
    """
    off = (row_distances(x, y)[p >= 0].max(initial=0.0) for x, y, p in zip(*held, strict=True))
    b = next(i for i, far in enumerate(off) if not far <= SAME)
    real = [p >= 0 for p in held.positions]
    known = {f"{case}, row {i}": y[r] for i, (y, r) in enumerate(zip(held.expected, real, strict=True))}
    expected = known.pop(f"{case}, row {b}")
    narrow = [quantiser(bits)(expected) for bits in (8, 4)]
    pool = np.concatenate([expected, *narrow, *known.values(), np.zeros_like(expected[:1])])
    found = held.seen[b][real[b]]
    for t, row in enumerate(found):
        far = row_distances(pool, np.broadcast_to(row, pool.shape)) if row.any() else norms(pool)
        found[t] = pool[far.argmin()] if far.min() <= SAME else row
    return explain(found, expected, known)


def _made_of(held: CachePair, beside: Shown, rows: Array) -> CachePair:
    """Return a cache beside these rows [B, T, G, K] of the calls."""
    wanted = held.expected.copy()
    for b, s in enumerate(beside.sequences):
        slots = np.flatnonzero(held.positions[b] >= s.earlier.start)
        wanted[b, slots] = rows[b, s.rows[: len(slots)]]
    return held._replace(expected=wanted)
