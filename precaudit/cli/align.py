"""``precaudit align``: which parameter of a program is which tensor of a checkpoint."""

from pathlib import Path

import click

from precaudit.cli._options import Delivery, deliver, progress_bar, report_options, write


@click.command()
@click.argument("own", metavar="PROGRAM")
@click.argument("theirs", metavar="MODEL")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the names map here, as --map reads it.",
)
@click.option("--no-points", is_flag=True, help="Leave points out: PROGRAM is run for them.")
@report_options("records")
def command(own: str, theirs: str, output: Path | None, no_points: bool, to: Delivery) -> int:
    """Find which parameter of PROGRAM is which tensor of MODEL.

    Values alone decide; names and shapes do not. The points that show values of the family's reference implementation
    are found the same way.

    Each is FILE.py:NAME, whose code runs, or a model as trace takes it. A folder of safetensors needs no config.json.

    Exit code 0: everything was found, and nothing is wrong. 1: a mistake of conversion. 3: something was not found.
    """
    from precaudit.reports.alignment import alignment_report
    from precaudit.workflows.alignment import align

    with progress_bar() as advance:
        found = align(own, theirs, points=not no_points, progress=advance)
    report = alignment_report(found)
    if output is not None:
        write(output, found.names.text)
    deliver(report, to)
    return report.exit_code
