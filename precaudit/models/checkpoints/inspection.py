"""Every tensor of a checkpoint, read once: its format, values that are not finite, and a hash."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from precaudit.models.checkpoints.opening import Checkpoint
from precaudit.models.checkpoints.tensors import row_blocks
from precaudit.numbers.arrays import widen


class TensorCheck(NamedTuple):
    """One tensor as the model uses it; ``sha256`` of its values."""

    name: str
    shape: tuple[int, ...]
    format: str
    nonfinite: int
    largest: float
    sha256: str


def inspect_tensors(checkpoint: Checkpoint) -> Iterator[TensorCheck]:
    """Read every tensor, one at a time."""
    for name in sorted(checkpoint.tensors.shapes()):
        x = np.ascontiguousarray(checkpoint.tensors.read_tensor(name))
        flat, bad, largest = x.reshape(-1), 0, 0.0
        for rows in row_blocks(flat.shape):
            part = widen(flat[rows])
            finite = np.isfinite(part)
            bad += int((~finite).sum())
            largest = max(largest, float(np.abs(np.where(finite, part, 0.0)).max(initial=0.0)))
        digest = hashlib.sha256(flat.view(np.uint8).data).hexdigest()
        yield TensorCheck(name, tuple(x.shape), x.dtype.name, bad, largest, digest)


def tensor_formats(checkpoint: Checkpoint) -> dict[str, int]:
    """Return how many tensors are read in each format; reads one tensor of every kind and shape."""
    found: Counter[str] = Counter()
    known: dict[tuple[str, tuple[int, ...]], str] = {}
    for name, shape in checkpoint.tensors.shapes().items():
        kind = (name.split(".")[-2] if "." in name else name, shape)
        if kind not in known:
            known[kind] = checkpoint.tensors.read_tensor(name).dtype.name
        found[known[kind]] += 1
    return dict(found)
