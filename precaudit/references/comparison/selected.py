"""Which part of a run is selected, resolved; what earlier selections wrote, and how a new one joins them."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from precaudit.errors import UserError
from precaudit.numbers.formats import parse_accumulation
from precaudit.progress import Advance
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.runs.written import check_points, computing_code, manifest_hash, read_compare_record
from precaudit.schema.emulations import Emulation
from precaudit.schema.graphs.decoder import POINTS, present
from precaudit.schema.places import spans
from precaudit.schema.records.base import SCHEMA, Number
from precaudit.schema.records.comparisons import CompareRecord, PrefillDecodeRecord, Selected
from precaudit.schema.records.errors import ERROR_KINDS, AccumulationError, ErrorRecord, FormulaError, WeightError
from precaudit.schema.records.lines import read_layers, read_lines, write_lines
from precaudit.schema.records.runs import Requested
from precaudit.schema.selection import Selection, choose_prompts, parse_layers


class ComparedRecords(NamedTuple):
    """What comparing gave: error records, pairs of prefill and decode, and what a reader should know."""

    errors: list[ErrorRecord]
    pairs: list[PrefillDecodeRecord]
    notes: tuple[str, ...]


def resolve_selection(recorded: Recorded, select: Selection | None, accum: Sequence[str]) -> Selected:
    """Resolve a selection against what was recorded."""
    asked = recorded.requested
    select = select or Selection(points=asked.points, phases=asked.phases)
    n = recorded.run.record.model.config["layers"]
    layers = asked.layers if select.layers is None else parse_layers(select.layers, n)
    outside = [i for i in layers if i not in asked.layers]
    if outside:
        raise UserError(
            f"layer {outside[0]} was not recorded in {recorded.run.folder}; recorded: {spans(asked.layers)}"
        )
    known = {*asked.points, *asked.support}
    every = present(recorded.config.sparse)
    chosen = [p for p in select.points if p in every]
    if set(every) == set(chosen):  # all that the run has: a program need not show what lies within an operation
        chosen = [p for p in chosen if p in known or POINTS[p].within is None]
    if not chosen:
        raise UserError(f"none of {', '.join(select.points)} is a point of {recorded.run.record.model.id}")
    for point in chosen:
        if point not in known:
            recorded_points = ", ".join(p for p in POINTS if p in known)
            raise UserError(f"point {point!r} was not recorded in {recorded.run.folder}; recorded: {recorded_points}")
    phases = tuple(p for p in select.phases if p in asked.phases)
    if not phases:
        raise UserError(f"none of the phases {', '.join(select.phases)} was recorded in {recorded.run.folder}")
    prompts = choose_prompts(select.prompts, list(recorded.run.prompts))
    names = tuple(_accum_name(a) for a in accum)
    return Selected(prompts=prompts, phases=phases, points=tuple(chosen), layers=layers, accum=names, weights=True)


def _accum_name(text: str) -> str:
    name, block = parse_accumulation(text)
    return name if block == 1 else f"{name}/{block}"


def verify(recorded: Recorded, prompts: Collection[str], layers: Collection[int | None], tell: Advance) -> None:
    """Read every tensor of some prompts and layers, so that an altered one is noticed even where rows are reused."""
    chosen = [p for p in recorded.run.points if p.prompt in prompts and p.layer in layers]
    for i, point in enumerate(chosen):
        recorded.run.tensor(point)
        if i % 500 == 0:
            tell(i, len(chosen), "checking hashes")


def reuse(run: Run, selected: Selected) -> ComparedRecords | None:
    """Return what an earlier compare of this very run wrote, when it covers ``selected``."""
    held = read_compare_record(run)
    if held is None or not any(covers(old, selected) for old in held.selections):
        return None
    path = run.folder / "errors.jsonl"
    errors = read_lines(path, ERROR_KINDS) if selected.formula else read_layers(path, selected.layers)
    return ComparedRecords(
        check_points(errors, path), read_lines(run.folder / "prefill_decode.jsonl", PrefillDecodeRecord), held.notes
    )


def covers(old: Selected, new: Selected) -> bool:
    """Whether everything in ``new`` is in ``old``."""
    fields = ("prompts", "phases", "points", "layers", "accum")
    known = old.weights >= new.weights and old.formula >= new.formula
    return known and all(set(getattr(new, f)) <= set(getattr(old, f)) for f in fields)


def selects_sums(asked: Requested, points: Collection[str]) -> bool:
    """Whether a selection is of what sums of rows tell, too: of no points in particular."""
    return set(asked.points) <= set(points)


def select_records(errors: list[ErrorRecord], selected: Selected, sums: bool) -> list[ErrorRecord]:
    """Return the records a selection asks for; ``sums``: those that sums of rows tell, too."""
    prompts, phases, points, layers = (
        set(selected.prompts),
        set(selected.phases),
        set(selected.points),
        set(selected.layers),
    )
    accums = {Emulation(accumulation=a).name for a in selected.accum}
    found: list[ErrorRecord] = []
    for e in errors:
        if isinstance(e, FormulaError):  # of the whole program, whatever was recorded
            found += [e] if selected.formula and e.prompt in prompts and e.phase in phases else []
            continue
        if e.layer is not None and e.layer not in layers:
            continue
        if isinstance(e, WeightError):
            found.append(e)
        elif isinstance(e, AccumulationError) and e.candidate not in accums:
            continue
        elif (
            e.prompt in prompts
            and e.phase in phases
            and (e.point in points or e.kind in (("state", "sums") if sums else ("state",)))
        ):
            found.append(e)
    return found


def write_selected(run: Run, selected: Selected, found: ComparedRecords, sigma: Number | None) -> ComparedRecords:
    """Write the files, together with rows of earlier selections that this one did not make again."""
    errors, pairs, notes = found
    held = read_compare_record(run)
    selections: tuple[Selected, ...] = (selected,)
    if held is not None:
        made = {_key(e) for e in errors}
        errors = [e for e in read_lines(run.folder / "errors.jsonl", ERROR_KINDS) if _key(e) not in made] + errors
        fresh = {p.prompt for p in pairs}
        old = read_lines(run.folder / "prefill_decode.jsonl", PrefillDecodeRecord)
        pairs = [p for p in old if p.prompt not in fresh] + pairs
        # rows of this one replace an older selection's, which stays complete only where it knew no more than this
        kept = [x for x in held.selections if x.weights <= selected.weights and set(x.accum) <= set(selected.accum)]
        others = [x for x in kept if not covers(selected, x)]
        asked = [_formula_of(x) for x in held.selections if x.formula and x not in others and not selected.formula]
        selections = (*others, *asked, selected)
        notes = tuple(dict.fromkeys((*notes, *(held.notes if others else ()))))
    write_lines(run.folder / "errors.jsonl", errors)
    write_lines(run.folder / "prefill_decode.jsonl", pairs)
    hashes = {n: file_hash(run.folder / n) for n in ("errors.jsonl", "prefill_decode.jsonl")}
    record = CompareRecord(
        schema=SCHEMA,
        precaudit=computing_code(),
        run=manifest_hash(run),
        selections=selections,
        sigma=sigma,
        notes=notes,
        hashes=hashes,
    )
    write_lines(run.folder / "compare.json", [record])
    return ComparedRecords(errors, pairs, notes)


def _formula_of(selected: Selected) -> Selected:
    """Return what is left of a selection whose other rows were made anew: that the formula was asked for."""
    return msgspec.structs.replace(selected, points=(), layers=(), accum=())


def _key(e: ErrorRecord) -> tuple[Any, ...]:
    return (e.prompt, e.phase, e.step, e.layer, e.point, e.kind, e.candidate)
