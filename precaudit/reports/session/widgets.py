"""The heat map that arrows move over, and the two screens above it: a cell's story, and what a command prints."""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Click
from textual.message import Message
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import RichLog, Static

from precaudit.reports.cells import Cell
from precaudit.reports.escaping import terminal_line
from precaudit.reports.session.grid import NOTHING, At, Grid, drawn, head

LABEL = 22  # columns of the points' names, at most
ARROWS = {
    "up": (-1, 0),
    "down": (1, 0),
    "left": (0, -1),
    "right": (0, 1),
    "pageup": (-10, 0),
    "pagedown": (10, 0),
    "home": (0, -1 << 20),
    "end": (0, 1 << 20),
}
SELECTED = "on #3a3f4b"


class HeatMap(Widget, can_focus=True):
    """Points in rows, layers in columns; the cell at the cursor stands in brackets."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, f"move({row}, {column})", show=False) for key, (row, column) in ARROWS.items()),
        *(Binding(f"shift+{key}", f"move({row}, {column}, True)", show=False) for key, (row, column) in ARROWS.items()),
    ]

    class Moved(Message):
        """The cursor is on another cell; ``by_hand``: somebody has moved it there."""

        def __init__(self, by_hand: bool) -> None:
            super().__init__()
            self.by_hand = by_hand

    def __init__(self) -> None:
        super().__init__()
        self.grid = Grid()
        self.cursor: At = (0, 0)
        self.begun: At | None = None
        self._first: At = (0, 0)  # the row and column that are drawn first

    @property
    def cell(self) -> Cell | None:
        """The cell at the cursor."""
        return self.grid.at(self.cursor)

    @property
    def selected(self) -> list[Cell]:
        """The cells between where the selection began and the cursor: one where none began."""
        return list(self.grid.within(self.begun or self.cursor, self.cursor))

    def show(self, grid: Grid, at: At) -> None:
        """Show a grid with the cursor on one of its cells."""
        self.grid, self.begun = grid, None
        self._go(at)

    def action_move(self, rows: int, columns: int, grow: bool = False) -> None:
        """Move the cursor; ``grow``: the selection goes along, from where it began."""
        self.begun = (self.begun or self.cursor) if grow else None
        self._go((self.cursor[0] + rows, self.cursor[1] + columns), by_hand=True)

    def on_click(self, event: Click) -> None:
        """Go to the cell that was clicked."""
        row, column = event.y - 1 + self._first[0], (event.x - self._label) // self.grid.width + self._first[1]
        if event.y >= 1 and event.x >= self._label:
            self.begun = None
            self._go((row, column), by_hand=True)

    def _go(self, at: At, by_hand: bool = False) -> None:
        rows, columns = len(self.grid.points), len(self.grid.layers)
        self.cursor = (min(max(at[0], 0), max(rows - 1, 0)), min(max(at[1], 0), max(columns - 1, 0)))
        self.refresh()
        self.post_message(self.Moved(by_hand))

    @property
    def _label(self) -> int:
        longest = max((len(terminal_line(p)) for p in self.grid.points), default=0)
        return min(longest, LABEL, max(self.size.width // 3, 8)) + 1

    @property
    def _fits(self) -> tuple[int, int]:
        """How many rows and columns there is room for."""
        width = self.size.width - self._label - 1
        return max(self.size.height - 1, 1), max(width // max(self.grid.width, 3), 1)

    def render(self) -> Text:
        """Return the map as text: a line of layers, then a line a point."""
        (row, column), (rows, columns) = self.cursor, self._fits
        top = min(max(self._first[0], row - rows + 1), row)
        left = min(max(self._first[1], column - columns + 1), column)
        self._first = top, left
        wide = max(self.grid.width, 3)
        shown = range(left, min(left + columns, len(self.grid.layers)))
        text = Text(" " * self._label, no_wrap=True, end="")
        for c in shown:
            text.append(f"{head(self.grid.layers[c]):>{wide}}", "bold" if c == column else "dim")
        marked = {(c.layer, c.point) for c in self.selected} if self.begun is not None else set()
        for r in range(top, min(top + rows, len(self.grid.points))):
            point = self.grid.points[r]
            text.append("\n" + _cut(terminal_line(point), self._label), "bold" if r == row else "")
            for c in shown:
                here = (r, c) == self.cursor
                after = (r, c - 1) == self.cursor and c > left
                gap = (
                    ("]" if after else " ") + " " * (wide - 4) + ("[" if here else " ")
                    if wide > 3
                    else ("[" if here else "]" if after else " ")
                )
                chars, style = drawn(self.grid.at((r, c)), self.grid.kind)
                chosen = (self.grid.layers[c], point) in marked
                text.append(gap, "bold" if here or after else SELECTED if chosen else "")
                text.append(chars, style or NOTHING[1]) if not chosen else text.append(chars, f"{style} {SELECTED}")
            text.append("]" if self.cursor == (r, shown[-1] if shown else -1) else "", "bold")
        return text


def _cut(text: str, width: int) -> str:
    return f"{text:{width}}" if len(text) <= width else f"{text[: width - 1]}…"


def labelled(lines: Sequence[tuple[str, str]]) -> Text:
    """Return (label, text) a line each, whatever they quote made harmless; the first is a heading."""
    text = Text()
    wide = max((len(label) for label, _ in lines[1:]), default=0)
    for i, (label, told) in enumerate(lines):
        if i == 0:
            text.append(terminal_line(told), "bold")
        else:
            text.append(f"\n{terminal_line(label):{wide}}  ", "dim")
            text.append(terminal_line(told))
    return text


class StoryScreen(ModalScreen[None]):
    """All there is to tell of a cell."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q", "dismiss", "Close")]

    def __init__(self, lines: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self.lines = list(lines)

    def compose(self) -> ComposeResult:
        """Return the box and what it holds."""
        with VerticalScroll(id="box"):
            yield Static(id="told", markup=False)
            yield Static("Esc closes", classes="quiet", markup=False)

    def on_mount(self) -> None:
        """Tell what is known at once."""
        self.tell(())

    def tell(self, more: Sequence[tuple[str, str]]) -> None:
        """Add lines."""
        self.lines += more
        self.query_one("#told", Static).update(labelled(self.lines))


class OutputScreen(ModalScreen[None]):
    """What a command prints, as it comes; closing it ends the command."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Close")]

    def __init__(self, line: str) -> None:
        super().__init__()
        self.line = line

    def compose(self) -> ComposeResult:
        """Return the box and what it holds."""
        with VerticalScroll(id="box"):
            yield Static(Text(f"$ {terminal_line(self.line)}", "bold"), markup=False)
            yield RichLog(id="log", wrap=True, markup=False, highlight=False)
            yield Static("running … Esc ends it", id="state", classes="quiet", markup=False)

    def say(self, line: str) -> None:
        """Add a line."""
        self.query_one("#log", RichLog).write(Text(terminal_line(line)), width=max(self.size.width - 6, 20))

    def end(self, code: int) -> None:
        """Say that the command has ended."""
        self.query_one("#state", Static).update(f"exit code {code}. Esc closes")
