"""A family's vectors looked up in a book: along which axes most of them are found."""

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.numbers.vector_hashes import vector_hashes
from precaudit.references.alignment.fingerprints import Book, Form, Shelf, finite, in_form, roundings
from precaudit.references.alignment.sides import Family, Side


@dataclass(frozen=True)
class Looked:
    """A family's vectors along a span of axes, and where each is in the book."""

    family: Family
    span: tuple[int, int]
    hashes: Array
    first: Array
    count: Array
    length: int

    @property
    def share(self) -> float:
        """The share of vectors that are in the book, of those that are not zeros."""
        real = (self.hashes != 0) | (self.count > 0)
        return float((self.count > 0).sum() / max(1, real.sum()))

    def again(self, shelf: Shelf) -> "Looked":
        """Return the same in a book that has taken in more."""
        first, count = shelf.look_up(self.hashes)
        mark_seen(shelf.seen, first, count)
        return replace(self, first=first, count=count)


def look_family(family: Family, side: Side, book: Book) -> Looked | None:
    """Return a family's vectors along the axes by which most are found; None where none is as long as a tensor's."""
    shape, n = family.shape, len(family.shape)
    spans = sorted(((a, a + 1) for a in range(n)), key=lambda s: -shape[s[0]])
    spans += [(a, b) for a in range(n) for b in range(a + 2, n + 1)]
    single = {t.shape[0] for t in book.tensors if len(t.shape) == 1}
    usable = [s for s in spans if prod(shape[slice(*s)]) in (book.shelves if s[1] - s[0] == 1 else single)]
    best: Looked | None = None
    for span in usable:
        if best is not None and best.share == 1:
            break
        looked = look_along(family, span, side, book)
        if best is None or looked.share > best.share + 1e-9:
            best = looked
    return best


def look_along(family: Family, span: tuple[int, int], side: Side, book: Book) -> Looked:
    """Return a family's vectors along a span, in the format by which most of its first array's are found."""
    length = prod(family.shape[slice(*span)])
    shelf = book.shelves[length]
    rest = family.shape[: span[0]] + family.shape[span[1] :]
    merged = (*family.shape[: span[0]], length, *family.shape[span[1] :])
    made: list[Array] = []
    format_name = ""
    for member in family.members:
        tensor = side.tensors[member]
        x = finite(tensor).reshape(merged)
        if not made:
            narrow = {t.format for t in book.tensors}
            tried = {f: _hashes(x, f, span[0]) for f in ["", *roundings(tensor.format, sorted(narrow))]}
            format_name = max(tried, key=lambda f: (shelf.look_up(tried[f])[1] > 0).mean())
            made.append(tried[format_name])
        else:
            made.append(_hashes(x, format_name, span[0]))
    hashes = np.stack(made).reshape(family.names.shape + rest)
    first, count = shelf.look_up(hashes)
    mark_seen(shelf.seen, first, count)
    return Looked(family, span, hashes, first, count, length)


def _hashes(x: Array, format_name: str, axis: int) -> Array:
    return vector_hashes(in_form(x, Form(format_name)) if format_name else x, axis)


def mark_seen(seen: Array, first: Array, count: Array) -> None:
    """Mark every place of a shelf that looked-up vectors have."""
    there = count > 0
    edges = np.zeros(len(seen) + 1, np.int64)
    np.add.at(edges, first[there], 1)
    np.add.at(edges, (first + count)[there], -1)
    seen |= np.cumsum(edges)[:-1] > 0


def vectors_at(x: Array, span: tuple[int, int], cells: Array) -> Array:
    """Return an array's vectors [N, n] along a span of axes, at cells [N, axes] of its others."""
    length = prod(x.shape[slice(*span)])
    merged = np.moveaxis(x.reshape(*x.shape[: span[0]], length, *x.shape[span[1] :]), span[0], -1)
    return np.asarray(merged[tuple(cells.T)]).reshape(-1, length)
