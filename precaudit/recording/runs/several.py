"""A run that several processes write: each the parts of tensors that it holds, one of them the tables."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from precaudit.recording.runs.arrays import TENSORS, WrittenArray
from precaudit.recording.runs.hosts import Hosts
from precaudit.recording.runs.point_lines import SharedTensor, point_record
from precaudit.recording.runs.shards import Shards, check_shared
from precaudit.recording.runs.writer import RunWriter
from precaudit.schema.records.manifests import MANIFEST
from precaudit.schema.records.runs import BatchRecord, PointRecord, PromptRecord, RunRecord, StepRecord


class SharedWriter:
    """Writes a run as ``RunWriter``, in each of several processes.

    A batch is there once every process has written its parts of it. Then each reader (``Shards``) reads some of the
    tensors whole, as they lie on the disk, and takes their hashes and statistics; the first writes the lines of all.
    """

    def __init__(
        self, folder: Path, run: RunRecord, prompts: Iterable[PromptRecord], kept: int | None, hosts: Hosts
    ) -> None:
        self.folder, self.hosts = folder, hosts
        self._tables = RunWriter(folder, run, prompts, kept) if hosts.first else None
        check_shared(folder / MANIFEST, hosts)
        self._shards = Shards(folder, hosts)
        self._batch: list[SharedTensor] = []
        self._bytes = 0

    def steps(self, records: Iterable[StepRecord]) -> None:
        """Append lines of steps.jsonl."""
        if self._tables is not None:
            self._tables.steps(records)

    def write_parts(self, tensors: Sequence[SharedTensor], arrays: Sequence[WrittenArray]) -> None:
        """Write the parts held here of what a call made."""
        self._bytes += self._shards.arrays.write(arrays, metadata=self.hosts.first)
        self._batch += tensors

    def mark(self, batch: BatchRecord) -> None:
        """Note that all of a batch is written by every process."""
        hosts, what = self.hosts, f"writing {', '.join(batch.prompts)}"
        self._shards.share(what, batch.prompts, self._bytes)
        readers = self._shards.readers
        if hosts.index < readers:
            self._shards.put_lines([self._line(t) for t in self._batch[hosts.index :: readers]])
        written = sum(map(int, hosts.share(what, str(self._bytes))))
        if self._tables is not None:
            found: list[PointRecord | None] = [None] * len(self._batch)
            for i, lines in enumerate(self._shards.take_lines()):
                found[i::readers] = lines
            self._tables.points((p for p in found if p is not None), written)
            self._tables.mark(batch)
        self._batch, self._bytes = [], 0

    def _line(self, t: SharedTensor) -> PointRecord:
        values = self._shards.arrays.read(f"{t.file.removeprefix(TENSORS + '/')}/{t.key}")
        return point_record(t, values, t.prompt, t.phase, t.step, t.file)

    def finish(self, run: RunRecord) -> RunRecord:
        """Write run.json with ``finished`` once all processes have written all; return it when it is written."""
        if self._tables is not None:
            run = self._tables.finish(run)
        self._shards.finish()
        return run

    def close(self) -> None:
        """Close the JSONL files."""
        if self._tables is not None:
            self._tables.close()


def writer_of(
    folder: Path, run: RunRecord, prompts: Iterable[PromptRecord], kept: int | None, hosts: Hosts
) -> RunWriter | SharedWriter:
    """Return what writes a run: of one process, or of several."""
    return SharedWriter(folder, run, prompts, kept, hosts) if hosts.several else RunWriter(folder, run, prompts, kept)
