"""Vectors of tensors by their values: a book of hashes, looked up by binary search."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from precaudit.errors import CannotJudge
from precaudit.models.checkpoints.tensors import row_blocks
from precaudit.numbers.arrays import Array, as_format, widen
from precaudit.numbers.formats import FORMATS
from precaudit.numbers.vector_hashes import vector_hashes
from precaudit.references.alignment.sides import Tensor


class Form(NamedTuple):
    """How a tensor may be held: ``values · times + plus``, rounded to ``format``, or to ``through`` before that."""

    format: str
    times: float = 1.0
    plus: float = 0.0
    through: str = ""

    @property
    def plain(self) -> bool:
        """Whether the values are the tensor's own, rounded once at most."""
        return self[1:] == (1.0, 0.0, "")


class Entry(NamedTuple):
    """Vectors of a book by their place in it: tensor number, its axis, its form, and the vector's row in it [N]."""

    tensor: Array
    axis: Array
    form: Array
    row: Array


@dataclass(frozen=True)
class Shelf:
    """All vectors of one length, by hash in order; ``seen``: which of them were looked up and found."""

    hashes: Array
    entries: Entry
    seen: Array
    keys: tuple[tuple[int, int, int], ...]
    order: Array

    def seen_rows(self, rows: Mapping[tuple[int, int, int], Array]) -> dict[tuple[int, int, int], Array]:
        """Return which vectors were found, by tensor, axis and form."""
        flat = np.empty_like(self.seen)
        flat[self.order] = self.seen
        edges = np.cumsum([0, *(len(rows[k]) for k in self.keys)])
        return {k: flat[a:b] for k, (a, b) in zip(self.keys, pairwise(edges), strict=True)}

    def look_up(self, hashes: Array) -> tuple[Array, Array]:
        """Return the first place of each hash and how many places have it."""
        flat = hashes.reshape(-1)
        first = np.searchsorted(self.hashes, flat)
        count = np.searchsorted(self.hashes, flat, "right") - first
        return first.reshape(hashes.shape), count.reshape(hashes.shape)


@dataclass
class Book:
    """Tensors' vectors by length; ``rows``: {(tensor, axis, form): hashes in the order of the tensor's other axes}."""

    tensors: Sequence[Tensor]
    forms: list[Form] = field(default_factory=list)
    rows: dict[tuple[int, int, int], Array] = field(default_factory=dict)
    shelves: dict[int, Shelf] = field(default_factory=dict)

    def add(self, number: int, x: Array, form: Form) -> None:
        """Take in the vectors of a tensor's values, held in a form, along every axis."""
        if form not in self.forms:
            self.forms.append(form)
        for axis in range(x.ndim):
            self.rows[number, axis, self.forms.index(form)] = vector_hashes(x, axis).reshape(-1)

    def close(self) -> "Book":
        """Sort what was taken in, by length; return the book."""
        lengths: dict[int, list[tuple[int, int, int]]] = {}
        before = self.seen
        for key in self.rows:
            lengths.setdefault(self.tensors[key[0]].shape[key[1]], []).append(key)
        self.shelves = {n: self._shelf(keys, before) for n, keys in lengths.items()}
        return self

    @property
    def seen(self) -> dict[tuple[int, int, int], Array]:
        """Which vectors were looked up and found, by tensor, axis and form."""
        return {k: x for shelf in self.shelves.values() for k, x in shelf.seen_rows(self.rows).items()}

    def _shelf(self, keys: list[tuple[int, int, int]], seen: Mapping[tuple[int, int, int], Array]) -> Shelf:
        keys = sorted(keys, key=lambda k: (k[2], k[0], -k[1]))  # plain forms first, and rows before columns
        sizes = [len(self.rows[k]) for k in keys]
        hashes = np.concatenate([self.rows[k] for k in keys])
        order = np.argsort(hashes, kind="stable")
        tensor, axis, form = (np.repeat(np.array(c, np.int32), sizes)[order] for c in zip(*keys, strict=True))
        row = np.concatenate([np.arange(n, dtype=np.int64) for n in sizes])[order]
        flags = np.concatenate([seen.get(k, np.zeros(len(self.rows[k]), bool)) for k in keys])[order]
        return Shelf(hashes[order], Entry(tensor, axis, form, row), flags, tuple(keys), order)


def book_of(tensors: Sequence[Tensor], formats: Iterable[str]) -> Book:
    """Return the book of tensors, each in its own format and in those of the other side that are no wider."""
    book = Book(tensors)
    others = sorted(set(formats))
    for number, tensor in enumerate(tensors):
        x = finite(tensor)
        book.add(number, x, Form(tensor.format))
        for name in roundings(tensor.format, others):
            book.add(number, in_form(x, Form(name)), Form(name))
    return book.close()


def roundings(format_name: str, others: Iterable[str]) -> list[str]:
    """Return those of other formats that values of one may have been rounded to: none that is wider."""
    size = FORMATS[format_name].dtype.itemsize
    return [name for name in others if name != format_name and FORMATS[name].dtype.itemsize <= size]


def in_form(x: Array, form: Form) -> Array:
    """Return values · times + plus, in FP64, rounded once; of float32 alone rounded as they are."""
    if form.plain and x.dtype == np.float32:
        with np.errstate(over="ignore"):
            return x.astype(FORMATS[form.format].dtype)
    if form.through:
        x = in_form(x, form._replace(format=form.through, through=""))
        form = Form(form.format)
    out = np.empty(x.shape, FORMATS[form.format].dtype)
    for rows in row_blocks(x.shape):
        out[rows] = as_format(widen(x[rows]) * form.times + form.plus, form.format)
    return out


def finite(tensor: Tensor) -> Array:
    """Return a tensor's values; raises CannotJudge where one is NaN or infinite."""
    x = tensor.read()
    for rows in row_blocks(x.shape):
        if not np.isfinite(x[rows]).all():
            raise CannotJudge(f"{tensor.name}: it holds NaN or infinity, which equals nothing; no alignment is judged")
    return x
