"""A comparison on a terminal: the verdict, one screen of evidence, and everything where it is asked for."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from precaudit.recording.runs.written import Comparison
from precaudit.reports import differences, fitting
from precaudit.reports.escaping import terminal
from precaudit.reports.summary import sentences
from precaudit.reports.tables import detail, pair_by_point, pair_table, prefill_decode, reported_table
from precaudit.reports.tokens import quoted, top_tokens
from precaudit.reports.worst import by_point, explained_by, largest, matrices, parted
from precaudit.schema.places import Place

if TYPE_CHECKING:
    from precaudit.references.comparison.between import Between

LEGEND = "d decode step, r rescore position, t position, h head. What a word means: precaudit explain excess"
NOTES = 3  # the rest are counted
TIES = 5  # positions listed where views part


def show(comparison: Comparison, console: Any, verbose: bool = False, every: bool = False) -> None:
    """Print what a comparison found: the worst layers of each point, what differs, a few sentences.

    ``verbose``: a line a layer and point with all its sizes; ``every``: all layers, all notes.
    """
    errors, pairs = comparison.errors, comparison.prefill_decode
    if comparison.against is not None:
        _notes(comparison.notes, console, verbose or every)
        fitting.show(pair_table(errors) if verbose or every else pair_by_point(errors), console)
        for text in differences.sentences(errors):
            _say(f"- {text}", console)
        return
    found = by_point(errors)
    tables = [found, *(matrices(errors) if every else []), detail(errors) if verbose else None]
    other = parted(pairs)[: None if verbose or every else TIES]
    tables.append(prefill_decode(other, quoted(comparison.run, top_tokens(other))))
    for table in tables:
        if table is not None:
            fitting.show(table, console)
    for text in [explained_by(errors), largest(errors), *sentences(errors, pairs, verbose)]:
        if text:
            _say(f"- {text}", console)
    _notes(comparison.notes, console, verbose or every)
    _say(LEGEND, console, "dim")


def _notes(notes: tuple[str, ...], console: Any, every: bool) -> None:
    for note in notes if every else notes[:NOTES]:
        _say(f"note: {note}", console, "yellow")
    if len(notes) > NOTES and not every:
        _say(f"note: and {len(notes) - NOTES} more (--all shows them)", console, "yellow")


def _say(text: str, console: Any, style: str = "") -> None:
    from rich.markup import escape

    console.print(escape(terminal(text)), style=style, soft_wrap=console.width > fitting.UNFOLDED)


def show_between(found: "Between", console: Any, every: bool = False) -> None:
    """Print what one run is against another of any kind: notes, the worst of every layer and point, what is missing."""
    for note in found.notes:
        _say(f"note: {note}", console, "yellow")
    if found.errors:
        fitting.show(pair_table(found.errors) if every else pair_by_point(found.errors), console)
    if off := [e for e in found.errors if e.nonfinite]:
        where = Place.of(off[0]).text
        _say(f"{len(off)} of {len(found.errors)} tensors hold NaN or infinity, first {where}", console, "bold red")
    if lacking := [e for e in found.errors if e.numberless is not None]:
        whys = Counter(e.numberless for e in lacking)
        said = ", ".join(f"{n} {why}" for why, n in whys.most_common(3))
        _say(f"{len(lacking)} of {len(found.errors)} without numbers: {said}", console)
    if found.beside:
        fitting.show(reported_table(found.beside), console)
