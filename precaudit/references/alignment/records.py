"""What an alignment says, a record a line."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import msgspec

from precaudit.references.alignment.align import Alignment
from precaudit.references.alignment.conversions import find_mistakes
from precaudit.references.alignment.forms import along_axes, nearest_tensor
from precaudit.references.alignment.names import NamesText, names_text, slice_text
from precaudit.references.alignment.parameters import Part, steps_in
from precaudit.references.alignment.points_text import EntryPoints
from precaudit.references.alignment.roles import Mistake
from precaudit.schema.digits import digits


class AlignedPart(msgspec.Struct, frozen=True):
    """A part of a parameter and the tensors it holds; ``found``: the share of its vectors that are theirs."""

    parameter: str
    shape: tuple[int, ...]
    tensors: str
    how: str
    found: float


class Unaligned(msgspec.Struct, frozen=True):
    """Parameters that the other side does not have; ``distance``: relative L2 to the nearest vector of its tensors."""

    parameter: str
    shape: tuple[int, ...]
    nearest: str = ""
    distance: float | None = None


@dataclass(frozen=True)
class Aligned:
    """Which parameter of one side is which tensor of the other, what is wrong, and what was not found.

    ``points``: what a program shows of the other side's textbook.
    """

    alignment: Alignment
    points: tuple[EntryPoints, ...] = ()

    @cached_property
    def parts(self) -> list[AlignedPart]:
        """A record of each part of a parameter, and the tensors it holds."""
        return list(part_records(self.alignment))

    @cached_property
    def mistakes(self) -> list[Mistake]:
        """What a conversion did wrong."""
        return find_mistakes(self.alignment)

    @cached_property
    def unaligned(self) -> list[Unaligned]:
        """The parameters that no tensor is, each with the nearest."""
        own, theirs = self.alignment.own, list(self.alignment.theirs.tensors.values())
        found = []
        for family in self.alignment.lost:
            every = (nearest_tensor(v, theirs) for v in along_axes(own.tensors[family.members[0]]))
            near = min((n for n in every if n is not None), key=lambda n: n.distance, default=None)
            where = ("", None) if near is None else (near.tensor, near.distance)
            found.append(Unaligned(family.general, family.shape, *where))
        return found

    @cached_property
    def names(self) -> NamesText:
        """The names map that ``--map`` reads."""
        return names_text(self.alignment, self.points)


def part_records(alignment: Alignment) -> Iterator[AlignedPart]:
    """Yield a record of each part."""
    for part in alignment.parts:
        yield AlignedPart(_block(part), part.family.shape, part.theirs, describe_part(alignment, part), part.share)


def _block(part: Part) -> str:
    """Return a part's parameter, with what of each axis is meant where that is not all."""
    names = part.family.names.ndim
    axes = [a for a in range(len(part.family.shape)) if not part.span[0] <= a < part.span[1]]
    cut = {
        axes[g - names]: s
        for g, s in enumerate(part.at)
        if g >= names and s != slice(0, part.family.shape[axes[g - names]])
    }
    if not cut:
        return part.family.general
    steps = [slice_text(cut[a]) if a in cut else ":" for a in range(max(cut) + 1)]
    return f"{part.family.general}[{', '.join(steps)}]"


def describe_part(alignment: Alignment, part: Part) -> str:
    """Return how a part holds its tensors, in words; empty where it is as they are."""
    said = ["ambiguous: others equal it"] if part.ambiguous else []
    tensor = next((alignment.book.tensors[t] for t in part.tensors if t is not None), None)
    if tensor is None:
        return ""
    form = alignment.book.forms[part.form]
    stacked = [n for a in part.owners if a >= part.family.names.ndim and (n := steps_in(part.at[a])) > 1]
    if stacked:
        said.append(f"{' x '.join(map(str, stacked))} stacked")
    if len(tensor.shape) == 2 and len(part.family.shape) >= 2 and (part.span[0] > _first_row(part)) != (part.axis == 1):
        said.append("transposed")
    if len(part.rows) > 1:
        said.append(f"rows apart as {' x '.join(map(str, part.rows))}")
    if part.order is not None and part.order.head and part.order.repeats == 1:
        said.append(f"heads of {part.order.head} interleaved" + (" backwards" if part.order.back else ""))
    if part.order is not None and part.order.repeats > 1:
        said.append(f"every head {part.order.repeats} times")
    if (part.index < 0).any() and part.order is not None:
        said.append(f"{int((part.index < 0).sum())} rows of zeros among them")
    if form.times != 1:
        said.append(f"times {digits(form.times, 6)}")
    if form.plus:
        said.append(f"plus {digits(form.plus, 6)}")
    if form.format != tensor.format:
        said.append(f"rounded to {form.format}")
    return ", ".join(said)


def _first_row(part: Part) -> int:
    """Return the array's first axis that is neither a vector's nor an owner's."""
    names = part.family.names.ndim
    axes = [a for a in range(len(part.family.shape)) if not part.span[0] <= a < part.span[1]]
    return next((a for g, a in enumerate(axes, names) if g not in part.owners), -1)
