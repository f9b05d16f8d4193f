"""A report as data: what a command has to say, the same for a terminal, Markdown, HTML and JSON."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from precaudit.reports.fitting import Table

Mark = Literal["✓", "✗", "?"]
COLOURS = {"✓": "green", "✗": "red", "?": "yellow"}
Only = Literal["terminal", "pages", "markdown", "html", ""]
Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Headline:
    """``mark``: ✓ fine, ✗ a fault, ? cannot judge; one sentence; ``next``: the command to run, if there is one."""

    mark: Mark
    sentence: str
    next: str = ""

    @property
    def text(self) -> str:
        """The sentence with its mark."""
        return f"{self.mark} {self.sentence}"

    @property
    def lines(self) -> list[str]:
        """That, and the command to run."""
        return [self.text, f"  Next: {self.next}"] if self.next else [self.text]


@dataclass(frozen=True)
class Chart:
    """A chart that a page's script draws: the element it is drawn in, its heading, what it shows, its Vega-Lite."""

    id: str
    title: str
    spec: Mapping[str, Any]
    says: str = ""
    width: int = 1120


@dataclass(frozen=True)
class Section:
    """A part of a report: its heading and what it shows, both told on pages alone; tables, facts by name, sentences.

    ``parts``: with headings of their own, told everywhere. ``only``: where it is shown, if not everywhere; "pages" are
    Markdown and HTML. Of an HTML page: ``menu``, its place there in a word; ``pictures``, which makes (title, SVG) of
    each; ``charts``; ``folded``, whether its tables are opened by hand; ``leads``, whether it comes right after the
    verdict; ``missing``, what is said among the notes, and the command to run, where nothing is there.
    """

    heading: str = ""
    says: str = ""
    tables: tuple[Table, ...] = ()
    facts: Facts = ()
    lines: tuple[str, ...] = ()
    only: Only = ""
    menu: str = ""
    pictures: Callable[[], Iterable[tuple[str, str]]] | None = None
    charts: tuple[Chart, ...] = ()
    parts: tuple["Section", ...] = ()
    folded: bool = False
    leads: bool = False
    missing: tuple[str, str] = ("", "")

    @property
    def id(self) -> str:
        """What a page's menu leads to."""
        return f"to-{self.menu.lower().replace(' ', '-')}" if self.menu else ""

    @property
    def empty(self) -> bool:
        """Whether nothing is there but what may be said of that."""
        return not (self.facts or self.lines or self.pictures or self.charts or self.parts or self.filled_tables)

    @property
    def all_sentences(self) -> list[str]:
        """Its sentences and those of its parts, under the heading of each."""
        return [*self.lines, *(x for p in self.parts for x in (p.heading, *(f"   {line}" for line in p.all_sentences)))]

    @property
    def filled_tables(self) -> list[Table]:
        """The tables that have rows, without their empty columns."""
        return [t.filled for t in self.tables if t.rows]


@dataclass(frozen=True)
class Report:
    """The first sentence, sections, and notes; ``ending``: what a terminal shows last.

    ``folds``: whether a terminal breaks its lines between words. For pages: the ``command`` that says so, ``title``
    and ``subtitle``, ``facts`` of what was run, ``words`` that are explained. For JSON: ``records``, a line each.
    """

    headline: Headline | None
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()
    ending: tuple[str, ...] = ()
    command: str = ""
    title: str = ""
    subtitle: str = ""
    facts: Facts = ()
    words: tuple[str, ...] = ()
    records: Sequence[Any] = ()
    folds: bool = False

    @property
    def lines(self) -> list[str]:
        """What a terminal shows of it besides tables."""
        said = [line for s in self.shown_on("terminal") for line in s.all_sentences]
        first = [] if self.headline is None else self.headline.lines
        return [*first, *said, *self.notes, *self.ending]

    @property
    def exit_code(self) -> int:
        """0 where the verdict is fine, 1 where it is a fault, 3 where nothing can be judged."""
        return {"✓": 0, "✗": 1}.get(self.headline.mark if self.headline is not None else "✓", 3)

    def shown_on(self, where: Literal["terminal", "markdown", "html"]) -> list[Section]:
        """Return the sections that a renderer shows, those without anything left out."""
        asked: set[Only] = {"", "terminal"} if where == "terminal" else {"", "pages", where}
        return [s for s in self.sections if s.only in asked and not s.empty]
