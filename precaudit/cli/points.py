"""``precaudit points``: what would be recorded of a program."""

import click


@click.command()
@click.argument("program", metavar="FILE.py:NAME|module:NAME")
@click.option("--json", "as_json", is_flag=True, help="Print the points as JSONL.")
def command(program: str, as_json: bool) -> None:
    """List the points of PROGRAM: shape, format, bytes, and the line that makes each. Its code is run."""
    from precaudit.cli._options import console
    from precaudit.programs.loading import load
    from precaudit.programs.tracing import points

    found = points(load(program))
    if as_json:
        from precaudit.records import encode

        for point in found:
            click.echo(encode(point), nl=False)
        return
    from precaudit.reports import program as report

    report.listing(found, console())
