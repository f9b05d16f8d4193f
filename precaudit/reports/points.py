"""The points of a program or a run: what would be recorded of it, or what was."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from precaudit.errors import UserError
from precaudit.numbers.formats import FORMATS
from precaudit.recording.opening import open_any
from precaudit.recording.runs.programs import Opened, ProgramPoint
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.sketched import is_sketched, sketches_in
from precaudit.reports import fitting
from precaudit.reports.report import Report, Section
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.records.runs import PointRecord

WORD = 4  # bytes of what rows are hashed or summed to


def recorded_entries(folder: Path) -> dict[str, Sequence[ProgramPoint]]:
    """Return the points that a run of a program or a model holds, by entry point or phase; raises UserError."""
    if is_sketched(folder):
        runs = sketches_in(folder).items()
        return {f"{name} {one.record.entry}".strip(): one.record.points for name, run in runs for one in run.entries}
    run = open_any(folder, partial=True)
    if isinstance(run, Opened):
        return {one.record.entry: one.record.points for one in run.entries}
    if not isinstance(run, Run):
        raise UserError(f"{folder} was imported: precaudit report {folder} lists its tensors once it is compared")
    found: dict[str, dict[str, list[PointRecord]]] = defaultdict(lambda: defaultdict(list))
    for p in run.points:
        found[p.phase][p.point].append(p)
    return {
        phase: [_model_point(points[name]) for name in sorted(points, key=_order)] for phase, points in found.items()
    }


def _order(name: str) -> int:
    """Return a point's place in the decoder; of sums of its rows, that of the point."""
    return list(POINTS).index(name.partition(".")[0])


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
        every.append((p.name, steps, "×".join(map(str, p.shape)), p.dtype, f"{nbytes:,}", p.primitive, p.source))
    columns = ("point", "steps", "shape", "format", "bytes", "primitive", "at")
    table = fitting.Table(title, columns, tuple(every), ("point", "format", "primitive", "at"))
    return Report(None, (Section(tables=(table.filled,)),), records=points)
