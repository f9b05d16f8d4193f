"""The story of a cell: its numbers, what explains them, the line that makes it, and its worst tokens in context."""

import linecache
from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from math import inf, isnan, prod

from precaudit.errors import UserError
from precaudit.judging.programs import sources
from precaudit.recording.runs.programs import Opened
from precaudit.reports.cells import KINDS, Cell, story
from precaudit.reports.gathered import Recalled
from precaudit.reports.tokens import Text, in_context, token_ids
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


def _context(run: Recalled, e: ErrorRecord, position: int, text: Text | None) -> str:
    """Return a token between what stands before and after it, marked; nothing of a program without token ids."""
    if run.program is None:
        before, this, after = in_context(token_ids(run.compared.run, e.prompt), position, text)
        return f"{before}«{this}»{after}  "
    ids = None if run.program is None else _fed(run.program, e, position)
    if ids is None:
        return ""
    before, this, after = in_context(dict(enumerate(ids[0])), ids[1], None)
    return " ".join(filter(None, (before, f"«{this}»", after))) + "  "


def _fed(program: Opened, e: ErrorRecord, row: int) -> tuple[list[int], int] | None:
    """Return the token ids of the sequence that a row of a point belongs to, and which of them is its own."""
    one = next((x for x in program.entries if x.record.phase == e.phase), None)
    if one is None or one.record.tokens is None:
        return None
    shape = next((p.shape for p in (*one.record.points, *one.record.outputs) if p.name == e.point), ())
    try:
        ids = one.tensors(e.prompt, e.step, "inputs")[str(one.record.tokens)]
    except (UserError, KeyError):
        return None
    if prod(shape[:-1]) != ids.size or row >= ids.size:
        return None
    length = ids.shape[-1] if ids.ndim else 1
    rows = ids.reshape(-1, length)
    return [int(x) for x in rows[row // length]], row % length
