"""Which key head each query head reads: tried one by one, so that heads that are exchanged are told by number."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.references.mutations.forms import Inputs, evaluate_form, on_inputs, usual_form
from precaudit.references.mutations.variants import Variant
from precaudit.schema.metrics.sizes import canonical

WHICH = {"keys and values": (1, 2), "keys": (1,), "values": (2,)}
MOST = 16  # key heads: each is tried on all rows


def head_variants(o: Inputs, candidate: Array) -> Iterator[Variant]:
    """Yield scores or attention's output [T, H, K] whose query heads read the key heads that make it best in FP64."""
    if not o.row.reads_keys or o.last or not 1 < (groups := o.values[1].shape[1]) <= MOST:
        return
    for what, which in WHICH.items():
        if max(which) < len(o.values) and (o.probs is None or which == (2,)):
            read = _nearest_heads(o, candidate, which)
            if read != tuple(range(groups)):
                says = f"{what} are those of heads {', '.join(map(str, read))} in place of 0 to {groups - 1}"
                a, b = (i for i, g in enumerate(read) if i != g) if _is_exchange(read) else (0, 0)
                name = f"{what} of heads {a} and {b} exchanged" if a != b else f"{what} of other heads"
                yield Variant(
                    name, "semantics", f"{name}: {says}", on_inputs(partial(_take_heads, which, read)), fitted=True
                )


def _nearest_heads(o: Inputs, candidate: Array, which: tuple[int, ...]) -> tuple[int, ...]:
    """Return the key head that each group of query heads comes nearest with."""
    groups, finite = o.values[1].shape[1], np.isfinite(candidate)
    left = np.zeros((groups, groups))  # of a group, with a head
    for g in range(groups):
        alone = replace(o, values=_take_heads(which, (g,) * groups, o))
        with np.errstate(all="ignore"):
            off = np.where(finite, candidate - canonical(evaluate_form(usual_form, alone, FP64), o.row.axes), 0.0)
        error = np.nan_to_num((off**2).sum(axis=(0, 2)), nan=np.inf)
        left[:, g] = error.reshape(groups, -1).sum(axis=1)
    return tuple(int(g) for g in left.argmin(axis=1))


def _is_exchange(read: tuple[int, ...]) -> bool:
    """Whether two heads stand in each other's place, and all others in their own."""
    moved = [i for i, g in enumerate(read) if i != g]
    return len(moved) == 2 and read[moved[0]] == moved[1] and read[moved[1]] == moved[0]


def _take_heads(which: tuple[int, ...], read: tuple[int, ...], o: Inputs) -> tuple[Array, ...]:
    return tuple(x[:, list(read)] if i in which else x for i, x in enumerate(o.values))
