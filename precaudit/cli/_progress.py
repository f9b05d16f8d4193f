"""The progress display: one bar on stderr, and what is said meanwhile on lines of its own above it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from precaudit.progress import Advance, silent

PERIOD = 3600.0  # seconds whose speed the estimate is of: a step may take minutes
_shown: list[Any] = []  # the console of the bar that is shown


def above(line: str) -> bool:
    """Print a line above the bar; return whether one is shown."""
    if not _shown:
        return False
    _shown[-1].print(line, markup=False, highlight=False, soft_wrap=True)
    return True


def remaining_time(so_far: float, left: float | None) -> str:
    """Return how long it has taken, and what is left of the part where its speed is known."""
    text = f"{_clock(so_far)} so far"
    return text if left is None else f"{text}, {_clock(left)} left here"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def progress_bar(label: str = "reading") -> Iterator[Advance]:
    """Yield ``advance(done, total, what)``: a bar on stderr, nothing where stderr is no terminal.

    ``label``: what is done until the first call. A part begins where ``total`` changes or ``done`` falls.
    """
    if not sys.stderr.isatty():
        yield silent
        return
    from precaudit.cli._options import console

    with display(console(stderr=True), label) as advance:
        yield advance


@contextmanager
def display(console: Any, label: str) -> Iterator[Advance]:
    """Show a bar on a console."""
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn
    from rich.table import Column
    from rich.text import Text

    from precaudit.reports.escaping import terminal_line

    began = monotonic()

    class Label(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(task.description, no_wrap=True, overflow="ellipsis")  # the column that gives way

    class Timing(ProgressColumn):
        def render(self, task: Task) -> Text:
            known = task.completed and "compiling" not in task.description  # how long that takes nobody knows
            return Text(remaining_time(monotonic() - began, task.time_remaining if known else None))

    fixed = Column(no_wrap=True)
    columns = (Label(), BarColumn(8, table_column=fixed), TaskProgressColumn(table_column=fixed), Timing(fixed))
    with Progress(*columns, console=console, transient=True, speed_estimate_period=PERIOD) as bar:
        task = bar.add_task(terminal_line(label), total=None)

        def advance(done: int, total: int, what: str) -> None:
            now = bar.tasks[0]
            if total != now.total or done < now.completed:
                bar.reset(task, total=total, completed=done, description=terminal_line(what))
            else:
                bar.update(task, completed=done, description=terminal_line(what))

        _shown.append(console)
        try:
            yield advance
        finally:
            _shown.pop()
