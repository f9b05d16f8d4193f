"""A program's points and their errors as tables that fit a terminal."""

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any

from rich.table import Table

from precaudit.formats import FORMATS
from precaudit.judging.rules import judge
from precaudit.limits import default_limits
from precaudit.programs.runs import Opened, ProgramPoint
from precaudit.records import ErrorRecord, value
from precaudit.reports.escaping import terminal


def listing(points: Sequence[ProgramPoint], console: Any) -> None:
    """Print the points of a program in its order."""
    table = Table("point", "steps", "shape", "format", "bytes", "made by", "at", box=None, pad_edge=False)
    for p in points:
        nbytes = prod((*p.stacked, *p.shape)) * FORMATS[p.dtype].itemsize
        steps = "×".join(map(str, p.stacked))
        row = (p.name, steps, "×".join(map(str, p.shape)), p.dtype, f"{nbytes:,}", p.primitive, p.source)
        table.add_row(*map(terminal, row))
    console.print(table)


def show(opened: Opened, errors: Sequence[ErrorRecord], console: Any) -> None:
    """Print, for every point, the largest error over cases, calls and steps, and what rounding leaves of it."""
    by_point: dict[str, list[ErrorRecord]] = defaultdict(list)
    for e in errors:
        by_point[e.point].append(e)
    table = Table("point", "format", "records", "error", "in u", "left", "bit-equal", "verdicts", "at",
                  box=None, pad_edge=False)  # fmt: skip
    for p in opened.record.points:
        found = by_point[p.name]
        judged = [v.status for e in found if (v := judge(e, default_limits())) is not None]
        told = ", ".join(f"{judged.count(s)} {s}" for s in sorted(set(judged), key=judged.index))
        known = [e for e in found if e.unexplained is not None]
        if not known:
            table.add_row(*map(terminal, (p.name, p.dtype, str(len(found)), "", "", "", "", told, p.source)))
            continue
        u = FORMATS[p.dtype].unit_roundoff
        error = max(value(e.rel_l2) for e in known)
        left = max(value(e.unexplained.u) for e in known if e.unexplained is not None)
        equal = sum(e.unexplained is not None and value(e.unexplained.rel_l2) == 0.0 for e in known)
        row = (p.name, p.dtype, str(len(found)), f"{error:.1e}", f"{error / u:.2f}", f"{left:.2g} u",
               f"{equal} of {len(known)}", told, p.source)  # fmt: skip
        table.add_row(*map(terminal, row))
    console.print(table)
    closed = sum(e.unexplained is not None and value(e.unexplained.rel_l2) == 0.0 for e in errors)
    console.print(
        f"{len(errors)} segments made again from recorded inputs, as the program's equations round: "
        f"{closed} come out bit for bit."
    )
    for n in opened.record.neutrality:
        if not n.bitwise:
            console.print(terminal(f"Tapping changed the outputs of {n.case} by up to {n.max_diff}."))
