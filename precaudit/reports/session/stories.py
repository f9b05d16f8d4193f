"""The story of a cell: its numbers, what explains them, the line that makes it, and its worst tokens in context."""

import linecache
from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from math import inf, isnan

from precaudit.judging.programs import sources
from precaudit.reports.cells import KINDS, Cell, story
from precaudit.reports.gathered import Recalled
from precaudit.reports.tokens import Text, in_context, sequence_of
from precaudit.schema.digits import digits
from precaudit.schema.filed import of_place
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord, PairError

TOKENS = 5  # that are shown
SCALES = {"local": ("excess", "rel_l2"), "forward": ("ratio", "rel_l2")}  # what orders tokens; of others rel_l2
UNITS = {"excess": "× what rounding leaves", "ratio": "× what rounding makes", "rel_l2": "relative"}
Told = list[tuple[str, str]]


def first_lines(run: Recalled, cell: Cell, causes: Sequence[str]) -> Told:
    """Return what is known of a cell at once, as (label, text); ``causes``: what diagnosis says of it."""
    told = [(label, text) for label, text in story(cell) if label != "line"]
    said = [("cause", text) for text in causes]
    return [(told[0][0], f"{cell.mark} {told[0][1]}"), *said, *told[1:], *_made_by(run, cell.point)]


def worst_tokens(
    run: Recalled,
    errors: Sequence[ErrorRecord],
    kind: str,
    cell: Cell,
    keeps: Callable[[ErrorRecord], bool],
    text: Text | None,
) -> Told:
    """Return the tokens of a cell whose error is largest, each in its context, from all of its records."""
    kinds = KINDS.get(kind, (PairError,))
    every = (e for e in of_place(errors, cell.layer, cell.point) if isinstance(e, kinds) and keeps(e))
    sized = [(*found, e) for e in every for found in _sizes(kind, e)]
    return [
        (f"token {position}", f"{_context(run, e, position, text)}{digits(size)} {UNITS[metric]}, {_call(e)}")
        for size, metric, position, e in nlargest(TOKENS, sized, key=lambda x: x[0])
    ]


def _sizes(kind: str, e: ErrorRecord) -> Iterator[tuple[float, str, int]]:
    """Yield the worst token of a record: its size, in what, and its position."""
    tokens = (e.scopes or {}).get("token", {})
    for metric in SCALES.get(kind, ("rel_l2",)):
        if metric in tokens:
            size, position = tokens[metric]
            yield (inf if isnan(value(size)) else value(size)), metric, position
            return


def _call(e: ErrorRecord) -> str:
    return f"{e.prompt} {e.phase} {e.step}"


def _made_by(run: Recalled, point: str) -> Iterator[tuple[str, str]]:
    """Yield the line of a program that makes a point; of a model what the point is made of."""
    if run.program is not None:
        place = sources(run.program).get(point, "")
        file, _, line = place.rpartition(":")
        code = linecache.getline(file, int(line)).strip() if line.isdigit() else ""
        if place:
            yield "line", f"{place}: {code}" if code else place
    elif point in POINTS and POINTS[point].inputs:
        yield "computed from", ", ".join(POINTS[point].inputs)


def _context(run: Recalled, e: ErrorRecord, row: int, text: Text | None) -> str:
    """Return a token between what stands before and after it, marked; nothing of a program without token ids."""
    its = sequence_of(run.compared.run, e, row)
    if its is None:
        return ""
    before, this, after = in_context(its.ids, its.position, text)
    return " ".join(filter(None, (before, f"«{this}»", after))) + "  " if text is None else f"{before}«{this}»{after}  "
