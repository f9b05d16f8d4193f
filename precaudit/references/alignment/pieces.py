"""What holds a tensor whole: one part of a parameter, or parts of several arrays, each with some of its rows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.references.alignment.align import Alignment
from precaudit.references.alignment.parameters import Part, steps_in

Pieces = tuple[Part, ...]


def whole_parts(alignment: Alignment) -> list[Pieces]:
    """Return the parts that hold tensors, each alone or with those of other arrays that hold their other rows.

    The parts of one array that hold the same tensors' other rows, groups of them, are one.
    """
    single = _in_one_array(alignment.parts)
    found: list[Pieces] = [(p,) for p in single]
    beside: dict[tuple[object, ...], list[Part]] = {}
    for part in single:
        if in_several_arrays(part) or len(rows_of([part])) < row_count(alignment, part):
            beside.setdefault((part.tensors, part.axis, part.form), []).append(part)
    for its in beside.values():
        pieces = tuple(sorted((piece for part in its for piece in _of_each_array(part)), key=_first_row))
        if len(pieces) > 1 and len(rows_of(pieces)) == row_count(alignment, pieces[0]):
            found.append(pieces)
    return found


def _first_row(part: Part) -> int:
    return int(part.index[part.index >= 0].min(initial=part.index.max()))


def rows_of(parts: Sequence[Part]) -> Array:
    """Return where each of a tensor's rows that parts hold lies first among their vectors, one after another."""
    index = np.concatenate([p.index for p in parts])
    known = np.flatnonzero(index >= 0)
    _, first = np.unique(index[known], return_index=True)
    return np.asarray(known[first])


def row_count(alignment: Alignment, part: Part) -> int:
    """Return how many rows the tensors of a part have; 0 where it has none."""
    tensor = next((alignment.book.tensors[t] for t in part.tensors if t is not None), None)
    return 0 if tensor is None else int(np.prod(tensor.shape)) // tensor.shape[part.axis]


def in_several_arrays(part: Part) -> bool:
    """Whether the rows of a tensor go through several arrays."""
    return bool(_array_axes(part))


def _array_axes(part: Part) -> list[int]:
    """Return the grid axes of numbers in names that a tensor's rows go through."""
    return [a for a in range(part.family.names.ndim) if a not in part.owners and steps_in(part.at[a]) > 1]


def _of_each_array(part: Part) -> Iterator[Part]:
    """Yield what a part holds in each of the arrays that a tensor's rows go through; itself where that is one."""
    apart = _array_axes(part)
    own = [a for a in range(len(part.at)) if a not in part.owners]
    steps = {a: range(part.at[a].stop)[part.at[a]] for a in apart}
    for place in product(*(range(len(steps[a])) for a in apart)):
        taken = dict(zip(apart, place, strict=True))
        cut = (slice(None), *(slice(taken[a], taken[a] + 1) if a in taken else slice(None) for a in own))
        at = tuple(
            slice(steps[a][taken[a]], steps[a][taken[a]] + 1) if a in taken else x for a, x in enumerate(part.at)
        )
        index, hashes, expected = (
            x.reshape(-1, *part.rows)[cut].reshape(len(x), -1) for x in (part.index[None], part.hashes, part.expected)
        )
        yield replace(part, at=at, index=index[0], hashes=hashes, expected=expected) if apart else part


def _in_one_array(parts: Sequence[Part]) -> list[Part]:
    """Return parts, those of one array that hold the same tensors' other rows as one."""
    beside: dict[tuple[object, ...], list[Part]] = {}
    for p in parts:
        beside.setdefault((id(p.family), p.span, p.owners, p.tensors, p.axis, p.form), []).append(p)
    joined = ([_joined(each)] if len(each) > 1 and _are_apart(each) else each for each in beside.values())
    return [p for each in joined for p in each]


def _are_apart(parts: Sequence[Part]) -> bool:
    """Whether no two parts hold the same row."""
    rows = np.concatenate([p.index[p.index >= 0] for p in parts])
    return len(np.unique(rows)) == len(rows)


def _joined(parts: Sequence[Part]) -> Part:
    """Return parts of one array as one: all of its vectors, and the rows of those that are a part's."""
    one = parts[0]
    inside = [n for i, n in enumerate(one.family.shape) if i not in range(*one.span)]
    sizes = [*one.family.names.shape, *inside]
    own = [a for a in range(len(one.at)) if a not in one.owners]
    index = np.full([sizes[a] for a in own], -1)
    for p in parts:
        index[tuple(p.at[a] for a in own)] = p.index.reshape(p.rows)
    at = tuple(x if a in one.owners else slice(0, sizes[a]) for a, x in enumerate(one.at))
    hashes, expected = (np.concatenate([getattr(p, n) for p in parts], axis=1) for n in ("hashes", "expected"))
    return replace(one, at=at, index=index.reshape(-1), order=None, hashes=hashes, expected=expected)
