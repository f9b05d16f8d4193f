"""``precaudit report``: the report of what compare has written, again."""

from pathlib import Path

import click

from precaudit.cli._options import announce, console


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--markdown", "as_markdown", is_flag=True, help="Print report.md instead of tables.")
@click.option("--html", "page", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write one HTML file with charts; it needs no network.")  # fmt: skip
@click.option("--all", "every", is_flag=True, help="Every layer as a column.")
@click.option("-v", "--verbose", is_flag=True, help="Every layer and point with all its sizes.")
def command(run: Path, as_markdown: bool, page: Path | None, every: bool, verbose: bool) -> None:
    """Show what compare recorded of RUN; computes nothing."""
    from precaudit.judging.gate import gate
    from precaudit.recording.runs.programs import is_program_run
    from precaudit.recording.runs.written import recall
    from precaudit.reports import markdown, terminal
    from precaudit.reports.headline import headline

    if page is not None:
        from precaudit.cli._judged import write
        from precaudit.reports.html import render

        write(page, render(run))
        click.echo(f"{page}: open it in a browser")
        return
    if is_program_run(run):
        _program(run, as_markdown, every or verbose)
        return
    found = recall(run, held=False)
    if as_markdown:
        click.echo(markdown.render(found))
    else:
        announce(headline(gate(found), str(run)))
        terminal.show(found, console(), verbose, every)


def _program(run: Path, as_markdown: bool, every: bool) -> None:
    from precaudit.judging.gate import gate
    from precaudit.judging.programs import filed_errors
    from precaudit.recording.runs.programs import open_program_run
    from precaudit.reports import program
    from precaudit.reports.headline import headline

    opened = open_program_run(run)
    if as_markdown:
        click.echo(program.render(opened, filed_errors(opened)))
    else:
        announce(headline(gate(run), str(run)))
        program.show(opened, filed_errors(opened), console(), every)
