"""The points of a program's entry points as lines of a names map."""

from collections.abc import Sequence
from typing import NamedTuple

from precaudit.references.alignment.points import FoundPoint


class EntryPoints(NamedTuple):
    """What an entry point shows: which of its input leaves holds token ids, and its points in the textbook's order."""

    entry: str
    tokens: int
    points: tuple[FoundPoint, ...]


def points_lines(entries: Sequence[EntryPoints]) -> list[str]:
    """Return the lines of a names map that say what entry points show: of all, and each later one's own."""
    if not entries:
        return []
    first, *later = entries
    own = {p.point: _seen(p) for p in first.points}
    lines = ["", "[points]", *(f"{name} = {seen}" for name, seen in own.items())]
    for one in later:
        its = {p.point: _seen(p) for p in one.points}
        differ = {name: seen for name, seen in its.items() if own.get(name) != seen}
        differ |= {name: "false" for name in own if name not in its}
        tokens = [f"tokens = {one.tokens}"] if one.tokens != first.tokens else []
        if differ or tokens:
            lines += ["", f"[entries.{one.entry}]", *tokens, *(f"points.{n} = {seen}" for n, seen in differ.items())]
    return lines


def _seen(p: FoundPoint) -> str:
    name = f'"{p.series.name}"'
    return f'{{ name = {name}, axes = "{p.axes}" }}' if p.axes else name
