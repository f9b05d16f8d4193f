"""Errors of a program's run: every segment between points made again in FP64 and as its equations round (JAX)."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import msgspec

from precaudit.arrays import Array
from precaudit.errors import UserError, enough_memory
from precaudit.programs.formula import OwnReference, callable_errors, shown, textbook_errors
from precaudit.programs.forward import Chains, NotChained, Truth, forward_numbers
from precaudit.programs.loading import line_of, load, trusted
from precaudit.programs.local import Emulations, lacks_of, place, step_of
from precaudit.programs.program import OUTPUT_LOGITS, Program
from precaudit.programs.runs import Compared, Opened, ProgramPoint, open_program_run, places
from precaudit.programs.textbook import Names, Textbook, textbook_of
from precaudit.programs.tracing import code_of, prepared, weights_of
from precaudit.records import ErrorRecord, write_lines
from precaudit.store import file_hash
from precaudit.transforms import CannotLift
from precaudit.transforms.tag import Tagged
from precaudit.writing import write_whole

Tell = Callable[[int, int, str], None]
CHAINED = "calls in FP64 and as drawn realisations"


@enough_memory()
def compare(
    run: Opened | Path | str, program: Program | str | None = None, reference: OwnReference | Names | None = None,
    tell: Tell = lambda done, total, what: None,
) -> list[ErrorRecord]:  # fmt: skip
    """Return the error records of a program's run and write them beside it.

    ``program``, or its name; without either the one the run names, if this user traced that very source.
    ``reference``: what the program's FP64 shadow is held against, a function of (params, *inputs) that returns
    {point: FP64 array} of some of the program's points, or the textbook by ``Names``.
    Raises UserError where the program is another than the one that was traced, or its code would be someone else's.
    """
    opened = run if isinstance(run, Opened) else open_program_run(run)
    opened.verify()
    found, made = traced_program(opened, program)
    book = textbook_of(reference, found, opened) if isinstance(reference, Names) else None
    inputs = jax.tree.structure(next(iter(found.cases.values())))
    segments, chains = Emulations(made), Chains(found, made)
    errors: list[ErrorRecord] = []
    total = len(opened.record.cases) * opened.record.calls
    for i, case in enumerate(opened.record.cases):
        for call in range(opened.record.calls):
            taps, held = (opened.tensors(case, call, kind) for kind in ("taps", "inputs"))
            given = jax.tree.unflatten(inputs, [held[str(j)] for j in range(len(held))])
            errors += segments.records(opened, case, call, taps, (found.params, *given))
            tell(i * opened.record.calls + call + 1, total, "segments in FP64 and emulated")
        wide: list[dict[str, Array]] = []
        errors += _forward(opened, chains, case, tell, wide)
        if reference is not None:
            errors += _formula(opened, found, book or reference, case, wide)
    path = opened.folder / "errors.jsonl"
    write_lines(path, errors)
    marks = Compared(
        run=file_hash(opened.folder / "program.json"), errors=file_hash(path),
        names=reference.record() if isinstance(reference, Names) else {},
    )  # fmt: skip
    write_whole(opened.folder / "compared.json", msgspec.json.encode(marks) + b"\n")
    return errors


def traced_program(opened: Opened, program: Program | str | None) -> tuple[Program, Tagged]:
    """Return a run's program, and with its taps; raises UserError where it is not what was traced, as ``compare``."""
    found = program if isinstance(program, Program) else load(_named(opened, program))
    made = prepared(found, opened.record.renamed)
    if code_of(made) != opened.record.code:
        raise UserError(
            f"{opened.folder}: the program is not the one that was traced (its operations differ); trace again"
        )
    if weights_of(found, made) != opened.record.weights:
        raise UserError(
            f"{opened.folder}: the parameters are not those that were traced (their hash differs); are they drawn "
            "without a seed? Trace again"
        )
    return found, made


def _formula(
    opened: Opened,
    program: Program,
    reference: OwnReference | Names | Textbook,
    case: str,
    exact: list[dict[str, Array]],
) -> Iterator[ErrorRecord]:
    """Yield the formula records of a case; unknown are those of calls that FP64 never came to."""
    for call in range(len(exact), opened.record.calls):
        for p, layer in reference.places if isinstance(reference, Textbook) else places(opened.record.points):
            yield place(opened, case, call, p, layer, "formula", unknown="the program in FP64 did not come so far")
    if isinstance(reference, Textbook):
        if exact:
            yield from textbook_errors(opened, reference, case, shown(opened, reference, case, exact))
        return
    assert not isinstance(reference, Names)
    structure = jax.tree.structure(next(iter(program.cases.values())))
    for call, values in enumerate(exact):
        held = opened.tensors(case, call, "inputs")
        given = jax.tree.unflatten(structure, [held[str(i)] for i in range(len(held))])
        try:
            expected = reference(program.params, *given)
        except Exception as error:
            raise UserError(f"the reference raised {type(error).__name__}: {error}{line_of(error)}") from None
        yield from callable_errors(opened, expected, case, call, values)


def _named(opened: Opened, program: str | None) -> str:
    """Return the name of a run's program; its code runs where the user named it, here or when it was traced."""
    if program is not None:
        return program
    named = opened.record.program
    if not named:
        raise UserError(f"{opened.folder} does not say which program it is of; give it with --program FILE.py:NAME")
    if not trusted(named):
        raise UserError(
            f"{opened.folder} is of {named}, which was not traced here as it stands: to run its code, name it with "
            f"--program {named}"
        )
    return named


def _forward(
    opened: Opened, chains: Chains, case: str, tell: Tell, exact: list[dict[str, Array]]
) -> Iterator[ErrorRecord]:
    """Yield one forward record for every point and step of its scans, and for every named output, of a case's calls.

    ``exact`` takes every call's FP64 values.
    """
    every = [*places(opened.record.points), *((p, None) for p in opened.record.outputs)]
    calls = range(opened.record.calls)
    done = 0
    try:
        with jax.enable_x64(True):
            for call, truth in enumerate(chains.calls(opened.tensors(case, call, "inputs") for call in calls)):
                stored = opened.tensors(case, call, "taps")
                if opened.record.outputs:
                    stored |= opened.tensors(case, call, "outputs")
                for p, layer in every:
                    yield _forward_record(opened, case, call, p, layer, stored, truth)
                exact.append(truth.exact)
                done = call + 1
                tell(done, len(calls), f"{case}: {CHAINED}")
    except (CannotLift, NotImplementedError, NotChained) as error:
        for call in calls[done:]:
            for p, layer in every:
                yield place(opened, case, call, p, layer, "forward", unknown=str(error))


def _forward_record(
    opened: Opened, case: str, call: int, p: ProgramPoint, layer: int | None, stored: dict[str, Array], truth: Truth
) -> ErrorRecord:
    whole = stored.get(p.name)
    if lacks := lacks_of(p, layer, whole, stored):
        return place(opened, case, call, p, layer, "forward", **lacks)
    assert whole is not None
    one = step_of(p, layer)
    drawn = [one(values[p.name]) for values in truth.drawn]
    numbers = forward_numbers(one(whole), one(truth.exact[p.name]), drawn, p.name == OUTPUT_LOGITS)
    return place(opened, case, call, p, layer, "forward", **numbers)
