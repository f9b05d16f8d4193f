"""``precaudit report``: what compare and diagnose wrote of a run, again; for people, as Markdown or HTML."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from precaudit.cli._options import SCREEN, Delivery, deliver, filter_options, report_options, say, write
from precaudit.cli._runs import RunFolder

if TYPE_CHECKING:
    from precaudit.schema.selection import Filters


@click.command()
@click.argument("run", type=RunFolder())
@filter_options()
@report_options("error records")
@click.option("--all", "every", is_flag=True, help="Every layer as a column.")
@click.option("-v", "--verbose", is_flag=True, help="Every layer and point with all its sizes.")
def command(run: Path, filters: "Filters", to: Delivery, every: bool, verbose: bool) -> None:
    """Show what compare and diagnose found of RUN; computes nothing.

    Markdown has every table, and the HTML page charts.
    """
    from precaudit.reports.comparison import recalled_report
    from precaudit.reports.gathered import gather_run
    from precaudit.reports.pages import as_markdown

    if to.html is not None:
        from precaudit.reports import charts
        from precaudit.reports.html import gathered_page

        charts.require_altair()
    found = gather_run(run, filters)
    if to.markdown is not None:
        text = as_markdown(recalled_report(found, verbose, every, True), 1, None)
        if to.markdown == SCREEN:
            click.echo(text)
        else:
            write(to.markdown, text)
            say(f"{to.markdown}: all that is known of {run}")
    if to.html is not None:
        write(to.html, gathered_page(found))
        say(f"{to.html}: open it in a browser")
    if to.as_json or (to.markdown is None and to.html is None):
        report = recalled_report(found, verbose, every)
        deliver(replace(report, records=found.errors), Delivery(to.as_json))
