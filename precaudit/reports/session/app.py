"""The sitting itself: a run's heat map, the story of the cell at the cursor, and the commands on what is selected."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.css.query import NoMatches
from textual.suggester import SuggestFromList
from textual.widgets import Footer, Input, Static
from textual.worker import get_current_worker

from precaudit.errors import UserError
from precaudit.recording.opening import against_folder
from precaudit.recording.runs.kinds import kind_of
from precaudit.reports.cells import Cell
from precaudit.reports.escaping import terminal_line
from precaudit.reports.gathered import recall_run
from precaudit.reports.provenance import subtitle, title
from precaudit.reports.report import COLOURS
from precaudit.reports.session.filters import command_line, look_of, narrowed, parse_filters
from precaudit.reports.session.grid import grid_of
from precaudit.reports.session.jobs import run_command
from precaudit.reports.session.reading import AGAINST, Shown, Signature, being_recorded, paused, read_run, signature
from precaudit.reports.session.stories import first_lines, worst_tokens
from precaudit.reports.session.widgets import HeatMap, OutputScreen, StoryScreen, labelled
from precaudit.reports.tokens import Text as Tokenized
from precaudit.reports.tokens import text_of
from precaudit.schema.filed import Filed
from precaudit.schema.records.errors import ERROR_KINDS, ErrorRecord
from precaudit.schema.selection import Filters

LOOK = 1.0  # seconds between looks at whether something was written
ASKS = {
    "filter": "--layers 0:2 --points q,k --phases decode --prompt a   (nothing: all)",
    "compare": "the folder of another run",
}


class _Stopped(Exception):
    """What was being read is no longer wanted."""


class Sitting(App[None]):
    """A compared run as one sitting.

    ``commands``: what was written down with x, a line each; ``reading``: what is being read, None where nothing is;
    ``failed``: why it has ended by itself.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #title { height: 1; text-style: bold; }
    #verdict { height: auto; max-height: 3; }
    #bar { height: 1; color: $text-muted; }
    HeatMap { height: 1fr; min-height: 5; }
    #story { height: auto; max-height: 7; border-top: solid $panel; text-wrap: nowrap; text-overflow: ellipsis; }
    #title, #bar { text-wrap: nowrap; text-overflow: ellipsis; }
    #ask { display: none; height: 3; }
    #box { width: 100%; height: 100%; padding: 0 1; background: $surface; border: round $primary; }
    #log { height: 1fr; }
    .quiet { color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "ask('filter')", "Filter", key_display="/"),
        Binding("enter", "story", "Story"),
        Binding("d", "diagnose", "Diagnose"),
        Binding("c", "ask('compare')", "Compare"),
        Binding("x", "command", "Command"),
        Binding("tab", "next_map", "Map", priority=True),
        Binding("escape", "close", show=False),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, folder: Path, filters: Filters) -> None:
        super().__init__()
        self.folder, self.filters = folder, filters
        self.shown = Shown()
        self.kind, self.chosen = "local", False  # which map, and whether somebody has moved or chosen one
        self.other: Path | None = None
        self.commands: list[str] = []
        self.reading: object | None = None
        self.failed: Exception | None = None
        self._seen = signature(folder)
        self._asking = ""
        self._text: dict[str, Tokenized | None] = {}

    def compose(self) -> ComposeResult:
        """Return the widgets from the top down."""
        yield Static(id="title", markup=False)
        yield Static(id="verdict", markup=False)
        yield Static(id="bar", markup=False)
        yield HeatMap()
        yield Static(id="story", markup=False)
        yield Input(id="ask")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Begin to read, and to look whether something is written."""
        self.query_one(HeatMap).focus()
        self.show(Shown())
        self.read()
        self.set_interval(LOOK, self.look_again)

    # what is read

    def read(self) -> None:
        """Read the run in a thread of its own, which nobody waits for who leaves; what was being read stops."""
        self.reading = object()
        Thread(target=self._read, args=(self.reading,), daemon=True).start()

    def _read(self, mine: object) -> None:
        def show(x: Shown) -> None:
            if self.reading is not mine or not self.is_running:
                raise _Stopped
            self.call_from_thread(self.show, x)

        seen, failed = signature(self.folder), None
        try:
            show(read_run(recall_run(self.folder), self.filters, self.other, show))
        except Exception as error:
            failed = error
        if self.is_running:  # who has left is told nothing
            self.call_from_thread(self._end_reading, mine, seen, failed)

    def _end_reading(self, mine: object, seen: Signature, failed: Exception | None) -> None:
        if self.reading is not mine:
            return
        self.reading, self._seen = None, seen
        if isinstance(failed, UserError):
            self.cannot(failed)
        elif failed is not None:
            self._leave(failed)

    def _leave(self, failed: Exception) -> None:
        self.failed = failed
        self.exit()

    def look_again(self) -> None:
        """Read the run again where something beside it was written."""
        found = signature(self.folder)
        if found != self._seen and self.reading is None:
            self._seen = found
            self.read()

    def cannot(self, error: UserError) -> None:
        """Show why the run cannot be read: it is being recorded, or compared anew; else leave."""
        told = being_recorded(self.folder)
        if self.shown.run is not None:
            self.show(paused(self.shown, str(error)))
        elif told is not None or self.shown.waiting:
            self.show(Shown(waiting=told or str(error)))
        else:
            self._leave(error)

    def show(self, shown: Shown) -> None:
        """Show what was read so far, the cursor where it was, or on the worst cell where nobody has moved it."""
        self.shown = shown
        if not self.chosen or (shown.judged is not None and not shown.maps.get(self.kind)):
            self.kind = shown.first
        heat, cell = self.query_one(HeatMap), self.query_one(HeatMap).cell
        grid = grid_of(self.kind, shown.maps, shown.order)
        heat.show(grid, grid.find(cell) if self.chosen and cell is not None else grid.worst)
        self._head()

    def _head(self) -> None:
        run, said = self.shown.run, self.shown.headline
        named = str(self.folder) if run is None else f"{title(run.record)} · {subtitle(run.record)}"
        self.query_one("#title", Static).update(Text(terminal_line(named)))
        colour = COLOURS[said.mark] if self.shown.judged is not None else ""
        self.query_one("#verdict", Static).update(Text(terminal_line(said.text), f"bold {colour}"))
        self._bar()

    def _bar(self) -> None:
        """Show which map it is, the filters, and how many of its records there are of each status."""
        text = Text()
        for name, its in self.shown.maps.items():
            if its:
                text.append(f" {name} ", "reverse" if name == self.kind else "")
                text.append(" ")
        told = self.shown.waiting or ", ".join(filter(None, (self.filters.text, self.shown.counts(self.kind))))
        self.query_one("#bar", Static).update(text.append(terminal_line(told)))

    def on_heat_map_moved(self, event: HeatMap.Moved) -> None:
        """Tell the first lines of the story of the cell at the cursor, which stays where somebody has moved it."""
        self.chosen = self.chosen or event.by_hand
        cell, run = self.query_one(HeatMap).cell, self.shown.run
        lines = [] if cell is None or run is None else first_lines(run, cell, self.shown.causes_of(cell))
        try:
            self.query_one("#story", Static).update(labelled(lines))
        except NoMatches:  # it closes
            return

    # what the keys do

    def action_next_map(self) -> None:
        """Show the next map that has cells."""
        names = [name for name, its in self.shown.maps.items() if its]
        if names:
            self.kind = names[(names.index(self.kind) + 1) % len(names)] if self.kind in names else names[0]
            self.chosen = True
            self.show(self.shown)

    def action_ask(self, what: str) -> None:
        """Ask for filters, or for another run."""
        self._asking = what
        ask = self.query_one("#ask", Input)
        ask.placeholder, ask.value = ASKS[what], self.filters.text if what == "filter" else ""
        ask.suggester = None if what == "filter" else SuggestFromList(_runs_beside(self.folder))
        ask.display = True
        ask.focus()

    def action_close(self) -> None:
        """Ask no more."""
        self.query_one("#ask", Input).display = False
        self.query_one(HeatMap).focus()
        self._bar()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Filter, or compare with the run that was named."""
        try:
            if self._asking == "filter":
                self._filter(event.value)
            elif event.value.strip():
                self._compare(Path(event.value.strip()).expanduser())
        except UserError as error:
            return self.notify(terminal_line(str(error)), severity="error", markup=False)
        return self.action_close()

    def _filter(self, text: str) -> None:
        filters = parse_filters(text)
        if self.shown.run is not None:
            look_of(self.shown.run, filters)
        self.filters, self.chosen = filters, False
        self.read()

    def _compare(self, other: Path) -> None:
        if not other.is_dir():
            raise UserError(f"{other}: no run here")
        self._run(["compare", str(self.folder), str(other)], other)

    def action_diagnose(self) -> None:
        """Diagnose what is selected."""
        if cells := self._cells():
            self._run(command_line("diagnose", self.folder, narrowed(self.filters, cells)))

    def action_command(self) -> None:
        """Write the selection as a command line: here, to the clipboard, and on the terminal when the sitting ends."""
        if not (cells := self._cells()):
            return
        line = f"precaudit {shlex.join(command_line('compare', self.folder, narrowed(self.filters, cells)))}"
        self.commands.append(line)
        self.copy_to_clipboard(line)
        self.notify(terminal_line(line), title="copied; printed when you leave", markup=False)

    def _cells(self) -> list[Cell]:
        """Return what is selected; where nothing is there, say so."""
        cells = self.query_one(HeatMap).selected
        if not cells:
            self.notify("no record is here: move to a cell first", severity="warning")
        return cells

    def action_story(self) -> None:
        """Tell all there is of the cell at the cursor."""
        cell, run = self.query_one(HeatMap).cell, self.shown.run
        if cell is not None and run is not None:
            screen = StoryScreen(first_lines(run, cell, self.shown.causes_of(cell)))
            self.push_screen(screen)
            self._tell_tokens(screen)

    @work(thread=True, group="story")
    def _tell_tokens(self, screen: StoryScreen) -> None:
        cell, run = self.query_one(HeatMap).cell, self.shown.run
        if cell is None or run is None:
            return
        if "of" not in self._text:
            self._text["of"] = text_of(run.compared.run)
        look = look_of(run, self.filters)
        errors: Sequence[ErrorRecord] = run.errors
        try:
            if self.kind == AGAINST and self.other is not None:
                errors = Filed(against_folder(run.folder, self.other) / "errors.jsonl", ERROR_KINDS)
            keeps = (lambda _: True) if look is None else look.holds
            found = worst_tokens(run, errors, self.kind, cell, keeps, self._text["of"])
        except UserError as error:
            found = [("tokens", str(error))]
        if screen.is_attached:
            self.call_from_thread(screen.tell, found)

    @work(group="command", exclusive=True)
    async def _run(self, words: Sequence[str], other: Path | None = None) -> None:
        """Run a command and show what it prints; ``other``: its map is shown once it has ended well."""
        screen = OutputScreen(shlex.join(["precaudit", *words]))
        worker = get_current_worker()
        await self.push_screen(screen, lambda _: worker.cancel())
        code = await run_command(words, max(self.size.width - 6, 40), screen.say)
        screen.end(code)
        if other is not None and code == 0:
            self.other, self.kind, self.chosen = other, AGAINST, True
            self.read()


def _runs_beside(folder: Path) -> list[str]:
    """Return the runs that lie beside one, as they are named from here."""
    here = sorted(p for p in folder.parent.iterdir() if p != folder and kind_of(p) is not None)
    return [str(p) for p in here]
