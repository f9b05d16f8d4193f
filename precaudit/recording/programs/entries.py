"""The entry points of a program, each as a program of its own, and the state that goes from one to the next (JAX)."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.wide import halve_widths
from precaudit.recording.programs.preparing import error_text, next_inputs
from precaudit.recording.programs.program import Entry, Program


def entries_of(program: Program) -> tuple[Program, ...]:
    """Return each entry point as a program, in order; cases of those after the first have shapes and no values.

    Raises UserError where ``begin`` does not make inputs of what the entry point before leaves.
    """
    found = [program.altered(then={})]
    for name, entry in program.then.items():
        found.append(_as_program(program, name, entry, _shapes(program, found[-1], name)))
    return tuple(found)


def with_values(program: Program) -> tuple[Program, ...]:
    """Return the same with the inputs of every case: each entry point is run, jitted, on what the last one leaves."""
    found = [program.altered(then={})]
    for name, entry in program.then.items():
        cases = {}
        for case in program.cases:
            cases[case] = first_inputs(entry, name, *_last(found[-1], found[-1].cases[case]))
        found.append(_as_program(program, name, entry, cases))
    return tuple(found)


def first_inputs(entry: Entry, name: str, inputs: tuple[Any, ...], outputs: object) -> tuple[Any, ...]:
    """Return an entry point's first inputs, of the last call's before it; raises UserError with what ``begin`` said."""
    try:
        made = entry.begin(inputs, outputs)
    except Exception as error:
        raise UserError(f"Program: begin of {name} raised {error_text(error)}") from None
    return _inputs(name, halve_widths(made))


def _inputs(name: str, made: object) -> tuple[Any, ...]:
    if not isinstance(made, tuple):
        raise UserError(f"Program: begin of {name} must return a tuple of inputs, not {type(made).__name__}")
    return made


def _as_program(program: Program, name: str, entry: Entry, cases: Mapping[str, tuple[Any, ...]]) -> Program:
    return program.altered(
        call=entry.call,
        cases=cases,
        steps=entry.steps,
        advance=entry.advance,
        outputs=entry.outputs,
        points=entry.points,
        tokens=entry.tokens,
        start=entry.start,
        lengths=entry.lengths,
        entry=name,
        then={},
    )


def _shapes(program: Program, before: Program, name: str) -> dict[str, tuple[Any, ...]]:
    """Return the shapes of an entry point's first inputs; it is run where ``begin`` reads values."""
    inputs, every = next(iter(before.cases.values())), list(program.then)
    try:
        out = jax.eval_shape(before.call, before.params, *inputs)
        made = jax.eval_shape(program.then[name].begin, inputs, out)
    except Exception:  # the user's code: what it says is told where it is run
        case = next(iter(program.cases))
        until = {n: program.then[n] for n in every[: every.index(name) + 1]}
        made = with_values(program.altered(cases={case: program.cases[case]}, then=until))[-1].cases[case]
    return dict.fromkeys(program.cases, jax.tree.map(_shape, _inputs(name, made)))


def _shape(x: Any) -> Any:
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def calls_of(one: Program, inputs: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the inputs and outputs of an entry point's calls; raises UserError where it does not run."""
    run = jax.jit(one.call)
    for call in range(one.steps + 1):
        try:
            out = run(one.params, *inputs)
        except Exception as error:
            raise UserError(f"{one.entry}: the program does not run: {error_text(error)}") from None
        yield inputs, out
        if call < one.steps:
            inputs = next_inputs(one, inputs, out)


def token_ids(program: Program, case: str) -> list[int]:
    """Return the ids that the calls of a case read, in order; raises UserError where the program does not say which."""
    if program.tokens is None:
        raise UserError("which input of the program holds its token ids? say it: Program(..., tokens=0)")
    read = (jax.tree.leaves(inputs)[program.tokens] for inputs, _ in calls_of(program, program.cases[case]))
    return [int(x) for ids in read for x in np.asarray(ids).reshape(-1)]


def _last(one: Program, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    *_, last = calls_of(one, inputs)
    return last
