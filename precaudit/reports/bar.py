"""A progress bar for scripts and notebooks."""

from collections.abc import Iterator
from contextlib import contextmanager

from precaudit.progress import Progress
from precaudit.reports.escaping import terminal_line


@contextmanager
def bar() -> Iterator[Progress]:
    """Yield where a verb reports to: rich's bar, in a terminal and (with ipywidgets) in a notebook."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=None)

        def advance(done: int, total: int, what: str) -> None:
            shown.update(task, completed=done, total=total, description=escape(terminal_line(what)))

        yield Progress(lambda line: shown.print(escape(terminal_line(line))), advance)
