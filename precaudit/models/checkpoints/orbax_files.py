"""Orbax checkpoints: arrays read where they lie, a layer at a time, under the names a map gives them.

A folder with ``names.toml`` beside ``config.json`` holds one:

    checkpoint = "items"          # folder of the Orbax checkpoint in this one, or gs://bucket/path, s3://bucket/path
    layout = "maxtext-llama"      # a shipped map (precaudit/models/checkpoints/maps), or a [tensors] table of one's own

A map's entry names the path of an array in the parameter tree and how its axes become the tensor's, an einops
pattern: ``d l h k -> (h k) d`` takes layer l and flattens heads; ``d h (k two) -> (h two k) d`` makes halves of pairs.
[config] replaces constants that such a program computes otherwise. Orbax reads the metadata, TensorStore the arrays.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from precaudit.errors import UserError
from precaudit.mirrors import bring_below
from precaudit.models.checkpoints.names import (
    NAMES,
    Layout,
    MapEntry,
    arrange_entry,
    entry_of,
    entry_values,
    layer_axis,
)
from precaudit.models.checkpoints.tensors import ALL, check_format
from precaudit.models.configs import DecoderConfig, model_tensors
from precaudit.numbers.arrays import Array

REMOTE = ("gs://", "s3://")


LOUD = ("gcsfs", "google.auth", "absl")  # what they log, with tracebacks, is raised as well


@dataclass(frozen=True)
class OrbaxFiles:
    """Tensors of an Orbax checkpoint at ``root``: ``entries`` by name with their layers; ``stored``: a path's key."""

    root: Any
    ocdbt: bool
    zarr3: bool
    stored: Mapping[str, str]
    entries: Mapping[str, tuple[MapEntry, int]]
    _opened: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, layout: Layout, config: DecoderConfig) -> "OrbaxFiles":
        """Read the checkpoint's metadata; raises UserError where it is broken or lacks a tensor of the map."""
        bring_below(folder)
        root = checkpoint_path(folder, layout)
        stored, ocdbt, zarr3 = _metadata(root)
        entries = {}
        for name in model_tensors(config):
            entries[name] = entry_of(name, layout, stored, str(folder / NAMES))
        below = f"{layout.prefix}/" if layout.prefix else ""
        passed = tuple(below + path for path in layout.ignore)
        used = {path for entry, _ in entries.values() for path in entry.paths}
        for path in stored:
            if path.startswith(below) and path not in used and not (passed and path.startswith(passed)):
                raise UserError(
                    f"{folder / NAMES}: array {path!r} is not in the map, so the model may not be that; "
                    f"if it is, ignore = [{path.removeprefix(below)!r}]"
                )
        return cls(root, ocdbt, zarr3, stored, entries)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, as the map turns it."""
        found = {}
        for name, (entry, layer) in self.entries.items():
            left = [np.broadcast_to(np.int8(0), self._shape(entry, path, layer)) for path in entry.paths]
            found[name] = arrange_entry(entry, left, name).shape
        return found

    def read_tensor(self, name: str) -> Array:
        """Return a tensor; of a stacked one only its layer is read."""
        entry, layer = self.entries[name]
        at = layer_axis(entry)
        cut = () if at is None else (slice(None),) * at + (layer,)
        each = [(path, self._array(path)) for path in entry.paths]
        return entry_values(entry, [self._values(x[cut] if cut else x, path) for path, x in each], name)

    def _shape(self, entry: MapEntry, path: str, layer: int) -> tuple[int, ...]:
        """Return an array's shape without its layers' axis; raises UserError where it lacks the layer."""
        shape, at = tuple(self._array(path).shape), layer_axis(entry)
        if at is not None and at < len(shape) and layer >= shape[at]:
            raise UserError(f"{self.root}: {path!r} {list(shape)} has no layer {layer}")
        return tuple(n for axis, n in enumerate(shape) if axis != at)

    def original(self, _name: str, _rows: slice = ALL) -> None:
        """Nothing is rounded: stored values are the model."""
        return

    def _values(self, array: Any, path: str) -> Array:
        """Read an array or a slice of one; raises UserError where any of its data is missing or broken."""
        try:
            return np.asarray(array.read().result())
        except (ValueError, OSError) as error:
            text = str(error).splitlines()[0][:200]
            raise UserError(f"{self.root}: array {path!r} cannot be read: {text}") from None

    def _array(self, path: str) -> Any:
        """Open an array, which reads its metadata alone."""
        if path in self._opened:
            return self._opened[path]
        import tensorstore
        from etils import epath  # of orbax-checkpoint
        from orbax.checkpoint import type_handlers

        key = self.stored[path]
        if isinstance(self.root, Path) and not self.ocdbt and not (self.root / key).resolve().is_relative_to(self.root):
            raise UserError(f"{self.root}: array {path!r} lies outside the checkpoint")
        context = type_handlers.get_ts_context(use_ocdbt=self.ocdbt)
        info = type_handlers.ParamInfo(
            name=key, parent_dir=epath.Path(self.root), use_zarr3=self.zarr3, ts_context=context
        )
        try:
            spec = type_handlers.get_json_tspec_read(info, self.ocdbt)
            array = tensorstore.open(spec, open=True, read=True, context=context).result()
        except (ValueError, OSError) as error:
            text = str(error).splitlines()[0][:200]
            raise UserError(f"{self.root}: array {path!r} cannot be read: {text}") from None
        check_format(str(array.dtype.name), path, str(self.root))
        self._opened[path] = array
        return array


def checkpoint_path(folder: Path, layout: Layout) -> Any:
    """Return where the checkpoint lies: a folder below ``folder``, or a path in a bucket; raises UserError."""
    if layout.checkpoint.startswith(REMOTE):
        from etils import epath  # of orbax-checkpoint

        return epath.Path(layout.checkpoint)
    root = (folder / layout.checkpoint).resolve()
    if not root.is_relative_to(folder.resolve()):
        raise UserError(f"{folder / NAMES}: checkpoint = {layout.checkpoint!r} lies outside the folder")
    return root


def bucket_listing(root: Any) -> str:
    """Return names, sizes and times of what lies in a bucket: its contents are not read to tell it from another."""

    def files(folder: Any) -> Iterator[Any]:
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                yield from files(path)
            else:
                yield path

    return "".join(f"{p.relative_to(root)} {p.stat().length} {p.stat().mtime}\n" for p in files(root))


def _metadata(root: Any) -> tuple[dict[str, str], bool, bool]:
    """Return every array's key by its path, and whether they lie in an OCDBT and as Zarr 3."""
    import orbax.checkpoint
    from orbax.checkpoint import type_handlers

    for name in LOUD:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        if not (root / "_METADATA").exists():
            raise UserError(f"{root}: no Orbax checkpoint here (no _METADATA)")
        ocdbt = bool(type_handlers.is_ocdbt_checkpoint(root))
        with orbax.checkpoint.PyTreeCheckpointer() as reader:
            meta = reader.metadata(root)
        tree = meta.item_metadata
        if tree is None:
            raise ValueError("Orbax reads no tree of arrays from it")
        flat = orbax.checkpoint.tree.to_flat_dict(tree.tree)
        stored = {"/".join(map(str, keys)): str(leaf.name) for keys, leaf in flat.items()}
    except UserError:
        raise
    except ImportError as error:  # what reads a bucket is a package of its own
        raise UserError(f"{root}: {error}") from None
    except OSError as error:
        raise UserError(f"{root}: cannot be read: {str(error).splitlines()[0]}") from None
    except Exception as error:  # the library raises whatever broken metadata leads to
        raise UserError(f"{root}: not the metadata of an Orbax checkpoint: {type(error).__name__}: {error}") from None
    return stored, ocdbt, bool(tree.use_zarr3)
