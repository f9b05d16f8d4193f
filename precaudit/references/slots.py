"""Which of a program's inputs are its caches of keys and values: found by the rows that its first call writes there.

A cache may hold its axes in any order, one layer or all of them, heads apart or together, and another scale than the
values have (quantised ones). What is compared is the row that changed between the inputs of two calls with the row
that the call made; keys by the length of each pair that RoPE turns, which no position changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from typing import NamedTuple

import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.numbers.arrays import Array, widen

NEAR = 0.1  # relative distance of a row in float8 (e4m3: 0.03) from what was written; of another row about 1
OWN_SCALE = 0.02  # relative distance of a cache's scale from a power of two, which alone is taken back exactly


class Written(NamedTuple):
    """A row [G, K] that a call made in a layer for a sequence of the batch."""

    layer: int
    batch: int
    row: Array


class CacheState(NamedTuple):
    """A layer's keys or values [S, G, K] of a sequence before the first call, as they are read, and the slot written.

    ``filled`` [S]: which slots hold anything.
    """

    held: Array
    filled: Array
    slot: int
    written: Array


def caches(
    first: Mapping[str, Array],
    second: Mapping[str, Array],
    rows: Sequence[Written],
    c: DecoderConfig,
    batch: int,
    turned: bool,
) -> dict[tuple[int, int], CacheState]:
    """Return {(layer, sequence): cache} of rows that the first call made, out of both calls' input leaves.

    ``turned``: rows are keys. Empty unless every row is found.
    """
    found: dict[tuple[int, int], CacheState] = {}
    floats = [n for n, x in first.items() if x.dtype.kind not in "iub" and n in second and x.shape == second[n].shape]
    for name in floats:
        before, after = widen(first[name]), widen(second[name])
        if np.array_equal(before, after):
            continue
        for order, shape in arrangements(before.shape, c, batch):
            a, b = (x.transpose(order).reshape(shape) for x in (before, after))
            its = [w for w in rows if (w.layer, w.batch) not in found] if len(a) == 1 else rows
            made = {(w.layer, w.batch): _cache(w, a, b, c, turned) for w in its}
            if len(a) == 1:  # a layer's own array
                held = {key: x for key, x in made.items() if x is not None and key[0] == _layer(made)}
                if len(held) == batch:
                    found |= held
                    break
            elif all(x is not None for x in made.values()):
                return {key: x for key, x in made.items() if x is not None}
    return found if len(found) == len(rows) else {}


def _layer(made: Mapping[tuple[int, int], CacheState | None]) -> int | None:
    return next((layer for (layer, _), x in made.items() if x is not None), None)


def arrangements(
    shape: tuple[int, ...], c: DecoderConfig, batch: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, int, int, int, int]]]:
    """Yield axis orders that make an array layers (all, or one), batch, slots, heads and their dimensions.

    Axes of slots (pages, and rows within them) stay in their order, one after another.
    """
    n = len(shape)
    if n > 6:
        return
    for heads in ((c.kv_heads, c.head_dim), (c.kv_heads * c.head_dim,)):
        for layers in ((c.layers,), ()):
            for rows in ((batch,), ()) if batch == 1 else ((batch,),):
                slots = n - len(heads) - len(layers) - len(rows)
                if slots not in (1, 2):
                    continue
                for order in permutations(range(n)):
                    size = [shape[i] for i in order]
                    ends = len(layers) + len(rows)
                    kept = order[ends : ends + slots]
                    if tuple(size[:ends]) != (*layers, *rows) or tuple(size[ends + slots :]) != heads:
                        continue
                    if any(b != a + 1 for a, b in pairwise(kept)):
                        continue
                    found = (layers or (1,))[0], batch, int(np.prod([shape[i] for i in kept])), c.kv_heads, c.head_dim
                    yield order, found


def _cache(w: Written, before: Array, after: Array, c: DecoderConfig, turned: bool) -> CacheState | None:
    """Return a layer's and sequence's part of a cache [L, B, S, G, K]; None where the row was not written there."""
    a, b = (x[w.layer if len(x) > 1 else 0, w.batch] for x in (before, after))
    changed = np.flatnonzero((a != b).any(axis=(1, 2)))
    row = lengths_of_pairs(w.row, c) if turned else w.row
    size = float((row**2).sum())
    best: tuple[float, int, float] | None = None
    for slot in changed:
        x = lengths_of_pairs(b[slot], c) if turned else b[slot]
        factor = float((x * row).sum()) / size if size else 0.0
        if factor > 0 and np.isfinite(factor):
            off = float(np.linalg.norm(x / factor - row)) / size**0.5
            best = min(best or (np.inf, 0, 0.0), (off, int(slot), factor))
    if best is None or best[0] > NEAR:
        return None
    scale = 2.0 ** np.round(np.log2(best[2]))
    if abs(best[2] / scale - 1) > OWN_SCALE:
        return None
    return CacheState(a / scale, (a != 0).any(axis=(1, 2)), best[1], b[best[1]] / scale)


def lengths_of_pairs(x: Array, c: DecoderConfig) -> Array:
    """Return a key row [G, K] with each pair that RoPE turns as its length: the same at every position."""
    half = c.rotary_size // 2
    pairs = np.hypot(x[..., :half], x[..., half : 2 * half])
    return np.concatenate([pairs, x[..., 2 * half :]], axis=-1)
