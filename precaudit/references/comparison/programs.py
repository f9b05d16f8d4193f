"""Errors of a program's run: every segment between points made again in FP64 and as its equations round (JAX)."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from precaudit.errors import UserError, enough_memory
from precaudit.interpreters.jaxpr.explicit import without_mesh
from precaudit.numbers.executors import Executor, in_waves
from precaudit.numbers.formats import parse_accumulation
from precaudit.progress import silent
from precaudit.recording.programs.loading import named_of, program_of
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.compared_programs import Compared, Unpaired, write_compared
from precaudit.recording.runs.programs import Opened, open_program_run
from precaudit.recording.runs.written import Comparison, computing_code
from precaudit.references.comparison.program_pieces import (
    ProgramShadows,
    WholeCase,
    divide_program,
    for_others,
    piece_errors,
    traced_entries,
)
from precaudit.references.comparison.program_records import (
    Holds,
    KnownRecords,
    Lacking,
    joined,
    known_records,
    lacking,
)
from precaudit.references.formula import OwnReference, Rests, formula_notes
from precaudit.references.mapped import MappedTextbook
from precaudit.references.mutations.declared import declared_formats
from precaudit.references.names_map import Names
from precaudit.references.textbook.pieces import HERE, Execution
from precaudit.schema.limits.checks import SAME, farthest_formula
from precaudit.schema.places import spans
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import EmulatedError, ErrorRecord, FormulaError, ForwardError


@enough_memory()
def compare_program(
    run: Opened | Path | str,
    program: Program | str | None = None,
    reference: OwnReference | Names | None = None,
    execution: Execution = HERE,
    accum: Sequence[str] = (),
    holds: Holds | None = None,
) -> Comparison[Opened]:
    """Return the error records of a program's run and write them beside it.

    ``program``, or its name; without either the one the run names, if this user traced that very source.
    ``reference``: what the program's FP64 shadow is held against, a function of (params, *inputs) that returns
    {point: FP64 array} of some of the program's points, or the textbook by ``Names``. ``accum``: formats that sums of
    products are made in, each for itself, as ``parse_accumulation`` takes them. ``execution``: what makes its pieces,
    by default threads; other processes load the program by its name. ``holds``: whether a place is looked at. Of
    those that are, what an earlier compare has not written is computed, and joins that; None: everything is computed.
    Raises UserError where the program is another than the one that was traced, or its code would be someone else's.
    """
    opened = run if isinstance(run, Opened) else open_program_run(run)
    for text in accum:
        parse_accumulation(text)
    opened.verify()
    if reference is not None and opened.record.layers is not None:
        held = spans(opened.record.layers)
        raise UserError(f"{opened.folder} holds layers {held} alone; a reference needs all of them")
    by = execution.executor
    name = for_others(None if isinstance(program, Program) else named_of(opened, program), reference, by)
    found = program_of(opened, program)
    entries = traced_entries(opened, found)  # under the mesh that it was recorded under
    names = reference.record() if isinstance(reference, Names) else {} if reference is None else None
    known = None if holds is None else known_records(opened, names)
    work = Lacking(None, opened.record.cases) if holds is None else lacking(opened, known, holds, accum)
    if known is not None and {*accum} <= {*known.marks.accum}:
        accum = known.marks.accum
    shared = ProgramShadows(found, entries, reference, accum, name, execution.tell, work.some)
    with without_mesh():
        made = _computed(shared, by, work)
        whole = joined(known, made, work)
        each = zip(entries, shared.books, strict=True)
        errors = [e for one, book in each for e in _with_inner_formats(one.opened, book, whole.of(one.opened.record))]
    pairs = [p for case in opened.record.cases for p in whole.pairs.get(case, ())]
    marks = msgspec.structs.replace(whole.marks, names=names or {})
    write_compared(opened, errors, pairs, marks)
    return Comparison(opened, errors, pairs, marks.told, opened.folder, peaks=by.peaks)


def _computed(shared: ProgramShadows, by: Executor, work: Lacking) -> KnownRecords:
    """Return the records of what lacks: of operations, of the whole program, and of positions that are seen twice."""
    opened = [one.opened for one in shared.entries]
    errors: list[ErrorRecord] = []
    pairs: list[PrefillDecodeRecord] = []
    unpaired: list[Unpaired] = []
    rests: list[Rests] = []
    pieces = divide_program(opened, by, work)
    for found in in_waves(by, piece_errors, shared, pieces, shared.tell if not by.here else silent):
        if not isinstance(found, WholeCase):
            errors += found
            continue
        errors += found.errors
        rests += found.rests
        pairs += found.pairs
        unpaired += found.unpaired
    told = formula_notes(rests)
    made = KnownRecords(
        Compared("", "", told=told, accum=tuple(shared.accum), unpaired=tuple(unpaired), code=computing_code()),
        opened[0].record.cases,
    )
    made.add(errors, pairs)
    return made


def _with_inner_formats(opened: Opened, book: MappedTextbook | None, errors: list[ErrorRecord]) -> list[ErrorRecord]:
    """Return an entry point's records, those of the first case with the narrow format that the textbook lacks."""
    return errors if book is None or opened.record.policy is not None else _with_declared_formats(opened, book, errors)


def _with_declared_formats(opened: Opened, book: MappedTextbook, errors: Sequence[ErrorRecord]) -> list[ErrorRecord]:
    """Return the records, those of the first case with the narrow format inside that the textbook does not have."""
    case = opened.record.cases[0]
    other = {e.point for e in errors if isinstance(e, FormulaError) and not farthest_formula(e)[0] <= SAME}
    found = {(call, p.step, p.shown.name): narrow for call, p, narrow in declared_formats(opened, book, case, other)}
    outputs = {p.name for p in opened.record.outputs}  # which have no segment of their own
    return [
        msgspec.structs.replace(e, narrow=narrow)
        if isinstance(e, EmulatedError | ForwardError)
        and e.kind == ("forward" if e.point in outputs else "local")
        and e.prompt == case
        and (narrow := found.get((e.step, e.layer, e.point))) is not None
        else e
        for e in errors
    ]
