"""What a conversion did wrong: parts that most of their kind contradict, each mistake named."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from precaudit.models.checkpoints.names import ranges_text
from precaudit.numbers.arrays import Array, widen
from precaudit.numbers.formats import FORMATS
from precaudit.references.alignment.align import Alignment
from precaudit.references.alignment.fingerprints import Form, in_form, roundings
from precaudit.references.alignment.forms import along_axes, fit_constants, nearest_tensor
from precaudit.references.alignment.numbering import most_common
from precaudit.references.alignment.parameters import Part, steps_in
from precaudit.references.alignment.roles import (
    Kind,
    Mistake,
    head_size,
    roped_alone,
    turned_alone,
    wrong_role,
)
from precaudit.references.alignment.rows import name_rows
from precaudit.schema.digits import digits

ALONE = 0.5  # of a tensor's vectors, above which what they are is what it is


def find_mistakes(alignment: Alignment) -> list[Mistake]:
    """Return the mistakes of a conversion, part after part; those of every layer alike are one."""
    found = [m for part in alignment.parts for m in _part_mistakes(alignment, part)]
    found += roped_alone(alignment)
    found += turned_alone(alignment)
    named = {m.tensor for m in found}
    found += [m for m in _missing(alignment) if m.tensor not in named]
    return list(_gathered(_exchanged(found)))


def _part_mistakes(alignment: Alignment, part: Part) -> Iterator[Mistake]:
    if part.ambiguous:
        return
    names = [_tensor_name(alignment, t) for t in part.tensors]
    form = alignment.book.forms[part.form]
    first = next((n for n in names if n is not None), "")
    if form.through:
        yield Mistake("rounded", part.family.general, part.theirs, _rounded_text(alignment, part, form))
    if wrong := wrong_role(alignment, part):
        yield Mistake("exchanged", part.family.general, part.theirs, wrong)
    template = part.order is None and part.found.any() and not _between_others(alignment, part)
    if template or (part.order is not None and part.order.back and alignment.theirs.config is not None):
        says = _name_rows(alignment, part, part.index)
        if says:
            yield Mistake("rows", part.family.general, part.theirs if len(names) > 1 else first, says)
    if part.order is not None and len(part.index) < _rows(alignment, part):
        lost = _nowhere(alignment, part)
        if lost.size:
            yield Mistake(
                "missing",
                part.family.general,
                part.theirs if len(names) > 1 else first,
                f"rows {ranges_text(lost)} are nowhere",
            )
    for owner in np.flatnonzero(~part.found.all(axis=1)):
        yield from _owner_mistakes(alignment, part, int(owner))


def _tensor_name(alignment: Alignment, tensor: int | None) -> str | None:
    return None if tensor is None else alignment.book.tensors[tensor].name


def _name_rows(alignment: Alignment, part: Part, index: Array) -> str:
    """Return the name of an order of a part's rows; empty where it has none."""
    heads = 0 if alignment.theirs.config is None else alignment.theirs.config.heads
    return name_rows(index, _rows(alignment, part), head_size(alignment), heads)


def _rows(alignment: Alignment, part: Part) -> int:
    t = next(t for t in part.tensors if t is not None)
    return len(alignment.book.rows[t, part.axis, part.form])


def _nowhere(alignment: Alignment, part: Part) -> Array:
    """Return which rows of its tensors neither a part nor another one holds; told of the first of them alone."""
    its = _sharing(alignment, part)
    first = next(p for p in its if not p.ambiguous)
    if first is not part or any(p.axis != part.axis for p in its):
        return np.zeros(0, int)
    return _lost(alignment, its)


def _between_others(alignment: Alignment, part: Part) -> bool:
    """Whether a part's rows are in the tensor's order, and all between them in other parts."""
    its = [p for p in _sharing(alignment, part) if p.axis == part.axis]
    ascending = (part.index >= 0).all() and (np.diff(part.index) > 0).all()
    return bool(ascending and not _lost(alignment, its).size)


def _lost(alignment: Alignment, its: Sequence[Part]) -> Array:
    """Return the rows of tensors that none of the parts holds."""
    return np.setdiff1d(np.arange(_rows(alignment, its[0])), np.concatenate([p.index for p in its]))


def _sharing(alignment: Alignment, part: Part) -> list[Part]:
    """Return the parts that hold rows of the same tensors, itself among them."""
    return [p for p in alignment.parts if set(p.tensors) & set(part.tensors) - {None}]


def _place(part: Part, owner: int) -> str:
    member, place = part.member(owner)
    inside = [
        i for a, i in zip(part.owners, place, strict=True) if a >= part.family.names.ndim and steps_in(part.at[a]) > 1
    ]
    return f"{member}[{', '.join(map(str, inside))}]" if inside else member


def _owner_mistakes(alignment: Alignment, part: Part, owner: int) -> Iterator[Mistake]:
    name, bad = _tensor_name(alignment, part.tensors[owner]), ~part.found[owner]
    where, hashes = _place(part, owner), part.hashes[owner]
    length = np.prod(part.family.shape[slice(*part.span)])
    shelf = alignment.book.shelves[int(length)]
    first, count = shelf.look_up(hashes)
    there = count > 0
    e = shelf.entries
    at = np.where(there, first, 0)
    tensor, axis, form, index = (np.where(there, x[at], -1) for x in (e.tensor, e.axis, e.form, e.row))
    own = part.tensors[owner]
    if name is None:
        holds = most_common(tensor[there])
        said = f"it holds {alignment.book.tensors[holds].name}" if holds is not None else "it is nowhere"
        yield Mistake("layer", where, where, f"no tensor is where the others' order leads; {said}")
        return
    if not hashes.any():
        yield Mistake("zeros", where, name, "it is zeros")
        return
    same = (tensor == own) & (axis == part.axis) & (form == part.form)
    same |= ~bad
    index = np.where(bad, index, part.index)
    if same[there].all() and there.any() and (there | (hashes == 0)).all():
        told = np.where(same, index, -1)
        says = _other_block(told, part.index) or _name_rows(alignment, part, _relative(told, part.index))
        yield Mistake("rows", where, name, says or "its rows are in another order")
        return
    other = most_common(tensor[bad & there])
    if other is not None and (bad & there & (tensor == other)).sum() > ALONE * len(bad):
        held = alignment.book.tensors[other].name
        if other == own and most_common(axis[bad & there]) != part.axis:
            yield Mistake("transposed", where, name, "it is transposed")
        elif other == own and (held_form := most_common(form[bad & there])) not in (None, part.form):
            form_held = alignment.book.forms[held_form or 0]
            yield Mistake("rounded" if form_held.through else "form", where, name, _form_text(form_held))
        elif other == own:
            yield Mistake("rows", where, name, "its rows are in another order")
        else:
            yield Mistake(_held_kind(name, held), where, name, f"it holds {held}")
        return
    if other is not None and (bad & there).sum() > ALONE * bad.sum():
        held = alignment.book.tensors[other].name
        rows = np.flatnonzero(bad)
        yield Mistake("rows", where, name, f"{bad.sum()} of its {len(bad)} rows, the first {rows[0]}, are of {held}")
        return
    yield _value_mistake(alignment, part, owner, name, bad)


def _other_block(told: Array, expected: Array) -> str:
    """Return that rows which another array should hold are there in place of its own; empty where they are not."""
    if (told < 0).any() or (expected < 0).any() or np.isin(told, expected).any():
        return ""
    return f"it holds rows {ranges_text(told)}, and should hold {ranges_text(expected)}"


def _relative(told: Array, expected: Array) -> Array:
    """Return which row is where each should be."""
    if len(np.unique(expected)) != len(expected) or (expected < 0).any():
        return told
    found = np.full(int(expected.max()) + 1, -1)
    found[expected] = told
    return found


def _held_kind(name: str, held: str) -> Kind:
    return "layer" if re.sub(r"\d+", "", name) == re.sub(r"\d+", "", held) else "exchanged"


def _value_mistake(alignment: Alignment, part: Part, owner: int, name: str, bad: Array) -> Mistake:
    """Return what is wrong with values that no tensor has, held to those that should be there."""
    where, rows = _place(part, owner), np.flatnonzero(bad)
    others = f"{len(rows)} of its {len(bad)} vectors are others, the first {rows[0]}"
    if not {*range(part.family.names.ndim)} <= {*part.owners}:  # rows of one tensor, in several arrays
        return Mistake("values", where, name, others)
    mine, theirs, tensor = _both_values(alignment, part, owner)
    own_format = alignment.own.tensors[part.member(owner)[0]].format
    for form in (Form(own_format, through=f) for f in roundings(tensor, FORMATS) if f != own_format):
        if np.array_equal(widen(in_form(theirs, form)), mine):
            return Mistake("rounded", where, name, _through_text(tensor, form))
    x = widen(theirs)
    near = fit_constants(mine[bad], x[bad])
    whole = bad.mean() > ALONE
    if whole and near.left < 2**-6 and near.times != 1:
        return Mistake("form", where, name, f"it is times {digits(near.times, 6)}")
    if whole and near.left < 2**-6 and near.plus:
        return Mistake("form", where, name, f"it is plus {digits(near.plus, 6)}")
    return Mistake("values", where, name, f"{others}: relative L2 error {digits(near.distance, 2)}")


def _both_values(alignment: Alignment, part: Part, owner: int) -> tuple[Array, Array, str]:
    """Return an owner's vectors [N, n] in FP64, those its tensor has for them, and the tensor's format."""
    member, place = part.member(owner)
    x = alignment.own.tensors[member].read()
    names = part.family.names.ndim
    length = int(np.prod(x.shape[slice(*part.span)]))
    x = x.reshape(*x.shape[: part.span[0]], length, *x.shape[part.span[1] :])
    x = np.moveaxis(x, part.span[0], -1)
    own_axes = [a for a in part.owners if a >= names]
    placed = dict(zip(part.owners, place, strict=True))
    x = x[tuple(placed[g] if g in own_axes else part.at[g] for g in range(names, len(part.at)))]
    tensor = alignment.book.tensors[part.tensors[owner] or 0]
    y = np.moveaxis(tensor.read(), part.axis, -1).reshape(-1, length)
    return widen(x.reshape(-1, length)), y[np.maximum(part.index, 0)], tensor.format


def _form_text(form: Form) -> str:
    if form.through:
        return f"its values were rounded to {form.through} before {form.format}"
    parts = [f"times {digits(form.times, 6)}"] * (form.times != 1) + [f"plus {digits(form.plus, 6)}"] * bool(form.plus)
    return f"it is {' '.join(parts) or 'as stored'}, where the others are not"


def _rounded_text(alignment: Alignment, part: Part, form: Form) -> str:
    return _through_text(next(alignment.book.tensors[t].format for t in part.tensors if t is not None), form)


def _through_text(stored: str, form: Form) -> str:
    narrow = FORMATS[form.through].dtype.itemsize < FORMATS[form.format].dtype.itemsize
    if narrow:
        return f"its values were rounded to {form.through}, and are stored as {form.format}"
    return f"its values were rounded twice: {stored}, {form.through}, {form.format}"


def _missing(alignment: Alignment) -> Iterator[Mistake]:
    lost = [alignment.own.tensors[m] for f in alignment.lost for m in f.members]
    for name, share in alignment.shares.items():
        if share:
            continue
        every = (nearest_tensor(v, lost) for v in along_axes(alignment.theirs.tensors[name]))
        near = min((n for n in every if n is not None), key=lambda n: n.distance, default=None)
        beside = (
            ""
            if near is None
            else f"; the nearest vector is of {near.tensor}, relative L2 error {digits(near.distance, 2)}"
        )
        yield Mistake("missing", "", name, f"it is nowhere in {alignment.own.label}{beside}")


def _exchanged(found: list[Mistake]) -> Iterator[Mistake]:
    """Yield mistakes, two that hold each other's tensor as one."""
    holds = {m.tensor: m.says.removeprefix("it holds ") for m in found if m.says.startswith("it holds ")}
    for m in found:
        other = holds.get(m.tensor)
        if other is None or holds.get(other) != m.tensor:
            yield m
        elif m.tensor < other:
            yield Mistake(m.kind, m.parameter, m.tensor, f"it is exchanged with {other}")


def _gathered(found: Iterator[Mistake]) -> Iterator[Mistake]:
    """Yield mistakes, those of every layer that say the same as one, with how many there are."""

    def key(m: Mistake) -> tuple[str, ...]:
        return (m.kind, re.sub(r"\d+", "{}", m.parameter), re.sub(r"\d+", "{}", m.tensor), re.sub(r"\d+", "{}", m.says))

    for _, same in groupby(found, key):
        first, *more = same
        if len(more) < 2:
            yield from (first, *more)
        else:
            yield Mistake(first.kind, first.parameter, first.tensor, f"{first.says}; so in {len(more)} more")
