"""What compare has written about a run, read again: all that judging and reporting need."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

import precaudit
from precaudit.caching import COMPARES, computed_by
from precaudit.errors import UserError
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import manifest_of
from precaudit.recording.runs.reader import Run, open_run
from precaudit.schema.brief import Brief
from precaudit.schema.filed import Filed
from precaudit.schema.frames import errors_frame, pairs_frame
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.records.base import SCHEMA
from precaudit.schema.records.comparisons import CompareRecord, PrefillDecodeRecord
from precaudit.schema.records.errors import ERROR_KINDS, ErrorRecord
from precaudit.schema.records.lines import read_lines

R = TypeVar("R")  # the kind of run


@dataclass(frozen=True, repr=False)
class Comparison(Brief, Generic[R]):
    """What compare found of a run of any kind: its records, restricted to what was looked at; a sequence of them.

    ``against``: the run that it is compared with, None for FP64. ``formula``: prompts it was asked of. ``peaks``: the
    most resident memory in bytes of each other process that computed them, by its name. ``beside``: numbers that a dump
    reports.
    """

    run: R
    errors: Sequence[ErrorRecord]
    prefill_decode: Sequence[PrefillDecodeRecord]
    notes: tuple[str, ...]
    folder: Path
    against: Any = None
    formula: tuple[str, ...] = ()
    peaks: Mapping[str, int] = field(default_factory=dict)
    beside: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.errors)

    def __iter__(self) -> Iterator[ErrorRecord]:
        return iter(self.errors)

    def __getitem__(self, i: int) -> ErrorRecord:
        return self.errors[i]

    def frame(self) -> Any:
        """Return the error records as a pandas DataFrame, always with the columns of ``precaudit.schema.frames``."""
        return errors_frame(self.errors)

    def prefill_decode_frame(self) -> Any:
        """Return the prefill-against-decode records as a pandas DataFrame."""
        return pairs_frame(self.prefill_decode)


def recall(run: Run | Path | str, held: bool = True) -> Comparison[Run]:
    """Return everything compare has written about a run; raises UserError when there is nothing, or of another run.

    ``held``: whether its records are in memory, or stay in their files (precaudit/schema/filed.py).
    """
    opened = run if isinstance(run, Run) else open_run(run, partial=True, held=held)
    before = read_compare_record(opened, by_this=False)
    if before is None:
        raise UserError(f"{opened.folder}: not compared yet, or changed since; run: precaudit compare {opened.folder}")
    filed = Filed(opened.folder / "errors.jsonl", ERROR_KINDS, _check_point)
    errors = list(filed) if held else filed
    pairs = read_lines(opened.folder / "prefill_decode.jsonl", PrefillDecodeRecord)
    asked = tuple(dict.fromkeys(p for selected in before.selections if selected.formula for p in selected.prompts))
    return Comparison(opened, errors, pairs, before.notes, opened.folder, formula=asked)


def read_compare_record(run: Run, by_this: bool = True) -> CompareRecord | None:
    """Return compare.json of this very run, or None; ``by_this``: only what this code and this NumPy computed.

    Records are what they are, whoever computed them; only what is not computed again has to be this code's.
    """
    path = run.folder / "compare.json"
    try:
        held = msgspec.json.decode(path.read_bytes(), type=CompareRecord)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    names = ("errors.jsonl", "prefill_decode.jsonl")
    if (held.schema, held.run) != (SCHEMA, manifest_hash(run)) or not all((run.folder / n).is_file() for n in names):
        return None
    if by_this and held.precaudit != computing_code():
        return None
    return held if all(held.hashes.get(n) == file_hash(run.folder / n) for n in names) else None


def computing_code() -> str:
    """Return what computed the records: version, and hash of the source and of the libraries that compute."""
    return f"{precaudit.__version__} {computed_by(COMPARES)[:16]}"


def manifest_hash(run: Run) -> str:
    """Return the hash of a run's manifest, which holds those of its files."""
    return file_hash(manifest_of(run.folder))


def check_points(errors: list[ErrorRecord], path: Path) -> list[ErrorRecord]:
    """Return error records as they are read; raises UserError for a point there is none of."""
    for e in errors:
        _check_point(e, str(path))
    return errors


def _check_point(e: ErrorRecord, where: str) -> None:
    if e.kind != "weights" and e.point not in POINTS:
        raise UserError(f"{where}: a record of an unknown point {e.point!r}; the file was altered: compare again")
