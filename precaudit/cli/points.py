"""``precaudit points``: what would be recorded of a program."""

from pathlib import Path
from typing import Literal

import click

Which = Literal["own", "automatic", "both"]


@click.command()
@click.argument("program", metavar="FILE.py:NAME|module:NAME")
@click.option("--rename", type=click.Path(path_type=Path), metavar="FILE", help='TOML of names: q = "query_proj~1".')
@click.option("--taps", type=click.Choice(["own", "automatic", "both"]), default="both", show_default=True,
              help="Its checkpoint_name taps alone, automatic points alone, or both.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the points as JSONL.")
def command(program: str, rename: Path | None, taps: Which, as_json: bool) -> None:
    """List what would be recorded of PROGRAM, whose code is run.

    Of every point: shape, format, bytes, and the line that makes it.
    """
    from precaudit.cli._options import console
    from precaudit.recording.programs.loading import load, renamed
    from precaudit.recording.programs.tracing import points

    found = points(load(program) if rename is None else renamed(load(program), rename), taps)
    if as_json:
        from precaudit.schema.records.lines import encode

        for point in found:
            click.echo(encode(point), nl=False)
        return
    from precaudit.reports import program as report

    report.listing(found, console())
