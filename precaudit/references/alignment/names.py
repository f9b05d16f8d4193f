"""The names map that an alignment makes: TOML as ``--map`` reads it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from precaudit.models.checkpoints.names import Layout, MapEntry, parse_map, ranges_text
from precaudit.models.configs import model_tensors
from precaudit.numbers.arrays import widen
from precaudit.references.alignment.align import Alignment
from precaudit.references.alignment.fingerprints import Form, in_form
from precaudit.references.alignment.orders import Order
from precaudit.references.alignment.parameters import Part, steps_in
from precaudit.references.alignment.pieces import Pieces, in_several_arrays, row_count, rows_of, whole_parts
from precaudit.references.alignment.points_text import EntryPoints, input_lines, points_lines
from precaudit.references.alignment.sides import NUMBER
from precaudit.references.mapped_tensors import mapped_tensors

LETTERS = {0: (), 1: ("o",), 2: ("h", "k"), 3: ("g", "h", "k")}
LAYERS = "model.layers."


@dataclass(frozen=True)
class NamesText:
    """A names map's text, and the tensors it has no entry for: ``unsaid``, {name: why}."""

    alignment: Alignment
    entries: dict[str, MapEntry]
    ignored: tuple[str, ...]
    unsaid: dict[str, str] = field(default_factory=dict)
    shown: tuple[EntryPoints, ...] = ()

    @cached_property
    def text(self) -> str:
        """The map as TOML."""
        a = self.alignment
        lines = [f"# {a.own.label} beside {a.theirs.label}: found by values (precaudit align)."]
        lines += [f"# no entry for {name}: {why}" for name, why in self.unsaid.items()]
        if self.ignored:
            lines.append(f"ignore = [{', '.join(_quoted(x) for x in self.ignored)}]")
        lines += [line for first in self.shown[:1] for line in input_lines(first)]
        lines += ["", "[tensors]", *(f"{_quoted(name)} = {_entry_text(e)}" for name, e in self.entries.items())]
        return "\n".join([*lines, *points_lines(self.shown)]) + "\n"

    def differences(self) -> dict[str, float]:
        """Return {tensor: relative L2} of those that the map, read again, does not give."""
        own, theirs = self.alignment.own, self.alignment.theirs
        layout = (
            parse_map(Path("map"), self.text.encode(), Layout)
            if not self.shown
            else Layout(tensors=self.entries, ignore=self.ignored)
        )
        expected = {n: t.shape for n, t in theirs.tensors.items() if n not in self.unsaid}
        leaves = {n: t.read() for n, t in own.tensors.items()}
        read = mapped_tensors(leaves, layout, expected, "the map")
        found = {}
        for name in expected:
            mapped, x = read(name), theirs.tensors[name].read()
            if mapped.dtype != np.float64 and (
                np.array_equal(mapped, in_form(x, Form(mapped.dtype.name)))
                or np.array_equal(in_form(mapped, Form(x.dtype.name)), x)
            ):
                continue
            far = float(np.linalg.norm(widen(mapped) - widen(x)) / max(float(np.linalg.norm(widen(x))), 1e-300))
            if far > 2**-8:
                found[name] = far
        return found


def names_text(alignment: Alignment, shown: tuple[EntryPoints, ...] = ()) -> NamesText:
    """Return the names map of an alignment with a checkpoint."""
    entries: dict[str, MapEntry] = {}
    unsaid: dict[str, str] = {}
    covered: set[str] = set()
    for pieces in sorted(whole_parts(alignment), key=_surest):
        names = [alignment.book.tensors[t].name if t is not None else None for t in pieces[0].tensors]
        if all(n is None or n in covered for n in names):
            continue
        why = _unsayable(alignment, pieces)
        for general, owners in _by_layer(names).items():
            made = None if why else _entries_of(alignment, pieces, general, owners, names)
            if made is None:
                said = why or f"its rows are in arrays of other axes, {_families(pieces)}"
                unsaid.update({str(names[o]): said for o in owners if names[o] not in covered})
                continue
            for key, entry in made:
                entries.setdefault(key, entry)
            covered |= {str(names[o]) for o in owners}
    _add_equals(alignment, entries, covered)
    unsaid = {n: why for n, why in unsaid.items() if n not in covered}
    unsaid |= {n: "it was not found" for n in alignment.theirs.tensors if n not in covered and n not in unsaid}
    used = {_array(path) for e in entries.values() for path in e.paths}
    generals = {NUMBER.sub("{}", u.replace("{i}", "0")) for u in used}
    ignored = [n for n in alignment.own.tensors if NUMBER.sub("{}", n) not in generals]
    config = alignment.theirs.config
    known = list(alignment.theirs.tensors if config is None else model_tensors(config))
    rank = {_general(name)[0]: i for i, name in enumerate(dict.fromkeys(_general(n)[0] for n in known))}
    ranked = sorted(entries, key=lambda k: (rank.get(_general(k)[0], len(rank)), k))
    return NamesText(alignment, {k: entries[k] for k in ranked}, (*ignored, *alignment.own.passed), unsaid, shown)


def _add_equals(alignment: Alignment, entries: dict[str, MapEntry], covered: set[str]) -> None:
    """Give a tensor that equals another one, as a head equals its embedding, the same entry."""
    first: dict[bytes, str] = {}
    for number, tensor in enumerate(alignment.book.tensors):
        key = alignment.book.rows[
            number, len(tensor.shape) - 1, alignment.book.forms.index(Form(tensor.format))
        ].tobytes()
        if tensor.name in covered:
            first.setdefault(key, tensor.name)
        elif key in first and first[key] in entries:
            entries[tensor.name] = entries[first[key]]
            covered.add(tensor.name)


def _surest(pieces: Pieces) -> tuple[float, bool, int]:
    return -min(p.share for p in pieces), not pieces[0].named, len(pieces)


def _families(pieces: Pieces) -> str:
    return ", ".join(dict.fromkeys(p.family.general for p in pieces))


def _unsayable(alignment: Alignment, pieces: Pieces) -> str:
    """Return why a map cannot say what parts hold; empty where it can."""
    rows = row_count(alignment, pieces[0])
    if not rows:
        return "it was not found"
    if in_several_arrays(pieces[0]):
        return f"its rows are in several arrays, {_families(pieces)}"
    there = len(rows_of(pieces))
    return f"{_families(pieces)} holds {there} of its {rows} rows" if there < rows else ""


def _by_numbers(part: Part) -> bool:
    """Whether a map says a part's rows one after another: padded heads, grouped, repeated, or turned in part."""
    order = part.order
    return order is None or bool(order.turned) or order.repeats > 1 or bool((part.index < 0).any())


def _by_layer(names: list[str | None]) -> dict[str, list[int]]:
    """Return the owners of each name with ``{i}`` for the layer."""
    found: dict[str, list[int]] = {}
    for owner, name in enumerate(names):
        if name is not None:
            found.setdefault(_general(name)[0], []).append(owner)
    return found


def _general(name: str) -> tuple[str, int | None]:
    """Return a name with ``{i}`` for its layer, and the layer."""
    parts = name.split(".")
    if not name.startswith(LAYERS) or not parts[2].isdigit():
        return name, None
    return ".".join([*parts[:2], "{i}", *parts[3:]]), int(parts[2])


def _entries_of(
    alignment: Alignment, pieces: Pieces, general: str, owners: list[int], names: list[str | None]
) -> list[tuple[str, MapEntry]] | None:
    """Return the entries of tensors of one general name; None where the arrays that hold them differ in their axes."""
    if len(pieces) == 1:
        return list(_entries_in_one(alignment, pieces[0], general, owners, names))
    # one after another as they lie, and which of their rows are the tensor's said by numbers
    each = [dict(_entries_in_one(alignment, replace(p, order=None), general, owners, names)) for p in pieces]
    first = each[0]
    if any(x.keys() != first.keys() or any(x[k].axes != first[k].axes for k in x) for x in each):
        return None
    places, vectors = rows_of(pieces), sum(len(p.index) for p in pieces)
    chosen = "" if np.array_equal(places, np.arange(vectors)) else ranges_text(places)
    columns = any(e.columns for e in first.values())
    said = {"rows": "", "columns": chosen or f"0:{vectors}"} if columns else {"rows": chosen, "columns": ""}
    return [
        (key, msgspec.structs.replace(e, path=tuple(p for x in each for p in x[key].paths), **said))
        for key, e in first.items()
    ]


def _entries_in_one(
    alignment: Alignment, part: Part, general: str, owners: list[int], names: list[str | None]
) -> Iterator[tuple[str, MapEntry]]:
    """Yield the entries of a part's tensors of one general name: one with ``{i}`` where layers lie in order."""
    layers = [_general(str(names[o]))[1] for o in owners]
    places = [part.member(o) for o in owners]
    if None not in layers and len(owners) > 1:
        for column, axis in enumerate(part.owners):
            others = {(m, p[:column] + p[column + 1 :]) for m, p in places}
            if axis >= part.family.names.ndim and len(others) == 1 and [p[column] for _, p in places] == layers:
                yield general, _entry(alignment, part, places[0][0], owners[0], axis)
                return
        paths = {_with_layer(m, i) for (m, _), i in zip(places, layers, strict=True) if i is not None}
        fits = (
            set.intersection(*(_with_layer_each(m, i) for (m, _), i in zip(places, layers, strict=True)))
            if paths
            else set()
        )
        inside = {tuple(p[c] for c, a in enumerate(part.owners) if a >= part.family.names.ndim) for _, p in places}
        if fits and len(inside) == 1:
            yield general, _entry(alignment, part, min(fits), owners[0], None)
            return
    for owner, (member, _) in zip(owners, places, strict=True):
        yield str(names[owner]), _entry(alignment, part, member, owner, None)


def _with_layer(member: str, layer: int) -> str:
    return member.replace(str(layer), "{i}")


def _with_layer_each(member: str, layer: int | None) -> set[str]:
    """Return a path with ``{i}`` in place of each of its numbers that is the layer's."""
    return {member[: m.start()] + "{i}" + member[m.end() :] for m in NUMBER.finditer(member) if int(m[0]) == layer}


def _entry(alignment: Alignment, part: Part, path: str, owner: int, layer_axis: int | None) -> MapEntry:
    """Return the entry of an owner's tensor: the block of its array, and the pattern of the block's axes."""
    names, numbered = part.family.names.ndim, _by_numbers(part)
    _, place = part.member(owner)
    placed = dict(zip(part.owners, place, strict=True))
    rows = [a for a in range(len(part.at)) if a not in part.owners]
    inside = [a for a in rows if a >= names]  # of an array, not of the numbers in its path
    letters = dict(zip(inside, _row_letters(len(inside)), strict=True))
    order = Order(tuple(steps_in(part.at[a]) for a in rows), tuple(range(len(rows)))) if numbered else part.order
    assert order is not None
    stored: list[str] = []
    block: list[str] = []
    sizes: dict[str, int] = {}
    group: dict[int, str] = {}
    grid = names
    span = range(*part.span)
    columns = len(alignment.book.tensors[next(t for t in part.tensors if t is not None)].shape) > 1 and part.axis == 0
    vector = [("o" if columns else "d")] if len(span) == 1 else [f"d{i}" for i in range(len(span))]
    if columns:
        letters = {a: "d" if x == "o" else x for a, x in letters.items()}
    for axis in range(len(part.family.shape)):
        if axis in span:
            stored.append(vector[axis - span.start])
            block.append(":")
            continue
        if grid == layer_axis:
            stored.append("l")
            block.append(":")
        elif grid in placed:
            block.append(str(placed[grid]))
        else:
            letter, at = letters[grid], part.at[grid]
            whole = at == slice(0, part.family.shape[axis])
            block.append(":" if whole else slice_text(at))
            number = rows.index(grid)
            last = order.head and number == order.axes[-1]
            size = order.shape[number]
            stored.append(_interleaved(letter, size, order.head, order.back, sizes)[0] if last else letter)
            group[number] = _interleaved(letter, size, order.head, order.back, sizes)[1] if last else letter
        grid += 1
    while block and block[-1] == ":":
        block.pop()
    inner = " ".join(group[a] for a in order.axes if a in group)
    grouped = f"({inner})" if len(inner.split()) != 1 else inner
    tensor = next(alignment.book.tensors[t] for t in part.tensors if t is not None)
    whole_vector = vector[0] if len(vector) == 1 else f"({' '.join(vector)})"
    if len(tensor.shape) == 1:
        right = whole_vector
    else:
        right = f"{whole_vector} {grouped}" if part.axis == 0 else f"{grouped} {whole_vector}"
    left = " ".join(stored)
    form = alignment.book.forms[part.form]
    chosen = ranges_text(rows_of([part])) if numbered else ""
    return MapEntry(
        f"{path}[{', '.join(block)}]" if block else path,
        "" if left == right else f"{left} -> {right}",
        rows="" if columns else chosen,
        columns=chosen if columns else "",
        sizes=sizes,
        times=1 / form.times,
        plus=-form.plus / form.times + 0.0,
    )


def _row_letters(n: int) -> tuple[str, ...]:
    return LETTERS.get(n, tuple(f"r{i}" for i in range(n)))


def _interleaved(letter: str, size: int, head: int, back: bool, sizes: dict[str, int]) -> tuple[str, str]:
    """Return how an axis of heads is stored and how the tensor has it: neighbours are a head's halves, or ``back``."""
    pairs, halves = f"{letter} two", f"two {letter}"
    if size != head:
        pairs, halves = f"h2 {pairs}", f"h2 {halves}"
        sizes["h2"] = size // head
    left, right = (halves, pairs) if back else (pairs, halves)
    return f"({left})", right


def slice_text(at: slice) -> str:
    """Return a range of steps as a map and a report have it."""
    return f"{at.start}:{at.stop}" + (f":{at.step}" if at.step else "")


def _array(path: str) -> str:
    return path.partition("[")[0]


def _quoted(text: str) -> str:
    escaped = "".join(
        c if c.isprintable() else f"\\u{ord(c):04x}" for c in text.replace("\\", "\\\\").replace('"', '\\"')
    )
    return f'"{escaped}"'


def _entry_text(entry: MapEntry) -> str:
    path = f"[{', '.join(map(_quoted, entry.path))}]" if isinstance(entry.path, tuple) else _quoted(entry.path)
    fields = [f"path = {path}"]
    if entry.axes:
        fields.append(f"axes = {_quoted(entry.axes)}")
    fields += [f"{n} = {_quoted(x)}" for n, x in (("rows", entry.rows), ("columns", entry.columns)) if x]
    if entry.sizes:
        fields.append(f"sizes = {{ {', '.join(f'{k} = {v}' for k, v in entry.sizes.items())} }}")
    fields += [
        f"{name} = {x!r}" for name, x, usual in (("times", entry.times, 1.0), ("plus", entry.plus, 0.0)) if x != usual
    ]
    return f"{{ {', '.join(fields)} }}"
