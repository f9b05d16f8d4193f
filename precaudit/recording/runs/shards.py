"""What each of several processes writes of a run, where it lies, and what is missing of one that is not finished."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from precaudit.buckets import is_url
from precaudit.errors import UserError
from precaudit.mirrors import by_url, commit, local_path, refresh
from precaudit.recording.runs.arrays import TENSORS, Arrays
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.hosts import Hosts
from precaudit.recording.runs.writer import Lines
from precaudit.schema.records.lines import decode_lines, encode, read_lines
from precaudit.schema.records.runs import PointRecord, ShardRecord
from precaudit.writing import write_whole

SHARDS = "shards"  # a folder of a run that is not finished


class Shards:
    """Where a process writes its parts of a run's tensors; ``readers``: how many, from the first, read them whole.

    In a folder that all share this is one database, and all read it. In a bucket each process but the first has a
    database of its own, below the run's: no two write the same object. The first brings what the others have written,
    enters it into the run's database, and reads it.
    """

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        url = by_url(str(folder))
        self.folder, self.hosts, self._bucket = folder, hosts, is_url(url)
        self.readers = 1 if self._bucket else hosts.count
        apart = self._bucket and not hosts.first
        self.own = local_path(f"{url}/{database_of(hosts.index)}") if apart else folder
        self.arrays = Arrays(self.own if apart else folder / TENSORS)

    def share(self, what: str, of: Sequence[str], written: int) -> None:
        """Note what this process has written; return once all have written theirs, and the readers can read it."""
        commit(self.own)
        note_shard(self.own, self.hosts.index, of, written)
        commit(self.own)
        self.hosts.share(what)
        if self._bucket and self.hosts.first:
            refresh(self.folder)
            for i in range(1, self.hosts.count):
                self.arrays.enter(self.folder / database_of(i))

    def put_lines(self, records: Iterable[PointRecord]) -> None:
        """Write what a reader says of the tensors that it read: the first takes it once all have."""
        write_whole(self._lines_of(self.hosts.index), b"".join(map(encode, records)), inside=True)

    def take_lines(self) -> list[list[PointRecord]]:
        """Return what each reader has said, and delete it."""
        paths = [self._lines_of(i) for i in range(self.readers)]
        found = [read_lines(path, PointRecord) for path in paths]
        for path in paths:
            path.unlink()
        return found

    def _lines_of(self, process: int) -> Path:
        return self.folder / SHARDS / f"points.{process}.jsonl"

    def finish(self) -> None:
        """Delete the notes of a run that is whole; return once it is there for every process."""
        if self.hosts.first:
            remove_shards(self.folder)
            commit(self.folder)
        self.hosts.share("the end of the run")
        if self._bucket:
            if not self.hosts.first:
                refresh(self.folder)
            self.hosts.share("the end of the run")


def database_of(process: int) -> str:
    """Return where a process, not the first, has its database in a bucket, below the run's folder."""
    return f"{TENSORS}/process_{process}"


def note_shard(folder: Path, process: int, of: Sequence[str], written: int) -> None:
    """Note that a process has written its parts of some prompts, or of a case."""
    (folder / SHARDS).mkdir(parents=True, exist_ok=True)
    lines = Lines(folder / SHARDS / f"{process}.jsonl")
    lines.add([ShardRecord(of=tuple(of), bytes=written)])
    lines.close()


def check_shared(path: Path, hosts: Hosts) -> None:
    """Raise UserError where a process does not see what the first has written; returns once that is written."""
    if hosts.first:
        commit(path)
    said = hosts.share("the run's folder", file_hash(path) if hosts.first else "")[0]
    if not hosts.first:
        refresh(path)
    seen = hosts.share("the run's folder", "seen" if path.is_file() and file_hash(path) == said else "")
    if blind := [i for i, x in enumerate(seen) if not x]:
        raise UserError(
            f"process {blind[0]} does not see {path} of process 0: -o is a folder that all hosts share, "
            "or a bucket (gs://, s3://)"
        )


def remove_shards(folder: Path) -> None:
    """Delete these notes, of a run that is finished or begins again."""
    for path in (folder / SHARDS, *folder.glob(f"{TENSORS}/*/{SHARDS}")):
        shutil.rmtree(path, ignore_errors=True)


def missing_shards(folder: Path, processes: Sequence[Sequence[int]]) -> str:
    """Return which processes lack what others have written of a run, in words; nothing where none does."""
    each = [_written(folder, i) for i in range(len(processes))]
    every = dict.fromkeys(of for written in each for of in written)
    return "; ".join(
        _lacks(i, devices, every, each[i]) for i, devices in enumerate(processes) if every.keys() - each[i]
    )


def _lacks(
    process: int, devices: Sequence[int], every: dict[tuple[str, ...], None], there: set[tuple[str, ...]]
) -> str:
    names = [name for of in every if of not in there for name in of]
    more = "" if len(names) <= 3 else f" and {len(names) - 3} more"
    many = f"devices {devices[0]} to {devices[-1]}" if len(devices) > 1 else f"device {devices[0]}" if devices else ""
    return f"shards of process {process} ({many}) are missing of {', '.join(names[:3])}{more}"


def _written(folder: Path, process: int) -> set[tuple[str, ...]]:
    places = (folder, folder / database_of(process))
    return {note.of for place in places for note in _notes(place / SHARDS / f"{process}.jsonl")}


def _notes(path: Path) -> Iterator[ShardRecord]:
    with suppress(OSError, UserError):
        yield from decode_lines(path.read_bytes(), ShardRecord, str(path), tolerate_tail=True)
