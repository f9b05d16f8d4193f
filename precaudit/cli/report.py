"""``precaudit report``: the report of what compare has written, again."""

from pathlib import Path

import click

from precaudit.cli._options import deliver, write


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--markdown", "as_markdown_", is_flag=True, help="Print Markdown, with every table.")
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write one HTML file with charts; it needs no network.",
)
@click.option("--all", "every", is_flag=True, help="Every layer as a column.")
@click.option("-v", "--verbose", is_flag=True, help="Every layer and point with all its sizes.")
def command(run: Path, as_markdown_: bool, page: Path | None, every: bool, verbose: bool) -> None:
    """Show what compare and diagnose found of RUN; computes nothing."""
    from precaudit.reports.comparison import recalled_report
    from precaudit.reports.gathered import gather_run
    from precaudit.reports.pages import as_markdown

    if page is not None:
        from precaudit.reports.html import render

        write(page, render(run))
        click.echo(f"{page}: open it in a browser")
        return
    report = recalled_report(gather_run(run), verbose, every, as_markdown_)
    if as_markdown_:
        click.echo(as_markdown(report, 1, None))
    else:
        deliver(report, as_json=False)
