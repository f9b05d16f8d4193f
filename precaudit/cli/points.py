"""``precaudit points``: what would be recorded of a program."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from precaudit.cli._options import Delivery, deliver, filter_options, report_options
from precaudit.cli._runs import require_one_run

if TYPE_CHECKING:
    from precaudit.recording.runs.programs import ProgramPoint
    from precaudit.schema.selection import Filters

Which = Literal["own", "automatic", "both"]


@click.command()
@click.argument("program", metavar="FILE.py:NAME|module:NAME|RUN")
@filter_options("points", "phases")
@click.option("--rename", type=click.Path(path_type=Path), metavar="FILE", help='TOML of names: q = "query_proj~1".')
@click.option(
    "--taps",
    type=click.Choice(["own", "automatic", "both"]),
    default="both",
    show_default=True,
    help="Its checkpoint_name taps alone, automatic points alone, or both.",
)
@report_options("points")
def command(program: str, filters: "Filters", rename: Path | None, taps: Which, to: Delivery) -> None:
    """List what would be recorded of PROGRAM, whose code runs.

    For every point: shape, format, bytes, and its line. For RUN, of a program or a model, what was recorded.
    """
    from precaudit.recording.opening import holds_run
    from precaudit.recording.programs.loading import load_program, rename_points
    from precaudit.recording.programs.planning import points
    from precaudit.recording.runs.sketched import is_sketched
    from precaudit.reports.points import entries_report, recorded_entries

    require_one_run(Path(program), "points")
    if holds_run(program) or is_sketched(program):
        every = recorded_entries(Path(program))
    else:
        of = load_program(program) if rename is None else rename_points(load_program(program), rename)
        every = {entry: points(of, taps, entry) for entry in (of.entry, *of.then)}
    deliver(entries_report(_chosen(every, filters)), to)


def _chosen(every: "dict[str, Sequence[ProgramPoint]]", filters: "Filters") -> "dict[str, Sequence[ProgramPoint]]":
    """Return the entry points and points that filters name; raises UserError for one that is not there."""
    from precaudit.schema.selection import check_names

    phases = filters.phases and check_names(filters.phases, "entry point", tuple(every), "there is")
    known = {name for its in every.values() for p in its for name in (p.name, p.name.partition("#")[0])}
    names = filters.points and check_names(filters.points, "point", sorted(known), "there is")
    every = {entry: its for entry, its in every.items() if not phases or entry in phases}
    if not names or "all" in names:
        return every
    return {e: [p for p in its if {p.name, p.name.partition("#")[0]} & set(names)] for e, its in every.items()}
