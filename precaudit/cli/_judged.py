"""Printing and writing a judgement, for the commands that make one."""

from pathlib import Path

import click

from precaudit.cli._options import announce, say
from precaudit.judging.judgement import Judgement


def show(
    j: Judgement,
    run: str,
    junit: Path | None,
    markdown: Path | None,
    github: bool = False,
    as_json: bool = False,
    verbose: bool = False,
) -> int:
    """Print a judgement, write the files asked for, and return the exit code."""
    from precaudit.reports import judgement, pull_request
    from precaudit.reports.headline import headline, how_far
    from precaudit.schema.records.lines import encode

    if junit is not None:
        from precaudit.reports.junit import render

        write(junit, render(j))
    if markdown is not None:
        write(markdown, pull_request.markdown(j))
    if github:
        for line in pull_request.annotations(j):
            click.echo(line)
    if as_json:
        for v in j.verdicts:
            click.echo(encode(v), nl=False)
    else:
        announce(headline(j, run))
        *rest, counted = judgement.lines(j, verbose)
        for line in rest:
            say(line)
        if j.farthest is not None:
            say(f"size: {how_far(j.farthest, j.sources)}")
        say(counted)
    return j.exit_code


def write(path: Path, text: str | bytes) -> None:
    """Write a file whole or not at all."""
    from precaudit.writing import write_whole

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
