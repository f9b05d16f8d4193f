"""Attention that reads a slot of a cache which nothing has written, where a sequence was begun elsewhere."""

from collections.abc import Iterator

import numpy as np

from precaudit.diagnosis.named import NamedOperation, row_distances
from precaudit.models.numpy_decoder.model import attention
from precaudit.models.numpy_decoder.operators import AttentionRule
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.references.formula import Shown
from precaudit.references.mapped import MappedTextbook, Pair
from precaudit.references.sequences import Tokens
from precaudit.schema.graphs.decoder import KEYS, POINTS, QUERY, VALUES
from precaudit.schema.limits.checks import SAME

NEVER = "slot never written"


def unwritten(book: MappedTextbook, beside: Shown, pair: Pair) -> NamedOperation | None:
    """Return what makes attention's output: keys and values of 0 between those before the first row and its own.

    None where that does not make it, to 1e-6, or the program does not show what its own keys are made from.
    """
    its = [(b, s, s.unwritten) for b, s in enumerate(beside.sequences) if s.unwritten is not None]
    if POINTS[pair.point].kind != "mix" or not its or pair.layer is None:
        return None
    shown = {(p.layer, p.point): x for p, x in beside.seen.items()}
    read = [shown.get((pair.layer, name)) for name in (QUERY, POINTS[KEYS].inputs[0])]
    if any(x is None for x in read):
        return None
    for b, sequence, empty in its:
        q, normed = (x[b, sequence.rows] for x in read if x is not None)
        made = _readings(book, pair.layer, sequence, len(empty), q, normed)
        seen = beside.seen[pair][b, sequence.rows]
        left = min(float(row_distances(x, seen).max()) for x in made)
        if not left <= SAME:
            return None
    b, sequence, empty = its[0]
    slots = f"slot {empty.start}" if len(empty) == 1 else f"slots {empty.start} to {empty.stop - 1}"
    says = (
        f"attention reads {slots} of the cache, which nothing has written: {sequence.earlier.start} rows are stored "
        f"before the first call, which writes slot {empty.stop}"
    )
    return NamedOperation(NEVER, says, left, "state")


def _readings(book: MappedTextbook, layer: int, s: Tokens, empty: int, q: Array, normed: Array) -> Iterator[Array]:
    """Yield attention's output over ``empty`` slots of 0 before a sequence's rows: keys turned past them, or not."""
    model, rule = book.model, AttentionRule.of(book.config, layer)
    v = model.apply(VALUES, model.context(layer, s.positions, FP64), [normed])
    gap = np.zeros((empty, *v.shape[1:]))
    for by in (empty, 0):
        k = model.apply(KEYS, model.context(layer, s.positions + s.earlier.turned + by, FP64), [normed])
        keys, values = s.earlier.before(layer, np.concatenate([gap, k]), np.concatenate([gap, v]))
        yield attention(q, keys, values, s.positions + empty, rule, FP64)
