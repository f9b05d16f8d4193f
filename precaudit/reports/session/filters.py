"""What a sitting shows and hands to other commands: filters as the command line has them."""

import shlex
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

from precaudit.errors import UserError, nearest
from precaudit.judging.looks import Look, look_by
from precaudit.reports.cells import Cell
from precaudit.reports.gathered import Recalled
from precaudit.schema.places import row_spans
from precaudit.schema.selection import Filters


def parse_filters(text: str) -> Filters:
    """Return the filters in ``--layers 0:2 --points q,k``, dashes or none; raises UserError for anything else."""
    names = tuple(f.name for f in fields(Filters))
    try:
        words = [part for word in shlex.split(text) for part in _halves(word)]
    except ValueError as error:
        raise UserError(f"{text!r}: {error}") from None
    given: dict[str, str] = {}
    while words:
        name = words.pop(0).lstrip("-")
        if name not in names:
            raise UserError(f"no filter {name!r}{nearest(name, names)}; such as --layers 0:2 --points q,k")
        if not words:
            raise UserError(f"--{name} needs a value")
        given[name] = words.pop(0)
    return Filters(**given)


def _halves(word: str) -> list[str]:
    """Return ``--layers=0:2`` as the two words that it stands for; a point's name may hold ``=``."""
    name, equals, rest = word.partition("=")
    return [name, rest] if equals and name.startswith("--") else [word]


def look_of(run: Recalled, filters: Filters) -> Look | None:
    """Return what filters leave of a run, None where there are none; raises UserError for what the run lacks."""
    return look_by(run.compared.run, filters)


def narrowed(filters: Filters, cells: Iterable[Cell]) -> Filters:
    """Return filters of some cells: their layers and points, and the other filters as they were.

    What lies outside layers is in no filter of layers. Operations that sums of rows alone tell of were not recorded,
    and cannot be named: they go along where no point is.
    """
    its = list(cells)
    within = sorted({c.layer for c in its if c.layer is not None})
    spans = (f"{a}:{b}" if b - a > 1 else str(a) for a, b in row_spans(within))
    points = dict.fromkeys(c.point for c in its if c.worst.kind != "sums")
    return replace(filters, layers=",".join(spans) or None, points=",".join(points) or None)


def command_line(command: str, run: Path, filters: Filters) -> list[str]:
    """Return the words of a command on what is selected, after ``precaudit``."""
    return [command, str(run), *filters.options]
