"""Options several commands share, and how they report."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from precaudit.cli._completion import complete_last, phase_names, point_names
from precaudit.cli._progress import above, progress_bar

__all__ = [
    "cache_option",
    "console",
    "deliver",
    "given_options",
    "leave_out",
    "page_options",
    "progress_bar",
    "references",
    "say",
    "selection_of_filters",
    "selection_options",
    "text_width",
    "write",
]

if TYPE_CHECKING:
    from precaudit.reports.report import Report

WIDE = 10_000  # columns of what is no terminal: nothing is folded
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def selection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --layers, --points, --phases, --prompt."""
    for option in (
        click.option("--prompt", "prompt", metavar="IDS", help="Only these prompts: ID[,ID]."),
        click.option(
            "--phases",
            metavar="PHASES",
            shell_complete=complete_last(phase_names),
            help="prefill, decode, rescore (default: all).",
        ),
        click.option(
            "--points",
            metavar="POINTS",
            shell_complete=complete_last(point_names),
            help="Points such as q,k,v,attn_out,logits, or all; logits:all.",
        ),
        click.option("--layers", metavar="LAYERS", help="Layers as Python slices: 0,15:18,-1."),
    ):
        function = option(function)
    return function


def page_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --markdown and --html."""
    file = click.Path(path_type=Path, dir_okay=False)
    for option in (
        click.option("--html", type=file, metavar="FILE", help="Write one HTML page here; it needs no network."),
        click.option("--markdown", type=file, metavar="FILE", help="Write Markdown for a pull request here."),
    ):
        function = option(function)
    return function


def selection_of_filters(
    requested: Any, layers: str | None, points: str | None, phases: str | None, prompt: str | None
) -> Any:
    """Return the Selection that filters of a recorded run make; None without filters."""
    from precaudit.schema.selection import Selection

    if all(x is None for x in (layers, points, phases, prompt)):
        return None
    return Selection.parse(
        layers, points or ",".join(requested.points), phases or ",".join(requested.phases), None, prompt
    )


def given_options(context: click.Context) -> dict[str, str]:
    """Return {parameter: how it is written} of the options and arguments that the command line gives."""
    from click.core import ParameterSource

    line = ParameterSource.COMMANDLINE
    given = (p for p in context.command.params if context.get_parameter_source(p.name or "") == line)
    return {
        p.name or "": p.human_readable_name if p.param_type_name == "argument" else p.opts[0]
        for p in given
        if context.params[p.name or ""] is not None
    }


SILENT = False  # of several processes, all but the first


def leave_out(context: click.Context, names: Iterable[str], why: str) -> None:
    """Raise UserError where the command line gives one of these parameters, which are of no use here."""
    from precaudit.errors import UserError

    given = given_options(context)
    if other := [given[name] for name in names if name in given]:
        raise UserError(f"{why}; leave out {', '.join(other)}")


def cache_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --no-cache."""
    return click.option("--no-cache", is_flag=True, help="Neither use nor keep FP64 references.")(function)


@contextmanager
def references(no_cache: bool) -> Iterator[Path]:
    """Yield the folder of FP64 references: the user's, or one that is deleted."""
    from tempfile import TemporaryDirectory

    from precaudit.caching import cache_folder

    if not no_cache:
        yield cache_folder("references")
        return
    with TemporaryDirectory(prefix="precaudit-") as name:
        yield Path(name)


def say(text: str, err: bool = False) -> None:
    """Print one line, whatever it quotes made harmless; what goes to stderr, above a bar that is shown there."""
    from precaudit.reports.escaping import terminal_line

    if not SILENT and not (err and above(terminal_line(text))):
        click.echo(terminal_line(text), file=_stream(err))


def deliver(
    r: "Report", as_json: bool, output: Path | None = None, markdown: Path | None = None, html: Path | None = None
) -> None:
    """Write a report into the files that are asked for, each whole or not at all, and print it or its records."""
    from precaudit.reports import pages
    from precaudit.reports.terminal import print_report

    for path, made in ((markdown, pages.as_markdown), (html, pages.as_html)):
        if path is not None:
            write(path, made(r))
    if output is not None:
        write(output, "".join(pages.as_json(r)))
    if not as_json:
        return print_report(r, console())
    for line in pages.as_json(r):
        click.echo(line, nl=False)
    return None


def write(path: Path, text: str | bytes) -> None:
    """Write a file whole or not at all."""
    from precaudit.writing import write_whole

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def _stream(err: bool) -> TextIO:
    """Return the stream as main() set it up: left to itself, click writes UTF-8 where a terminal takes ASCII."""
    return sys.stderr if err else sys.stdout


def text_width() -> int | None:
    """Return the columns text is wrapped to: $COLUMNS, else the terminal's; None where output is no terminal."""
    import shutil

    columns = os.environ.get("COLUMNS", "")
    if sys.stdout.isatty() or (columns.isdigit() and int(columns)):
        return shutil.get_terminal_size().columns
    return None


def console(stderr: bool = False) -> Any:
    """Return a rich console as wide as the terminal, or as COLUMNS says; of any width where output goes elsewhere."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    told = os.environ.get("COLUMNS", "").isdigit() or stream.isatty()
    return Console(stderr=stderr, width=None if told else WIDE, highlight=False)
