"""What every reader offers: named tensors, read one at a time."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from precaudit.errors import UserError, nearest
from precaudit.mirrors import remote_mark
from precaudit.models.configs import EMBEDDING, HEAD, DecoderConfig, model_tensors
from precaudit.numbers.arrays import Array, as_format, release, widen
from precaudit.numbers.formats import FORMATS

# Left by some exporters; RoPE's frequencies follow from the configuration.
IGNORED_SUFFIXES = ("rope_freqs.weight", ".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")

ALL = slice(None)
ELEMENTS = 1 << 22  # looked at together: 32 MiB in FP64


def row_blocks(shape: Sequence[int]) -> Iterator[slice]:
    """Yield the rows of a tensor in blocks of about ELEMENTS elements; all at once where there are no rows."""
    if not shape:
        yield ALL
        return
    step = max(1, ELEMENTS // max(1, prod(shape[1:])))
    yield from (slice(i, i + step) for i in range(0, shape[0], step))


def count_nonfinite(x: Array) -> int:
    """Return how many values are NaN or infinite."""
    flat = x.reshape(-1)
    return sum(int((~np.isfinite(widen(flat[rows]))).sum()) for rows in row_blocks(flat.shape))


class Tensors(Protocol):
    """Named tensors of a checkpoint, under Hugging Face names."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape."""
        ...

    def read_tensor(self, name: str) -> Array:
        """Return the tensor's values as the model uses them (a view of the file where it can be)."""
        ...

    def original(self, name: str, rows: slice = ALL, /) -> Array | None:
        """Return FP64 values of ``rows`` before rounding to the model's format; None where nothing was rounded."""
        ...


@runtime_checkable
class TensorsByRows(Protocol):
    """What a reader offers beside these where it reads some rows of a tensor without the others."""

    def read_rows(self, name: str, rows: slice, /) -> Array:
        """Return some rows of a tensor."""
        ...


def read_rows(tensors: Tensors, name: str, rows: slice = ALL) -> Array:
    """Return some rows of a tensor as the model uses them: no others are read, where the reader can read rows."""
    if rows != ALL and isinstance(tensors, TensorsByRows):
        return tensors.read_rows(name, rows)
    return tensors.read_tensor(name)[rows]


@dataclass(frozen=True)
class Rounded:
    """Tensors rounded once to another storage format (policy key ``weights``), those in ``kept`` left as they are."""

    inner: Tensors
    format: str
    kept: tuple[str, ...] = ()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors underneath."""
        return self.inner.shapes()

    def read_tensor(self, name: str) -> Array:
        """Return the tensor rounded to the format."""
        stored = self.inner.read_tensor(name)
        if name in self.kept:
            return stored
        out = np.empty(stored.shape, FORMATS[self.format].dtype)
        for rows in row_blocks(stored.shape):
            before = self.inner.original(name, rows)
            out[rows] = as_format(widen(stored[rows]) if before is None else before, self.format)
        return out

    def original(self, name: str, rows: slice = ALL) -> Array | None:
        """Return the tensor before rounding, in FP64."""
        before = self.inner.original(name, rows)
        if name in self.kept:
            return before
        x = widen(self.inner.read_tensor(name)[rows]) if before is None else before
        return x if (widen(as_format(x, self.format)) != x).any() else None


@dataclass(frozen=True)
class FileHashes:
    """SHA-256 over several files, and over a text about others, computed once when first asked for.

    A file in a bucket counts by what its listing says of it, since few of its bytes may be here.
    """

    paths: tuple[Path, ...]
    text: str = ""
    _found: list[str] = field(default_factory=list)

    def sha256(self) -> str:
        """Return the hex digest of the files' contents in order."""
        if not self._found:
            digest = hashlib.sha256(self.text.encode())
            for path in self.paths:
                if (mark := remote_mark(path)) is not None:
                    digest.update(f"{path.name} {mark}\n".encode())
                    continue
                with path.open("rb") as f:
                    while block := f.read(1 << 22):
                        digest.update(block)
            self._found.append(digest.hexdigest())
        return self._found[0]


def check_tensors(config: DecoderConfig, tensors: Tensors, where: str) -> None:
    """Raise UserError where the tensors are not exactly those the configuration implies."""
    found = tensors.shapes()
    if config.layers > len(found):
        raise UserError(f"{where}: {config.layers} layers, but only {len(found)} tensors: some are missing")
    expected = model_tensors(config)
    for name, shape in expected.items():
        if name not in found:
            raise UserError(f"{where}: tensor {name!r} {list(shape)} is missing{nearest(name, found)}")
        if tuple(found[name]) != shape:
            raise UserError(
                f"{where}: tensor {name!r} has shape {list(found[name])}, the configuration implies {list(shape)}"
            )
    for name in found:
        if name in expected or name.endswith(IGNORED_SUFFIXES) or (config.tied and name == HEAD):
            continue
        raise UserError(f"{where}: tensor {name!r} is not part of family {config.family}, so the model is not that")


def as_tied(config: DecoderConfig, tensors: Tensors) -> DecoderConfig:
    """Return the configuration with its head its own where the file holds one that is not the embedding.

    So transformers (from 5.0) reads tie_word_embeddings; a head that equals the embedding is the embedding.
    """
    shapes = tensors.shapes()
    if not config.tied or HEAD not in shapes:
        return config
    if shapes[HEAD] == shapes[EMBEDDING]:
        a, b = tensors.read_tensor(HEAD), tensors.read_tensor(EMBEDDING)
        same = all(np.array_equal(widen(a[rows]), widen(b[rows])) for rows in row_blocks(a.shape))
        release(a)
        if same:
            return config
    return msgspec.structs.replace(config, tied=False)


def check_format(dtype_name: str, name: str, where: str) -> None:
    """Raise UserError for a tensor whose stored format is not a floating-point one known here."""
    if dtype_name not in FORMATS:
        raise UserError(f"{where}: tensor {name!r} is stored as {dtype_name}, which is not supported")
