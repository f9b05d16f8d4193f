"""Errors of a program's run: every segment between points made again in FP64 and as its equations round (JAX)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import msgspec

from precaudit.errors import UserError, enough_memory
from precaudit.interpreters.jaxpr.explicit import to_host, without_mesh, without_shardings
from precaudit.interpreters.jaxpr.tag import Tagged
from precaudit.numbers.formats import parse_accumulation
from precaudit.progress import Advance, silent
from precaudit.recording.programs.agreement import OfRun, recorded_entries
from precaudit.recording.programs.loading import program_of, raising_line
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.compared_programs import Compared, Unpaired
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.programs import PAIRS, Opened, ProgramErrors, judged_places, open_program_run
from precaudit.references.announced import announced_errors
from precaudit.references.comparison.against import place_errors
from precaudit.references.comparison.entry_views import entry_views
from precaudit.references.entry_textbooks import entry_textbooks, goes_on
from precaudit.references.formula import (
    OwnReference,
    Rests,
    Shown,
    Values,
    callable_errors,
    formula_notes,
    read_shown,
    rests_on,
    textbook_errors,
)
from precaudit.references.mapped import MappedTextbook
from precaudit.references.mutations.declared import declared_formats
from precaudit.references.names_map import Names, check_entries
from precaudit.references.traced.judged import record_of
from precaudit.references.traced.reference import Traced
from precaudit.references.viewed import view_case
from precaudit.schema.limits.checks import SAME, farthest_formula
from precaudit.schema.places import Place, spans
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import ErrorRecord
from precaudit.schema.records.lines import write_lines
from precaudit.writing import write_whole


@enough_memory()
def compare_program(
    run: Opened | Path | str,
    program: Program | str | None = None,
    reference: OwnReference | Names | None = None,
    tell: Advance = silent,
    accum: Sequence[str] = (),
) -> ProgramErrors:
    """Return the error records of a program's run and write them beside it.

    ``program``, or its name; without either the one the run names, if this user traced that very source.
    ``reference``: what the program's FP64 shadow is held against, a function of (params, *inputs) that returns
    {point: FP64 array} of some of the program's points, or the textbook by ``Names``. ``accum``: formats that sums of
    products are made in, each for itself, as ``parse_accumulation`` takes them.
    Raises UserError where the program is another than the one that was traced, or its code would be someone else's.
    """
    opened = run if isinstance(run, Opened) else open_program_run(run)
    for text in accum:
        parse_accumulation(text)
    opened.verify()
    if reference is not None and opened.record.layers is not None:
        held = spans(opened.record.layers)
        raise UserError(f"{opened.folder} holds layers {held} alone; a reference needs all of them")
    found = program_of(opened, program)
    entries = traced_entries(opened, found)  # under the mesh that it was recorded under
    with without_mesh():
        errors, pairs, unpaired, told = _errors(found, entries, reference, tell, accum)
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
    program: Program,
    entries: Sequence[OfRun],
    reference: OwnReference | Names | None,
    tell: Advance,
    accum: Sequence[str],
) -> tuple[list[ErrorRecord], list[PrefillDecodeRecord], list[Unpaired], tuple[str, ...]]:
    """Return the error records of every entry point, those of positions seen twice, and what formulas rest on."""
    each: list[EntryBesideShadow] = []
    books: Sequence[MappedTextbook | None] = [None] * len(entries)
    if isinstance(reference, Names):
        check_entries(reference, [program.entry, *program.then])
        books = entry_textbooks(reference, entries, program)
    for i, one in enumerate(entries):
        before = each[-1].traced if i and goes_on(program, entries[i - 1], one.program) else None
        begins = None if before is None else (before, program.then[one.program.entry].begin)
        traced = Traced(one, tell, reference is not None and before is None, begins, accum)
        each.append(EntryBesideShadow(traced, books[i], reference))
    errors: list[list[ErrorRecord]] = [[] for _ in each]
    pairs: list[PrefillDecodeRecord] = []
    unpaired: list[Unpaired] = []
    rests: list[Rests] = []
    for case in entries[0].opened.record.cases:
        for found, beside in zip(errors, each, strict=True):
            its, rest = beside.of_case(case)
            found += its
            rests += rest
        found_pairs, others = entry_views([beside.traced for beside in each], case)
        pairs += found_pairs
        unpaired += others
    whole = [e for found, beside in zip(errors, each, strict=True) for e in beside.with_declared_formats(found)]
    return whole, pairs, unpaired, formula_notes(rests)


@dataclass(frozen=True)
class EntryBesideShadow:
    """An entry point beside its FP64 shadow, and a reference of the user's or the textbook (``book``)."""

    traced: Traced
    book: MappedTextbook | None
    reference: OwnReference | Names | None

    def of_case(self, case: str) -> tuple[list[ErrorRecord], list[Rests]]:
        """Return the error records of a case, and what those of formulas rest on."""
        opened, traced, book = self.traced.opened, self.traced, self.book
        every = [*judged_places(opened.record), *((p, None) for p in opened.record.outputs)]
        calls = product(range(opened.record.calls), every)
        where = (Place(case, opened.record.phase, call, layer, p.name) for call, (p, layer) in calls)
        errors = list(place_errors(traced, where))
        for call in range(opened.record.calls):
            errors += traced.chosen(case, call)
        exact = [] if self.reference is None else traced.alone(case)
        beside = read_shown(opened, book, case, exact) if book is not None and exact else None
        if self.reference is not None:
            errors += _formula(traced, book or self.reference, case, beside, exact)
        if book is not None:
            errors += announced_errors(view_case(opened, book, case), book, case, opened.record.phase)
        return errors, [] if beside is None else [rests_on(beside, None if book is None else book.passed.get(case))]

    def with_declared_formats(self, errors: list[ErrorRecord]) -> list[ErrorRecord]:
        """Return records, those of the first case with the narrow format inside that the textbook does not have."""
        opened, book = self.traced.opened, self.book
        return (
            errors if book is None or opened.record.policy is not None else _with_declared_formats(opened, book, errors)
        )


def traced_entries(opened: Opened, program: Program) -> list[OfRun]:
    """Return the entry points of a run's program; raises UserError where it is not what was traced.

    Where its types carry shardings, as one device makes it, to be run under ``without_mesh``.
    """
    return [_alone(*one) for one in recorded_entries(opened, program)]


def _alone(opened: Opened, one: Program, made: Tagged) -> OfRun:
    alone = without_shardings(made, one.params, *next(iter(one.cases.values())))
    if alone is not made:
        one = replace(one, params=to_host(one.params), cases={n: to_host(x) for n, x in one.cases.items()})
    return OfRun(opened, one, alone)


def _formula(
    traced: Traced,
    reference: OwnReference | Names | MappedTextbook,
    case: str,
    beside: Shown | None,
    exact: Sequence[Values],
) -> Iterator[ErrorRecord]:
    """Yield the formula records of a case; unknown are those of calls that FP64 never came to."""
    opened = traced.opened
    for call in range(len(exact), opened.record.calls):
        for p, layer in reference.places if isinstance(reference, MappedTextbook) else judged_places(opened.record):
            yield record_of(opened, case, call, p, layer, "formula", unknown="the program in FP64 did not come so far")
    if isinstance(reference, MappedTextbook):
        if beside is not None:
            yield from textbook_errors(opened, reference, case, beside)
        return
    assert not isinstance(reference, Names)
    for call, values in enumerate(exact):
        try:
            expected = reference(traced.program.params, *traced.inputs(case, call))
        except Exception as error:
            raise UserError(f"the reference raised {type(error).__name__}: {error}{raising_line(error)}") from None
        yield from callable_errors(opened, expected, case, call, values)


def _with_declared_formats(opened: Opened, book: MappedTextbook, errors: Sequence[ErrorRecord]) -> list[ErrorRecord]:
    """Return the records, those of the first case with the narrow format inside that the textbook does not have."""
    case = opened.record.cases[0]
    other = {e.point for e in errors if e.kind == "formula" and not farthest_formula(e)[0] <= SAME}
    found = {(call, p.step, p.shown.name): narrow for call, p, narrow in declared_formats(opened, book, case, other)}
    outputs = {p.name for p in opened.record.outputs}  # which have no segment of their own
    return [
        msgspec.structs.replace(e, narrow=narrow)
        if e.kind == ("forward" if e.point in outputs else "local")
        and e.prompt == case
        and (narrow := found.get((e.step, e.layer, e.point))) is not None
        else e
        for e in errors
    ]
