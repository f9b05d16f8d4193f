"""Printing and writing a judgement, for the commands that make one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from precaudit.cli._options import Delivery, deliver, report_options, say, write

if TYPE_CHECKING:
    from precaudit.judging.judgement import Judgement


@dataclass(frozen=True)
class Judged:
    """Where a judgement goes: as a report, as JUnit XML, and as GitHub's annotations."""

    report: Delivery = field(default_factory=Delivery)
    junit: Path | None = None
    github: bool = False


def judged_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --junit, --github and those of reports; given as ``to``."""

    @wraps(function)
    def command(*args: Any, to: Delivery, junit: Path | None, github: bool, **given: Any) -> Any:
        return function(*args, to=Judged(to, junit, github), **given)

    made: Callable[..., Any] = command
    for option in (
        report_options("verdicts that do not pass"),
        click.option("--github", is_flag=True, envvar="GITHUB_ACTIONS", help="Print GitHub annotations."),
        click.option("--junit", type=click.Path(path_type=Path), metavar="FILE", help="Write JUnit XML here."),
    ):
        made = option(made)
    return made


def deliver_judgement(j: "Judgement", run: str, to: Judged, verbose: bool = False) -> int:
    """Print a judgement, write the files asked for, and return the exit code."""
    from precaudit.errors import UserError
    from precaudit.reports.findings import causes_by_place
    from precaudit.reports.gate import gate_report
    from precaudit.reports.gathered import findings_of
    from precaudit.reports.report import Report

    try:
        found = findings_of(Path(run), j) or ()
    except UserError as error:  # the verdicts stand without them
        say(f"note: what diagnose found is omitted: {error}", err=True)
        found = ()
    causes = causes_by_place(j, found)
    if to.junit is not None:
        from precaudit.reports.junit import render_junit

        write(to.junit, render_junit(j, causes))
    if to.github:
        from precaudit.reports.annotations import annotations

        for line in annotations(j, causes=causes):
            click.echo(line)
    pages = (to.report.markdown, to.report.html)
    bare = to.report.as_json and pages == (None, None)  # nothing but the records is wanted
    deliver(Report(None, records=j.verdicts) if bare else gate_report(j, run, verbose, causes), to.report)
    return j.exit_code
