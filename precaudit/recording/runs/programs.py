"""Runs of programs on disk: run.json with its own table of points, a file of tensors for each call."""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from precaudit.errors import UserError
from precaudit.recording.runs.arrays import is_file, stored_arrays
from precaudit.recording.runs.folders import NO_TENSORS
from precaudit.recording.runs.hashes import known_hash
from precaudit.recording.runs.kinds import check_schema, kind_of, manifest_of
from precaudit.recording.runs.shards import missing_shards
from precaudit.recording.watching.records import WatchedCommand
from precaudit.schema.brief import Brief
from precaudit.schema.emulations import Emulation
from precaudit.schema.policies import announced_policy
from precaudit.schema.records.base import Count, Index, Number, Record
from precaudit.schema.records.devices import SplitSum, Way
from precaudit.schema.records.lines import decode_lines, read_record
from precaudit.schema.records.manifests import Manifest
from precaudit.schema.records.runs import PROGRAM_CALL, PointRecord, Prediction, call_of

if TYPE_CHECKING:
    from precaudit.numbers.arrays import Array

POINTS = "points.jsonl"
PAIRS = "prefill_decode.jsonl"
EQUATIONS = Emulation("equations").name  # the emulation of a segment as its equations round
OWN_SUMS = "sums in their own format"
CARRIED = "carry"  # what made a point that is a loop's state: nothing that is judged by itself


class ProgramPoint(Record, frozen=True, omit_defaults=False):
    """A point of a program: where it was made, its own shape, and what it is stacked over (steps of scans).

    ``whole``: it holds whole numbers, by what made it. ``support``: it is recorded for others that were asked for, and
    not judged.
    """

    name: str
    shape: tuple[Index, ...]
    stacked: tuple[Index, ...]
    dtype: str
    source: str
    scope: str
    primitive: str
    whole: bool = False
    support: bool = False


class Disturbance(Record, frozen=True, omit_defaults=False):
    """Whether tapping left a case's outputs bit for bit as the bare program's; ``max_diff`` where it did not.

    ``predicted``: of a TPU that was not there, None of a device that was. ``made``: how a TPU's or a GPU's compiler has
    each product of the program with taps made, by its label ("" for those without); empty where it was not read.
    ``split``: products in parts of several devices.
    """

    case: str
    bitwise: bool
    max_diff: Number
    predicted: Prediction | None = None
    made: dict[str, tuple[Way, ...]] = msgspec.field(default_factory=dict)
    split: dict[str, SplitSum] = msgspec.field(default_factory=dict)


class ProgramLoop(Record, frozen=True, omit_defaults=False):
    """A while loop that holds points: its name, the user's line, and the most iterations that it took in any call."""

    name: str
    source: str
    iterations: Count


class EntryRun(Record, frozen=True, omit_defaults=False):
    """An entry point after the first that a run holds, as ``ProgramRun`` has the first."""

    entry: str
    code: str
    weights: str
    automatic: bool
    calls: Annotated[int, msgspec.Meta(ge=1, le=1 << 17)]
    points: tuple[ProgramPoint, ...]
    outputs: tuple[ProgramPoint, ...] = ()
    renamed: dict[str, str] = msgspec.field(default_factory=dict)
    loops: tuple[ProgramLoop, ...] = ()
    began: Count = 0
    neutrality: tuple[Disturbance, ...] = ()
    tokens: Count | None = None
    start: Count | None = None
    lengths: Count | None = None


class ProgramRun(Manifest, frozen=True, kw_only=True, omit_defaults=False, tag="program"):
    """A run of a program. ``code``: SHA-256 of the program's jaxpr, ``weights`` of its arrays.

    ``outputs``: those that the program names; ``renamed``: automatic points under other names, by the new one.
    ``layers``: the steps of the outermost scans that were recorded, None for all; points are then stacked over those.
    ``loops``: while loops that hold points, which are stacked over as many iterations as any call took.
    ``flushes``: whether the device made 0 of subnormals; None of runs that do not say.
    ``began``: how many calls were run before the first that is recorded, which is call 0 here.
    ``asked``: the names of the points that were asked for, None for all; their occurrences go along.
    ``automatic``: whether no point is of the program's own taps; ``taps``: which were asked for, None of runs that do
    not say, where the program's own were the only points if it had any. ``policy``: what the program announces,
    ``origin``: the checkpoint that its parameters are meant to hold.
    ``tokens``, ``start``, ``lengths``: the inputs that hold token ids, the position of the first, and which rows are no
    padding, as the program says.
    ``entry``: the first entry point that is recorded, ``then``: those after it. ``before``: of one of these by itself
    (``Opened.entries``), how many calls of a case lie in files before its own. ``watched``: the command whose calls
    these are. ``sketch``: no tensors are kept but what ``interpreters/jaxpr/sketches.py`` makes of them, with so many
    projections; None: tensors.
    """

    program: str
    code: str
    weights: str
    automatic: bool
    cases: tuple[str, ...]
    calls: Annotated[int, msgspec.Meta(ge=1, le=1 << 17)]
    points: tuple[ProgramPoint, ...]
    outputs: tuple[ProgramPoint, ...] = ()
    renamed: dict[str, str] = msgspec.field(default_factory=dict)
    layers: tuple[Index, ...] | None = None
    asked: tuple[str, ...] | None = None
    loops: tuple[ProgramLoop, ...] = ()
    began: Count = 0
    neutrality: tuple[Disturbance, ...] = ()
    flushes: bool | None = None
    taps: Literal["own", "automatic", "both"] | None = None
    policy: dict[str, str] | None = None
    origin: str | None = None
    tokens: Count | None = None
    start: Count | None = None
    lengths: Count | None = None
    entry: str = PROGRAM_CALL
    then: tuple[EntryRun, ...] = ()
    before: Count = 0
    watched: WatchedCommand | None = None
    sketch: Count | None = None

    @property
    def phase(self) -> str:
        """The phase of records of the (first) entry point."""
        return call_of(self.entry)

    @property
    def every_calls(self) -> str:
        """How many calls of a case each entry point has, in words: ``7 calls``, ``1 prefill call, 7 decode calls``."""
        each = [(call_of(self.entry), self.calls), *((call_of(x.entry), x.calls) for x in self.then)]
        return ", ".join(f"{n} {phase}{'' if n == 1 else 's'}" for phase, n in each)

    @property
    def judged_points(self) -> tuple[ProgramPoint, ...]:
        """The points that were asked for."""
        return tuple(p for p in self.points if not p.support)


def points_text(record: ProgramRun) -> str:
    """Return which points a run holds, in words."""
    return "automatic" if record.automatic else "own and automatic" if record.taps == "both" else "own"


@dataclass(frozen=True, repr=False)
class Opened(Brief):
    """A run of a program opened for reading; ``absent``: its cases that were not recorded, since it was cut off."""

    folder: Path
    record: ProgramRun
    absent: tuple[str, ...] = ()

    @property
    def entries(self) -> "tuple[Opened, ...]":
        """Each entry point that was recorded, as a run of its own, in order."""
        one = msgspec.structs.replace(self.record, then=())
        found, before = [replace(self, record=one)], one.before + one.calls
        for entry in self.record.then:
            own = {name: getattr(entry, name) for name in entry.__struct_fields__}
            found.append(replace(self, record=msgspec.structs.replace(one, **own, before=before)))
            before += entry.calls
        return tuple(found)

    def verify(self) -> None:
        """Read every file once; raises UserError for the first that is gone or was altered."""
        if POINTS in self.record.hashes:
            self._checked_path(POINTS)
        for one in self.entries:
            for case in one.record.cases:
                for call in range(one.record.calls):
                    for kind in ("taps", "inputs"):
                        if is_file(name := file_name(one.record, case, call, kind)):
                            self._checked_path(name)
                        else:
                            one.tensors(case, call, kind)

    @property
    def points(self) -> list[PointRecord]:
        """The lines of points.jsonl; none of a run of sketches, or that was made before such runs had them.

        Raises UserError where it is gone or was altered.
        """
        every: tuple[ProgramRun | EntryRun, ...] = (self.record, *self.record.then)
        path, phases = self.folder / POINTS, {call_of(x.entry) for x in every}
        if whole := POINTS in self.record.hashes:
            self._checked_path(POINTS)
        data = path.read_bytes() if path.is_file() else b""
        held = decode_lines(data, PointRecord, str(path), tolerate_tail=not whole)
        return [p for p in held if p.prompt in self.record.cases and p.phase in phases]

    def tensor(self, p: PointRecord) -> "Array":
        """Return the tensor of a line of points.jsonl; raises UserError where its file is gone or was altered."""
        from precaudit.recording.runs.program_places import step_values

        one = next(x for x in self.entries if x.record.phase == p.phase)
        outputs = {x.name: x for x in one.record.outputs}
        point = outputs.get(p.point) or next(x for x in one.record.points if x.name == p.point)
        held = one.tensors(p.prompt, p.step, "outputs" if p.point in outputs else "taps")
        return step_values(one.record, point, p.layer, held[p.point])

    def tensors(self, case: str, call: int, kind: str) -> "dict[str, Array]":
        """Return the ``taps`` or ``inputs`` of a call; raises UserError where the file is gone or was altered."""
        name = file_name(self.record, case, call, kind)
        if not is_file(name):
            return dict(stored_arrays(self.folder, name, self.record.hashes.get(name, "")))
        return dict(_load(str(self._checked_path(name)), self.record.hashes[name]))

    def _checked_path(self, name: str) -> Path:
        path = self.folder / name
        if name not in self.record.hashes or not path.is_file():
            raise UserError(f"{path} is missing; the run is damaged: trace again")
        if known_hash(path) != self.record.hashes[name]:
            raise UserError(f"{path} was altered since it was recorded (its hash differs); trace again")
        return path


@lru_cache(maxsize=4)
def _load(path: str, _digest: str) -> "dict[str, Array]":
    from precaudit.models.checkpoints.safetensors_files import ANYTHING, SafetensorsFiles

    files = SafetensorsFiles.open([Path(path)], ANYTHING)
    return {name: files.read_tensor(name) for name in files.entries}


def file_name(run: ProgramRun, case: str, call: int, kind: str) -> str:
    """Return a call's file below the run's folder; cases by their place, since their names are anyone's."""
    return file_of(run, run.cases.index(case), run.before + call, kind)


def file_of(run: ProgramRun, case: int, call: int, kind: str) -> str:
    """Return the same by the place of a case; what several processes wrote is in their database, and no file."""
    return f"tensors/{case}.{call}.{kind}{'' if run.processes else '.safetensors'}"


def is_program_run(folder: Path | str) -> bool:
    """Whether a folder is a run of a program."""
    return kind_of(folder) == "program"


def open_program_run(folder: Path | str, sketched: bool = False, partial: bool = False) -> Opened:
    """Open a run of a program, or of sketches; raises UserError for what is none, was cut off, or is newer than us.

    ``partial``: of one that was cut off, open the cases that it holds whole.
    """
    path = manifest_of(folder)
    check_schema(path)
    record = read_record(path, ProgramRun, "a program's run")
    noted = {n.case for n in record.neutrality}  # written after the last file of a case
    there = tuple(takewhile(noted.__contains__, record.cases))
    if record.finished is None and not (partial and there and not sketched):
        lost = missing_shards(Path(folder), record.processes)
        cut_off = f"this run was cut off before it finished{f' ({lost})' if lost else ''}"
        open_it = "open what is there with --partial, or " if there and not sketched else ""
        raise UserError(f"{folder}: {cut_off}; {open_it}trace it with --resume")
    absent = record.cases[len(there) :] if record.finished is None else ()
    if absent:  # files are numbered by the place of their case: those that are there come first
        record = msgspec.structs.replace(record, cases=there)
    if (record.sketch is None) == sketched:
        whole = f"{folder} keeps tensors, and no sketches: trace with --sketch"
        raise UserError(whole if sketched else NO_TENSORS.format(folder=folder))
    every: tuple[ProgramRun | EntryRun, ...] = (record, *record.then)
    if not record.cases or not all(x.points for x in every) or record.before:
        raise UserError(f"{path}: a run has at least one case and one point; it was altered")
    names = [record.cases, [x.entry for x in every], *([p.name for p in x.points] for x in every)]
    if any(len(set(x)) != len(x) for x in names):
        raise UserError(f"{path}: two cases, entry points or points have one name; the run was altered")
    if record.policy is not None:
        try:
            announced_policy(record.policy)
        except UserError as error:
            raise UserError(f"{path}: policy: {error}; the run was altered") from None
    return Opened(Path(folder), record, absent)
