"""Parts of a program's parameters and the tensors that they hold, by the vectors that both have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from math import prod

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.references.alignment.fingerprints import Book
from precaudit.references.alignment.looking import Looked
from precaudit.references.alignment.numbering import most_common, predict_numbers
from precaudit.references.alignment.orders import Order, head_sizes, order_of
from precaudit.references.alignment.sides import Family, Side, families, numbers_in
from precaudit.references.alignment.words import role_of

MOST_CUTS = 64  # of an axis into parts
MOST_IN_TURN = 4  # families whose vectors take turns along an axis: gate and up
MOST_ALIKE = 0.9  # share of vectors that are of the family that is as many steps before, where families take turns
NOTHING, ZEROS = -1, -2  # labels of vectors that no tensor has


@dataclass(frozen=True)
class Part:
    """A block of a family's arrays that holds the tensors of one family, an owner each.

    Its grid: the axes of the family's numbers, then those of the arrays without ``span``, the axes of one vector.
    ``at``: where it lies in the grid; ``owners``: grid axes whose steps are other tensors; ``tensors``: the one that
    each owner should hold, None where there is none; ``axis``: which of the tensor's a vector is; ``index`` [N]: the
    row of each of an owner's vectors, −1 where none tells; ``hashes``, ``expected`` [owners, N]: those that are there,
    those that should be; ``named``: by equal names; ``ambiguous``: other tensors equal these.
    """

    family: Family
    span: tuple[int, int]
    at: tuple[slice, ...]
    owners: tuple[int, ...]
    theirs: str
    tensors: tuple[int | None, ...]
    axis: int
    form: int
    index: Array
    order: Order | None
    hashes: Array
    expected: Array
    named: bool = False
    ambiguous: bool = False

    @cached_property
    def found(self) -> Array:
        """Whether each vector [owners, N] is the one that it should be."""
        return np.asarray(self.hashes == self.expected)

    @property
    def share(self) -> float:
        """The share of its vectors that are those they should be; zeros beside a tensor's rows are padding."""
        return float(self.found.mean()) if self.found.size else 0.0

    @property
    def rows(self) -> tuple[int, ...]:
        """The sizes of the grid axes that are an owner's vectors."""
        sizes = [steps_in(s) for s in self.at]
        return tuple(n for a, n in enumerate(sizes) if a not in self.owners)

    def member(self, owner: int) -> tuple[str, tuple[int, ...]]:
        """Return the array that holds an owner, and the owner's place on the owners' axes."""
        sizes = [steps_in(self.at[a]) for a in self.owners]
        place = np.unravel_index(owner, sizes) if sizes else ()
        whole = {a: range(self.at[a].stop)[self.at[a]][int(i)] for a, i in zip(self.owners, place, strict=True)}
        of_names = tuple(whole.get(a, self.at[a].start) for a in range(self.family.names.ndim))
        return str(self.family.names[of_names]), tuple(whole[a] for a in self.owners)


@dataclass(frozen=True)
class Cut:
    """Part of a family's grid, and what its vectors are, most of them by one label.

    ``fits``: which are of the label; ``tensor``, ``row``: whose vector each is.
    """

    at: tuple[slice, ...]
    label: int
    fits: Array
    tensor: Array
    row: Array


class Theirs:
    """The other side's tensors by family and numbers."""

    def __init__(self, side: Side) -> None:
        """Take in a side's names."""
        self.side, self.tensors = side, list(side.tensors.values())
        self.families = families({t.name: t.shape for t in self.tensors})
        number = {t.name: i for i, t in enumerate(self.tensors)}
        self.of = np.zeros(len(self.tensors), np.int32)
        self.keys = [numbers_in(t.name) for t in self.tensors]
        ids: dict[tuple[int, ...], int] = {}
        self.key_ids = np.array([ids.setdefault(k, len(ids)) for k in self.keys])
        self.numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        for f, family in enumerate(self.families):
            for name in family.members:
                self.of[number[name]] = f
                self.numbers[f, self.keys[number[name]]] = number[name]
        self.by_name: Mapping[str, int] = number
        self.head = 0 if side.config is None else side.config.head_dim
        self.turned = 0 if side.config is None else side.config.rotary or 0


def parts_of(looked: Looked, theirs: Theirs, book: Book) -> list[Part]:
    """Return the parts of a family's arrays, each with the tensors it should hold by what most of its vectors say."""
    by_name = _by_name(looked, theirs)
    entries = book.shelves[looked.length].entries
    there = looked.count > 0
    place = np.where(there, looked.first, 0)
    tensor = np.where(there, entries.tensor[place], 0)
    label = (theirs.of[tensor].astype(np.int64) * 8 + entries.axis[place]) * 64 + entries.form[place]
    alone = looked.count == 1
    clear = 10 * alone.sum() > there.sum()
    if not clear and by_name is None and (parts := _assigned(looked, theirs, book)):
        return parts
    label = np.where(alone if clear else there, label, np.where((looked.hashes == 0) & ~there, ZEROS, NOTHING))
    keys = theirs.key_ids[tensor]
    if by_name is not None:
        own = theirs.of[by_name[0]]
        fits = (label // 512 == own) & (label // 64 % 8 == looked.span[0])
        most = most_common(label[fits])
        whole = tuple(slice(0, n) for n in label.shape)
        if most is None:
            return [_named(looked, by_name, book)]
        cut = Cut(whole, most, label == most, tensor, entries.row[place])
        return [_part(looked, cut, theirs, book, by_name)]
    cuts = [_cuts(label, keys, axis) for axis in range(label.ndim)]
    found = []
    for at in product(*cuts):
        most = _preferred(label[at][label[at] >= 0], role_of(looked.family.general), theirs)
        if most is not None:
            cut = Cut(at, most, label[at] == most, tensor[at], entries.row[place][at])
            part = _part(looked, cut, theirs, book)
            found.append(part if clear or part.share == 1 else replace(part, ambiguous=True))
    return found


def _preferred(labels: Array, role: str, theirs: Theirs) -> int | None:
    """Return the most common label; of several, that of the tensors which are what the parameter's name says."""
    if not labels.size:
        return None
    values, counts = np.unique(labels, return_counts=True)
    most = [int(v) for v in values[counts == counts.max()]]
    return next((v for v in most if role and role_of(theirs.families[v // 512].general) == role), most[0])


def _by_name(looked: Looked, theirs: Theirs) -> list[int] | None:
    """Return the tensors of a family's names, where the other side has each in the same shape; else None."""
    tensors = [theirs.by_name.get(name) for name in looked.family.members]
    if looked.span[1] - looked.span[0] > 1:
        return None
    found = [t for t in tensors if t is not None and theirs.tensors[t].shape == looked.family.shape]
    return found if len(found) == len(tensors) else None


def _named(looked: Looked, tensors: list[int], book: Book) -> Part:
    """Return the part of a family each of whose arrays is the tensor of its name, in its order."""
    family, axis, grid = looked.family, looked.span[0], looked.hashes.shape
    hashes = looked.hashes.reshape(len(tensors), -1)
    forms = [f for f in range(len(book.forms)) if all((t, axis, f) in book.rows for t in tensors)]
    expected = [np.stack([book.rows[t, axis, f] for t in tensors]) for f in forms]
    form = max(range(len(forms)), key=lambda i: (expected[i] == hashes).mean())
    rows = grid[family.names.ndim :]
    order = Order(rows or (1,), tuple(range(max(1, len(rows)))))
    return Part(
        family, looked.span, tuple(slice(0, n) for n in grid), tuple(range(family.names.ndim)), family.general,
        tuple(tensors), axis, forms[form], order.index, order, hashes, expected[form], True,
    )  # fmt: skip


def _assigned(looked: Looked, theirs: Theirs, book: Book) -> list[Part] | None:
    """Return parts of whole tensors, as norms are, each vector of which several tensors equal: any of them will do.

    None where their equals do not make up the family.
    """
    grid = looked.hashes.shape
    parts: list[Part] = []
    for axis in range(len(grid)):
        kinds = [
            (f, form, [theirs.by_name[n] for n in t.members])
            for f, t in enumerate(theirs.families)
            for form in range(len(book.forms))
            if t.shape == (looked.length,) and t.names.size == grid[axis] and all(
                (theirs.by_name[n], 0, form) in book.rows for n in t.members)
        ]  # fmt: skip
        parts = []
        for rest in product(*(range(n) if a != axis else [None] for a, n in enumerate(grid))):
            at = tuple(slice(0, grid[axis]) if i is None else slice(i, i + 1) for i in rest)
            hashes = looked.hashes[at].reshape(grid[axis], 1)
            fits = (
                (f, form, tensors, x)
                for f, form, tensors in kinds
                if theirs.families[f].general not in {p.theirs for p in parts}
                and (x := np.stack([book.rows[t, 0, form] for t in tensors])).shape == hashes.shape
                and (x == hashes).all()
            )
            if (found := next(fits, None)) is None:
                break
            f, form, tensors, expected = found
            order = Order((1,), (0,))
            part = Part(
                looked.family, looked.span, at, tuple(range(len(grid))), theirs.families[f].general, tuple(tensors), 0,
                form, order.index, order, hashes, expected, ambiguous=True,
            )  # fmt: skip
            parts.append(part)
        else:
            return parts
    return None


def steps_in(at: slice) -> int:
    """Return how many steps of an axis a slice takes."""
    return len(range(at.start, at.stop, at.step or 1))


def _cuts(label: Array, keys: Array, axis: int) -> list[slice]:
    """Return an axis's parts: where most vectors go over to another family's of the same numbers a part ends.

    Where families take turns, step after step, each is a part.
    """
    a, k = (np.moveaxis(x, axis, 0).reshape(label.shape[axis], -1) for x in (label, keys))
    zeros = (a == ZEROS).all(axis=1)
    before = np.maximum.accumulate(np.where(zeros, 0, np.arange(len(a))))
    a, k = a[before], k[before]  # zeros behind a head or a tensor are its own
    both = (a[:-1] != NOTHING) & (a[1:] != NOTHING)
    both &= (a[:-1] != ZEROS) & (a[1:] != ZEROS)
    share = (both & (a[:-1] != a[1:]) & (k[:-1] == k[1:])).sum(axis=1) > both.sum(axis=1) / 2
    if len(share) > MOST_IN_TURN and share.mean() > 0.5:  # most steps are of another family than the one before
        for turns in (n for n in range(2, MOST_IN_TURN + 1) if len(a) % n == 0):
            if ((a[:-turns] == a[turns:]) | (a[:-turns] < 0) | (a[turns:] < 0)).mean() > MOST_ALIKE:
                return [slice(i, len(a), turns) for i in range(turns)]
    edges = [0, *(int(i) + 1 for i in np.flatnonzero(share)), len(a)]
    last = int(np.flatnonzero(~zeros).max(initial=-1)) + 1
    if edges[-2] < last < len(a) and not zeros[:last].any():  # added behind all of them: a padded vocabulary
        edges.insert(-1, last)
    return [slice(i, j) for i, j in pairwise(edges if len(edges) <= MOST_CUTS else [0, len(a)])]


def _part(looked: Looked, cut: Cut, theirs: Theirs, book: Book, by_name: Sequence[int] | None = None) -> Part:
    family, (axis, form) = cut.label // 512, (cut.label // 64 % 8, cut.label % 64)
    at, fits, tensor = cut.at, cut.fits, cut.tensor
    numbered = bool(theirs.families[family].numbers)
    known, ids = looked.count[at] > 0, theirs.key_ids[tensor]
    owners = tuple(a for a in range(fits.ndim) if numbered and (fits.shape[a] == 1 or _is_owner(known, ids, a)))
    if by_name is not None:
        owners = tuple(range(looked.family.names.ndim))
    inside = [a for a in range(fits.ndim) if a not in owners]
    count = prod(fits.shape[a] for a in owners)
    fits, tensor, index, hashes = (
        x.transpose(*owners, *inside).reshape(count, -1) for x in (fits, tensor, cut.row, looked.hashes[at])
    )
    coordinates = list(product(*(_steps(looked.family, a, at[a]) for a in owners)))
    own = [most_common(tensor[c][fits[c]]) for c in range(count)]
    keys = [None if t is None else theirs.keys[t] for t in own]
    wanted: list[int | None] = [theirs.numbers.get((family, key)) for key in predict_numbers(coordinates, keys)]
    if by_name is not None:
        wanted = list(by_name)
    rows = len(next(book.rows[t, axis, form] for t in own if t is not None))
    shape = tuple(looked.hashes[at].shape[a] for a in inside)
    same = fits & (tensor == np.array([-1 if t is None else t for t in wanted])[:, None])
    known = known.transpose(*owners, *inside).reshape(count, -1)
    padding = ((hashes == 0) & ~known).all(axis=0)
    if padding.any():  # between heads, say
        shape = (int((~padding).sum()),)
    template = np.full(hashes.shape[1], -1, np.int64)
    template[~padding], order = _template(np.where(same, index, -1)[:, ~padding], shape, rows, theirs)
    expected = np.zeros_like(hashes)
    for c, t in enumerate(wanted):
        if t is not None:
            expected[c] = np.where(template >= 0, book.rows[t, axis, form][np.maximum(template, 0)], 0)
    return Part(
        looked.family, looked.span, at, owners, theirs.families[family].general, tuple(wanted), axis, form, template,
        order, hashes, expected, by_name is not None,
    )  # fmt: skip


def _is_owner(known: Array, keys: Array, axis: int) -> bool:
    """Whether most steps of an axis lead to a tensor of other numbers, whichever it is."""
    f, k = np.moveaxis(known, axis, 0), np.moveaxis(keys, axis, 0)
    both = f[:-1] & f[1:]
    return bool(2 * (both & (k[:-1] != k[1:])).sum() > both.sum() > 0)


def _steps(family: Family, axis: int, at: slice) -> Sequence[int]:
    """Return the numbers of a grid axis's steps: those in the names, or from 0."""
    if axis < len(family.numbers):
        return family.numbers[axis][at]
    return range(steps_in(at))


def _template(index: Array, shape: tuple[int, ...], rows: int, theirs: Theirs) -> tuple[Array, Order | None]:
    """Return the order of rows that most owners have, an honest one before others, and what it is."""
    heads, turned = head_sizes(rows, shape, theirs.head), theirs.turned
    whole = index[(index >= 0).all(axis=1)]
    if len(whole):
        kinds, counts = np.unique(whole, axis=0, return_counts=True)
        found = [(int(n), order_of(k, shape, rows, heads, turned), k) for k, n in zip(kinds, counts, strict=True)]
        most = max(n for n, _, _ in found)
        n, order, best = max(found, key=lambda f: (f[0] == most, f[1] is not None, f[0]))
        honest = [f for f in found if f[1] is not None and 2 * f[0] >= n]
        return (best, order) if order is not None or not honest else (honest[0][2], honest[0][1])
    best = np.full(index.shape[1], -1, np.int64)
    for p in range(index.shape[1]):
        best[p] = -1 if (found_mode := most_common(index[:, p][index[:, p] >= 0])) is None else found_mode
    order = order_of(best, shape, rows, heads, turned)
    filled = best if order is None else order.index
    return np.where(filled < rows, filled, -1), order
