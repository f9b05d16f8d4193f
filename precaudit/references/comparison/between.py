"""Two runs of any kind against each other: a model's, a program's, an imported dump. No JAX."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from precaudit.errors import UserError
from precaudit.numbers.arrays import Array
from precaudit.progress import Advance, silent
from precaudit.recording.dumps.runs import MANIFEST as DUMP
from precaudit.recording.dumps.runs import Imported, Reported, is_imported, open_imported
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.programs import MANIFEST, Opened, cut, is_program_run, not_taken, open_program_run, places
from precaudit.recording.runs.reader import open_run
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.comparison.pairs import Side, side_of, sides_errors, token_notes
from precaudit.schema.brief import Brief
from precaudit.schema.frames import errors_frame
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.places import Place
from precaudit.schema.records.base import Number
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import ErrorRecord
from precaudit.schema.records.lines import read_lines, write_lines
from precaudit.schema.records.runs import PROGRAM_CALL

# What the JSONL of an attention audit calls its numbers of what attention makes: kind of record, and field
STATISTICS = {
    "attn_ref_mae": ("local", "mae"),
    "attn_ref_max_diff": ("local", "max_diff"),
    "attn_accum_mae": ("accum", "mae"),
    "attn_accum_max_diff": ("accum", "max_diff"),
}
MIXED = next(p.name for p in POINTS.values() if p.kind == "mix")
FP16 = "float16"  # what it accumulates in
TOP = {"prefill_last_top1": "prefill_top1", "decode0_top1": "decode_top1"}


class Beside(NamedTuple):
    """A number that a dump reports, and the same of the other run, None where that has none."""

    reported: Reported
    here: Number | None


@dataclass(frozen=True, repr=False)
class Between(Brief):
    """What one run is against another: records, notes, and the numbers that a dump reports beside ours."""

    errors: tuple[ErrorRecord, ...]
    notes: tuple[str, ...]
    beside: tuple[Beside, ...]
    folder: Path

    def frame(self) -> Any:
        """Return the error records as a pandas DataFrame, always with the columns of ``precaudit.schema.frames``."""
        return errors_frame(self.errors)


def compare_runs(run: Path | str, against: Path | str, tell: Advance = silent) -> Between:
    """Hold ``run`` against another; write its records to run/against/<hash>/errors.jsonl and return them.

    A call of a program is prefill where it is its first, else decode step by step. Raises UserError for what is no run,
    was altered, or has nothing in common with the other.
    """
    sides = [_side(Path(x)) for x in (run, against)]
    programs = [any(p.phase == PROGRAM_CALL for p in side.places) for side in sides]
    beside = tuple(_beside(Path(run), Path(against)))
    if any(programs) and not all(programs):
        sides = [side if program else _as_calls(side) for side, program in zip(sides, programs, strict=True)]
    errors: list[ErrorRecord] = []
    notes: list[str] = []
    if not beside or all(side.places for side in sides):  # a dump may hold reported numbers alone
        errors, notes = sides_errors(sides[0], sides[1], tell)
    notes += _inputs(*map(open_program_run, (run, against))) if all(programs) else token_notes(*sides)
    dumps = [open_imported(x) for x in (run, against) if is_imported(x)]
    notes += [f"not in the dump: {text}" for dump in dumps for text in dump.record.absent]
    folder = Path(run) / "against" / hashlib.sha256(_identity(Path(against)).encode()).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "errors.jsonl", errors)
    return Between(tuple(errors), tuple(notes), beside, folder)


def _identity(folder: Path) -> str:
    manifest = next(name for name in ("run.json", MANIFEST, DUMP) if (folder / name).is_file())
    return file_hash(folder / manifest)


def _side(folder: Path) -> Side:
    """Return a run of any kind as a side; raises UserError for what is none."""
    if is_imported(folder):
        return _imported(open_imported(folder))
    if is_program_run(folder):
        return _program(open_program_run(folder))
    return side_of(Recorded.of(open_run(folder)))


def _imported(run: Imported) -> Side:
    index, tokens = run.index(), run.record.tokens
    lengths = {p.prompt: t.shape[0] for p, t in index.items() if p.phase == "prefill" and _rowwise(p)}

    def rows(place: Place) -> Array | None:
        """Return the positions of rows: all of a prompt's, or the token that a decode step was fed."""
        if not _rowwise(place):
            return None
        if place.phase != "decode":
            return np.arange(index[place].shape[0])
        return np.array([lengths[place.prompt] - 1 + place.step]) if place.prompt in lengths else None

    return Side(run.record.id, run.folder, index, lambda place: run.tensor(index[place]), rows, tokens.get)


def _rowwise(place: Place) -> bool:
    return place.point in POINTS and POINTS[place.point].axes.startswith("T")


def _program(run: Opened) -> Side:
    every = [*places(run.record), *((p, None) for p in run.record.outputs)]
    held = {
        Place(case, PROGRAM_CALL, call, layer, p.name): p
        for case in run.record.cases
        for call in range(run.record.calls)
        for p, layer in every
    }

    def tensor(place: Place) -> Array:
        p = held[place]
        found = run.tensors(place.prompt, place.step, "outputs" if p in run.record.outputs else "taps")
        if p.name not in found:
            raise UserError(f"{run.folder}: {place.text} was not recorded; the run is damaged: trace again")
        return np.asarray(cut(run.record, p, place.layer, found[p.name]))

    def skipped(place: Place) -> str | None:
        p = held[place]
        if p in run.record.outputs:
            return None
        return not_taken(run.record, p, place.layer, run.tensors(place.prompt, place.step, "taps"))

    return Side(run.record.id, run.folder, held, tensor, lambda _place: None, lambda _case: None, skipped)


def _as_calls(side: Side) -> Side:
    """Return a model's side with calls for phases: prefill, then the steps that follow its last position."""
    old = {
        p._replace(phase=PROGRAM_CALL): p
        for p in side.places
        if (p.phase, p.step) == ("prefill", 0) or (p.phase == "decode" and p.step)
    }
    return replace(
        side, places=old, tensor=lambda place: side.tensor(old[place]), rows=lambda place: side.rows(old[place])
    )  # fmt: skip


def _inputs(a: Opened, b: Opened) -> Iterator[str]:
    """Yield the cases that two programs were not given the same inputs for, in their first calls."""
    for case in (c for c in a.record.cases if c in b.record.cases):
        x, y = (run.tensors(case, 0, "inputs") for run in (a, b))
        differ = sorted(k for k in {**x, **y} if k not in x or k not in y or x[k].tobytes() != y[k].tobytes())
        if differ:
            yield f"{case}: the inputs of the first call differ (leaves {', '.join(differ[:5])})"


def _beside(run: Path, against: Path) -> Iterator[Beside]:
    """Yield the numbers that a dump reports, with what compare wrote of the other run."""
    for dump, other in ((run, against), (against, run)):
        if is_imported(dump) and (told := open_imported(dump).record.reported):
            errors, pairs = other / "errors.jsonl", other / "prefill_decode.jsonl"
            written = read_lines(errors, ErrorRecord) if errors.is_file() else []
            views = read_lines(pairs, PrefillDecodeRecord) if pairs.is_file() else []
            for x in told:
                yield Beside(x, _here(x, written, views))


def _here(x: Reported, errors: list[ErrorRecord], pairs: list[PrefillDecodeRecord]) -> Number | None:
    if x.name in TOP:
        found = [p for p in pairs if p.prompt == x.prompt and p.against == "prefill"]
        return getattr(found[0], TOP[x.name]) if found else None
    if x.name not in STATISTICS:
        return None
    kind, field = STATISTICS[x.name]
    place = (x.prompt, x.phase, x.step, x.layer, MIXED)
    its = [e for e in errors if e.kind == kind and Place.of(e) == place and (kind == "local" or e.candidate == FP16)]
    return getattr(its[0], field) if its else None
