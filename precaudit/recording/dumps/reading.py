"""What a dump holds: arrays in .npy, .npz, .safetensors and JSONL, by name, loaded one at a time.

Names are paths below the dump, without the suffix, and the name within the file: ``layers/3/q`` of layers/3/q.npy, of
layers/3.npz and of layers.safetensors with a tensor ``3/q``. Lists of numbers in JSONL are ``case/call/layer/key``.
"""

import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from precaudit.errors import UserError
from precaudit.models.checkpoints.safetensors_files import ANYTHING, SafetensorsFiles
from precaudit.numbers.arrays import Array
from precaudit.schema.records.base import Number, json_number

KINDS = (".npy", ".npz", ".safetensors", ".jsonl")
MOST_LINE = 1 << 30  # bytes of a line of JSONL
CASES, CALLS = ("prompt", "case", "id", "name"), ("call", "step")  # keys of a line that say where it belongs


@dataclass(frozen=True)
class DumpArray:
    """An array of a dump, by its name; ``load`` reads it."""

    name: str
    load: Callable[[], Array]


class Lone(NamedTuple):
    """A number that a line of JSONL reports of a case, a call and a layer."""

    case: str
    call: int
    layer: int | None
    name: str
    value: Number


@dataclass(frozen=True)
class Dump:
    """What a dump holds: arrays, numbers somebody reported, and what is neither."""

    arrays: tuple[DumpArray, ...]
    reported: tuple[Lone, ...]
    other: tuple[str, ...]


def read_dump(path: Path) -> Dump:
    """Return what a file or a folder holds; raises UserError for what is not there or cannot be read.

    Links are not followed out of the folder.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    arrays: list[DumpArray] = []
    reported: list[Lone] = []
    other: list[str] = []
    root = path if path.is_dir() else path.parent
    for file in files:
        name = file.relative_to(root).as_posix()
        if file.suffix not in KINDS or not file.resolve().is_relative_to(root.resolve()):
            other.append(name)
        elif file.suffix == ".jsonl":
            lines = _jsonl(file)
            arrays += lines.arrays
            reported += lines.reported
            other += lines.other
        else:
            below = name.removesuffix(file.suffix) if path.is_dir() else ""
            arrays += _arrays(file, below)
    if not arrays and not reported:
        raise UserError(f"{path}: no arrays here; a dump holds {', '.join(KINDS)}")
    seen: set[str] = set()
    for held in arrays:
        if held.name in seen:
            raise UserError(f"{path}: two arrays are named {held.name!r}")
        seen.add(held.name)
    return Dump(tuple(arrays), tuple(reported), tuple(other))


def _arrays(file: Path, below: str) -> Iterator[DumpArray]:
    if file.suffix == ".npy":
        yield DumpArray(below or file.stem, lambda: _npy(file))
        return
    prefix = f"{below}/" if below else ""
    if file.suffix == ".safetensors":
        found = SafetensorsFiles.open([file], ANYTHING)
        for key in found.entries:
            yield DumpArray(prefix + key, lambda key=key: found.read_tensor(key))  # type: ignore[misc]
        return
    try:
        with zipfile.ZipFile(file) as z:
            keys = [n.removesuffix(".npy") for n in z.namelist() if n.endswith(".npy")]
    except Exception as error:
        raise UserError(f"{file}: not .npz: {error}") from None
    for key in keys:
        yield DumpArray(prefix + key, lambda key=key: _npz(file, key))  # type: ignore[misc]


def _npy(file: Path) -> Array:
    try:
        return np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except Exception as error:  # a broken header is read as Python text, and fails as that likes
        raise UserError(f"{file}: {_first(error)}") from None


def _npz(file: Path, key: str) -> Array:
    try:
        with np.load(file, allow_pickle=False) as held:
            return np.asarray(held[key])
    except Exception as error:
        raise UserError(f"{file}: {key}: {_first(error)}") from None


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _jsonl(file: Path) -> Dump:
    """Return lists of numbers as arrays, lone numbers as reported, of lines that say prompt, layer and step."""
    arrays: list[DumpArray] = []
    reported: list[Lone] = []
    other: dict[str, None] = {}
    with file.open("rb") as f:
        for n, line in enumerate(iter(lambda: f.readline(MOST_LINE), b""), 1):
            if not line.strip():
                continue
            where = f"{file}:{n}"
            row = _object(line, where)
            case = next((str(row[k]) for k in CASES if isinstance(row.get(k), str)), file.stem)
            call = next((row[k] for k in CALLS if _index(row.get(k))), 0)
            layer = row["layer"] if _index(row.get("layer")) else None
            for key, x in row.items():
                if key in (*CASES, *CALLS, "layer", "phase", "point") or isinstance(x, str | bool) or x is None:
                    continue
                if isinstance(x, int | float):
                    reported.append(Lone(case, call, layer, key, x if isinstance(x, int) else json_number(x)))
                elif isinstance(x, list):
                    name = "/".join(str(part) for part in (case, call, layer, key) if part is not None)
                    found = _numbers(x, f"{where}: {key}")
                    arrays.append(DumpArray(name, lambda found=found: found))  # type: ignore[misc]
                else:
                    other[f"{file.name}: {key}"] = None
    return Dump(tuple(arrays), tuple(reported), tuple(other))


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if isinstance(row, dict):  # half a character has no bytes
            "".join([*row, *(x for x in row.values() if isinstance(x, str))]).encode()
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {_first(error)}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object")
    return row


def _index(x: object) -> bool:
    return type(x) is int and 0 <= x < 1 << 31


def _numbers(x: list[Any], where: str) -> Array:
    try:
        found = np.asarray(x)
    except (ValueError, RecursionError, OverflowError) as error:
        raise UserError(f"{where}: {_first(error)}") from None
    if found.dtype.kind not in "fiu":
        raise UserError(f"{where}: not numbers")
    return found
