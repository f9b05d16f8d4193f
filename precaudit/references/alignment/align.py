"""Align two sides: every family of one held to the tensors of the other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from precaudit.errors import CannotJudge
from precaudit.numbers.arrays import Array
from precaudit.references.alignment.fingerprints import Book, book_of, in_form
from precaudit.references.alignment.forms import SAMPLED, along_axes, nearest_tensor, possible_forms, sizes_of
from precaudit.references.alignment.looking import Looked, look_family, vectors_at
from precaudit.references.alignment.parameters import Part, Theirs, parts_of
from precaudit.references.alignment.sides import Family, Side, families

FEW = 0.5  # of a tensor's vectors: fewer may be equal by chance, where it was rounded twice
Told = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Alignment:
    """Which parameter of ``own`` is which tensor of ``theirs``; ``lost``: families without a part."""

    own: Side
    theirs: Side
    parts: tuple[Part, ...]
    book: Book
    lost: tuple[Family, ...]

    @cached_property
    def shares(self) -> dict[str, float]:
        """The share of each tensor's vectors, along the axis of which most were found, that the program has."""
        found = {t.name: 0.0 for t in self.book.tensors}
        for (number, _, _), seen in self.book.seen.items():
            name = self.book.tensors[number].name
            found[name] = max(found[name], float(seen.mean()))
        return found


def align_sides(own: Side, theirs: Side, tell: Told = lambda *_: None) -> Alignment:
    """Return which parameters of one side are which tensors of the other.

    Raises CannotJudge where nothing is common, or what is missing may be what was passed over.
    """
    tensors = list(theirs.tensors.values())
    tell(0, 2, f"reading {theirs.label}")
    book = book_of(tensors, {t.format for t in own.tensors.values()})
    known = Theirs(theirs)
    every = families({t.name: t.shape for t in own.tensors.values()})
    looked: list[Looked | None] = []
    for done, family in enumerate(every):
        tell(done, len(every), family.general)
        looked.append(look_family(family, own, book))
    looked = _in_other_forms(every, looked, own, theirs, known, book)
    parts, lost = [], []
    for family, found in zip(every, looked, strict=True):
        made = [] if found is None else parts_of(found, known, book)
        parts += made
        if not made:
            lost.append(family)
    if not any(p.found.any() for p in parts):
        raise CannotJudge(f"{own.label} and {theirs.label} have no vector of values in common: another model, or size?")
    aligned = Alignment(own, theirs, tuple(parts), book, tuple(lost))
    if own.passed and (missing := [name for name, share in aligned.shares.items() if share == 0]):
        raise CannotJudge(
            f"{own.label}: {len(own.passed)} arrays are no floats, the first {own.passed[0]!r}, and {len(missing)} "
            f"tensors are nowhere else, the first {missing[0]!r}: make quantised weights floats again to align them"
        )
    return aligned


def _in_other_forms(
    every: Sequence[Family], looked: Sequence[Looked | None], own: Side, theirs: Side, known: Theirs, book: Book
) -> list[Looked | None]:
    """Return families' vectors looked up again, where most were not found, with the forms they may be held in."""
    left = [(f, *m) for f, x in zip(every, looked, strict=True) for m in _unfound(f, x, own)]
    if not left:
        return list(looked)
    seen = {k[0] for k, rows in book.seen.items() if rows.mean() > FEW}
    unseen = [t for n, t in enumerate(book.tensors) if n not in seen]
    changed = []
    for family, member, vectors in left:
        near = nearest_tensor(vectors, unseen)
        if near is None:
            continue
        tensor = theirs.tensors[near.tensor]
        own_format = own.tensors[member].format
        for form in possible_forms(near, own_format, tensor.format, sizes_of(own, theirs, family)):
            tried = Book([replace(tensor)])
            tried.add(0, in_form(tensor.read(), form), form)
            alone = families({member: family.shape})[0]
            look_family(alone, own, tried.close())
            if max(x.mean() for x in tried.seen.values()) <= FEW:
                continue
            of = known.of[known.by_name[near.tensor]]
            for number, other in enumerate(book.tensors):
                if known.of[number] == of:
                    book.add(number, in_form(other.read(), form), form)
            changed.append(family)
            break
    if changed:
        book.close()
    return [
        look_family(f, own, book) if any(f is c for c in changed) or x is None else x.again(book.shelves[x.length])
        for f, x in zip(every, looked, strict=True)
    ]


def _unfound(family: Family, looked: Looked | None, own: Side) -> Iterator[tuple[str, Array]]:
    """Yield an array of a family, and vectors of it, where of some step of an axis few were found."""
    if looked is None:
        member = family.members[0]
        yield from ((member, vectors) for vectors in along_axes(own.tensors[member]))
        return
    gone = np.asarray((looked.count == 0) & (looked.hashes != 0))
    if gone.ndim == 0 and gone:
        yield family.members[0], own.tensors[family.members[0]].read().reshape(1, -1)
    for axis in range(gone.ndim):
        steps = np.moveaxis(gone, axis, 0).reshape(gone.shape[axis], -1)
        if (share := steps.mean(axis=1)).max(initial=0) <= FEW:
            continue
        inside = np.zeros_like(gone)
        np.moveaxis(inside, axis, 0)[int(share.argmax())] = True
        cells = np.argwhere(inside & gone)
        number = (
            np.ravel_multi_index(tuple(cells[0][: family.names.ndim]), family.names.shape) if family.names.ndim else 0
        )
        cells = cells[(cells[:, : family.names.ndim] == cells[0][: family.names.ndim]).all(axis=1)]
        cells = cells[np.linspace(0, len(cells) - 1, min(SAMPLED, len(cells))).astype(int), family.names.ndim :]
        member = family.members[int(number)]
        yield member, vectors_at(own.tensors[member].read(), looked.span, cells)
        return
