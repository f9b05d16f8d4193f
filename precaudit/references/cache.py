"""FP64 forward values on disk, one file a point, named by the hash of everything they depend on.

A file is a line of JSON (what it is of, format and shape, padded to whole cache lines), the values, and the XXH3-128 of
both: one that was damaged, altered, or lies under another's name is computed again. It is no .npy, whose header is
Python source: CPython 3.11 cannot parse that in two threads at once (SystemError, "AST constructor recursion depth
mismatch").
"""

import hashlib
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from precaudit.buckets import is_url
from precaudit.caching import READS, cache_folder, computed_by
from precaudit.errors import UserError
from precaudit.mirrors import commit, local_path
from precaudit.models.configs import DecoderConfig
from precaudit.numbers.arrays import Array
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.writing import whole

DIGEST = 16  # bytes of an XXH3-128
LINE = 64  # bytes of a cache line, to which values are aligned


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file's first line says of its values: whose they are, NumPy's name of their format, and the shape.

    ``of``: the folder's name, which is that of the sequence and its model, and the file's.
    """

    of: str
    dtype: str
    shape: tuple[int, ...]


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
    def of(
        cls, root: Path, weights: str, config: DecoderConfig, tokens: tuple[int, ...], lengths: Array | None = None
    ) -> "References":
        """Return the place of a sequence; ``weights`` identifies the tensors as they are used.

        ``lengths``: how long it was when its rows were turned, where that tells (precaudit/schema/lengths.py).
        """
        parts = (
            computed_by(READS),
            weights,
            msgspec.json.encode(config).decode(),
            np.asarray(tokens, np.int64).tobytes().hex(),
            *(() if lengths is None else (lengths.astype(np.int64).tobytes().hex(),)),
        )
        key = hashlib.sha256("|".join(parts).encode()).hexdigest()[:32]
        bucket = os.environ.get("PRECAUDIT_REFERENCES")
        if not bucket or root != cache_folder("references"):  # --no-cache, or a folder that was given, is another
            return cls(root / key)
        if not is_url(bucket):
            raise UserError(f"PRECAUDIT_REFERENCES={bucket} is no URL of a bucket; a folder is PRECAUDIT_CACHE")
        return cls(local_path(f"{bucket.rstrip('/')}/{key}", anew=False))

    def name(self, layer: int | None, point: str, rows: Array) -> str:
        """Return a point's file name; logits depend on which rows were wanted."""
        name = point if layer is None else f"{layer}.{point}"
        if point == LOGITS:
            name += "." + hashlib.sha256(rows.astype(np.int64).tobytes()).hexdigest()[:12]
        return f"{name}.fp64"

    def _of(self, name: str) -> str:
        return f"{self.folder.name}/{name}"

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
            start = stored.find(b"\n") + 1
            header = msgspec.json.decode(stored[:start], type=Header)
            if header.of != self._of(name):
                raise ValueError("it is of another point or sequence")
            return np.frombuffer(stored, np.dtype(header.dtype), prod(header.shape), start).reshape(header.shape)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, msgspec.MsgspecError):
            self.said.append(f"{path} was damaged and is computed again")
            return None

    def save(self, layer: int | None, point: str, rows: Array, values: Array) -> None:
        """Write a point's values, whole or not at all; hold them in memory where the disk takes none."""
        name = self.name(layer, point, rows)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            header = msgspec.json.encode(Header(self._of(name), values.dtype.str, values.shape))
            header += b" " * (-(len(header) + 1) % LINE) + b"\n"
            data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
            digest = xxhash.xxh3_128(header)
            digest.update(data)
            with whole(self.folder / name, inside=True) as f:
                f.writelines((header, data, digest.digest()))
        except OSError as error:
            self.held[name] = np.array(values)
            self.said.append(f"references are not kept: {self.folder}: {error.strerror}")

    def touch(self) -> None:
        """Mark as used now, and have what is new in the bucket that it follows."""
        commit(self.folder)
        with suppress(OSError):
            os.utime(self.folder)
