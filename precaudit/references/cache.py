"""FP64 forward values on disk, one file a point, named by the hash of everything they depend on.

A file is a .npy with the XXH3-128 of its bytes behind it: one that was damaged or altered is computed again.
"""

import hashlib
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from precaudit.arrays import Array
from precaudit.caching import READS, computed_by
from precaudit.configs import DecoderConfig
from precaudit.graphs.decoder import LOGITS
from precaudit.writing import whole

DIGEST = 16  # bytes of an XXH3-128


@dataclass(frozen=True)
class References:
    """The cached values of one sequence under one model.

    ``said``: what a reader should know: files that were not what was written, or could not be.
    """

    folder: Path
    said: list[str] = field(default_factory=list, compare=False)
    held: dict[str, Array] = field(default_factory=dict, compare=False)
    checked: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def of(cls, root: Path, weights: str, config: DecoderConfig, tokens: tuple[int, ...]) -> "References":
        """Return the place of a sequence; ``weights`` identifies the tensors as they are used."""
        parts = (
            computed_by(READS), weights, msgspec.json.encode(config).decode(),
            np.asarray(tokens, np.int64).tobytes().hex(),
        )  # fmt: skip
        return cls(root / hashlib.sha256("|".join(parts).encode()).hexdigest()[:32])

    def name(self, layer: int | None, point: str, rows: Array) -> str:
        """Return a point's file name; logits depend on which rows were wanted."""
        name = point if layer is None else f"{layer}.{point}"
        if point == LOGITS:
            name += "." + hashlib.sha256(rows.astype(np.int64).tobytes()).hexdigest()[:12]
        return f"{name}.npy"

    def load(self, layer: int | None, point: str, rows: Array) -> Array | None:
        """Return the values by mmap, or None when they are not there or not what was written."""
        name = self.name(layer, point, rows)
        if name in self.held:
            return self.held[name]
        path = self.folder / name
        try:
            with path.open("rb") as f:
                stored = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
            if name not in self.checked:
                if xxhash.xxh3_128_digest(memoryview(stored)[:-DIGEST]) != stored[-DIGEST:]:
                    raise ValueError("its hash differs")
                self.checked.add(name)
            # version 1.0, which is what is written: magic and version, the header's length in two bytes, the header
            start = 10 + int.from_bytes(stored[8:10], "little")
            shape, dtype = _header(stored[:start])
            return np.frombuffer(stored, dtype, count=prod(shape), offset=start).reshape(shape)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError):
            self.said.append(f"{path} was damaged and is computed again")
            return None

    def save(self, layer: int | None, point: str, rows: Array, values: Array) -> None:
        """Write a point's values, whole or not at all; hold them in memory where the disk takes none."""
        name = self.name(layer, point, rows)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole(self.folder / name) as f:
                seen = _Hashed(f)
                np.lib.format.write_array(seen, np.ascontiguousarray(values), allow_pickle=False)
                f.write(seen.digest.digest())
        except OSError as error:
            self.held[name] = np.array(values)
            self.said.append(f"references are not kept: {self.folder}: {error.strerror}")

    def touch(self) -> None:
        """Mark as used now."""
        with suppress(OSError):
            os.utime(self.folder)


@lru_cache(maxsize=4096)
def _header(data: bytes) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and format of a .npy from its first bytes; parsed once for all that begin alike."""
    file = BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("not of version 1.0")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran or dtype.hasobject:
        raise ValueError("not what is written")
    return shape, dtype


class _Hashed:
    """A file that hashes what is written to it."""

    def __init__(self, file: object) -> None:
        self.file, self.digest = file, xxhash.xxh3_128()

    def write(self, data: bytes | memoryview) -> int:
        self.digest.update(data)
        return int(self.file.write(data))  # type: ignore[attr-defined]
