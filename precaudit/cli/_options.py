"""Options several commands share, and how they report."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from precaudit.cli._completion import listed, phases, points
from precaudit.cli._progress import above, progress_bar

__all__ = [
    "announce", "cache_option", "console", "narrowed", "progress_bar", "references", "say", "selection_options",
    "text_width",
]  # fmt: skip

if TYPE_CHECKING:
    from precaudit.reports.headline import Headline

WIDE = 10_000  # columns of what is no terminal: nothing is folded
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def selection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --layers, --points, --phases, --prompt."""
    for option in (
        click.option("--prompt", "prompt", metavar="IDS", help="Only these prompts: ID[,ID]."),
        click.option("--phases", metavar="PHASES", shell_complete=listed(phases),
                     help="prefill, decode, rescore (default: all)."),
        click.option("--points", metavar="POINTS", shell_complete=listed(points),
                     help="Points such as q,k,v,attn_out,logits, or all; logits:all."),
        click.option("--layers", metavar="LAYERS", help="Layers as Python slices: 0,15:18,-1."),
    ):  # fmt: skip
        function = option(function)
    return function


def narrowed(requested: Any, layers: str | None, points: str | None, phases: str | None, prompt: str | None) -> Any:
    """Return the Selection that filters of a recorded run make; None without filters."""
    from precaudit.schema.selection import Selection

    if all(x is None for x in (layers, points, phases, prompt)):
        return None
    return Selection.parse(
        layers, points or ",".join(requested.points), phases or ",".join(requested.phases), None, prompt
    )


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
    from precaudit.reports.escaping import terminal

    if not (err and above(terminal(text))):
        click.echo(terminal(text), file=_stream(err))


def announce(found: "Headline", err: bool = False) -> None:
    """Print the first sentence in its colour, and the next command."""
    from precaudit.reports.escaping import terminal
    from precaudit.reports.headline import COLOURS

    plain = False if os.environ.get("NO_COLOR") else None
    click.secho(terminal(found.text), file=_stream(err), fg=COLOURS[found.mark], bold=True, color=plain)
    if found.next:
        say(f"  Next: {found.next}", err)


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
