"""A report on a terminal."""

from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from precaudit.reports import fitting
from precaudit.reports.escaping import terminal_line
from precaudit.reports.report import COLOURS, Facts, Report

LABEL = 12  # columns of a fact's name


def print_report(r: Report, console: Any) -> None:
    """Print a report: the verdict in its colour and the next command, tables and sentences, notes, and the ending.

    Tables are as wide as the console lets them be, and so are the lines of what ``folds``; others are left to it.
    """
    for line in [] if r.headline is None else r.headline.lines:
        print_line(line, console)
    for s in r.shown_on("terminal"):
        for table in s.tables:
            fitting.print_table(table, console)
        for line in (*_rows(s.facts, console), *s.all_sentences):
            print_line(line, console, r.folds)
    for line in (*r.notes, *r.ending):
        print_line(line, console, r.folds)


def print_line(text: str, console: Any, folds: bool = False) -> None:
    """Print one line, whatever it quotes made harmless: a verdict in the colour of its mark, a note in yellow."""
    from rich.text import Text

    marked = text[1:2] == " " and text[0] in COLOURS
    style = "yellow" if text.startswith("note: ") else f"bold {COLOURS[text[0]]}" if marked else ""
    console.print(Text(terminal_line(text)), style=style, soft_wrap=not folds or console.width > fitting.UNFOLDED)


def _rows(facts: Facts, console: Any) -> Iterator[str]:
    """Yield ``name  text``, the text hanging beside its name; paths and commands are never cut."""
    for name, told in facts:
        if console.width > fitting.UNFOLDED:
            yield f"{name:{LABEL}}{told}"
        else:
            first, rest, width = f"{name:{LABEL}}", " " * LABEL, max(console.width, 40)
            yield from wrap(
                told,
                width,
                initial_indent=first,
                subsequent_indent=rest,
                break_long_words=False,
                break_on_hyphens=False,
            )
