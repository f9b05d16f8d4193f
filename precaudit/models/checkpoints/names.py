"""Names maps: where the tensors of a model lie in somebody's tree of arrays, and how their axes become the tensor's."""

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from precaudit.errors import UserError, nearest
from precaudit.models.configs import DecoderConfig
from precaudit.numbers.arrays import Array, widen
from precaudit.schema.toml import toml_table

NAMES = "names.toml"
RANGE = re.compile(r"(\d+)(?::(\d+)(?::([1-9]\d*))?)?")
SIZES = {"two": 2}  # axes of a pattern that no array tells
ROPE = {"linear": "halves", "llama3": "interleaved"}  # by how its frequencies are stretched


class MapEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a tensor lies, and the einops pattern of its axes: ``l`` is the layer's, ``two`` has size 2.

    Of several paths the arrays' rows, or columns where ``columns`` says which, come one after another.
    Without ``axes`` it is as it is stored. ``rows``, ``columns``: which of what that gives are the tensor's, in its
    order, numbers and ranges: ``0:64, 96:160, 7``. ``sizes``: of axes in brackets; the tensor is what is stored
    ``times`` a constant, ``plus`` another.
    """

    path: str | tuple[str, ...]
    axes: str = ""
    rows: str = ""
    columns: str = ""
    sizes: dict[str, int] = {}
    times: float = 1.0
    plus: float = 0.0

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each array."""
        return (self.path,) if isinstance(self.path, str) else self.path


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A names map. ``tensors``: by Hugging Face name, ``{i}`` for the layer; empty: names are the paths themselves.

    ``ignore``: paths below ``prefix`` that the model does not have, or what they begin with. ``interleaved``: entries
    of trees whose RoPE turns neighbouring elements of a head; ``rope``: whether this one does (``with_rope``).
    """

    checkpoint: str = "."
    layout: str = ""
    prefix: str = ""
    config: dict[str, float | str] = {}
    tensors: dict[str, MapEntry] = {}
    ignore: tuple[str, ...] = ()
    rope: Literal["", "halves", "interleaved"] = ""
    interleaved: dict[str, MapEntry] = {}


Map = TypeVar("Map", bound=Layout)


def read_layout(folder: Path) -> Layout:
    """Return a folder's names map, a shipped one filled in; raises UserError naming file and field."""
    own = parse_map(folder / NAMES, (folder / NAMES).read_bytes(), Layout)
    if not own.layout:
        return own
    maps = resources.files("precaudit") / "models" / "checkpoints" / "maps"
    known = sorted(p.name.removesuffix(".toml") for p in maps.iterdir() if p.name.endswith(".toml"))
    if own.layout not in known:
        raise UserError(f"{folder / NAMES}: unknown layout {own.layout!r}{nearest(own.layout, known)}")
    shipped = parse_map(Path(own.layout), (maps / f"{own.layout}.toml").read_bytes(), Layout)
    others = {name: entry for name, entry in shipped.interleaved.items() if name not in own.tensors}
    return Layout(
        own.checkpoint,
        own.layout,
        own.prefix or shipped.prefix,
        shipped.config | own.config,
        shipped.tensors | own.tensors,
        shipped.ignore + own.ignore,
        own.rope,
        others | own.interleaved,
    )


def parse_map(where: Path, data: bytes, kind: type[Map]) -> Map:
    """Return a names map of a kind; raises UserError naming file and field."""
    table = toml_table(data, str(where))
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {error}") from None


def with_constants(config: DecoderConfig, layout: Layout, where: str) -> DecoderConfig:
    """Return the configuration with a map's constants; raises UserError for one that is not known."""
    names = {"1/sqrt(width)": 1 / sqrt(config.width), "sqrt(width)": sqrt(config.width)}
    changed: dict[str, Any] = {}
    for key, value in layout.config.items():
        if key not in ("query_scale", "norm_offset", "embed_scale", "logit_scale", "residual_scale"):
            raise UserError(f"{where}: [config] {key} cannot be set by a names map")
        if isinstance(value, str) and value not in names:
            raise UserError(f"{where}: [config] {key} = {value!r}; a number, or one of {', '.join(names)}")
        if not isinstance(value, str) and not isfinite(value):
            raise UserError(f"{where}: [config] {key} = {value} is no finite number")
        changed[key] = names[value] if isinstance(value, str) else float(value)
    return msgspec.structs.replace(config, **changed)


def with_rope(layout: Layout, config: DecoderConfig, where: str) -> Layout:
    """Return a map with the entries of its tree's RoPE: those of ``rope``, else those that the configuration decides.

    MaxText 0.2.5 turns a head's halves, stretched linearly or not at all; Llama 3.1's stretched RoPE turns neighbours
    (maxtext/layers/attentions.py, init_rotary_embedding). Raises UserError where a configuration leaves it open.
    """
    if not layout.interleaved:
        if layout.rope:
            raise UserError(f"{where}: rope = {layout.rope!r}, but its map knows one RoPE alone; leave rope out")
        return layout
    kind = config.rope_scaling.kind if config.rope_scaling else "linear"
    rope = layout.rope or ROPE.get(kind)
    if rope is None:
        raise UserError(
            f"{where}: config.json's rope_type = {kind!r} does not tell how q and k are stored; "
            'give rope = "interleaved" (rope_interleave = true in MaxText) or rope = "halves"'
        )
    tensors = layout.tensors | (layout.interleaved if rope == "interleaved" else {})
    return msgspec.structs.replace(layout, tensors=tensors)


def entry_of(name: str, layout: Layout, stored: Mapping[str, str], where: str) -> tuple[MapEntry, int]:
    """Return where a tensor lies, its path whole, and its layer."""
    parts = name.split(".")
    layer = int(parts[2]) if name.startswith("model.layers.") else 0
    general = ".".join([*parts[:2], "{i}", *parts[3:]]) if name.startswith("model.layers.") else name
    if not layout.tensors:
        candidates = [MapEntry(name), MapEntry(name.replace(".", "/"))]
    elif name in layout.tensors or general in layout.tensors:
        candidates = [layout.tensors.get(name) or layout.tensors[general]]
    else:
        raise UserError(f"{where}: no entry for {general!r}{nearest(general, layout.tensors)}")
    for entry in candidates:
        paths = tuple("/".join(x for x in (layout.prefix, p.replace("{i}", str(layer))) if x) for p in entry.paths)
        if not paths:
            raise UserError(f"{where}: {name!r}: path = []: it names no array")
        lost = [path for path in paths if path not in stored]
        if not lost:
            return msgspec.structs.replace(entry, path=paths if len(paths) > 1 else paths[0]), layer
    raise UserError(f"{where}: {name!r} should lie at {lost[0]!r}, which is not there{nearest(lost[0], stored)}")


def _stored_axes(entry: MapEntry) -> list[str]:
    """Return the left side of a pattern, an axis of the stored array each."""
    return re.findall(r"\([^)]*\)|[^\s()]+", entry.axes.partition("->")[0])


def layer_axis(entry: MapEntry) -> int | None:
    """Return the axis of the stored array that is the layers'; None where there is none."""
    axes = _stored_axes(entry)
    return axes.index("l") if "l" in axes else None


def arrange_entry(entry: MapEntry, arrays: Sequence[Array], name: str) -> Array:
    """Return arrays without their layers' axis, the other axes and rows as the map has them; raises UserError."""
    where = f"names map: {name!r} of {', '.join(map(repr, entry.paths))}"
    if entry.axes:
        before = " ".join(a for a in _stored_axes(entry) if a != "l")
        pattern = f"{before} ->{entry.axes.partition('->')[2]}"
        arrays = [rearrange_axes(x, pattern, where, entry.sizes) for x in arrays]
    x = arrays[0] if len(arrays) == 1 else _one_after_another(arrays, int(bool(entry.columns)), where)
    for axis, text in enumerate((entry.rows, entry.columns)):
        if text:
            if axis >= x.ndim:
                raise UserError(f"{where}: columns = {text!r} of an array of {x.ndim} axis")
            x = x.take(_numbers(text, x.shape[axis], where), axis=axis)
    return x


def _one_after_another(arrays: Sequence[Array], axis: int, where: str) -> Array:
    """Return the rows (axis 0) or columns (1) of arrays one after another; raises UserError where they do not fit."""
    formats, shapes = {x.dtype.name for x in arrays}, {(*x.shape[:axis], *x.shape[axis + 1 :]) for x in arrays}
    if len(formats) > 1 or len(shapes) > 1 or any(x.ndim <= axis for x in arrays):
        told = ", ".join(f"{x.dtype} {list(x.shape)}" for x in arrays)
        raise UserError(f"{where}: {'columns' if axis else 'rows'} one after another do not fit: {told}")
    return np.concatenate(arrays, axis=axis)


def _numbers(text: str, size: int, where: str) -> Array:
    """Return the numbers that ranges say, of so many; raises UserError."""
    found: list[Array] = []
    for part in text.split(","):
        said = RANGE.fullmatch(part.strip())
        if said is None:
            raise UserError(f"{where}: {part.strip()!r} is no number and no range: 0:64, 96:160:2, 7")
        first, end, step = int(said[1]), said[2], int(said[3] or 1)
        found.append(np.arange(first, first + 1 if end is None else int(end), step))
    numbers = np.concatenate(found)
    if not numbers.size or numbers.max() >= size:
        raise UserError(f"{where}: {text!r} says {'nothing' if not numbers.size else numbers.max()} of {size} rows")
    return numbers


def ranges_text(numbers: Array) -> str:
    """Return numbers in their order as ranges."""
    found, rest = list[str](), [int(n) for n in numbers]
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 0
        n = next((i for i in range(1, len(rest)) if rest[i] - rest[i - 1] != step), len(rest)) if step > 0 else 1
        if n < 3 and step != 1:
            n = 1
        found.append(str(rest[0]) if n == 1 else f"{rest[0]}:{rest[n - 1] + 1}" + (f":{step}" if step > 1 else ""))
        rest = rest[n:]
    return ", ".join(found)


def entry_values(entry: MapEntry, arrays: Sequence[Array], name: str) -> Array:
    """Return a tensor's values by arrays without their layers' axis, in FP64 where constants belong to them."""
    found = np.ascontiguousarray(arrange_entry(entry, arrays, name))
    if (entry.times, entry.plus) == (1.0, 0.0):
        return found
    if not (isfinite(entry.times) and isfinite(entry.plus)):
        raise UserError(f"names map: {name!r}: times = {entry.times}, plus = {entry.plus}: no finite numbers")
    return widen(found) * entry.times + entry.plus


def rearrange_axes(x: Array, pattern: str, where: str, given: Mapping[str, int] | None = None) -> Array:
    """Return an array's axes as an einops pattern has them; raises UserError where it does not fit.

    ``given``: sizes of axes that no array tells.
    """
    try:
        import einops
    except ImportError:
        raise UserError(f"{where}: axes = {pattern!r} needs einops: pip install einops") from None
    named = re.findall(r"\w+", pattern.partition("->")[0])
    sizes = {a: n for a, n in (SIZES | dict(given or {})).items() if a in named}
    try:
        found: Array = einops.rearrange(x, pattern, **sizes)
    except (einops.EinopsError, ValueError) as error:  # the latter for a pattern without an arrow
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(
            f"{where}: axes {pattern!r} do not fit {list(x.shape)} ({reason}); for example 'd l h k -> (h k) d'"
        ) from None
    return found
