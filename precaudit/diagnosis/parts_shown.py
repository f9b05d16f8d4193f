"""Scores or probabilities that a program shows, where they are the first of attention to leave the textbook."""

from collections.abc import Sequence

import numpy as np

from precaudit.diagnosis.named import row_distances
from precaudit.models.numpy_decoder.model import all_probs, all_scores
from precaudit.models.numpy_decoder.operators import AttentionRule
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.references.formula import Shown
from precaudit.references.mapped import Pair
from precaudit.references.mutations.forms import Inputs
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.limits.checks import SAME
from precaudit.schema.metrics.rows import unseen


def first_part(beside: Shown, pair: Pair, each: Sequence[Inputs]) -> Pair:
    """Return what shows first that attention is not the textbook's: scores, probabilities, or its output ``pair``.

    ``each``: what every sequence that has rows reads, in FP64. Compared is what a row may see, as the program has it in
    FP64 too, with what the textbook makes of the same queries and keys.
    """
    parts = (p for p in beside.keyed if p.layer == pair.layer and POINTS[p.point].within == pair.point)
    for part in sorted(parts, key=lambda p: list(POINTS).index(p.point)):
        its = [(b, s) for b, s in enumerate(beside.sequences) if len(s.rows)]
        for (b, s), o in zip(its, each, strict=True):
            for call, rows in enumerate(beside.calls):
                first, end = (int(i) for i in np.searchsorted(s.rows, (rows.start, rows.stop)))
                shown = beside.keyed[part][call][b][:, s.rows[first:end] - rows.start, s.lead :]
                if first < end and _differs(part, shown, o.rows(slice(first, end))):
                    return part
    return pair


def _differs(part: Pair, seen: Array, o: Inputs) -> bool:
    """Whether scores or probabilities [H, T, S] are not the textbook's of these rows' queries."""
    rule, keys = AttentionRule.of(o.config, o.layer), min(int(o.positions[-1]) + 1, seen.shape[2])
    made = all_scores(o.values[0], o.values[1][:keys], rule, FP64)
    if POINTS[part.point].kind == "softmax":
        made = all_probs(made, o.positions, rule.window, FP64)
    hidden = unseen(np.asarray(o.positions), keys, rule.window)
    x, y = (np.where(hidden, 0.0, v[:, :, :keys]).transpose(1, 0, 2) for v in (made, seen))
    return not bool((row_distances(x, y) <= SAME).all())
