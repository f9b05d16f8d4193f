"""The verb ``compare``: everything known about one run's errors, written beside it."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import numpy as np

from precaudit.caching import cache_folder
from precaudit.errors import UserError
from precaudit.models.checkpoints import Checkpoint, file_hashes, recorded_source
from precaudit.numbers.bytes_text import bytes_of
from precaudit.numbers.executors import Executor, executor
from precaudit.numbers.formats import parse_accumulation
from precaudit.numbers.threads import one_blas_thread
from precaudit.progress import Advance, silent
from precaudit.recording.runs.positioned import calls_at
from precaudit.recording.runs.reader import Run, open_run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.runs.written import Comparison, read_compare_record
from precaudit.references.comparison.model_pairs import ModelPair, compare_models
from precaudit.references.comparison.notes import notes_on
from precaudit.references.comparison.prefill_decode import prefill_decode_records
from precaudit.references.comparison.selected import (
    ComparedRecords,
    covers,
    resolve_selection,
    reuse,
    select_records,
    selects_sums,
    verify,
    write_selected,
)
from precaudit.references.comparison.shares import layer_errors, open_weights
from precaudit.references.comparison.weight_rounding import weight_errors
from precaudit.references.textbook.pieces import Execution
from precaudit.references.textbook.reference import Textbook, shadow_records
from precaudit.schema.coverage import config_of, expected_tensors, formula_keys
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.places import Place
from precaudit.schema.records.base import json_number
from precaudit.schema.records.comparisons import Selected
from precaudit.schema.records.errors import ErrorRecord, FormulaError, ForwardError, LocalError
from precaudit.schema.selection import Selection

DEFAULT_ACCUM = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class CompareOptions:
    """``accum``: formats to emulate sums in; ``model``: where the weights lie now; ``cache``: where references go.

    ``jobs``: processes of this machine that make its pieces, or ``scheduler``: the address of a cluster's (extra
    ``[cluster]``); without either, threads. ``memory``: the most that each of these processes may hold, in bytes or as
    ``"4GB"``. ``partial``: open a run that was cut off; ``fresh``: compute again what is
    there; ``formula``: compare the program's FP64 shadow with the reference too (needs JAX). ``held``: whether records
    against another run are in memory, or stay in their file (precaudit/schema/filed.py).
    """

    accum: tuple[str, ...] = DEFAULT_ACCUM
    model: str | None = None
    partial: bool = False
    jobs: int = 1
    scheduler: str | None = None
    memory: int | str | None = None
    cache: Path = field(default_factory=lambda: cache_folder("references"))
    fresh: bool = False
    formula: bool = False
    held: bool = field(default=True, metadata={"keyword": False})


def pieces_by(options: CompareOptions) -> AbstractContextManager[Executor]:
    """Return what makes pieces, as options say: a context; raises UserError."""
    return executor(options.jobs, options.scheduler, bytes_of(options.memory, "--memory"))


@dataclass(frozen=True)
class Weights:
    """A run's weights, or why they are not at hand."""

    checkpoint: Checkpoint | None
    absent: str


@np.errstate(all="ignore")  # what is not finite has its own status
def compare(
    run: Run | Path | str,
    against: Path | str | None = None,
    select: Selection | None = None,
    options: CompareOptions | None = None,
    tell: Advance = silent,
    subject: Any = None,
) -> Comparison[Run]:
    """Compare a recorded run with FP64 and emulations, or (``against``) with another run; write the errors beside it.

    ``select`` filters; None takes all that was recorded. ``subject``: the program that was recorded, for its formula,
    where it is not the shipped decoder. Raises UserError for a run that was altered, weights that
    are not the run's, or a selection outside what was recorded.
    """
    options = options or CompareOptions()
    for name in options.accum:
        parse_accumulation(name)
    opened = run if isinstance(run, Run) else open_run(run, options.partial)
    if against is not None:
        pair = _pair(opened, open_run(against, options.partial, options.held), select, options, tell)
        return pair if select is None or select.positions is None else at_positions(pair, select.positions)
    recorded = Recorded.of(opened)
    selected = resolve_selection(recorded, select, options.accum)
    absent = _absent(recorded.run, options)
    selected = msgspec.structs.replace(selected, weights=not absent, formula=options.formula)
    verify(recorded, selected.prompts, (*selected.layers, None), tell)
    kept = None if options.fresh else reuse(recorded.run, selected)
    peaks: Mapping[str, int] = {}
    if kept is None:
        checkpoint = None if absent else open_weights(recorded.run, _source(recorded.run, options))
        weights = Weights(checkpoint, absent)
        with pieces_by(options) as made, one_blas_thread():
            execution, peaks = Execution(made, tell), made.peaks
            if selected.formula:
                kept = _add_formula(recorded, selected, weights, options, execution, subject)
            else:
                kept = _compute(recorded, selected, weights, options.cache, execution)
    errors, pairs, notes = kept
    sums = selects_sums(recorded.requested, selected.points)
    found = Comparison(
        recorded.run,
        select_records(errors, selected, sums),
        [p for p in pairs if p.prompt in selected.prompts],
        notes,
        recorded.run.folder,
        formula=selected.prompts if selected.formula else (),
        peaks=peaks,
    )
    return found if select is None or select.positions is None else at_positions(found, select.positions)


def at_positions(found: Comparison[Run], positions: str) -> Comparison[Run]:
    """Return what was found of the calls that hold some positions; raises UserError where none does."""
    calls = calls_at(found.run, positions)
    errors = [e for e in found.errors if not e.prompt or (e.prompt, e.phase, e.step) in calls]
    pairs = [p for p in found.prefill_decode if (p.prompt, "decode", p.step) in calls]
    whole = sorted({phase for _, phase, _ in calls} - {"decode"} & {e.phase for e in errors})
    note = f"--positions keeps whole calls: numbers of {' and '.join(whole)} are over all rows that it recorded"
    return replace(found, errors=errors, prefill_decode=pairs, notes=(*found.notes, *([note] if whole else ())))


def _absent(run: Run, options: CompareOptions) -> str:
    """Return why the run's weights are not at hand, or nothing when they are.

    Raises UserError when other weights are where its should be, or where --model says.
    """
    record = run.record
    try:
        hashes = file_hashes(_source(run, options))
    except UserError as error:
        if options.model is not None:
            raise
        return str(error)
    found = hashes.sha256()
    if found != record.model.sha256:
        raise UserError(
            f"{hashes.paths[0]}: the weights are not those of this run (SHA-256 {found[:12]}…, the run has "
            f"{record.model.sha256[:12]}…); give the right ones with --model PATH"
        )
    return ""


def _source(run: Run, options: CompareOptions) -> str:
    return options.model or recorded_source(run.record.model.reference)


def _compute(
    recorded: Recorded, selected: Selected, weights: Weights, cache: Path, execution: Execution
) -> ComparedRecords:
    checkpoint = weights.checkpoint
    errors = list(_missing(recorded, selected))
    book = Textbook.of(recorded, selected, checkpoint, cache, execution)
    errors += layer_errors(book, selected, execution)
    if book.summed_as(errors, execution):
        errors = [e for e in errors if not isinstance(e, ForwardError)] + list(_forwards(book, selected))
    if checkpoint is not None:
        errors += weight_errors(checkpoint, selected.layers)
    whole = book.whole
    pairs = list(prefill_decode_records(recorded, selected.prompts, whole))
    notes = (*notes_on(recorded, selected, whole, errors, weights.absent), *(whole.notes if whole is not None else ()))
    return write_selected(
        recorded.run,
        selected,
        ComparedRecords(errors, pairs, notes),
        None if whole is None else json_number(whole.sigma),
    )


def _add_formula(
    recorded: Recorded,
    selected: Selected,
    weights: Weights,
    options: CompareOptions,
    execution: Execution,
    subject: Any,
) -> ComparedRecords:
    """Add formula records to what a selection holds beside them, computed where no earlier selection wrote it."""
    run, without = recorded.run, msgspec.structs.replace(selected, formula=False)
    if options.fresh or reuse(run, without) is None:
        _compute(recorded, without, weights, options.cache, execution)
    held = read_compare_record(run)
    assert held is not None
    started = perf_counter()
    execution.tell(0, 1, "the program in FP64")
    if weights.checkpoint is None:
        keys = list(formula_keys(recorded.requested, recorded.config, selected.phases))
        places = [Place(prompt, *key) for prompt in selected.prompts for key in keys]
        made: list[ErrorRecord] = [p.record(FormulaError, "shadow", "fp64", unknown="weights") for p in places]
    else:
        made = [*shadow_records(recorded, weights.checkpoint, selected, (subject, options.model), execution)]
    n = len(selected.prompts)
    note = f"formula: FP64 of the program on {n} prompt{'s' if n > 1 else ''} took {perf_counter() - started:.1f} s"
    base = next(x for x in held.selections if covers(x, without))
    grown = msgspec.structs.replace(selected, accum=base.accum)
    kept = write_selected(run, grown, ComparedRecords(made, [], (*held.notes, note)), held.sigma)
    return ComparedRecords(kept.errors, kept.pairs, kept.notes)


def _missing(recorded: Recorded, selected: Selected) -> Iterator[ErrorRecord]:
    """Yield an unknown record for every requested tensor that is not in the run."""
    for prompt in selected.prompts:
        for e in expected_tensors(recorded.requested, len(recorded.run.prompts[prompt].tokens)):
            wanted = (
                e.phase in selected.phases
                and e.point in selected.points
                and (e.layer is None or e.layer in selected.layers)
            )
            place = Place(prompt, *e.key)
            there = recorded.summed if e.summed else recorded.hashed if e.hashed else recorded.index
            if wanted and place not in there:
                cut_off = ", which was cut off" if recorded.run.record.finished is None else ""
                why = recorded.misfits.get(place, f"requested, not in the run{cut_off}")
                yield place.record(LocalError, recorded.run.record.id, "fp64", missing=why)


def _forwards(book: Textbook, selected: Selected) -> Iterator[ErrorRecord]:
    """Yield the forward records of a selection."""
    for layer, prompt, phase, point in product(
        (*selected.layers, None), selected.prompts, selected.phases, selected.points
    ):
        if POINTS[point].per_layer == (layer is not None) and not POINTS[point].state:
            yield from book.forward(Place(prompt, phase, 0, layer, point))


def _pair(run: Run, against: Run, select: Selection | None, options: CompareOptions, tell: Advance) -> Comparison[Run]:
    """Compare a run (candidate) with another."""
    selected = resolve_selection(Recorded(run, {}, {}, config_of(run.record.model.config)), select, options.accum)
    with pieces_by(options) as made:
        return compare_models(ModelPair((run, against), selected), options.held, tell, made)
