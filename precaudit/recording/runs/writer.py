"""A run written, tensor file by tensor file, with lines that say what is in each."""

import errno
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from precaudit.mirrors import commit
from precaudit.recording.runs.hashes import file_hash, tensor_hash
from precaudit.recording.runs.manifest import JSONL
from precaudit.recording.runs.positions import pack_positions
from precaudit.schema.records.base import Record, json_number
from precaudit.schema.records.lines import encode, write_lines
from precaudit.schema.records.runs import BatchRecord, PointRecord, PromptRecord, RunRecord, Stats, StepRecord
from precaudit.writing import sync, temporary, write_whole

if TYPE_CHECKING:
    from precaudit.numbers.arrays import Array

BATCHES = "batches.jsonl"  # what is written whole of a run that is not finished


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


class Lines:
    """A file of lines that grows; ``since``: bytes and hash of what was added since this was last asked."""

    def __init__(self, path: Path) -> None:
        self._file, self._hash, self._bytes = path.open("ab", buffering=0), xxhash.xxh3_128(), 0

    def add(self, records: Iterable[Record]) -> None:
        """Append a line for each record; raises OSError where the disk takes but a part of them."""
        data = b"".join(encode(r) for r in records)
        if self._file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        self._hash.update(data)
        self._bytes += len(data)

    def since(self) -> tuple[int, str]:
        """Return bytes and hash of what was added since the last call."""
        found = self._bytes, f"xxh3:{self._hash.hexdigest()}"
        self._hash, self._bytes = xxhash.xxh3_128(), 0
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RunWriter:
    """Writes a run: run.json without ``finished`` first, then tensors and lines, then run.json again.

    ``kept``: bytes of the tensors that are there, of a run that goes on (``runs/unfinished.py``); None: a new run.
    """

    def __init__(self, folder: Path, run: RunRecord, prompts: Iterable[PromptRecord], kept: int | None = None) -> None:
        self.folder, self.run = folder, run
        self.written = self._marked = kept or 0
        self._pool = ThreadPoolExecutor(1, "precaudit-file")
        if kept is None:
            (folder / "tensors").mkdir(parents=True, exist_ok=True)
            self._write_run(run)
            write_lines(folder / "prompts.jsonl", prompts)
            commit(folder)
        self._steps, self._points, self._batches = (
            Lines(folder / name) for name in ("steps.jsonl", "points.jsonl", BATCHES)
        )

    def _write_run(self, run: RunRecord) -> None:
        text = msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n"
        write_whole(self.folder / "run.json", text, inside=True)

    def steps(self, records: Iterable[StepRecord]) -> None:
        """Append lines of steps.jsonl."""
        self._steps.add(records)

    def tensors(self, prompt: str, phase: str, step: int, tensors: list[Tensor]) -> None:
        """Write one file of tensors and its lines of points.jsonl."""
        import numpy as np
        from safetensors.numpy import save_file

        name = f"tensors/{safe_name(prompt)}.{phase}.{step}.safetensors"
        path = self.folder / name
        part = temporary(path)
        blobs = {t.key: np.ascontiguousarray(t.values) for t in tensors}
        try:
            # hashes and statistics are taken while the kernel copies the file
            writing = self._pool.submit(save_file, blobs, part)
            lines = [point_record(t, blobs[t.key], prompt, phase, step, name) for t in tensors]
            writing.result()
            part.replace(path)
            self.written += sum(x.nbytes for x in blobs.values())
        except Exception as error:
            part.unlink(missing_ok=True)
            if "No space left" in str(error):
                raise OSError(28, "No space left on device", str(path)) from None
            raise
        self._points.add(lines)

    def points(self, records: Iterable[PointRecord], written: int) -> None:
        """Append lines of points.jsonl, of tensors of so many bytes that are written elsewhere."""
        self._points.add(records)
        self.written += written

    def mark(self, batch: BatchRecord) -> None:
        """Note that all of a batch is written: since the last mark nothing else was."""
        size, self._marked = self.written - self._marked, self.written
        steps, points = self._steps.since(), self._points.since()
        self._batches.add([msgspec.structs.replace(batch, steps=steps, points=points, bytes=size)])
        commit(self.folder)

    def finish(self, run: RunRecord) -> RunRecord:
        """Write run.json with ``finished`` and the hashes of the JSONL files, once the disk has all of the run."""
        self.close()
        for path in (*(self.folder / name for name in JSONL), *(self.folder / "tensors").iterdir()):
            sync(path)
        hashes = {name: file_hash(self.folder / name) for name in JSONL}
        done = msgspec.structs.replace(run, hashes=hashes, bytes=self.written)
        self._write_run(done)
        sync(self.folder / "run.json")
        (self.folder / BATCHES).unlink(missing_ok=True)
        sync(self.folder)
        return done

    def close(self) -> None:
        """Close the JSONL files."""
        self._pool.shutdown()
        for lines in (self._steps, self._points, self._batches):
            lines.close()


def point_record(
    t: "Tensor | SharedTensor", values: "Array", prompt: str, phase: str, step: int, file: str
) -> PointRecord:
    """Return the line of points.jsonl of a tensor."""
    positions, rows = pack_positions(t.positions)
    return PointRecord(
        prompt=prompt,
        phase=phase,
        step=step,
        layer=t.layer,
        point=t.point,
        axes=tuple(t.axes),
        shape=values.shape,
        dtype=values.dtype.name,
        positions=positions,
        rows="range" if rows == "range" else "list",
        file=file,
        key=t.key,
        hash=tensor_hash(values),
        support=t.support,
        stats=statistics(values),
    )
