"""Errors of a program's run: every segment between points made again in FP64 and as its equations round (JAX)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec

from precaudit.errors import UserError, enough_memory
from precaudit.interpreters.jaxpr.explicit import hosted, unmeshed, unsharded
from precaudit.interpreters.jaxpr.tag import Tagged
from precaudit.progress import Advance, silent
from precaudit.recording.programs.agreement import tagged_as
from precaudit.recording.programs.loading import line_of, load, named_of
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.programs import Compared, Opened, ProgramErrors, open_program_run, places
from precaudit.references.announced import announced_errors
from precaudit.references.comparison.against import errors_of
from precaudit.references.formula import (
    OwnReference,
    Rests,
    Shown,
    callable_errors,
    rests_on,
    sentences,
    shown,
    textbook_errors,
)
from precaudit.references.mapped import Names, Textbook, textbook_of
from precaudit.references.mutations.declared import declared
from precaudit.references.traced.judged import record_of
from precaudit.references.traced.reference import Traced
from precaudit.references.viewed import viewed
from precaudit.schema.limits.checks import SAME, farthest
from precaudit.schema.places import Place, spans
from precaudit.schema.records.errors import ErrorRecord
from precaudit.schema.records.lines import write_lines
from precaudit.schema.records.runs import PROGRAM_CALL
from precaudit.writing import write_whole


@enough_memory()
def compare(
    run: Opened | Path | str, program: Program | str | None = None, reference: OwnReference | Names | None = None,
    tell: Advance = silent,
) -> ProgramErrors:  # fmt: skip
    """Return the error records of a program's run and write them beside it.

    ``program``, or its name; without either the one the run names, if this user traced that very source.
    ``reference``: what the program's FP64 shadow is held against, a function of (params, *inputs) that returns
    {point: FP64 array} of some of the program's points, or the textbook by ``Names``.
    Raises UserError where the program is another than the one that was traced, or its code would be someone else's.
    """
    opened = run if isinstance(run, Opened) else open_program_run(run)
    opened.verify()
    if reference is not None and opened.record.layers is not None:
        held = spans(opened.record.layers)
        raise UserError(f"{opened.folder} holds layers {held} alone; a reference needs all of them")
    found, made = traced_program(opened, program)
    with unmeshed():
        errors, told = _errors(opened, found, made, reference, tell)
    path = opened.folder / "errors.jsonl"
    write_lines(path, errors)
    marks = Compared(
        run=file_hash(opened.folder / "program.json"), errors=file_hash(path),
        names=reference.record() if isinstance(reference, Names) else {}, told=told,
    )  # fmt: skip
    write_whole(opened.folder / "compared.json", msgspec.json.encode(marks) + b"\n", inside=True)
    return ProgramErrors(errors, opened)


def _errors(
    opened: Opened, found: Program, made: Tagged, reference: OwnReference | Names | None, tell: Advance
) -> tuple[list[ErrorRecord], tuple[str, ...]]:
    """Return the error records of every case, and what those of formulas rest on."""
    book = textbook_of(reference, found, opened) if isinstance(reference, Names) else None
    traced = Traced(opened, found, made, tell, kept=reference is not None)
    every = [*places(opened.record), *((p, None) for p in opened.record.outputs)]
    errors: list[ErrorRecord] = []
    rests: list[Rests] = []
    for case in opened.record.cases:
        calls = product(range(opened.record.calls), every)
        errors += errors_of(traced, (Place(case, PROGRAM_CALL, call, layer, p.name) for call, (p, layer) in calls))
        for call in range(opened.record.calls):
            errors += traced.chosen(case, call)
        beside = shown(opened, book, case, traced.exact) if book is not None and traced.exact else None
        if reference is not None:
            errors += _formula(traced, book or reference, case, beside)
        rests += [] if beside is None else [rests_on(beside)]
        if book is not None and opened.record.policy is not None:
            errors += announced_errors(viewed(opened, book, case), book, case)
    if book is not None and opened.record.policy is None:
        errors = _declared(opened, book, errors)
    return errors, sentences(rests)


def traced_program(opened: Opened, program: Program | str | None) -> tuple[Program, Tagged]:
    """Return a run's program, and with its taps; raises UserError where it is not what was traced, as ``compare``.

    Where its types carry shardings, as one device makes it, to be run under ``unmeshed``.
    """
    found = program if isinstance(program, Program) else load(named_of(opened, program))
    made = tagged_as(opened, found)
    alone = unsharded(made, found.params, *next(iter(found.cases.values())))
    if alone is not made:
        found = replace(found, params=hosted(found.params), cases={n: hosted(x) for n, x in found.cases.items()})
    return found, alone


def _formula(
    traced: Traced, reference: OwnReference | Names | Textbook, case: str, beside: Shown | None
) -> Iterator[ErrorRecord]:
    """Yield the formula records of a case; unknown are those of calls that FP64 never came to."""
    opened, exact = traced.opened, traced.exact
    for call in range(len(exact), opened.record.calls):
        for p, layer in reference.places if isinstance(reference, Textbook) else places(opened.record):
            yield record_of(opened, case, call, p, layer, "formula", unknown="the program in FP64 did not come so far")
    if isinstance(reference, Textbook):
        if beside is not None:
            yield from textbook_errors(opened, reference, case, beside)
        return
    assert not isinstance(reference, Names)
    for call, values in enumerate(exact):
        try:
            expected = reference(traced.program.params, *traced.inputs(case, call))
        except Exception as error:
            raise UserError(f"the reference raised {type(error).__name__}: {error}{line_of(error)}") from None
        yield from callable_errors(opened, expected, case, call, values)


def _declared(opened: Opened, book: Textbook, errors: Sequence[ErrorRecord]) -> list[ErrorRecord]:
    """Return the records, those of the first case with the narrow format inside that the textbook does not have."""
    case = opened.record.cases[0]
    other = {e.point for e in errors if e.kind == "formula" and not farthest(e)[0] <= SAME}
    found = {(call, p.step, p.shown.name): narrow for call, p, narrow in declared(opened, book, case, other)}
    return [
        msgspec.structs.replace(e, narrow=narrow)
        if e.kind == "local" and e.prompt == case and (narrow := found.get((e.step, e.layer, e.point))) is not None
        else e
        for e in errors
    ]
