"""The points of a program's entry points as lines of a names map."""

from collections.abc import Sequence
from typing import NamedTuple

from precaudit.references.alignment.points import FoundPoint


class EntryPoints(NamedTuple):
    """What an entry point shows: which of its input leaves holds token ids, and its points in the textbook's order.

    ``batch``: ids [N] are of N sequences; ``lengths``: the leaf that says which rows are padding, None where none does.
    """

    entry: str
    tokens: int
    points: tuple[FoundPoint, ...]
    batch: bool = False
    lengths: int | None = None

    @property
    def inputs(self) -> dict[str, str]:
        """What a map says of its inputs."""
        said = {"tokens": str(self.tokens), "batch": "true" if self.batch else "false"}
        return said if self.lengths is None else said | {"lengths": str(self.lengths)}


def input_lines(entry: EntryPoints) -> list[str]:
    """Return the lines of a names map that say which of the inputs are tokens, and what of padding."""
    return [f"{key} = {said}" for key, said in entry.inputs.items() if said != "false"]


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
        own_inputs = [f"{key} = {said}" for key, said in one.inputs.items() if first.inputs.get(key) != said]
        if differ or own_inputs:
            lines += [
                "",
                f"[entries.{one.entry}]",
                *own_inputs,
                *(f"points.{n} = {seen}" for n, seen in differ.items()),
            ]
    return lines


def _seen(p: FoundPoint) -> str:
    name = f'"{p.series.name}"'
    return f'{{ name = {name}, axes = "{p.axes}" }}' if p.axes else name
