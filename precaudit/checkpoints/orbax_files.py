"""Orbax checkpoints: arrays read where they lie, a layer at a time, under the names a map gives them.

A folder with ``names.toml`` beside ``config.json`` holds one:

    checkpoint = "items"          # folder of the Orbax checkpoint
    layout = "maxtext-llama"      # a shipped map (precaudit/checkpoints/maps), or a [tensors] table of one's own

A map's entry names the path of an array in the parameter tree and how its axes become the tensor's:
``d l h k -> (h k) d`` takes layer l and flattens heads. ``interleaved = "k"``: that axis holds pairs (2i, 2i + 1) in
place of halves. [config] replaces constants that such a program computes otherwise.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from math import prod, sqrt
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from precaudit.checkpoints.tensors import ALL, check_format
from precaudit.configs import DecoderConfig, expected_tensors
from precaudit.errors import UserError, nearest
from precaudit.formats import Array

NAMES = "names.toml"
INSTALL = "pip install 'precaudit[orbax]'"


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a tensor lies; without ``axes`` as it is stored."""

    path: str
    axes: str = ""
    interleaved: str = ""


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A names map. ``tensors``: by Hugging Face name, ``{i}`` for the layer; empty: names are the paths themselves.

    ``ignore``: paths below ``prefix`` that the model does not have, or what they begin with.
    """

    checkpoint: str = "."
    layout: str = ""
    prefix: str = ""
    config: dict[str, float | str] = {}
    tensors: dict[str, Entry] = {}
    ignore: tuple[str, ...] = ()


def read_layout(folder: Path) -> Layout:
    """Return a folder's names map, a shipped one filled in; raises UserError naming file and field."""
    own = _toml(folder / NAMES, (folder / NAMES).read_bytes())
    if not own.layout:
        return own
    maps = resources.files("precaudit") / "checkpoints" / "maps"
    known = sorted(p.name.removesuffix(".toml") for p in maps.iterdir() if p.name.endswith(".toml"))
    if own.layout not in known:
        raise UserError(f"{folder / NAMES}: unknown layout {own.layout!r}{nearest(own.layout, known)}")
    shipped = _toml(Path(own.layout), (maps / f"{own.layout}.toml").read_bytes())
    return Layout(
        own.checkpoint, own.layout, own.prefix or shipped.prefix, shipped.config | own.config,
        shipped.tensors | own.tensors, shipped.ignore + own.ignore,
    )  # fmt: skip


def _toml(where: Path, data: bytes) -> Layout:
    try:
        return msgspec.toml.decode(data, type=Layout)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{where}: {error}") from None


def configured(config: DecoderConfig, layout: Layout, where: str) -> DecoderConfig:
    """Return the configuration with a map's constants; raises UserError for one that is not known."""
    names = {"1/sqrt(width)": 1 / sqrt(config.width), "sqrt(width)": sqrt(config.width)}
    changed: dict[str, Any] = {}
    for key, value in layout.config.items():
        if key not in ("query_scale", "norm_offset", "embed_scale", "logit_scale", "residual_scale"):
            raise UserError(f"{where}: [config] {key} cannot be set by a names map")
        if isinstance(value, str) and value not in names:
            raise UserError(f"{where}: [config] {key} = {value!r}; a number, or one of {', '.join(names)}")
        changed[key] = names[value] if isinstance(value, str) else float(value)
    return msgspec.structs.replace(config, **changed)


@dataclass(frozen=True)
class OrbaxFiles:
    """Tensors of an Orbax checkpoint: ``entries`` by name, each with its layer; ``stored``: a path's key."""

    folder: Path
    ocdbt: bool
    zarr: str
    stored: Mapping[str, str]
    entries: Mapping[str, tuple[Entry, int]]
    _opened: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, layout: Layout, config: DecoderConfig) -> "OrbaxFiles":
        """Read the checkpoint's metadata; raises UserError where it is broken or lacks a tensor of the map."""
        root = (folder / layout.checkpoint).resolve()
        if not root.is_relative_to(folder.resolve()):
            raise UserError(f"{folder / NAMES}: checkpoint = {layout.checkpoint!r} lies outside the folder")
        try:
            meta = json.loads((root / "_METADATA").read_bytes())
            leaves = [[str(k["key"]) for k in leaf["key_metadata"]] for leaf in meta["tree_metadata"].values()]
            ocdbt, zarr3 = bool(meta.get("use_ocdbt", True)), bool(meta.get("use_zarr3", False))
        except FileNotFoundError:
            raise UserError(f"{root}: no Orbax checkpoint here (no _METADATA)") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{root / '_METADATA'}: not the metadata of an Orbax checkpoint: {error}") from None
        stored = {"/".join(keys): ".".join(keys) for keys in leaves}
        entries = {}
        for name in expected_tensors(config):
            entries[name] = _entry(name, layout, stored, str(folder / NAMES))
        below = f"{layout.prefix}/" if layout.prefix else ""
        passed = tuple(below + path for path in layout.ignore)
        used = {entry.path for entry, _ in entries.values()}
        for path in stored:
            if path.startswith(below) and path not in used and not (passed and path.startswith(passed)):
                raise UserError(
                    f"{folder / NAMES}: array {path!r} is not in the map, so the model may not be that; "
                    f"if it is, ignore = [{path.removeprefix(below)!r}]"
                )
        return cls(root, ocdbt, "zarr3" if zarr3 else "zarr", stored, entries)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, as the map turns it."""
        found = {}
        for name, (entry, layer) in self.entries.items():
            shape = tuple(self._array(entry.path).shape)
            found[name] = _turned_shape(entry, shape, name)
            before = entry.axes.partition("->")[0].split()
            if "l" in before and layer >= shape[before.index("l")]:
                raise UserError(f"{self.folder}: {entry.path!r} {list(shape)} has no layer {layer}")
        return found

    def read(self, name: str) -> Array:
        """Return a tensor; of a stacked one only its layer is read."""
        entry, layer = self.entries[name]
        array = self._array(entry.path)
        if not entry.axes:
            return self._values(array, entry.path)
        before, after = _axes(entry, name)
        index = tuple(layer if a == "l" else slice(None) for a in before)
        x = self._values(array[index], entry.path)
        left = [a for a in before if a != "l"]
        if entry.interleaved:
            axis = left.index(entry.interleaved)
            x = np.concatenate([np.take(x, range(s, x.shape[axis], 2), axis=axis) for s in (0, 1)], axis=axis)
        flat = [a for group in after for a in group]
        sizes = dict(zip(left, x.shape, strict=True))
        turned = x.transpose([left.index(a) for a in flat])
        return np.ascontiguousarray(turned.reshape([prod(sizes[a] for a in group) for group in after]))

    def original(self, name: str, rows: slice = ALL) -> None:
        """Nothing is rounded: stored values are the model."""
        return

    def _values(self, array: Any, path: str) -> Array:
        """Read an array or a slice of one; raises UserError where any of its data is missing or broken."""
        try:
            return np.asarray(array.read().result())
        except (ValueError, OSError) as error:
            text = str(error).splitlines()[0][:200]
            raise UserError(f"{self.folder}: array {path!r} cannot be read: {text}") from None

    def _array(self, path: str) -> Any:
        """Open an array, which reads its metadata alone."""
        if path in self._opened:
            return self._opened[path]
        try:
            import tensorstore
        except ImportError:
            raise UserError(f"{self.folder}: Orbax checkpoints need tensorstore: {INSTALL}") from None
        key = self.stored[path]
        store: dict[str, Any] = {"driver": "ocdbt", "base": f"file://{self.folder}/", "path": f"{key}/"}
        if not self.ocdbt:
            place = (self.folder / key).resolve()
            if not place.is_relative_to(self.folder):
                raise UserError(f"{self.folder}: array {path!r} lies outside the checkpoint")
            store = {"driver": "file", "path": f"{place}/"}
        try:
            # A chunk that is not there is an error, not zeros.
            spec = {"driver": self.zarr, "kvstore": store, "fill_missing_data_reads": False}
            array = tensorstore.open(spec, open=True, read=True).result()
        except (ValueError, OSError) as error:
            text = str(error).splitlines()[0][:200]
            raise UserError(f"{self.folder}: array {path!r} cannot be read: {text}") from None
        check_format(str(array.dtype.name), path, str(self.folder))
        self._opened[path] = array
        return array


def _entry(name: str, layout: Layout, stored: Mapping[str, str], where: str) -> tuple[Entry, int]:
    """Return where a tensor lies, its path whole, and its layer."""
    parts = name.split(".")
    layer = int(parts[2]) if name.startswith("model.layers.") else 0
    general = ".".join([*parts[:2], "{i}", *parts[3:]]) if name.startswith("model.layers.") else name
    if not layout.tensors:
        candidates = [Entry(name), Entry(name.replace(".", "/"))]
    elif general in layout.tensors:
        candidates = [layout.tensors[general]]
    else:
        raise UserError(f"{where}: no entry for {general!r}{nearest(general, layout.tensors)}")
    for entry in candidates:
        path = "/".join(x for x in (layout.prefix, entry.path.replace("{i}", str(layer))) if x)
        if path in stored:
            return msgspec.structs.replace(entry, path=path), layer
    raise UserError(f"{where}: {name!r} should lie at {path!r}, which the checkpoint lacks{nearest(path, stored)}")


def _axes(entry: Entry, name: str) -> tuple[list[str], list[list[str]]]:
    """Return the stored axes, and for every axis of the tensor those it is made of; raises UserError for nonsense."""
    before, arrow, after = entry.axes.partition("->")
    groups: list[list[str]] = []
    inside = False
    for token in after.replace("(", " ( ").replace(")", " ) ").split():
        if token in "()":
            inside = token == "("
            groups += [[]] if inside else []
        elif inside:
            groups[-1].append(token)
        else:
            groups.append([token])
    axes = before.split()
    if (
        not arrow
        or sorted(a for a in axes if a != "l") != sorted(a for g in groups for a in g)
        or len({*axes}) < len(axes)
    ):
        raise UserError(f"names map: axes {entry.axes!r} of {name!r} do not fit; for example 'd l h k -> (h k) d'")
    if entry.interleaved and entry.interleaved not in axes:
        raise UserError(f"names map: {name!r} has no axis {entry.interleaved!r} to be interleaved")
    return axes, groups


def _turned_shape(entry: Entry, shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    if not entry.axes:
        return shape
    before, after = _axes(entry, name)
    if len(before) != len(shape):
        raise UserError(f"names map: {name!r} has axes {entry.axes!r}, but {entry.path!r} has shape {list(shape)}")
    sizes = dict(zip(before, shape, strict=True))
    return tuple(prod(sizes[a] for a in group) for group in after)
