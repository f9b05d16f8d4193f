"""What a recorded run says of the values of its points: the least and the largest. Runs of models and of programs."""

import re
from collections.abc import Iterator, Mapping
from functools import singledispatch
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from precaudit.errors import UserError
from precaudit.numbers.arrays import Array, widen
from precaudit.recording.opening import open_any
from precaudit.recording.runs.programs import Opened
from precaudit.recording.runs.reader import Run
from precaudit.schema.records.base import value

OCCURRENCE = re.compile(r"#\d+$")  # of a name that the program has several taps of


class Extent(NamedTuple):
    """The least and the largest value of a point; an infinity where one was recorded."""

    low: float
    high: float

    @property
    def most(self) -> float:
        """The largest magnitude."""
        return max(-self.low, self.high)


class Extents(NamedTuple):
    """The extents of a run's points, of all layers, calls and cases; ``renamed``: as its program's points were.

    ``taps``: which of a program's it holds.
    """

    folder: Path
    extents: Mapping[str, Extent]
    renamed: Mapping[str, str]
    taps: Literal["own", "automatic", "both"] | None = None


def read_extents(folder: Path) -> Extents:
    """Read what a run recorded, of a model or of a program; raises UserError for what is no whole run."""
    run = open_any(folder)
    found: dict[str, Extent] = {}
    for point, extent in _extents(run):
        for name in {point, OCCURRENCE.sub("", point)}:
            known = found.get(name, extent)
            found[name] = Extent(min(known.low, extent.low), max(known.high, extent.high))
    return Extents(folder, found, getattr(run.record, "renamed", {}), getattr(run.record, "taps", None))


@singledispatch
def _extents(run: Any) -> Iterator[tuple[str, Extent]]:
    """Yield the extent of every tensor by its point."""
    raise UserError(f"{run.folder} was imported: trace the program itself")


@_extents.register
def _(run: Opened) -> Iterator[tuple[str, Extent]]:
    for one in run.entries:
        for case, call in product(one.record.cases, range(one.record.calls)):
            taps = one.tensors(case, call, "taps")
            yield from ((p.name, _extent(taps[p.name])) for p in one.record.points if p.name in taps)


@_extents.register
def _(run: Run) -> Iterator[tuple[str, Extent]]:
    for p in run.points:
        if p.stats.inf:  # what the statistics say is of finite values alone
            yield p.point, _extent(run.tensor(p))
        else:
            yield p.point, _extent(np.array([value(p.stats.min), value(p.stats.max)]))


def _extent(x: Array) -> Extent:
    """Return the extent of an array, NaN aside; of nothing but NaN, zero."""
    wide = widen(x)
    wide = wide[~np.isnan(wide)]
    return Extent(float(wide.min()), float(wide.max())) if wide.size else Extent(0.0, 0.0)
