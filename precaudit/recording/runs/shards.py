"""What each of several processes has written of a run that is not finished, and what is missing."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from precaudit.errors import UserError
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.hosts import Hosts
from precaudit.recording.runs.writer import Lines
from precaudit.schema.records.lines import decode_lines
from precaudit.schema.records.runs import ShardRecord

SHARDS = "shards"  # a folder of a run that is not finished


def note_shard(folder: Path, process: int, of: Sequence[str], written: int) -> None:
    """Note that a process has written its parts of some prompts, or of a case."""
    (folder / SHARDS).mkdir(exist_ok=True)
    lines = Lines(folder / SHARDS / f"{process}.jsonl")
    lines.add([ShardRecord(of=tuple(of), bytes=written)])
    lines.close()


def check_shared(path: Path, hosts: Hosts) -> None:
    """Raise UserError where a process does not see what the first has written; returns once that is written."""
    said = hosts.share("the run's folder", file_hash(path) if hosts.first else "")[0]
    seen = hosts.share("the run's folder", "seen" if path.is_file() and file_hash(path) == said else "")
    if blind := [i for i, x in enumerate(seen) if not x]:
        raise UserError(f"process {blind[0]} does not see {path} of process 0: -o is a folder that all hosts share")


def remove_shards(folder: Path) -> None:
    """Delete these notes, of a run that is finished or begins again."""
    shutil.rmtree(folder / SHARDS, ignore_errors=True)


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
    return {note.of for note in _notes(folder / SHARDS / f"{process}.jsonl")}


def _notes(path: Path) -> Iterator[ShardRecord]:
    with suppress(OSError, UserError):
        yield from decode_lines(path.read_bytes(), ShardRecord, str(path), tolerate_tail=True)
