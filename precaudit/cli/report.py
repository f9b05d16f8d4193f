"""``precaudit report``: the report of what compare has written, again."""

from pathlib import Path

import click

from precaudit.cli._options import console


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--markdown", "as_markdown", is_flag=True, help="Print report.md instead of tables.")
@click.option("-v", "--verbose", is_flag=True, help="Every layer and point with all its sizes.")
def command(run: Path, as_markdown: bool, verbose: bool) -> None:
    """Show what compare recorded of RUN; computes nothing."""
    from precaudit.reports import markdown, terminal
    from precaudit.runs.programs import is_program_run
    from precaudit.runs.written import recall

    if is_program_run(run):
        _program(run, as_markdown)
        return
    found = recall(run)
    if as_markdown:
        click.echo(markdown.render(found))
    else:
        terminal.show(found, console(), verbose)


def _program(run: Path, as_markdown: bool) -> None:
    from precaudit.judging.programs import errors_of
    from precaudit.reports import program
    from precaudit.runs.programs import open_program_run

    opened = open_program_run(run)
    if as_markdown:
        click.echo(program.render(opened, errors_of(opened)))
    else:
        program.show(opened, errors_of(opened), console())
