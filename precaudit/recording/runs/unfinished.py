"""A run that was cut off: what is written whole of it, batch by batch, and whether it is the one that is asked for.

The unit is a batch of prompts with all its phases, since decode continues a cache. ``batches.jsonl`` has a line for
each batch that is written whole, with the hashes of its lines. On resuming these and every tensor's hash are checked.
What follows the last whole batch is deleted and recorded again.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from precaudit.errors import UserError
from precaudit.recording.runs.arrays import OCDBT
from precaudit.recording.runs.kinds import Kind, kind_of, manifest_of
from precaudit.recording.runs.manifest import read_manifest
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.writer import BATCHES
from precaudit.schema.records.lines import decode_lines, write_lines
from precaudit.schema.records.manifests import MANIFEST
from precaudit.schema.records.runs import BatchRecord, Neutrality, PointRecord, PromptRecord, RunRecord
from precaudit.writing import PART

GROWING = ("steps", "points")  # the files of lines that a batch adds to


@dataclass(frozen=True)
class Continuation:
    """What goes on: the run's manifest, its first batches, which are there whole, and the files of their tensors."""

    record: RunRecord
    batches: tuple[BatchRecord, ...]
    files: frozenset[str]

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that are there."""
        return sum(b.bytes for b in self.batches)

    @property
    def prompts(self) -> int:
        """How many prompts are there."""
        return sum(len(b.prompts) for b in self.batches)

    @property
    def neutrality(self) -> list[Neutrality]:
        """What was noted of the compiled programs of these batches."""
        return [n for b in self.batches for n in b.neutrality]

    @property
    def absent(self) -> dict[str, None]:
        """The points that the program does not show."""
        return {name: None for b in self.batches for name in b.absent}


def finished_prompts(folder: Path) -> tuple[int, int] | None:
    """Return of how many prompts a run that was cut off holds everything, and how many it has; None where none is."""
    try:
        record, lines = read_manifest(folder / MANIFEST), _journal(folder)
    except (OSError, UserError):
        return None
    return None if record.finished is not None else (sum(len(b.prompts) for b in lines), len(record.requested.prompts))


def before(folder: Path) -> RunRecord:
    """Return the manifest of a model's run to go on with; raises UserError where there is none."""
    return read_manifest(manifest_to_go_on(folder, "model"))


def manifest_to_go_on(folder: Path, kind: Kind) -> Path:
    """Return where the manifest of a run of a kind is; raises UserError where none is, or it is of another kind."""
    held = kind_of(folder)
    if held is None:
        raise UserError(f"{folder}: no run here to go on with (no {MANIFEST}); leave out --resume")
    if held == "dump":
        raise UserError(f"{folder} is an imported dump, which is whole: choose another -o")
    if held != kind:
        raise UserError(f"{folder} is of a {held}: go on with that, or trace again with --force")
    return manifest_of(folder)


def check_same(folder: Path, held: RunRecord, now: RunRecord, prompts: Sequence[PromptRecord]) -> None:
    """Raise UserError, naming what differs, unless ``now`` asks for the run that is there."""
    now = msgspec.json.decode(msgspec.json.encode(now), type=RunRecord)  # as it is once it was written
    differs = [*_other_requests(held, now), *(_other_conditions(held, now) if held.finished is None else ())]
    path = folder / "prompts.jsonl"
    if path.is_file() and list(decode_lines(path.read_bytes(), PromptRecord, str(path))) != list(prompts):
        differs.append("the prompts")
    if now.program != "shipped" or held.program != "shipped":
        differs.append("the program, which is not the shipped decoder")
    refuse(folder, differs)


def whole_batches(folder: Path, held: RunRecord, code: str, fed: Callable[[Sequence[str]], str]) -> Continuation:
    """Return what is there whole, every hash checked; raises UserError where other source or tokens made it.

    ``fed``: the hash of the tokens that are given to prompts.
    """
    found = list(_whole(folder, held))
    batches = tuple(b for b, _ in found)
    differs = ["precaudit's own source"] if any(b.code != code for b in batches) else []
    if any(b.fed != fed(b.prompts) for b in batches):
        differs.append("the tokens that --tokens-from gives")
    refuse(folder, differs)
    return Continuation(held, batches, frozenset(p.file for _, points in found for p in points))


def trim(folder: Path, kept: Continuation) -> None:
    """Delete what was written after the batches that are kept; raises UserError where a part of the run is a link."""
    held = [*folder.iterdir(), *(folder / "tensors").iterdir()]
    shared = (
        folder / "tensors" / OCDBT
    ).exists()  # arrays that several processes write: what is made again replaces it
    if links := [path for path in (folder, *held) if path.is_symlink()]:
        raise UserError(
            f"{links[0]} is a link: nothing is deleted behind it; trace again with --force into another folder"
        )
    write_lines(folder / BATCHES, kept.batches)
    for name in GROWING:
        os.truncate(folder / f"{name}.jsonl", sum(getattr(b, name)[0] for b in kept.batches))
    for path in held:
        ours = not shared and path.parent.name == "tensors" and f"tensors/{path.name}" not in kept.files
        if path.is_file() and (path.name.endswith(PART) or ours):
            path.unlink()


def refuse(folder: Path, differs: Sequence[str]) -> None:
    """Raise UserError where a run cannot go on, with what differs."""
    if differs:
        raise UserError(
            f"{folder} cannot go on, since it differs in {'; '.join(differs)}. Trace as it was traced, or again from "
            "the start with --force in place of --resume"
        )


def _other_requests(held: RunRecord, now: RunRecord) -> Iterator[str]:
    """Yield what was asked for otherwise."""
    if held.model.sha256 != now.model.sha256:
        yield "the weights"
    elif (held.model.config, held.model.allowed) != (now.model.config, now.model.allowed):
        yield "the model's configuration"
    yield from _fields("policy ", held.policy, {k: v for k, v in now.policy.items() if k != "name"})
    yield from _fields("", msgspec.structs.asdict(held.requested), msgspec.structs.asdict(now.requested))


def _other_conditions(held: RunRecord, now: RunRecord) -> Iterator[str]:
    """Yield what else the numbers depend on."""
    names = ("device", "device_count", "mesh", "processes", "xla_flags")
    yield from _fields("", {n: getattr(held, n) for n in names}, {n: getattr(now, n) for n in names})
    both = {**held.versions, **now.versions}
    yield from _fields("the version of ", held.versions, {n: now.versions.get(n) for n in both})


def _fields(what: str, held: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for name, value in now.items():
        if held.get(name) != value:
            short = isinstance(value, str | int) or value is None
            yield f"{what}{name}" + (f" ({held.get(name)}, now {value})" if short else "")


def _journal(folder: Path) -> list[BatchRecord]:
    path = folder / BATCHES
    if not path.is_file():
        return []
    return list(decode_lines(path.read_bytes(), BatchRecord, str(path), tolerate_tail=True))


def _whole(folder: Path, held: RunRecord) -> Iterator[tuple[BatchRecord, list[PointRecord]]]:
    """Yield batches, from the first, as long as all that they wrote is there as it was written."""
    data = {n: path.read_bytes() if (path := folder / f"{n}.jsonl").is_file() else b"" for n in GROWING}
    size, ids = held.requested.batch, held.requested.prompts
    at = dict.fromkeys(GROWING, 0)
    with suppress(UserError):  # what cannot be read is made again
        for i, batch in enumerate(_journal(folder)):
            lines = {n: data[n][at[n] : at[n] + getattr(batch, n)[0]] for n in GROWING}
            as_written = all(_hash(lines[n]) == getattr(batch, n)[1] for n in GROWING)
            if batch.prompts != ids[i * size : (i + 1) * size] or not as_written:
                return
            points = list(decode_lines(lines["points"], PointRecord, str(folder / "points.jsonl")))
            opened = Run(folder, held, {}, [], points)
            for point in points:
                opened.tensor(point)
            yield batch, points
            at = {n: at[n] + len(lines[n]) for n in GROWING}


def _hash(data: bytes) -> str:
    return f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"
