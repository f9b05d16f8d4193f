"""Which rows of a batch hold sequences and which are padding: what the map says, or what is found among the inputs.

Nobody reads padding, so what a program makes there is nobody's: it is in no formula record, and counted. What no map
names is only taken for padding where the values show that no row of a sequence reads it, or that it reads nothing else.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np

from precaudit.models.numpy_decoder.model import Model, attention
from precaudit.models.numpy_decoder.operators import AttentionRule
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array, widen
from precaudit.schema.graphs.decoder import KEYS, MIX, POINTS, QUERY, VALUES

Shown = Mapping[tuple[int | None, str], Array]


class Padding(NamedTuple):
    """What says which rows of a call are padding: an input, by its leaf, or a token id that no sequence has.

    ``kind``: "rows", how many rows of a call are each sequence's [B], from its first on, or a mask of them [B, T];
    "lead": how many before each sequence's first are padding [B]; "id": the token of padding is ``number``.
    """

    kind: Literal["rows", "lead", "id"]
    number: int

    def rows(self, given: Mapping[str, Array], ids: Array) -> Array | None:
        """Return which rows [B, T] of a call are a sequence's, of its inputs and ids; None where neither says it."""
        if self.kind == "id":
            return np.asarray(ids != self.number)
        x = given.get(str(self.number))
        if x is None or self.kind == "rows":
            return None if x is None else as_rows(x, *ids.shape)
        if x.dtype.kind in "iu" and x.size == len(ids) and x.ndim <= 2 and (x >= 0).all():
            return np.asarray(np.arange(ids.shape[1]) >= x.reshape(-1, 1))
        return None


def as_rows(x: Array, batch: int, rows: int) -> Array | None:
    """Return which rows [B, T] are a sequence's by an input: lengths [B] of right-padded ones, or a mask [B, T].

    None where it is neither.
    """
    if x.shape == (batch, rows) and rows > 1:
        mask = x if x.dtype.kind in "iub" else widen(x)
        if ((mask == 0) | (mask == 1)).all():
            return np.asarray(mask != 0)
    if x.dtype.kind in "iu" and x.size == batch and x.ndim <= 2 and (x >= 0).all():
        return np.asarray(np.arange(rows) < x.reshape(-1, 1))
    return None


def possible_padding(first: Mapping[str, Array], tokens: int, ids: Array) -> Iterator[tuple[Padding, Array]]:
    """Yield what may say which rows of a first call are padding, and the rows [B, T] that are a sequence's by it.

    Each sequence's are at least one, one after another, and not all rows are. A token id may be that of padding where
    it is at the ends of sequences of several lengths, more than once in one.
    """
    leaves = [int(n) for n, x in first.items() if int(n) != tokens and x.ndim <= 2]
    every = [*(Padding("rows", n) for n in leaves), *(Padding("lead", n) for n in leaves)]
    every += [Padding("id", int(n)) for n in np.unique(ids[:, [0, -1]])]
    for one in every:
        real = one.rows(first, ids)
        if real is None or real.all() or not real.any(axis=1).all():
            continue
        lengths = real.sum(axis=1)
        if one.kind == "id" and (len(set(lengths.tolist())) == 1 or ids.shape[1] - lengths.min() < 2):
            continue
        if (np.abs(np.diff(real.astype(int), axis=1, prepend=0, append=0)).sum(axis=1) == 2).all():
            yield one, real


def possible_leads(first: Mapping[str, Array], batch: int) -> Iterator[tuple[int, ...]]:
    """Yield how many slots before each sequence [B] inputs of a first call may say are padding: counts, and masks."""
    for x in (x for x in first.values() if 0 < x.ndim <= 2 and x.size):
        if x.dtype.kind in "iu" and x.size == batch and (x >= 0).all() and x.any():
            yield tuple(int(n) for n in x.reshape(-1))
        elif len(x) == batch and x.ndim == 2:
            mask = as_rows(x, *x.shape)
            if mask is not None and mask.any(axis=1).all() and not mask[:, 0].all():
                yield tuple(int(n) for n in mask.argmax(axis=1))


def padding(
    model: Model, shown: Shown, rows: slice, first: Mapping[str, Array], tokens: tuple[int, Array], near: float
) -> Padding | None:
    """Return what says which rows of the first call are padding, as the values show it; None where nothing does.

    ``shown``: [B, T, …] of all calls; ``tokens``: the input of token ids, and these; ``near``: relative distance within
    which attention's output is the textbook's.
    """
    best: tuple[int, Padding] | None = None
    for one, real in possible_padding(first, *tokens):
        if best is not None and real.sum() >= best[0]:
            continue
        begins, ends = real.argmax(axis=1), real.shape[1] - real[:, ::-1].argmax(axis=1)
        own = [slice(int(a), int(b)) for a, b in zip(begins, ends, strict=True)]
        if all(
            any(_reads_its_own(model, _attended(shown, b, rows), at, near, turned) for turned in (0, at.start))
            if at.start
            else ends[b] == rows.stop - rows.start
            or _reads_no_padding(model, _attended(shown, b, rows), ends, int(ends[b]), near)
            for b, at in enumerate(own)
        ):
            best = int(real.sum()), one
    return None if best is None else best[1]


class Attended(NamedTuple):
    """What the first layer's attention reads and makes of one sequence [T, …]."""

    normed: Array
    q: Array
    mixed: Array


def _attended(shown: Shown, b: int, rows: slice) -> Attended | None:
    """Return a sequence's rows of the first layer's attention; None where one of them is not shown."""
    names = POINTS[KEYS].inputs[0], QUERY, MIX
    if any((0, name) not in shown for name in names):
        return None
    return Attended(*(widen(shown[0, name][b, rows]) for name in names))


def _reads_its_own(model: Model, rows: Attended | None, own: slice, near: float, turned: int) -> bool:
    """Whether a sequence's rows, with padding before them, read their own keys alone.

    ``turned``: by how much more than its position RoPE turns every row: positions may count the padding.
    """
    if rows is None:
        return False
    read, q, seen = (x[own] for x in rows)
    at = np.arange(len(q))
    k, v = (model.apply(name, model.context(0, at + turned, FP64), [read]) for name in (KEYS, VALUES))
    made = attention(q, k, v, at, AttentionRule.of(model.config, 0), FP64)
    return bool(np.linalg.norm(made - seen) <= near * np.linalg.norm(seen))


def _reads_no_padding(model: Model, rows: Attended | None, ends: Array, last: int, near: float) -> bool:
    """Whether the rows from ``last`` on read none of their own keys: as many as a sequence is long, or nothing."""
    if rows is None:
        return False
    read, q, seen = rows
    if not seen[last:].any():
        return True
    at = np.arange(len(q))
    k, v = (model.apply(name, model.context(0, at, FP64), [read]) for name in (KEYS, VALUES))
    rule, size = AttentionRule.of(model.config, 0), np.linalg.norm(seen[last:])
    made = (
        attention(q[last:], k[:m], v[:m], at[last:], rule, FP64) for m in sorted({int(e) for e in ends if e <= last})
    )
    return any(np.linalg.norm(x - seen[last:]) <= near * size for x in made)
