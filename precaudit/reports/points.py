"""The points of a program or a run: what would be recorded of it, or what was."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from math import prod
from pathlib import Path
from typing import Any

from precaudit.numbers.formats import FORMATS
from precaudit.recording.opening import open_any
from precaudit.recording.runs.programs import Opened, ProgramPoint
from precaudit.recording.runs.sketched import is_sketched, sketches_in
from precaudit.reports import fitting
from precaudit.reports.report import Report, Section
from precaudit.schema.digits import digits
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.records.base import Count, Number, json_number, value
from precaudit.schema.records.runs import PointRecord

WORD = 4  # bytes of what rows are hashed or summed to


class RecordedPoint(ProgramPoint, frozen=True, omit_defaults=False):
    """A point of a run with what its values are, in all cases and steps: the largest |x|, the root mean square.

    Both of the finite ones; ``nonfinite``: how many are not.
    """

    largest: Number = 0.0
    rms: Number = 0.0
    nonfinite: Count = 0


def recorded_entries(folder: Path) -> dict[str, Sequence[ProgramPoint]]:
    """Return the points that a run of any kind holds, by entry point or phase; raises UserError."""
    if is_sketched(folder):
        runs = sketches_in(folder).items()
        return {f"{name} {one.record.entry}".strip(): one.record.points for name, run in runs for one in run.entries}
    return _points(open_any(folder, partial=True))


@singledispatch
def _points(run: Any) -> dict[str, Sequence[ProgramPoint]]:
    """Return the points of a model's run, or of a dump: those that their lines tell of."""
    lines = run.points
    found: dict[str, dict[str, list[PointRecord]]] = defaultdict(lambda: defaultdict(list))
    for p in lines:
        found[p.phase][p.point].append(p)
    ranges = _ranges(lines)
    return {
        phase: [_with_range(_model_point(its[name]), ranges.get((phase, name))) for name in sorted(its, key=_order)]
        for phase, its in found.items()
    }


@_points.register
def _(run: Opened) -> dict[str, Sequence[ProgramPoint]]:
    ranges = _ranges(run.points)
    return {
        one.record.entry: [_with_range(p, ranges.get((one.record.phase, p.name))) for p in one.record.points]
        for one in run.entries
    }


@dataclass
class _Range:
    """What lines of points.jsonl say of a point's values together."""

    count: int = 0
    power: float = 0.0
    largest: float = 0.0
    nonfinite: int = 0

    def add(self, p: PointRecord) -> None:
        off = p.stats.nan + p.stats.inf
        self.nonfinite += off
        if finite := prod(p.shape) - off:
            self.count += finite
            self.power += value(p.stats.rms) ** 2 * finite
            self.largest = max(self.largest, abs(value(p.stats.min)), abs(value(p.stats.max)))


def _ranges(lines: Iterable[PointRecord]) -> dict[tuple[str, str], _Range]:
    """Return the range of each phase's points; hashes and sums of rows have none."""
    found: dict[tuple[str, str], _Range] = defaultdict(_Range)
    for p in lines:
        if not p.dtype.startswith("uint"):
            found[p.phase, p.point].add(p)
    return found


def _with_range(p: ProgramPoint, its: _Range | None) -> ProgramPoint:
    if its is None:
        return p
    rms = json_number((its.power / its.count) ** 0.5 if its.count else math.nan)
    held = {name: getattr(p, name) for name in p.__struct_fields__}
    return RecordedPoint(**held, largest=json_number(its.largest), rms=rms, nonfinite=its.nonfinite)


def _order(name: str) -> int:
    """Return a point's place in the decoder; of sums of its rows, that of the point; of other names, the end."""
    known = name.partition(".")[0]
    return list(POINTS).index(known) if known in POINTS else len(POINTS)


def _model_point(its: Sequence[PointRecord]) -> ProgramPoint:
    """Return a model's point as those of programs are told: over its layers, of the largest tensor's shape."""
    largest, layers = max((p.shape for p in its), key=prod), {p.layer for p in its if p.layer is not None}
    return ProgramPoint(its[0].point, largest, (len(layers),) if layers else (), its[0].dtype, "", "", "")


def entries_report(entries: Mapping[str, Sequence[ProgramPoint]]) -> Report:
    """Return the report of what is recorded of a program's entry points, a table each."""
    made = [points_report(points, entry if len(entries) > 1 else "") for entry, points in entries.items()]
    records = [p for r in made for p in r.records]
    return Report(None, tuple(s for r in made for s in r.sections), records=records, command="points")


def points_report(points: Sequence[ProgramPoint], title: str = "") -> Report:
    """Return the report of what would be recorded of a program's entry point: its points in its order."""
    every = []
    for p in points:
        nbytes = prod((*p.stacked, *p.shape)) * (FORMATS[p.dtype].itemsize if p.dtype in FORMATS else WORD)
        steps = "×".join(map(str, p.stacked))
        shape = "×".join(map(str, p.shape))
        every.append((p.name, steps, shape, p.dtype, f"{nbytes:,}", *_range_cells(p), p.primitive, p.source))
    columns = ("point", "steps", "shape", "format", "bytes", "largest", "rms", "NaN or inf", "primitive", "at")
    table = fitting.Table(title, columns, tuple(every), ("point", "format", "primitive", "at"))
    return Report(None, (Section(tables=(table.filled,)),), records=points)


def _range_cells(p: ProgramPoint) -> tuple[str, str, str]:
    if not isinstance(p, RecordedPoint):
        return "", "", ""
    return digits(p.largest), digits(p.rms), f"{p.nonfinite:,}" if p.nonfinite else ""
