"""The names map that an alignment makes: TOML as ``--map`` reads it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from precaudit.models.checkpoints.names import Layout, MapEntry, parse_map, ranges_text
from precaudit.models.configs import model_tensors
from precaudit.numbers.arrays import Array, widen
from precaudit.references.alignment.align import Alignment
from precaudit.references.alignment.fingerprints import Form, in_form
from precaudit.references.alignment.orders import Order
from precaudit.references.alignment.parameters import Part, steps_in
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
        layout = parse_map(Path("map"), self.text.encode(), Layout) if not self.shown else Layout(
            tensors=self.entries, ignore=self.ignored
        )  # fmt: skip
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
    for part in sorted(_whole_parts(alignment.parts), key=lambda p: (-p.share, not p.named)):
        names = [alignment.book.tensors[t].name if t is not None else None for t in part.tensors]
        if all(n is None or n in covered for n in names):
            continue
        why = _unsayable(alignment, part)
        for general, owners in _by_layer(names).items():
            if why:
                unsaid.update({str(names[o]): why for o in owners if names[o] not in covered})
                continue
            for key, entry in _entries_of(alignment, part, general, owners, names):
                entries.setdefault(key, entry)
        covered |= set() if why else {n for n in names if n is not None}
    _add_equals(alignment, entries, covered)
    unsaid = {n: why for n, why in unsaid.items() if n not in covered}
    unsaid |= {n: "it was not found" for n in alignment.theirs.tensors if n not in covered and n not in unsaid}
    used = {_array(e.path) for e in entries.values()}
    generals = {NUMBER.sub("{}", u.replace("{i}", "0")) for u in used}
    ignored = [n for n in alignment.own.tensors if NUMBER.sub("{}", n) not in generals]
    config = alignment.theirs.config
    known = list(alignment.theirs.tensors if config is None else model_tensors(config))
    rank = {_general(name)[0]: i for i, name in enumerate(dict.fromkeys(_general(n)[0] for n in known))}
    ranked = sorted(entries, key=lambda k: (rank.get(_general(k)[0], len(rank)), k))
    return NamesText(
        alignment, {k: entries[k] for k in ranked}, (*ignored, *alignment.own.passed), unsaid, shown
    )  # fmt: skip


def _whole_parts(parts: Sequence[Part]) -> list[Part]:
    """Return parts, those of one array that hold the same tensors' other rows, groups of them, as one."""
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


def _unsayable(alignment: Alignment, part: Part) -> str:
    """Return why a map cannot say what a part holds; empty where it can."""
    tensor = next((alignment.book.tensors[t] for t in part.tensors if t is not None), None)
    if tensor is None:
        return "it was not found"
    rows = int(np.prod(tensor.shape)) // tensor.shape[part.axis]
    if any(a < part.family.names.ndim and steps_in(s) > 1 for a, s in enumerate(part.at) if a not in part.owners):
        return f"its rows are in several arrays, {part.family.general}"
    there = len(set(part.index[part.index >= 0].tolist()))
    return f"{part.family.general} holds {there} of its {rows} rows" if there < rows else ""


def _by_numbers(part: Part) -> bool:
    """Whether a map says a part's rows one after another: padded heads, grouped, repeated, or turned in part."""
    order = part.order
    return order is None or bool(order.turned) or order.repeats > 1 or bool((part.index < 0).any())


def _places(part: Part) -> Array:
    """Return where each of a tensor's rows lies first among the vectors of its part."""
    known = np.flatnonzero(part.index >= 0)
    _, first = np.unique(part.index[known], return_index=True)
    return np.asarray(known[first])


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
    said = all(a >= names or part.family.names.shape[a] == 1 for a in rows)
    letters = dict(zip(inside, _row_letters(len(inside)), strict=True)) if said else {}
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
    chosen = ranges_text(_places(part)) if numbered else ""
    return MapEntry(
        f"{path}[{', '.join(block)}]" if block else path, "" if left == right else f"{left} -> {right}",
        rows="" if columns else chosen, columns=chosen if columns else "", sizes=sizes,
        times=1 / form.times, plus=-form.plus / form.times + 0.0,
    )  # fmt: skip


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
    fields = [f"path = {_quoted(entry.path)}"]
    if entry.axes:
        fields.append(f"axes = {_quoted(entry.axes)}")
    fields += [f"{n} = {_quoted(x)}" for n, x in (("rows", entry.rows), ("columns", entry.columns)) if x]
    if entry.sizes:
        fields.append(f"sizes = {{ {', '.join(f'{k} = {v}' for k, v in entry.sizes.items())} }}")
    fields += [
        f"{name} = {x!r}" for name, x, usual in (("times", entry.times, 1.0), ("plus", entry.plus, 0.0)) if x != usual
    ]
    return f"{{ {', '.join(fields)} }}"
