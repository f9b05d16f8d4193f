"""What is in a cache that is not the textbook's rows: from which slot on, and times what, or nothing at all."""

import numpy as np

from precaudit.diagnosis.named import UNNAMED, Named, distances
from precaudit.diagnosis.naming import read
from precaudit.diagnosis.scales import OTHER, from_slot
from precaudit.diagnosis.unwritten import NEVER
from precaudit.numbers.arrays import Array
from precaudit.references.cached import MADE, Held
from precaudit.references.formula import Shown
from precaudit.references.mapped import Pair, Textbook
from precaudit.schema.limits.checks import SAME
from precaudit.schema.places import spans


def name_cache(book: Textbook, beside: Shown, pair: Pair, suspect: bool = False) -> Named | None:
    """Return what the slots of a cache hold after the last call; None where the textbook's rows.

    ``suspect``: what the rows are made from is not the textbook's either; then rows made from what the program shows.
    """
    last = beside.caches[pair][-1]
    if suspect:
        own = read(book, beside, pair, MADE[pair.point], suspect)
        if own is None:
            return None
        last = _made_of(last, beside, own.values)
    real = last.positions >= 0
    seen, wanted, slots = last.seen[real], last.expected[real], last.positions[real]
    off = distances(seen, wanted) > SAME if len(seen) else np.zeros(0, bool)
    if not off.any():
        return None
    at = sorted({int(s) for s in slots[off]})
    where = f"slot{'s' if len(at) > 1 else ''} {spans(at)}"
    if not seen[off].any():
        return Named(NEVER, f"{where} of the cache {'hold' if len(at) > 1 else 'holds'} nothing", 0.0, "state")
    factor = float((seen[off] * wanted[off]).sum() / (wanted[off] ** 2).sum()) if wanted[off].any() else 0.0
    left = float(distances(seen[off], factor * wanted[off]).max()) if factor else np.inf
    if left <= SAME and at == list(range(at[0], int(slots.max()) + 1)):
        short = next(x for d in range(17) if abs((x := float(f"{factor:.{d}e}")) / factor - 1) <= SAME)
        return Named(OTHER, f"it is times {short:.6g} from {from_slot(at[0], last.seen.shape[1])}", left)
    return Named(UNNAMED, f"{where} of the cache {'hold' if len(at) > 1 else 'holds'} other rows than were made", 1.0)


def _made_of(held: Held, beside: Shown, rows: Array) -> Held:
    """Return a cache beside these rows [B, T, G, K] of the calls."""
    wanted = held.expected.copy()
    for b, s in enumerate(beside.sequences):
        slots = np.flatnonzero(held.positions[b] >= s.earlier.start)
        wanted[b, slots] = rows[b, s.rows[: len(slots)]]
    return held._replace(expected=wanted)
