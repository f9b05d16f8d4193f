"""Imported runs on disk: dump.json with its table of tensors, and a file of them for every case and call."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from precaudit.errors import UserError
from precaudit.recording.runs.hashes import known_hash
from precaudit.recording.runs.positioned import Calls, calls_at, calls_of_tokens
from precaudit.schema.brief import Brief
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.places import Place
from precaudit.schema.records.base import Index, Number, Record
from precaudit.schema.records.lines import read_lines, read_record
from precaudit.schema.records.runs import PointRecord

if TYPE_CHECKING:
    from precaudit.numbers.arrays import Array

MANIFEST = "dump.json"
SCHEMA = 2


class Reported(Record, frozen=True, omit_defaults=False):
    """A number that somebody reported of a place: ``attn_ref_mae`` of a layer, ``gap`` of a prompt."""

    prompt: str
    phase: str
    step: Index
    layer: Index | None
    name: str
    value: Number


class DumpTensor(Record, frozen=True, omit_defaults=False):
    """A tensor: where it belongs, what it is called in its file and was called in the dump, its shape and format."""

    prompt: str
    phase: str
    step: Index
    layer: Index | None
    point: str
    file: str
    key: str
    source: str
    shape: tuple[Index, ...]
    dtype: str


class DumpRun(Record, frozen=True, omit_defaults=False):
    """dump.json. ``tokens``: ids [T] of a case, where the dump has them; ``left_out``: names of it that no entry takes.

    ``absent``: tensors that others of their point have beside them and the dump lacks.
    """

    schema: Annotated[int, msgspec.Meta(ge=2, le=SCHEMA)]
    id: str
    source: str
    command: str
    tensors: tuple[DumpTensor, ...] = ()
    tokens: dict[str, tuple[Index, ...]] = msgspec.field(default_factory=dict)
    reported: tuple[Reported, ...] = ()
    left_out: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    hashes: dict[str, str] = msgspec.field(default_factory=dict)
    finished: str = ""


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
            raise UserError(f"{path}: {t.key!r} is not what dump.json says; import again")
        return x


def is_rowwise(point: str) -> bool:
    """Whether a point's first axis counts tokens."""
    return point in POINTS and POINTS[point].axes.startswith("T")


def is_imported(folder: Path | str) -> bool:
    """Whether a folder is an imported run."""
    return (Path(folder) / MANIFEST).is_file()


def open_imported(folder: Path | str) -> Imported:
    """Open an imported run; raises UserError for what is none or was cut off."""
    path = Path(folder) / MANIFEST
    record = read_record(path, DumpRun, "an imported run")
    names = [t.file for t in record.tensors]
    if bad := next((n for n in names if Path(n).is_absolute() or ".." in Path(n).parts), None):
        raise UserError(f"{path}: {bad!r} lies outside the run; it was altered")
    return Imported(Path(folder), record)


@calls_at.register
def _(run: Imported, positions: str) -> Calls:
    """How long a prompt is, the rows of its prefill say."""
    lengths, steps = run.lengths, dict[str, int]()
    for t in run.record.tensors:
        steps[t.prompt] = max(t.step, steps.get(t.prompt, 0))
    known = {(t.prompt, t.phase, t.step) for t in run.record.tensors if t.prompt in lengths}
    return calls_of_tokens([(*at, lengths[at[0]], steps[at[0]]) for at in known], positions)
