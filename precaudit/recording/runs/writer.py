"""A run written, tensor file by tensor file, with lines that say what is in each."""

import errno
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from precaudit.mirrors import commit
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import write_manifest
from precaudit.recording.runs.manifest import JSONL
from precaudit.recording.runs.point_lines import Tensor, point_record, safe_name
from precaudit.schema.records.base import Record
from precaudit.schema.records.lines import encode, write_lines
from precaudit.schema.records.manifests import MANIFEST
from precaudit.schema.records.runs import BatchRecord, PointRecord, PromptRecord, RunRecord, StepRecord
from precaudit.writing import sync, temporary

BATCHES = "batches.jsonl"  # what is written whole of a run that is not finished


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
            write_manifest(folder, run)
            write_lines(folder / "prompts.jsonl", prompts)
            commit(folder)
        self._steps, self._points, self._batches = (
            Lines(folder / name) for name in ("steps.jsonl", "points.jsonl", BATCHES)
        )

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
        write_manifest(self.folder, done)
        sync(self.folder / MANIFEST)
        (self.folder / BATCHES).unlink(missing_ok=True)
        sync(self.folder)
        return done

    def close(self) -> None:
        """Close the JSONL files."""
        self._pool.shutdown()
        for lines in (self._steps, self._points, self._batches):
            lines.close()
