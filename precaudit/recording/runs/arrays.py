"""Tensors of a run that several processes write together: arrays of TensorStore (zarr3) in one OCDBT database.

Each process writes the parts that it holds, one transaction a call; any process reads any part of an array after that.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from precaudit.errors import UserError
from precaudit.mirrors import bring_below
from precaudit.recording.runs.hashes import file_hash, tensor_hash
from precaudit.writing import temporary

if TYPE_CHECKING:
    from precaudit.numbers.arrays import Array

TENSORS = "tensors"
METADATA = "/zarr.json"
OCDBT = "manifest.ocdbt"  # what a database has in its folder


@dataclass(frozen=True)
class Part:
    """A part of an array: where it begins on each axis, and its values."""

    start: tuple[int, ...]
    values: "Array"


@dataclass(frozen=True)
class WrittenArray:
    """An array to write: its name, whole shape and format, the size of a cell of its grid, and the parts held here.

    No part shares a cell with another: two processes would write it over each other.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    cell: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Entry:
    """What an array is."""

    shape: tuple[int, ...]
    dtype: str


def cell_of(shape: Sequence[int], starts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the size of a cell such that every part, which begins at one of ``starts``, is of whole cells."""
    every = list(starts)
    return tuple(max(reduce(gcd, {s[axis] for s in every}, n), 1) for axis, n in enumerate(shape))


class Arrays:
    """The arrays in a folder, all of which is here once this is made."""

    def __init__(self, folder: Path) -> None:
        import tensorstore as ts

        bring_below(folder)
        self.folder, self._ts = folder, ts
        self._base = {"driver": "file", "path": f"{folder.resolve()}/"}
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})

    def write(self, arrays: Iterable[WrittenArray], metadata: bool) -> int:
        """Write the parts held here, all or none; return their bytes. ``metadata``: say what the arrays are, too."""
        transaction, todo, written = self._ts.Transaction(atomic=True), [], 0
        for array in arrays:
            for create in (True, False) if metadata else (False,):
                if not create and not array.parts:
                    continue
                store = self._open(
                    array.name,
                    transaction,
                    create=create,
                    assume_metadata=not create,
                    delete_existing=False,
                    dtype=self._ts.dtype(array.dtype),
                    shape=array.shape,
                    chunk_layout=self._ts.ChunkLayout(chunk_shape=array.cell),
                )
                for part in () if create else array.parts:
                    at = tuple(slice(a, a + n) for a, n in zip(part.start, part.values.shape, strict=True))
                    todo.append(store[at].write(part.values))
                    written += part.values.nbytes
        try:
            for one in todo:
                one.result()
            transaction.commit_async().result()
        except ValueError as error:
            if "No space left" in str(error) or "File too large" in str(error):
                raise OSError(28, "No space left on device", str(self.folder)) from None
            raise OSError(5, f"cannot be written: {str(error).splitlines()[0]}", str(self.folder)) from None
        return written

    def enter(self, folder: Path) -> None:
        """Enter what another database holds, in a folder below this one, where its data stay; raises UserError."""
        bring_below(folder)
        base = {"driver": "file", "path": f"{folder.resolve()}/"}
        try:
            theirs, ours = (
                self._ts.KvStore.open({"driver": "ocdbt", "base": x}, context=self._context).result()
                for x in (base, self._base)
            )
            theirs.experimental_copy_range_to(ours).result()
        except ValueError as error:
            raise UserError(f"{folder}: cannot be read ({str(error)[:200]}); trace again") from None

    def entry(self, name: str) -> Entry | None:
        """Return what an array is; None where there is none."""
        try:
            store = self._open(name)
        except ValueError:
            return None
        return Entry(tuple(store.shape), store.dtype.name)

    def read(self, name: str) -> "Array":
        """Return a whole array; raises UserError where it is not there, or cannot be read."""
        try:
            return self._open(name).read().result()
        except ValueError as error:
            missing = "NOT_FOUND" in str(error)
            why = "is missing" if missing else f"cannot be read ({str(error).splitlines()[0][:200]})"
            raise UserError(f"{self.folder}: {name} {why}; the run is damaged: trace again") from None

    def names(self, folder: str) -> list[str]:
        """Return the names of all arrays below a folder, sorted."""
        try:
            store = self._ts.KvStore.open(self._store(folder), context=self._context).result()
            keys = [key.decode() for key in store.list().result()]
        except ValueError as error:
            raise UserError(f"{self.folder}: cannot be read ({str(error)[:200]}); trace again") from None
        return sorted(key.removesuffix(METADATA) for key in keys if key.endswith(METADATA))

    def _store(self, name: str) -> dict[str, Any]:
        return {"driver": "ocdbt", "base": self._base, "path": f"{name}/"}

    def _open(self, name: str, transaction: Any = None, **how: Any) -> Any:
        given = {"driver": "zarr3", "kvstore": self._store(name)}
        return self._ts.open(given, open=True, context=self._context, transaction=transaction, **how).result()


class Folder:
    """The arrays below a folder of the database, as ``SafetensorsFiles`` has the tensors of a file."""

    def __init__(self, arrays: Arrays, name: str) -> None:
        self._arrays, self._name = arrays, name
        self.entries = self

    def get(self, key: str) -> Entry | None:
        """Return what an array is; None where there is none."""
        return self._arrays.entry(f"{self._name}/{key}")

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the arrays."""
        return iter(self._arrays.names(self._name))

    def read_tensor(self, key: str) -> "Array":
        """Return an array."""
        return self._arrays.read(f"{self._name}/{key}")

    def close(self) -> None:
        """Nothing is held open."""


def is_file(name: str) -> bool:
    """Whether a name below a run's folder is of a file of tensors, and not of arrays in the database."""
    return name.endswith(".safetensors")


@lru_cache(maxsize=4)
def stored_arrays(run: Path, name: str, digest: str) -> "dict[str, Array]":
    """Return the arrays below a name in the database of a run's folder.

    Raises UserError where they have another hash (``arrays_hash``) than ``digest``.
    """
    found = read_arrays(run, name)
    if arrays_hash(found) != digest:
        raise UserError(f"{run}/{name} was altered since it was recorded (its hash differs); trace again")
    return found


def read_arrays(run: Path, name: str) -> "dict[str, Array]":
    """Return the arrays below a name, whatever they hold; none where nothing is there."""
    folder = Folder(Arrays(run / TENSORS), name.removeprefix(f"{TENSORS}/"))
    return {key: folder.read_tensor(key) for key in folder}


def arrays_hash(tensors: "dict[str, Array]") -> str:
    """Return the hash of arrays under names, whatever parts they were written in."""
    lines = (f"{k} {x.dtype.name} {x.shape} {tensor_hash(x)}\n" for k, x in sorted(tensors.items()))
    return f"xxh3:{xxhash.xxh3_128_hexdigest(''.join(lines).encode())}"


def write_tensors(folder: Path, name: str, tensors: dict[str, Any]) -> tuple[str, int]:
    """Write a file of tensors whole or not at all; return its hash and bytes."""
    from safetensors.numpy import save_file

    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    part = temporary(path)
    try:
        save_file(tensors, part)
        part.replace(path)
    except Exception as error:
        if "No space left" in str(error):
            raise OSError(28, "No space left on device", str(path)) from None
        raise
    finally:
        part.unlink(missing_ok=True)
    return file_hash(path), path.stat().st_size
