"""points.jsonl: a line for each recorded tensor of a run: its place, shape, format, hash and statistics."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from precaudit.recording.runs.hashes import tensor_hash
from precaudit.recording.runs.positions import pack_positions
from precaudit.schema.places import Place
from precaudit.schema.records.base import json_number
from precaudit.schema.records.runs import PointRecord, Stats

if TYPE_CHECKING:  # the gate reads runs, and no tensor of them
    from precaudit.numbers.arrays import Array


def statistics(x: "Array") -> Stats:
    """Return a tensor's statistics; mean and rms summed in FP32 pairs and FP32 dots, for the eye only."""
    import numpy as np

    from precaudit.numbers.arrays import to_single

    y = to_single(x).reshape(-1) if x.dtype.itemsize <= 4 else x.astype(np.float64).reshape(-1)
    power = float(np.dot(y, y)) if y.size else 0.0
    nan = inf = 0
    if not np.isfinite(power):
        nan, inf = int(np.isnan(y).sum()), int(np.isinf(y).sum())
        y = y[np.isfinite(y)].astype(np.float64)
        power = float(np.dot(y, y)) if y.size else 0.0
    if not y.size:
        return Stats(min="nan", max="nan", mean="nan", rms="nan", nan=nan, inf=inf)
    low, high, mean, rms = y.min(), y.max(), y.mean(), (power / y.size) ** 0.5
    return Stats(
        min=json_number(low), max=json_number(high), mean=json_number(mean), rms=json_number(rms), nan=nan, inf=inf
    )


def safe_name(prompt: str) -> str:
    """Return a file name for a prompt id, which may hold anything."""
    clean = "".join(c if (c.isalnum() and c.isascii()) or c in "-_" else "_" for c in prompt)[:80]
    return clean if clean == prompt else f"{clean}-{hashlib.sha256(prompt.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: which point it is, its rows and values."""

    layer: int | None
    point: str
    axes: str
    positions: tuple[int, ...]
    values: "Array"
    support: bool

    @property
    def key(self) -> str:
        """Its name inside the file."""
        return self.point if self.layer is None else f"{self.layer}.{self.point}"


@dataclass(frozen=True)
class SharedTensor:
    """A tensor of which processes hold parts: as ``Tensor``, and where its call is written."""

    layer: int | None
    point: str
    axes: str
    positions: tuple[int, ...]
    support: bool
    prompt: str
    phase: str
    step: int

    @property
    def key(self) -> str:
        """Its name inside the file."""
        return self.point if self.layer is None else f"{self.layer}.{self.point}"

    @property
    def file(self) -> str:
        """Where its call is written, below the run's folder."""
        return f"tensors/{safe_name(self.prompt)}.{self.phase}.{self.step}"


def point_record(
    t: "Tensor | SharedTensor", values: "Array", prompt: str, phase: str, step: int, file: str
) -> PointRecord:
    """Return the line of points.jsonl of a tensor."""
    positions, rows = pack_positions(t.positions)
    found = place_record(Place(prompt, phase, step, t.layer, t.point), values, (file, t.key), t.axes, t.support)
    return msgspec.structs.replace(found, positions=positions, rows="range" if rows == "range" else "list")


def place_record(
    place: Place, values: "Array", held: tuple[str, str], axes: Sequence[str] = (), support: bool = False
) -> PointRecord:
    """Return the line of a tensor whose rows have no positions; ``held``: its file, and its name there."""
    file, key = held
    return PointRecord(
        **place._asdict(),
        axes=tuple(axes),
        shape=values.shape,
        dtype=values.dtype.name,
        positions=(),
        rows="range",
        file=file,
        key=key,
        hash=tensor_hash(values),
        support=support,
        stats=statistics(values),
    )
