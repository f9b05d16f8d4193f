"""Errors of a program's run: every segment between points made again in FP64 and as its equations round (JAX)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from precaudit.errors import UserError, enough_memory
from precaudit.interpreters.jaxpr.explicit import without_mesh
from precaudit.numbers.executors import Executor, Threads, in_waves
from precaudit.numbers.formats import parse_accumulation
from precaudit.progress import Advance, silent
from precaudit.recording.programs.loading import named_of, program_of
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.compared_programs import Compared, Unpaired
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.programs import PAIRS, Opened, ProgramErrors, open_program_run
from precaudit.references.comparison.program_pieces import (
    ProgramShadows,
    WholeCase,
    divide_program,
    for_others,
    piece_errors,
    traced_entries,
)
from precaudit.references.formula import OwnReference, Rests, formula_notes
from precaudit.references.mapped import MappedTextbook
from precaudit.references.mutations.declared import declared_formats
from precaudit.references.names_map import Names
from precaudit.schema.limits.checks import SAME, farthest_formula
from precaudit.schema.places import spans
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import EmulatedError, ErrorRecord, FormulaError, ForwardError
from precaudit.schema.records.lines import write_lines
from precaudit.writing import write_whole


@enough_memory()
def compare_program(
    run: Opened | Path | str,
    program: Program | str | None = None,
    reference: OwnReference | Names | None = None,
    tell: Advance = silent,
    accum: Sequence[str] = (),
    by: Executor | None = None,
) -> ProgramErrors:
    """Return the error records of a program's run and write them beside it.

    ``program``, or its name; without either the one the run names, if this user traced that very source.
    ``reference``: what the program's FP64 shadow is held against, a function of (params, *inputs) that returns
    {point: FP64 array} of some of the program's points, or the textbook by ``Names``. ``accum``: formats that sums of
    products are made in, each for itself, as ``parse_accumulation`` takes them. ``by``: what makes its pieces (None:
    threads); other processes load the program by its name.
    Raises UserError where the program is another than the one that was traced, or its code would be someone else's.
    """
    opened = run if isinstance(run, Opened) else open_program_run(run)
    for text in accum:
        parse_accumulation(text)
    opened.verify()
    if reference is not None and opened.record.layers is not None:
        held = spans(opened.record.layers)
        raise UserError(f"{opened.folder} holds layers {held} alone; a reference needs all of them")
    by = by or Threads()
    name = for_others(None if isinstance(program, Program) else named_of(opened, program), reference, by)
    found = program_of(opened, program)
    entries = traced_entries(opened, found)  # under the mesh that it was recorded under
    with without_mesh():
        errors, pairs, unpaired, told = _errors(ProgramShadows(found, entries, reference, accum, name, tell), by)
    path = opened.folder / "errors.jsonl"
    write_lines(path, errors)
    write_lines(opened.folder / PAIRS, pairs)
    marks = Compared(
        run=file_hash(opened.folder / "program.json"),
        errors=file_hash(path),
        names=reference.record() if isinstance(reference, Names) else {},
        told=told,
        accum=tuple(accum),
        pairs=file_hash(opened.folder / PAIRS),
        unpaired=tuple(unpaired),
    )
    write_whole(opened.folder / "compared.json", msgspec.json.encode(marks) + b"\n", inside=True)
    return ProgramErrors(errors, opened, pairs)


def _errors(
    shared: ProgramShadows, by: Executor
) -> tuple[list[ErrorRecord], list[PrefillDecodeRecord], list[Unpaired], tuple[str, ...]]:
    """Return the error records of every entry point, those of positions seen twice, and what formulas rest on."""
    opened = [one.opened for one in shared.entries]
    errors: list[list[ErrorRecord]] = [[] for _ in opened]
    pairs: list[PrefillDecodeRecord] = []
    unpaired: list[Unpaired] = []
    rests: list[Rests] = []
    made: dict[tuple[str, int | None], Any] = {}
    pieces = divide_program(opened, by)
    made_in_order = in_waves(by, piece_errors, shared, pieces, shared.tell if not by.here else silent)
    for piece, found in zip(pieces, made_in_order, strict=True):
        if piece.entry is None:
            made[piece.case, None] = found
        else:
            made.setdefault((piece.case, piece.entry), []).extend(found)
    for case in opened[0].record.cases:
        whole: WholeCase = made[case, None]
        for i, its in enumerate(errors):
            for local, forward in zip(made[case, i], whole.forwards[i], strict=True):
                its += [*local, *forward]
            its += whole.others[i]
        rests += whole.rests
        pairs += whole.pairs
        unpaired += whole.unpaired
    every = zip(opened, shared.books, errors, strict=True)
    return [e for one in every for e in _with_inner_formats(*one)], pairs, unpaired, formula_notes(rests)


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
