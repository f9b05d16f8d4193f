"""Options several commands share, and how they report."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from precaudit.progress import Advance, silent

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def selection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --layers, --points, --phases, --prompt."""
    for option in (
        click.option("--prompt", "prompt", metavar="IDS", help="Only these prompts: ID[,ID]."),
        click.option("--phases", metavar="PHASES", help="prefill, decode, rescore (default: all)."),
        click.option("--points", metavar="POINTS", help="Points such as q,k,v,attn_out,logits, or all; logits:all."),
        click.option("--layers", metavar="LAYERS", help="Layers as Python slices: 0,15:18,-1."),
    ):
        function = option(function)
    return function


def narrowed(requested: Any, layers: str | None, points: str | None, phases: str | None, prompt: str | None) -> Any:
    """Return the Selection that filters of a recorded run make; None without filters."""
    from precaudit.selection import Selection

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
    """Print one line, whatever it quotes made harmless."""
    from precaudit.reports.escaping import terminal

    click.echo(terminal(text), err=err)


def console(stderr: bool = False) -> Any:
    """Return a rich console; 100 columns where output is no terminal."""
    import sys

    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 100, highlight=False)


@contextmanager
def progress_bar() -> Iterator[Advance]:
    """Yield ``advance(done, total, what)``: a bar on stderr, nothing where stderr is no terminal."""
    import sys

    if not sys.stderr.isatty():
        yield silent
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
