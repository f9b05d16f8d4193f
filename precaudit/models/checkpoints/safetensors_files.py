"""Safetensors by memory map. The library's NumPy reader copies each tensor; the format is a header and raw bytes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from precaudit.errors import UserError
from precaudit.mirrors import bring
from precaudit.models.checkpoints.tensors import ALL, check_format
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS

DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
WORDS = {"U32": "uint32"}  # what runs hold beside floats
ANYTHING = WORDS | {
    "F64": "float64",
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
}  # of programs and dumps
NOTHING: Mapping[str, str] = MappingProxyType({})
MAX_HEADER = 100_000_000  # the limit of the format's own implementation


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: byte offsets within the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path, also: Mapping[str, str] = NOTHING) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file; raises UserError when the header contradicts the file or itself.

    ``also``: formats to take that no model has, ``WORDS`` or ``ANYTHING``.
    """
    size = path.stat().st_size
    bring(path, 0, 8)
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise UserError(f"{path}: truncated or not safetensors: header of {length} bytes in a file of {size}")
        bring(path, 8, 8 + length)
        f.seek(8)
        text = f.read(length)
    try:
        header = json.loads(text)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: the safetensors header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise UserError(f"{path}: the safetensors header is not a table")
    start, entries = 8 + length, {}
    for name, item in header.items():
        if name != "__metadata__":
            entries[name] = _entry(path, name, item, start, size, also)
    _check_bytes(path, entries, start, size)
    return entries


def _check_bytes(path: Path, entries: Mapping[str, TensorEntry], start: int, size: int) -> None:
    """Raise UserError unless the tensors lie one behind the other and fill the file, as the format has it.

    A file that says one byte of two tensors, or of none, shows another reader other weights.
    """
    end, before = start, ""
    for name, e in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if e.begin < end:
            raise UserError(
                f"{path}: tensors {before!r} and {name!r} overlap at byte {e.begin - start}: written wrongly or altered"
            )
        if e.begin > end:
            raise UserError(
                f"{path}: bytes {end - start} to {e.begin - start}, before tensor {name!r}, are of no tensor: "
                "written wrongly or altered"
            )
        end, before = e.end, name
    if end < size:
        raise UserError(
            f"{path}: {size - end} bytes behind the last tensor are of no tensor: written wrongly or altered"
        )


def _entry(path: Path, name: str, item: Any, start: int, size: int, also: Mapping[str, str]) -> TensorEntry:
    try:
        stored, shape, (begin, end) = item["dtype"], item["shape"], item["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and isinstance(stored, str)
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise UserError(f"{path}: tensor {name!r} has a malformed header entry")
    dtype = also.get(stored) or DTYPES.get(stored, stored)
    if stored not in also:
        check_format(dtype, name, str(path))
    nbytes = prod(shape) * _dtype(dtype).itemsize
    if end - begin != nbytes or start + end > size:
        raise UserError(
            f"{path}: tensor {name!r} {shape} {stored} claims bytes {begin} to {end}, needs {nbytes}, "
            f"and the file holds {max(size - start, 0)}: truncated or altered"
        )
    return TensorEntry(dtype, tuple(shape), start + begin, start + end)


def _dtype(name: str) -> np.dtype[Any]:
    return FORMATS[name].dtype if name in FORMATS else np.dtype(name)


@dataclass(frozen=True)
class SafetensorsFiles:
    """Tensors of one or several safetensors files; ``where`` maps each name to its file."""

    entries: Mapping[str, TensorEntry]
    where: Mapping[str, Path]
    _maps: dict[Path, Array] = field(default_factory=dict)

    @classmethod
    def open(cls, paths: list[Path], also: Mapping[str, str] = NOTHING) -> "SafetensorsFiles":
        """Read the headers of ``paths``; raises UserError for a broken one or a tensor in two files.

        ``also``: as of ``read_header``.
        """
        entries: dict[str, TensorEntry] = {}
        where: dict[str, Path] = {}
        for path in paths:
            for name, entry in read_header(path, also).items():
                if name in entries:
                    raise UserError(f"{path}: tensor {name!r} is also in {where[name].name}")
                entries[name], where[name] = entry, path
        return cls(entries, where)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape."""
        return {name: e.shape for name, e in self.entries.items()}

    def read_rows(self, name: str, rows: slice) -> Array:
        """Return a read-only view of some rows, one after another: of a file in a bucket their bytes alone are read."""
        entry = self.entries[name]
        first, last, _ = rows.indices(entry.shape[0])
        each, count = (entry.end - entry.begin) // max(1, entry.shape[0]), max(0, last - first)
        part = TensorEntry(
            entry.dtype, (count, *entry.shape[1:]), entry.begin + first * each, entry.begin + (first + count) * each
        )
        return self._read(self.where[name], part)

    def read_tensor(self, name: str) -> Array:
        """Return a read-only view of the file."""
        return self._read(self.where[name], self.entries[name])

    def _read(self, path: Path, entry: TensorEntry) -> Array:
        dtype = _dtype(entry.dtype)
        if prod(entry.shape) == 0:
            return np.zeros(entry.shape, dtype)
        if path not in self._maps:
            self._maps[path] = np.asarray(np.memmap(path, np.uint8, "r"))
        bring(path, entry.begin, entry.end)
        raw = self._maps[path][entry.begin : entry.end]
        aligned = raw if entry.begin % dtype.itemsize == 0 else np.array(raw)
        return aligned.view(dtype).reshape(entry.shape)

    def close(self) -> None:
        """Let go of the files; what is read next maps them again."""
        self._maps.clear()

    def original(self, _name: str, _rows: slice = ALL) -> None:
        """Nothing is rounded: stored values are the model."""
        return
