"""Attention of a batch in which rows are given the mask of another."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from precaudit.diagnosis.named import NamedOperation, row_distances
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.references.formula import Shown
from precaudit.references.mutations.forms import Inputs, evaluate_form, usual_form
from precaudit.schema.limits.checks import SAME

OTHER = "another row's mask"
AHEAD = "mask one ahead"


def other_mask(each: Sequence[Inputs], seen: Sequence[Array]) -> NamedOperation | None:
    """Return which rows of a batch see as many keys as another has; None where that does not make all of them.

    ``seen``: attention's output [T, H, K] of every row of the batch, in FP64.
    """
    if len(each) < 2 or each[0].row.kind != "mix":
        return None
    found: dict[int, int] = {}
    worst, first = 0.0, ""
    for b, o in enumerate(each):
        off = row_distances(evaluate_form(usual_form, o, FP64), seen[b])
        if off.max() <= SAME:
            continue
        sizes = {len(x.values[1]): i for i, x in reversed(list(enumerate(each))) if len(x.values[1]) < len(o.values[1])}
        left = {keys: float(row_distances(_seeing(o, keys), seen[b]).max()) for keys in sizes}
        keys = min(left, key=lambda n: left[n], default=None)
        if keys is None or not left[keys] <= SAME:
            return None
        first = first or f"row {b}, position {int(o.positions[np.flatnonzero(off > SAME)[0]])}"
        found[b], worst = sizes[keys], max(worst, left[keys])
    if not found:
        return None
    of = sorted(set(found.values()))
    which, has = ("row", "has") if len(found) == 1 else ("rows", "have")
    keys_of = ", ".join(f"row {i} has {len(each[i].values[1])}" for i in of)
    says = f"{which} {_list(list(found))} of the batch {has} the mask of another: {keys_of} keys; first at {first}"
    return NamedOperation(OTHER, says, worst)


def one_ahead(beside: Shown, each: Sequence[Inputs], seen: Sequence[Array]) -> NamedOperation | None:
    """Return that every row sees one key past its own, in the slot after the last written one a row of zeros.

    ``seen``: as for ``other_mask``.
    """
    if each[0].row.kind != "mix":
        return None
    worst = 0.0
    for o, x, s in zip(each, seen, (s for s in beside.sequences if len(s.rows)), strict=True):
        for rows in beside.calls:
            first, end = (int(i) for i in np.searchsorted(s.rows, (rows.start, rows.stop)))
            if first == end:
                continue
            its, written = o.rows(slice(first, end)), int(o.positions[end - 1]) + 1
            k, v = (np.concatenate([c[:written], np.zeros_like(c[:1])]) for c in o.values[1:])
            ahead = replace(its, positions=its.positions + 1, values=(its.values[0], k, v))
            worst = max(worst, float(row_distances(evaluate_form(usual_form, ahead, FP64), x[first:end]).max()))
            if not worst <= SAME:
                return None
    return NamedOperation(
        AHEAD, "every row attends to one key past its own; the slot after the last written one holds zeros", worst
    )


def _seeing(o: Inputs, keys: int) -> Array:
    """Return attention's output over the first keys alone."""
    q, k, v = o.values
    return evaluate_form(usual_form, replace(o, values=(q, k[:keys], v[:keys])), FP64)


def _list(rows: Sequence[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, rows[:-1])), str(rows[-1]))))
