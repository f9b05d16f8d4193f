"""Is it the formula? Where the program's FP64 shadow first leaves the independent FP64 reference."""

from collections.abc import Sequence
from typing import Any

import msgspec

from precaudit.diagnosis.evidence.kept import read_kept, write_kept
from precaudit.diagnosis.evidence.records import Differs, FormulaRecord
from precaudit.models.numpy_decoder.model import Model
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import manifest_of
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.runs.written import read_compare_record
from precaudit.references.textbook.formula import ProgramOn, formula_errors
from precaudit.schema.filed import Filed, of_kinds
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.limits.checks import SAME, farthest_formula
from precaudit.schema.places import LAST, ORDER, Place
from precaudit.schema.records.base import json_number, value
from precaudit.schema.records.errors import ERROR_KINDS, ErrorRecord, FormulaError

PHASES = ("prefill", "decode")
NAME = "formula.json"
replace = msgspec.structs.replace


def first_parting(
    recorded: Recorded, model: Model, prompt: str, program_on: ProgramOn, kept: bool = True
) -> FormulaRecord:
    """Return where shadow and reference first part: from compare's formula records, formula.json, or computed now.

    ``program_on``: as ``recorded_program`` gives; ``kept``: formula.json is read and written, as the program is the
    shipped decoder. Computed are the prompts of the batch ``prompt`` ran in.
    """
    run = recorded.run
    given = FormulaRecord(run=file_hash(manifest_of(run.folder)), prompt=prompt, differs=(), largest=0.0)
    compared = [e for e in _formula_records(run) if e.phase in PHASES and e.unknown is None]
    if compared:
        return _summary(given, compared)
    if kept and (before := read_kept(run.folder, NAME, FormulaRecord)):
        return before[0]
    asked = [p for p in PHASES if p in recorded.requested.phases]
    if not asked:
        return replace(given, unknown="neither prefill nor decode was recorded: nothing was compared")
    found = list(formula_errors(recorded, model, recorded.batch_of(prompt), program_on, asked))
    if unknown := next((e.unknown for e in found if e.unknown is not None), None):
        return replace(given, unknown=unknown)
    made = _summary(given, [e for e in found if e.missing is None])
    return write_kept(run.folder, NAME, [made])[0] if kept else made


def _summary(given: FormulaRecord, records: Sequence[FormulaError]) -> FormulaRecord:
    """Return where records first part in each phase, the prompt that is of, and the largest distance."""
    found = [
        (e.prompt, Differs(**_place(e), distance=json_number(farthest_formula(e)[0])))
        for e in records
        if e.rel_l2 is not None
    ]
    first: dict[str, tuple[str, Differs]] = {}
    for prompt, d in sorted(found, key=lambda x: _order(x[1])):
        if not value(d.distance) <= SAME:
            first.setdefault(d.phase, (prompt, d))
    largest = max((value(d.distance) for _, d in found), default=0.0)
    prompt = next((p for p, _ in first.values()), given.prompt)
    return replace(given, prompt=prompt, differs=tuple(d for _, d in first.values()), largest=json_number(largest))


def _place(e: ErrorRecord) -> dict[str, Any]:
    return {"phase": e.phase, "step": e.step, "layer": e.layer, "point": e.point}


def _formula_records(run: Run) -> list[FormulaError]:
    """Return the formula records compare wrote about this very run."""
    held = read_compare_record(run)
    if held is None or not any(selected.formula for selected in held.selections):
        return []
    return list(of_kinds(Filed(run.folder / "errors.jsonl", ERROR_KINDS), FormulaError))


def right_until(formula: FormulaRecord, place: Place) -> bool:
    """Whether the shadow equals the reference up to a place and at it: its formula is no cause there.

    Never where the shadow does not tell: RoPE's tables are made for it, and scores are compared by what attention
    makes of them, to which a constant is nothing.
    """
    row = POINTS[place.point]
    if formula.unknown is not None or place.prompt != formula.prompt or row.over_keys or row.rotates:
        return False
    here = (place.step, LAST if place.layer is None else place.layer, ORDER[place.point])
    return not any(_order(d) <= here for d in formula.differs if d.phase == place.phase)


def _order(d: Differs) -> tuple[int, int, int]:
    return (d.step, LAST if d.layer is None else d.layer, ORDER[d.point])
