"""What a program's caches hold beside the textbook's keys and values, a position in its slot after padding."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from precaudit.errors import UserError
from precaudit.numbers.arrays import Array
from precaudit.references.mapped import MappedTextbook, Pair, as_cache
from precaudit.references.sequences import Tokens
from precaudit.schema.graphs.decoder import CACHES, KEYS

MADE = {cache: made for made, cache in CACHES.items()}


class CachePair(NamedTuple):
    """A cache in a call, the program's and the textbook's [B, S, G, K], and positions [B, S], −1 of other slots."""

    seen: Array
    expected: Array
    positions: Array


def read_caches(
    book: MappedTextbook,
    values: Sequence[Mapping[str, Array]],
    expected: Mapping[tuple[int | None, str], Array],
    sequences: Sequence[Tokens],
    calls: Sequence[slice],
) -> dict[Pair, list[CachePair]]:
    """Return the caches that the map names, in every call; raises UserError where one has fewer slots than rows."""
    found: dict[Pair, list[CachePair]] = {}
    for pair in book.pairs:
        if pair.point not in MADE or pair.layer is None:
            continue
        rows = expected[pair.layer, MADE[pair.point]]
        for x, call in zip(values, calls, strict=True):
            seen = as_cache(pair, x[pair.shown.name], len(sequences), rows.shape[2:], book.where)
            wanted, at = np.zeros(seen.shape), np.full(seen.shape[:2], -1)
            for b, s in enumerate(sequences):
                mine = rows[b, s.rows[s.rows < call.stop]]
                before = s.earlier.kept.get(pair.layer)
                first = s.earlier.start
                if before is not None:
                    mine, first = np.concatenate([before[pair.point != CACHES[KEYS]], mine]), 0
                end = first + len(mine)
                if s.lead + end > seen.shape[1]:
                    raise UserError(
                        f"{book.where}: [points] {pair.point}: {pair.shown.name!r} has {seen.shape[1]} slots for "
                        f"{end} positions; a cache that begins again is not compared with the reference implementation"
                    )
                slots = slice(s.lead + first, s.lead + end)
                wanted[b, slots], at[b, slots] = mine, np.arange(first, end)
            found.setdefault(pair, []).append(CachePair(seen, wanted, at))
    return found
