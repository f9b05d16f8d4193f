"""Options several commands share, and how they report."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from precaudit.cli._completion import complete_last, phase_names, point_names
from precaudit.cli._progress import above, progress_bar

__all__ = [
    "FILTERS",
    "Delivery",
    "cache_option",
    "console",
    "deliver",
    "filter_options",
    "given_options",
    "leave_out",
    "options_record",
    "policy_names",
    "progress_bar",
    "references",
    "report_options",
    "say",
    "selection_of_filters",
    "text_width",
    "write",
    "write_pages",
]

if TYPE_CHECKING:
    from precaudit.reports.report import Report
    from precaudit.schema.selection import Filters

WIDE = 10_000  # columns of what is no terminal: nothing is folded
SCREEN = Path("-")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


FILTERS = ("layers", "points", "phases", "prompt", "positions")  # as fields of Filters and parameters of commands


def filter_options(*names: str) -> Decorator:
    """Add --layers, --points, --phases, --prompt or --case, --positions, or those named; given as ``filters``."""
    chosen = names or FILTERS
    every = {
        "layers": click.option("--layers", metavar="LAYERS", help="Layers as Python slices: 0,15:18,-1."),
        "points": click.option(
            "--points",
            metavar="POINTS",
            shell_complete=complete_last(point_names),
            help="Points such as q,k,v,attn_out,logits, or all; logits:all.",
        ),
        "phases": click.option(
            "--phases",
            metavar="PHASES",
            shell_complete=complete_last(phase_names),
            help="prefill, decode, rescore, or a program's entry points (default: all).",
        ),
        "prompt": click.option(
            "--prompt", "--case", "prompt", metavar="IDS", help="Only these prompts, or a program's cases: ID[,ID]."
        ),
        "positions": click.option(
            "--positions", metavar="ROWS", help="Positions of tokens, or a program's calls: last:16,::64."
        ),
    }

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(*args: Any, **given: Any) -> Any:
            from precaudit.schema.selection import Filters

            return function(*args, filters=Filters(**{name: given.pop(name) for name in chosen}), **given)

        for name in reversed(FILTERS):
            command = every[name](command) if name in chosen else command
        return command

    return decorate


def options_record(kind: type, name: str = "asked") -> Decorator:
    """Give a command those of its options that are fields of a record as one, by a name; next to the function."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(*args: Any, **given: Any) -> Any:
            made = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            return function(*args, **{name: made}, **given)

        return command

    return decorate


@dataclass(frozen=True)
class Delivery:
    """Where a report goes: records as JSON in place of the screen, and files; ``-`` as Markdown's: the screen."""

    as_json: bool = False
    markdown: Path | None = None
    html: Path | None = None
    output: Path | None = None


def report_options(records: str | None = "records", output: str | None = None) -> Decorator:
    """Add --markdown, --html and --json, and with ``output`` -o FILE, of which it is the help; given as ``to``.

    ``records``: what --json prints; None: no --json.
    """
    path = click.Path(path_type=Path, dir_okay=False)
    dash = click.Path(path_type=Path, dir_okay=False, allow_dash=True)
    options = [
        click.option(
            "--markdown", type=dash, metavar="FILE", help="Write Markdown for a pull request here; -: print it."
        ),
        click.option("--html", type=path, metavar="FILE", help="Write one HTML page here; it needs no network."),
    ]
    if records is not None:
        options.append(click.option("--json", "as_json", is_flag=True, help=f"Print the {records} as JSONL."))
    if output is not None:
        options.insert(0, click.option("-o", "--output", type=path, metavar="FILE", help=output))

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(*args: Any, markdown: Path | None, html: Path | None, **given: Any) -> Any:
            as_json = records is not None and given.pop("as_json")
            written = given.pop("output") if output is not None else None
            return function(*args, to=Delivery(as_json, markdown, html, written), **given)

        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def policy_names(text: str) -> list[str]:
    """Return the policies named in ``bf16,fp32``; a file's name may hold a comma."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return [text] if Path(text).is_file() or not names else names


def selection_of_filters(requested: Any, filters: "Filters") -> Any:
    """Return the Selection that filters of a recorded run make; None without filters."""
    from precaudit.schema.selection import Selection

    if not filters.options:
        return None
    points, phases = filters.points or ",".join(requested.points), filters.phases or ",".join(requested.phases)
    return Selection.parse(filters.layers, points, phases, filters.positions, filters.prompt)


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


def deliver(r: "Report", to: Delivery | None = None) -> None:
    """Write a report into the files that are asked for, each whole or not at all, and print it or its records."""
    from precaudit.reports import pages
    from precaudit.reports.terminal import print_report

    to = to or Delivery()
    write_pages(r, to)
    if to.output is not None:
        write(to.output, "".join(pages.as_json(r)))
    if to.as_json:
        for line in pages.as_json(r):
            click.echo(line, nl=False)
    elif to.markdown == SCREEN:
        click.echo(pages.as_markdown(r), nl=False)
    else:
        print_report(r, console())


def write_pages(r: "Report", to: Delivery) -> None:
    """Write a report as Markdown and as a page, where that is asked for."""
    from precaudit.reports import pages

    for path, made in ((to.markdown, pages.as_markdown), (to.html, pages.as_html)):
        if path is not None and path != SCREEN:
            write(path, made(r))


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
