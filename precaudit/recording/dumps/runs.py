"""Imported runs on disk: run.json with its table of tensors, and a file of them for every case and call."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from precaudit.errors import UserError
from precaudit.recording.runs.hashes import known_hash
from precaudit.recording.runs.kinds import check_schema, kind_of, tag_of
from precaudit.recording.runs.positioned import Calls, calls_at, calls_of_tokens
from precaudit.schema.brief import Brief
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.places import Place
from precaudit.schema.records.lines import read_lines, read_record
from precaudit.schema.records.manifests import MANIFEST, DumpRun, DumpTensor
from precaudit.schema.records.runs import PointRecord, RunRecord

if TYPE_CHECKING:
    from precaudit.numbers.arrays import Array


@dataclass(frozen=True, repr=False)
class Imported(Brief):
    """An imported run, opened for reading."""

    folder: Path
    record: DumpRun

    def index(self) -> dict[Place, DumpTensor]:
        """Return its tensors by place."""
        return {Place.of(t): t for t in self.record.tensors}

    @property
    def lengths(self) -> dict[str, int]:
        """How many tokens each prompt has, by what prefill recorded of each: of the prompts where it did."""
        rows = (t for t in self.record.tensors if t.phase == "prefill" and t.shape and is_rowwise(t.point))
        return {t.prompt: t.shape[0] for t in rows}

    @property
    def points(self) -> list[PointRecord]:
        """The lines of points.jsonl; raises UserError where the dump was imported before these had them."""
        path = self.folder / "points.jsonl"
        if not path.is_file():
            raise UserError(f"{path} is missing: import the dump again")
        return read_lines(path, PointRecord)

    def tensor(self, t: DumpTensor) -> "Array":
        """Return a tensor; raises UserError where its file is gone or was altered."""
        from precaudit.models.checkpoints.safetensors_files import ANYTHING, SafetensorsFiles

        path = self.folder / t.file
        if t.file not in self.record.hashes or not path.is_file():
            raise UserError(f"{path} is missing; the run is damaged: import again")
        if known_hash(path) != self.record.hashes[t.file]:
            raise UserError(f"{path} was altered since it was imported (its hash differs); import again")
        files = SafetensorsFiles.open([path], ANYTHING)
        if t.key not in files.entries:
            raise UserError(f"{path} holds no {t.key!r}; import again")
        x = files.read_tensor(t.key)
        if x.shape != t.shape or x.dtype.name != t.dtype:
            raise UserError(f"{path}: {t.key!r} is not what {self.folder.name}/run.json says; import again")
        return x


def is_rowwise(point: str) -> bool:
    """Whether a point's first axis counts tokens."""
    return point in POINTS and POINTS[point].axes.startswith("T")


def is_imported(folder: Path | str) -> bool:
    """Whether a folder is an imported run."""
    return kind_of(folder) == "dump"


def open_imported(folder: Path | str) -> Imported:
    """Open an imported run; raises UserError for what is none or was cut off."""
    record = _read(Path(folder))
    names = [t.file for t in record.tensors]
    if bad := next((n for n in names if Path(n).is_absolute() or ".." in Path(n).parts), None):
        raise UserError(f"{folder}: {bad!r} lies outside the run; it was altered")
    return Imported(Path(folder), record)


def _read(folder: Path) -> DumpRun:
    """Return what a manifest says of a dump, also where it says whose weights made it."""
    former, path = folder / "dump.json", folder / MANIFEST
    check_schema(path)
    if former.is_file():
        return read_record(former, DumpRun, "an imported run")
    if tag_of(folder) == "dump":
        return read_record(path, DumpRun, "an imported run")
    if (found := read_record(path, RunRecord, "an imported run").imported) is None:
        raise UserError(f"{folder} is no imported run")
    return found


@calls_at.register
def _(run: Imported, positions: str) -> Calls:
    """How long a prompt is, the rows of its prefill say."""
    lengths, steps = run.lengths, dict[str, int]()
    for t in run.record.tensors:
        steps[t.prompt] = max(t.step, steps.get(t.prompt, 0))
    known = {(t.prompt, t.phase, t.step) for t in run.record.tensors if t.prompt in lengths}
    return calls_of_tokens([(*at, lengths[at[0]], steps[at[0]]) for at in known], positions)
