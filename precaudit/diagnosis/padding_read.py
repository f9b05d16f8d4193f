"""Attention that reads the padding before its sequence in the same call, where positions count it."""

import numpy as np

from precaudit.diagnosis.named import NamedOperation, row_distances
from precaudit.models.numpy_decoder.model import attention
from precaudit.models.numpy_decoder.operators import AttentionRule
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.references.formula import Shown
from precaudit.references.mapped import MappedTextbook, Pair
from precaudit.schema.graphs.decoder import KEYS, POINTS, QUERY, VALUES
from precaudit.schema.limits.checks import SAME

READ = "padding read"


def padding_read(book: MappedTextbook, beside: Shown, pair: Pair) -> NamedOperation | None:
    """Return that keys and values of the rows before sequences make attention's output, as if these were theirs.

    None where they do not make all of it, or the program does not show what it reads.
    """
    if POINTS[pair.point].kind != "mix" or pair.layer is None:
        return None
    shown = {(p.layer, p.point): x for p, x in beside.seen.items()}
    queries, normed = (shown.get((pair.layer, name)) for name in (QUERY, POINTS[KEYS].inputs[0]))
    if queries is None or normed is None:
        return None
    worst, most = 0.0, 0
    for b, s in enumerate(beside.sequences):
        if s.earlier.start or s.earlier.turned != s.lead or not len(s.rows):
            return None
        at, end = s.rows, int(s.rows[-1]) + 1
        made = _over_all(book, pair.layer, queries[b, at], normed[b, :end], at)
        worst = max(worst, float(row_distances(made, beside.seen[pair][b, at]).max()))
        most = max(most, s.lead)
    if not most or not worst <= SAME:
        return None
    says = f"attention reads the padding before its sequences, up to {most} rows"
    return NamedOperation(READ, says, worst)


def _over_all(book: MappedTextbook, layer: int, q: Array, normed: Array, at: Array) -> Array:
    """Return attention's output of rows ``at`` over the keys of all rows, each turned by its place."""
    context = book.model.context(layer, np.arange(len(normed)), FP64)
    k, v = (book.model.apply(name, context, [normed]) for name in (KEYS, VALUES))
    return attention(q, k, v, at, AttentionRule.of(book.config, layer), FP64)
