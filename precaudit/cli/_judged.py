"""Printing and writing a judgement, for the commands that make one."""

from pathlib import Path

import click

from precaudit.cli._options import deliver, say, write
from precaudit.judging.judgement import Judgement


def deliver_judgement(
    j: Judgement,
    run: str,
    junit: Path | None,
    markdown: Path | None,
    github: bool = False,
    as_json: bool = False,
    verbose: bool = False,
) -> int:
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
    if junit is not None:
        from precaudit.reports.junit import render_junit

        write(junit, render_junit(j, causes))
    if github:
        from precaudit.reports.annotations import annotations

        for line in annotations(j, causes=causes):
            click.echo(line)
    bare = as_json and markdown is None  # nothing but the records is wanted
    report = Report(None, records=j.verdicts) if bare else gate_report(j, run, verbose, causes)
    deliver(report, as_json, markdown=markdown)
    return j.exit_code
