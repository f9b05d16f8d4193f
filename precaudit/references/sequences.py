"""A case as sequences: which rows of its calls hold each one, where it starts, and what came before its first row.

A program whose first call is given a filled cache goes on with sequences that were begun elsewhere. Where they start is
what the map says, or found: by where RoPE turns the first query, where that call writes, and how much its caches hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from precaudit.models.numpy_decoder.earlier import FIRST, Earlier
from precaudit.models.numpy_decoder.model import Model, attention
from precaudit.models.numpy_decoder.operators import AttentionRule, rope, rope_frequencies
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array, widen
from precaudit.references.padding import possible_leads
from precaudit.references.slots import NEAR, CacheState, Written, caches
from precaudit.schema.graphs.decoder import CACHES, KEYS, MIX, POINTS, QUERY, VALUES

FAR = 1 << 17  # positions that are tried where no cache bounds them
BLOCK = 1 << 10  # of these at once


@dataclass(frozen=True)
class Tokens:
    """A sequence: its token ids [n], which of the calls' rows, one after another, hold them [n], what was before.

    ``unwritten``: the slots before the one of its first row that hold nothing; None where none do not, or no cache is
    known. ``beyond``: those from the slot of its first row on that hold something before; None where none do. ``lead``:
    the slot of position 0, after padding before the sequence.
    """

    ids: Array
    rows: Array
    earlier: Earlier = FIRST
    unwritten: range | None = None
    beyond: range | None = None
    lead: int = 0

    @property
    def positions(self) -> Array:
        """The position [n] of every row."""
        return self.earlier.start + np.arange(len(self.rows))


class Before(NamedTuple):
    """What came before a sequence, the slots around its first call's rows that hold nothing, and too much, and its own.

    ``lead``: the slot of its position 0.
    """

    earlier: Earlier = FIRST
    unwritten: range | None = None
    beyond: range | None = None
    lead: int = 0

    def passing_over(self, n: int) -> "Before":
        """Return the same, the first ``n`` rows of what came before padding that positions count."""
        kept = {layer: (k[n:], v[n:]) for layer, (k, v) in self.earlier.kept.items()}
        earlier = replace(self.earlier, start=self.earlier.start - n, kept=kept, turned=self.earlier.turned + n)
        return self._replace(earlier=earlier, lead=self.lead + n)


class Beginning(NamedTuple):
    """What a program shows, as [B, T, …] by (layer, point), the first call's rows and the input leaves of two calls.

    ``lead`` [B]: which of these rows is each sequence's first.
    """

    model: Model
    shown: Mapping[tuple[int | None, str], Array]
    rows: slice
    inputs: Sequence[Mapping[str, Array]]
    lead: Array

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return len(self.lead)


def find_beginnings(p: Beginning, told: Sequence[int] | None, near: float) -> list[Before]:
    """Return what came before each sequence.

    ``told``: positions of their first rows; ``near``: the relative distance of a query from the textbook's at its own
    position, 1e-6 in FP64.
    """
    lead = [int(first) for first in p.lead]
    if told is not None and not any((*told, *lead)):
        return [Before()] * p.batch
    turned = [_first_position(p, b, near) for b in range(p.batch)]
    new = [Before(Earlier(turned=n) if n and n == t else FIRST, lead=n) for n, t in zip(lead, turned, strict=True)]
    if told is not None and not any(told):
        return new
    given = any(x.dtype.kind not in "iub" and widen(x).any() for x in p.inputs[0].values())
    if told is None and (all(t in (0, n) for t, n in zip(turned, lead, strict=True)) or not given):
        return new
    held = caches_of(p)
    begun = [
        one if one.earlier.turned else _earlier(p, held, b, None if told is None else told[b], turned[b])
        for b, one in enumerate(new)
    ]
    return _without_hidden(p, begun, near)


def _without_hidden(p: Beginning, begun: list[Before], near: float) -> list[Before]:
    """Return what came before each sequence, without padding that positions count and that its first row passes over.

    Of counts before each sequence and masks among the inputs those that the values show.
    """
    off = [_read_from(p, b, one, 0) for b, one in enumerate(begun)]
    for lead in possible_leads(p.inputs[0], p.batch):
        its = [_read_from(p, b, one, n) for (b, one), n in zip(enumerate(begun), lead, strict=True)]
        if all(x is not None and x <= near for x in its) and all(
            not n or (x is not None and y is not None and x < y) for x, y, n in zip(its, off, lead, strict=True)
        ):
            return [one.passing_over(n) for one, n in zip(begun, lead, strict=True)]
    return begun


def _read_from(p: Beginning, b: int, one: Before, n: int) -> float | None:
    """Return how far attention over all but the first ``n`` rows that came before is from a first row's, relatively.

    None where the rows before are not known, are no more than these, or the program does not show what it reads.
    """
    layer = next((i for i in range(p.model.config.layers) if p.model.config.window_of(i) is None), 0)
    names = (POINTS[KEYS].inputs[0], QUERY, MIX)
    if layer not in one.earlier.kept or n > one.earlier.start or any((layer, x) not in p.shown for x in names):
        return None
    read, q, seen = (widen(p.shown[layer, name][b, p.rows][p.lead[b] :][:1]) for name in names)
    at = np.asarray([one.earlier.start + one.earlier.turned])
    own = (p.model.apply(name, p.model.context(layer, at, FP64), [read]) for name in (KEYS, VALUES))
    k, v = (np.concatenate([x[n:], y]) for x, y in zip(one.earlier.kept[layer], own, strict=True))
    made = attention(q, k, v, np.asarray([len(k) - 1]), AttentionRule.of(p.model.config, layer), FP64)
    return float(np.linalg.norm(made - seen) / np.linalg.norm(seen))


def _earlier(
    p: Beginning, held: Mapping[str, Mapping[tuple[int, int], CacheState]], b: int, told: int | None, turned: int | None
) -> Before:
    """Return what came before a sequence; ``turned``: where its first query is, None where that is not seen."""
    layers = range(p.model.config.layers)
    mine = {(i, name): x for name, every in held.items() for (i, n), x in every.items() if n == b}
    if not mine or not _as_read(p, mine[0, KEYS], b, (told, turned)):
        start = told if told is not None else turned if turned and _says(p, b, turned) else 0
        mixed = {i: widen(p.shown[i, MIX][b]) for i in layers if (i, MIX) in p.shown} if start else {}
        return Before(Earlier(start, mixed=mixed))
    filled = np.logical_and.reduce([x.filled for x in mine.values()])
    slot = mine[0, KEYS].slot - (p.rows.stop - p.rows.start - 1) + int(p.lead[b])  # of the first row
    n = int(np.argmin([*filled, False]))
    start = told if told is not None else slot if turned is None else turned
    if told is None and not (slot - start >= 0 and filled[slot - start : slot].all()):
        start = min(slot, n)
    first = max(min(slot, n) - start, 0)
    empty = range(first + start, slot)
    gap = empty if empty and not filled[empty.start : empty.stop].any() else None
    kept = {i: (mine[i, KEYS].held[first:][:start], mine[i, VALUES].held[first:][:start]) for i in layers}
    # in a ring, where a row's slot is not its position, what stands from there on is older and may be read
    beyond = range(slot, slot + int(np.argmin([*filled[slot:], False]))) if slot == start else None
    return Before(Earlier(start, kept) if start else FIRST, gap, beyond or None, first)


def _as_read(p: Beginning, cache: CacheState, b: int, at: Sequence[int | None]) -> bool:
    """Whether a cache of keys holds them as RoPE turned them: at one of these positions, or where they were written."""
    last = p.rows.stop - 1
    read = widen(p.shown[0, POINTS[KEYS].inputs[0]][b, last : last + 1])
    found = [t + last - int(p.lead[b]) for t in at if t is not None] + [cache.slot]
    made = p.model.apply(KEYS, p.model.context(0, np.asarray(found), FP64), [np.repeat(read, len(found), axis=0)])
    off = np.linalg.norm((made - cache.written).reshape(len(found), -1), axis=1)
    return bool(off.min() <= NEAR * np.linalg.norm(cache.written))


def _first_position(p: Beginning, b: int, near: float) -> int | None:
    """Return the position by which RoPE turns a sequence's first query; None where no position's is the program's."""
    point = next((name for name in (QUERY, KEYS) if (0, name) in p.shown), None)
    if point is None or (0, POINTS[point].inputs[0]) not in p.shown:
        return None
    read, seen = (widen(p.shown[0, name][b, p.rows][p.lead[b] :][:1]) for name in (POINTS[point].inputs[0], point))
    size = np.linalg.norm(seen)
    most = min(FAR, max([64, *(int(np.max(x, initial=0)) + 2 for x in _integers(p))]))
    first = p.model.apply(point, p.model.context(0, np.zeros(1), FP64), [read])  # RoPE turns nothing at position 0
    frequencies = rope_frequencies(p.model.config, 0)[0], 1.0
    for low in range(0, most, BLOCK):
        at = np.arange(low, min(most, low + BLOCK))
        made = rope(np.repeat(first, len(at), axis=0), at, frequencies, FP64)
        off = np.linalg.norm((made - seen).reshape(len(at), -1), axis=1)
        if off.min() <= near * size:
            return int(at[np.argmin(off)])
    return None


def _integers(p: Beginning) -> list[Array]:
    """Return the first call's integer inputs, and the sizes of its others, of which one may be the number of slots."""
    first = p.inputs[0].values()
    return [x for x in first if x.dtype.kind in "iu"] + [np.asarray(x.shape) for x in first if x.ndim > 2]


def _says(p: Beginning, b: int, start: int) -> bool:
    """Whether an integer among the first call's inputs is a sequence's start, and its floats hold what came before."""
    config = p.model.config
    least = 2 * config.layers * p.batch * start * config.kv_heads * config.head_dim
    held = sum(int(np.count_nonzero(widen(x))) for x in p.inputs[0].values() if x.dtype.kind not in "iub")
    said = [x for x in p.inputs[0].values() if x.dtype.kind in "iu" and x.ndim <= 2 and x.size]
    rows = [x if x.ndim and len(x) == p.batch else np.broadcast_to(x.reshape(-1)[:1], p.batch) for x in said]
    return held >= least / 2 and any(int(x[b].reshape(-1)[0]) == start for x in rows)


def caches_of(p: Beginning) -> dict[str, dict[tuple[int, int], CacheState]]:
    """Return the caches of keys and values among the inputs, by (layer, sequence); none unless both are found."""
    if len(p.inputs) < 2:
        return {}
    last, config, found = p.rows.stop - 1, p.model.config, {}
    for name in CACHES:
        source = POINTS[name].inputs[0]
        rows = []
        for layer in range(config.layers):
            for b in range(p.batch):
                if (layer, source) not in p.shown:
                    return {}
                read = widen(p.shown[layer, source][b, last : last + 1])
                made = p.model.apply(name, p.model.context(layer, np.zeros(1), FP64), [read])
                rows.append(Written(layer, b, made[0]))
        found[name] = caches(p.inputs[0], p.inputs[1], rows, config, p.batch, turned=name == KEYS)
    return found if all(found.values()) else {}
