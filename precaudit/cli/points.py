"""``precaudit points``: what would be recorded of a program."""

from pathlib import Path
from typing import Literal

import click

Which = Literal["own", "automatic", "both"]


@click.command()
@click.argument("program", metavar="FILE.py:NAME|module:NAME|RUN")
@click.option("--rename", type=click.Path(path_type=Path), metavar="FILE", help='TOML of names: q = "query_proj~1".')
@click.option(
    "--taps",
    type=click.Choice(["own", "automatic", "both"]),
    default="both",
    show_default=True,
    help="Its checkpoint_name taps alone, automatic points alone, or both.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the points as JSONL.")
def command(program: str, rename: Path | None, taps: Which, as_json: bool) -> None:
    """List what would be recorded of PROGRAM, whose code runs.

    For every point: shape, format, bytes, and its line. For RUN, a program's, what was recorded.
    """
    from precaudit.cli._options import deliver
    from precaudit.recording.opening import holds_run
    from precaudit.recording.programs.loading import load_program, rename_points
    from precaudit.recording.programs.planning import points
    from precaudit.recording.runs.programs import open_program_run
    from precaudit.reports.program import points_report

    if holds_run(program):
        recorded = open_program_run(program).entries
        for one in recorded:
            deliver(points_report(one.record.points, one.record.entry if len(recorded) > 1 else ""), as_json)
        return
    of = load_program(program) if rename is None else rename_points(load_program(program), rename)
    for entry in (of.entry, *of.then):
        deliver(points_report(points(of, taps, entry), entry if of.then else ""), as_json)
