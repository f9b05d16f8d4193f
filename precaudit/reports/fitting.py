"""Tables made to fit: one too wide is cut between columns, never inside a number."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from precaudit.reports.escaping import terminal_line

GAP = 2  # spaces between columns
UNFOLDED = 1000  # a console this wide folds nothing
WORDS = 24  # columns of words are folded rather than moved, down to this width


@dataclass(frozen=True)
class Table:
    """A title, column names and rows; ``left``: columns that hold words; the first ``keys`` say what a row is of."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[str, ...] = ()
    keys: int = 1

    @property
    def filled(self) -> "Table":
        """The table without the columns, keys aside, in which no row has anything."""
        kept = [i for i in range(len(self.columns)) if i < self.keys or any(row[i] for row in self.rows)]
        return _part(self, kept, 0) if self.rows else self


def fit_tables(table: Table, width: int) -> list[Table]:
    """Return the table, or as many with some of its columns each as it takes; every one has the key columns.

    A column of words may be folded to what is left of a line; one of numbers is whole, whatever the width.
    """
    sizes = natural(table)
    keys = list(range(table.keys))
    most = max(WORDS, width // 3)
    left = width - sum((min(sizes[i], most) if table.columns[i] in table.left else sizes[i]) + GAP for i in keys)
    blocks: list[list[int]] = [[]]
    room = left
    for i in range(table.keys, len(sizes)):
        needs = min(sizes[i], WORDS) if table.columns[i] in table.left else sizes[i]
        if blocks[-1] and needs > room:
            blocks.append([])
            room = left
        blocks[-1].append(i)
        room -= min(sizes[i], max(room, needs)) + GAP
    return [_part(table, [*keys, *block], n) for n, block in enumerate(blocks)] if len(blocks) > 1 else [table]


def natural(table: Table) -> list[int]:
    """Return how wide each column is if nothing of it is folded."""
    from rich.cells import cell_len

    return [max(cell_len(row[i]) for row in (table.columns, *table.rows)) for i in range(len(table.columns))]


def print_table(table: Table, console: Any) -> None:
    """Print a table as wide as the console lets it be, in as many parts as it takes."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable

    if table.title:
        console.print(escape(terminal_line(table.title)), style="bold", soft_wrap=console.width > UNFOLDED)
    for part in fit_tables(table, console.width):
        out = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), collapse_padding=True)
        for name in part.columns:
            words = name in part.left
            out.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
        for row in part.rows:
            out.add_row(*(escape(terminal_line(cell)) for cell in row))
        console.print(out)
        console.print()


def _part(table: Table, columns: Sequence[int], n: int) -> Table:
    return replace(
        table,
        title=table.title if n == 0 else "",
        columns=tuple(table.columns[i] for i in columns),
        rows=tuple(tuple(row[i] for i in columns) for row in table.rows),
    )
