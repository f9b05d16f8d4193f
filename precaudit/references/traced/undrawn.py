"""A local record's numbers under the least noise there is, one rounding of its format, in one pass over memory.

What closes under it with a tenth of every limit to spare needs no noise sampled: more noise would fail no record.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from precaudit.models.numpy_decoder.ensemble import RECIPROCAL
from precaudit.numbers.arrays import Array, widen
from precaudit.numbers.formats import FORMATS
from precaudit.numbers.threads import each
from precaudit.recording.runs.programs import EQUATIONS
from precaudit.references.closing import SINGLE, TIES, Remainder, Residue, left_of, residue_of
from precaudit.references.traced.remade import restore
from precaudit.references.traced.unrounded import Name
from precaudit.schema.metrics.axes import WorstSlice, worst_of_rows
from precaudit.schema.metrics.moments import BFLOAT16
from precaudit.schema.metrics.residue import Noise, Sums, finite
from precaudit.schema.metrics.sizes import canonical, ratio, share_of, sizes, smallest_normal
from precaudit.schema.records.base import json_number

BLOCK = 1 << 21  # elements


@dataclass(frozen=True)
class Left:
    """What an emulation leaves: ``sums`` of it, and norms, with 0 for each value that is not finite.

    ``apart``: c − ê; ``shown``: c − r; ``error``: c − r, 0 where that is not finite; ``change``: ê − r. ``far``: the
    farthest element, and its index.
    """

    sums: Sums
    apart: float
    shown: float
    error: float
    change: float
    far: tuple[float, tuple[int, ...]]


def undrawn_numbers(
    stored: Array,
    exact: Array,
    honest: Mapping[Name, Array],
    shape: tuple[int, ...] | None = None,
    smallest: float = 0.0,
) -> dict[str, Any]:
    """Return a local record's fields as of ``local_numbers``, of arrays [rows, N]; ``honest`` as segments give it.

    No noise of any realisations is less, so that a record which closes by these numbers does by theirs.
    """
    dtype = stored.dtype.name
    wide, u = dtype in ("float32", "float64"), FORMATS[dtype].unit_roundoff
    noise = Noise.least(len(stored), u, RECIPROCAL if wide else 0.0, smallest)
    made = [(name, _measure_left(stored, exact, y, noise.relative)) for name, y in _different(honest)]
    best, left = min(made, key=lambda x: x[1].apart)
    share = ratio(*(float(left.sums.cells[i].sum()) ** 0.5 for i in (0, 2)))
    slices = _slices(stored, exact, honest[best], left, noise, stored.shape if shape is None else shape)
    whole = Remainder(left.sums, share, left.far, slices)
    residue = residue_of(whole, noise, np.arange(len(stored)), "TD", dtype)
    explained = share_of(left.apart, left.shown)
    return undrawn_fields(stored, exact, best, residue, explained, ratio(left.error, left.change))


def _slices(
    stored: Array, exact: Array, emulated: Array, left: Left, noise: Noise, shape: tuple[int, ...]
) -> dict[str, WorstSlice]:
    """Return the worst slices of what the best emulation leaves; nothing is looked at where it leaves nothing."""
    dtype, some = stored.dtype.name, np.flatnonzero(left.sums.cells[0].reshape(-1))
    if not len(some):
        return worst_of_rows(some, exact[some], np.broadcast_to(0.0, exact.shape), shape, noise, left.sums)
    mine = exact[some]
    ties = None if dtype in ("float32", "float64") else TIES * SINGLE * np.abs(mine)
    rest = finite(left_of(widen(stored[some]), restore(emulated[some], dtype), mine, ties, dtype))
    return worst_of_rows(some, rest, finite(exact), shape, noise, left.sums)


def undrawn_fields(
    stored: Array, exact: Array, best: Name, residue: Residue, explained: float, over: float
) -> dict[str, Any]:
    """Return a local record's fields; ``explained``: the share of the error; ``over``: it over the emulation's."""
    found = sizes(stored, canonical(exact, "TD"), "TD", np.arange(len(stored)))
    for name, scope in residue.scopes.items():
        found["scopes"].setdefault(name, {}).update(scope)
    found |= {
        "explained": {EQUATIONS: json_number(explained)},
        "unexplained": residue.unexplained,
        "slices": residue.slices,
        "ratio": json_number(over),
    }
    return found | ({"elided": {EQUATIONS: best}} if best else {})


def _different(honest: Mapping[Name, Array]) -> Iterator[tuple[Name, Array]]:
    """Yield the emulations that are none of those before them."""
    seen: list[Array] = []
    for name, y in honest.items():
        if not any(np.array_equal(x, y) for x in seen):
            seen.append(y)
            yield name, y


def _measure_left(stored: Array, exact: Array, emulated: Array, relative: float) -> Left:
    """Return what an emulation leaves; of large arrays blocks of rows are looked at at once."""
    rows, width = exact.shape
    n = max(1, min(rows, exact.size // BLOCK))
    bounds = list(pairwise(rows * i // n for i in range(n + 1)))
    parts = each(_part, [(stored[a:b], exact[a:b], emulated[a:b], relative) for a, b in bounds], exact.size)
    cells = np.concatenate([cells for cells, *_ in parts], axis=1)
    channels = np.sum([channels for _, channels, *_ in parts], axis=0)
    squares = np.sum([part[2] for part in parts], axis=0)
    first = max(range(n), key=lambda i: parts[i][3])
    worst, place = parts[first][3:]
    at = (bounds[first][0] + place // width, 0, place % width) if exact.size else (0, 0, 0)
    apart, shown, error, change = (float(x) ** 0.5 for x in squares)
    return Left(Sums(cells, channels[:, None]), apart, shown, error, change, (worst, at))


def _part(
    stored: Array, exact: Array, emulated: Array, relative: float
) -> tuple[Array, Array, tuple[float, ...], float, int]:
    """Return cells, channels, the sums of squares, the farthest element and its place, of a block of rows."""
    from precaudit.schema.metrics import _residue_kernel as kernel  # numba takes a third of a second to import

    dtype, form = stored.dtype.name, FORMATS[stored.dtype.name]
    tie = -1.0 if dtype in ("float32", "float64") else TIES * SINGLE
    rows, width = exact.shape
    cells, channels = np.zeros((kernel.CELLS, rows, 1)), np.zeros((kernel.CHANNELS, width))
    rest = (kernel.as_kernel_input(exact), relative, tie, smallest_normal(dtype), form.unit_roundoff, cells, channels)
    if stored.dtype == BFLOAT16 and emulated.dtype == np.uint32:
        *squares, worst, place = kernel.undrawn_bfloat16(
            kernel.as_is(stored.view(np.uint16)), kernel.as_is(emulated), *rest
        )
    else:
        found = kernel.add_undrawn_sums(
            kernel.as_kernel_input(widen(stored)), kernel.as_kernel_input(restore(emulated, dtype)), *rest
        )
        *squares, worst, place = found
    return cells, channels, tuple(squares), worst, place
