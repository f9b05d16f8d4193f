"""A run opened for reading, with every hash checked."""

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from precaudit.errors import UserError
from precaudit.recording.runs.arrays import TENSORS, Arrays, Folder, is_file
from precaudit.recording.runs.folders import NO_TENSORS, runs_of_lengths
from precaudit.recording.runs.hashes import file_hash, tensor_hash
from precaudit.recording.runs.kinds import tag_of
from precaudit.recording.runs.manifest import JSONL, read_manifest
from precaudit.recording.runs.shards import missing_shards
from precaudit.recording.runs.unique import require_unique
from precaudit.schema.brief import Brief
from precaudit.schema.filed import Filed
from precaudit.schema.records.manifests import MANIFEST
from precaudit.schema.records.runs import PointRecord, PromptRecord, RunRecord, StepRecord

if TYPE_CHECKING:  # the gate reads runs, and no tensor of them
    from precaudit.numbers.arrays import Array

OPEN = 128
R = TypeVar("R", PointRecord, StepRecord)


@dataclass(frozen=True, repr=False)
class Run(Brief):
    """A run opened for reading."""

    folder: Path
    record: RunRecord
    prompts: dict[str, PromptRecord]
    steps: Sequence[StepRecord]
    points: Sequence[PointRecord]
    _files: dict[str, Any] = field(default_factory=dict)
    _mapped: set[str] = field(default_factory=set)

    def tensor(self, record: PointRecord) -> "Array":
        """Return a tensor (a view of its file) after checking its hash; raises UserError when it was altered."""
        files = self._files.get(record.file) or self._open(record.file)
        if record.file not in self._mapped:
            self._map(record.file)
        entry = files.entries.get(record.key)
        if entry is None or entry.shape != record.shape or entry.dtype != record.dtype:
            where = self.folder / record.file
            raise UserError(f"{where}: tensor {record.key!r} is not what points.jsonl says; the run was altered")
        values = files.read_tensor(record.key)
        if tensor_hash(values) != record.hash:
            where = self.folder / record.file
            raise UserError(
                f"{where}: tensor {record.key!r} was altered since it was recorded (its hash differs); trace again"
            )
        return values

    def by_prompt(self) -> Callable[[str], "Run"]:
        """Return what gives the part of a prompt, with no file open; lines that stay in their file are read there."""
        points, steps = _by_prompt(self.points), _by_prompt(self.steps)
        return lambda p: replace(
            self, prompts={p: self.prompts[p]}, steps=steps(p), points=points(p), _files={}, _mapped=set()
        )

    def _open(self, name: str) -> Any:
        """Return a file of tensors, whose header is read once."""
        path = self.folder / name
        if Path(name).parts[:1] != ("tensors",) or ".." in Path(name).parts:
            raise UserError(f"{self.folder}: points.jsonl names a file outside the run: {name!r}")
        if not is_file(name):
            self._files[name] = Folder(Arrays(self.folder / TENSORS), name.removeprefix(f"{TENSORS}/"))
            return self._files[name]
        if not path.is_file():
            raise UserError(f"{path} is missing; the run is damaged: trace again")
        from precaudit.models.checkpoints.safetensors_files import (  # brings every reader of models
            WORDS,
            SafetensorsFiles,
        )

        self._files[name] = SafetensorsFiles.open([path], WORDS)
        return self._files[name]

    def _map(self, name: str) -> None:
        """Note that a file is mapped; every map holds a file descriptor."""
        if len(self._mapped) >= OPEN:
            for other in self._mapped:
                self._files[other].close()
            self._mapped.clear()
        self._mapped.add(name)


def open_run(folder: Path | str, partial: bool = False, held: bool = True) -> Run:
    """Open a run; raises UserError when it is not one, was cut off (unless ``partial``), altered, or newer than us.

    ``held``: whether lines of steps.jsonl and points.jsonl are in memory, or stay there (precaudit/schema/filed.py).
    """
    folder = Path(folder)
    path, tag = folder / MANIFEST, tag_of(folder)
    if tag == "program":
        raise UserError(f"{folder} is of a program of one's own, which compare, gate, diagnose and report take")
    if tag == "dump":
        raise UserError(
            f"{folder} was imported; compare it with FP64 of a model: precaudit compare {folder} --model PATH; "
            f"or with another run: precaudit compare {folder} RUN"
        )
    if tag is None and runs_of_lengths(folder):
        raise UserError(NO_TENSORS.format(folder=folder))
    if tag is None:
        raise UserError(f"{folder}: no run here (no run.json); make one with: precaudit {_tracing(folder)}")
    record = read_manifest(path)
    if record.finished is None and not partial:
        lost = missing_shards(folder, record.processes)
        raise UserError(
            f"{folder}: this run was cut off before it finished{f' ({lost})' if lost else ''}; open what is there with "
            "--partial, or trace it with --resume"
        )
    files = {name: _lines(folder / name, kind, record) for name, kind in JSONL.items()}
    prompts = list(files["prompts.jsonl"])
    steps, points = (list(files[n]) if held else files[n] for n in ("steps.jsonl", "points.jsonl"))
    if not prompts:
        raise UserError(f"{folder / 'prompts.jsonl'}: no prompt is in it; a run has at least one")
    if odd := {p.id for p in prompts} - {*record.requested.prompts}:  # what was asked for and is not there is missing
        raise UserError(f"{path}: prompt {min(odd)!r} is in prompts.jsonl alone; the run was altered")
    require_unique(folder / "prompts.jsonl", (p.id for p in prompts))
    require_unique(folder / "steps.jsonl", ((s.prompt, s.phase, s.step, s.position) for s in steps))
    require_unique(folder / "points.jsonl", _keys(folder / "points.jsonl", points))
    return Run(folder, record, {p.id: p for p in prompts}, steps, points)


def _by_prompt(records: Sequence[R]) -> Callable[[str], list[R]]:
    if isinstance(records, Filed):
        spans, none = records.spans(attrgetter("prompt")), array("q")
        return lambda p: list(records.within(spans.get(p, none)))
    found: dict[str, list[R]] = {}
    for x in records:
        found.setdefault(x.prompt, []).append(x)
    return lambda p: found.get(p, [])


def _keys(path: Path, points: Iterable[PointRecord]) -> Iterator[tuple[Hashable, ...]]:
    for line, p in enumerate(points, 1):
        _check_rows(f"{path}:{line}", p)
        yield p.prompt, p.phase, p.step, p.layer, p.point


def _check_rows(where: str, p: PointRecord) -> None:
    """Raise UserError where a line claims more positions than its tensor has elements, or none.

    Nothing is made of a size that a line claims; a shape that is not the point's is another matter, and judged.
    """
    ranged, size = p.rows == "range", prod(p.shape)
    if ranged and len(p.positions) != 2:
        raise UserError(f"{where}: {len(p.positions)} positions are no range; the run was altered")
    held = p.positions[1] - p.positions[0] if ranged else len(p.positions)
    if not min(size, 1) <= held <= size:
        raise UserError(f"{where}: {held} positions of {size} elements; the run was altered")


def _lines(path: Path, kind: Any, run: RunRecord) -> Filed[Any]:
    if not path.is_file():
        raise UserError(f"{path} is missing; the run is damaged: trace again")
    if run.finished is not None and file_hash(path) != run.hashes.get(path.name):
        raise UserError(f"{path} was altered since it was recorded (its hash differs); trace again")
    return Filed(path, kind, tail=run.finished is not None)


def _tracing(folder: Path) -> str:
    """Return how to record a run where none is: of what was named in its place, where that can run."""
    runs = ":" in folder.name or (folder / "config.json").is_file() or str(folder) in ("tiny", "smollm2")
    return f"trace {folder} -o runs/a" if runs and "://" not in str(folder) else f"trace SUBJECT -o {folder}"
