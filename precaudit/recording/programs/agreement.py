"""Whether a run holds what its program would record today: its operations, parameters, points, inputs (JAX)."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import jax

from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.keys import key_bits
from precaudit.interpreters.jaxpr.sites import STATE, TAKEN
from precaudit.interpreters.jaxpr.tag import Tagged, TapChoice
from precaudit.numbers.arrays import Array
from precaudit.recording.programs.entries import entries_of
from precaudit.recording.programs.preparing import (
    code_hash,
    outputs_of,
    points_of,
    prepare_program,
    shapes_of,
    weights_hash,
)
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.kinds import manifest_of
from precaudit.recording.runs.programs import Opened, ProgramPoint

Table = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], str]]  # of points: stacked, shape, dtype


class OfRun(NamedTuple):
    """An entry point of a recorded program: its part of the run, itself as a program, and with its taps."""

    opened: Opened
    program: Program
    made: Tagged


def recorded_entries(opened: Opened, program: Program) -> list[OfRun]:
    """Return the entry points that a run holds, in order; raises UserError where the program is another.

    Cases of those after the program's first have the recorded inputs of their first calls.
    """
    own = {one.entry: one for one in entries_of(program)}
    found = []
    for view in opened.entries:
        name = view.record.entry
        if name not in own:
            raise UserError(f"{opened.folder}: the program has no entry point {name!r} any more; trace again")
        one = own[name]
        made = tagged_as(view, one)
        if name != program.entry:
            given = {case: one.inputs(view.tensors(case, 0, "inputs")) for case in view.record.cases}
            one = replace(one, cases=given)
        found.append(OfRun(view, one, made))
    return found


def tagged_as(opened: Opened, program: Program) -> Tagged:
    """Return an entry point with the taps that it was recorded with; raises UserError where it is another."""
    record = opened.record
    recorded = None if record.asked is None else {*record.asked, *(p.name.partition("#")[0] for p in record.points)}
    choice = TapChoice(record.taps, record.renamed, recorded)
    made = prepare_program(program, choice, record.layers, record.loops)
    check_agreement(opened, program, made)
    return made


def check_agreement(opened: Opened, program: Program, made: Tagged) -> None:
    """Raise UserError where ``program``, and ``made`` of it with taps, are not what the run was recorded of."""
    if code_hash(made) != opened.record.code:
        raise UserError(
            f"{opened.folder}: the program is not the one that was traced (its operations differ); trace again"
        )
    if weights_hash(program, made) != opened.record.weights:
        raise UserError(
            f"{opened.folder}: the parameters are not those that were traced (their hash differs); are they sampled "
            "without a seed? Trace again"
        )
    points = _table(points_of(made, opened.record.layers))
    outputs = _table(outputs_of(program, opened.record.asked))
    if _table(opened.record.points) != points or _table(opened.record.outputs) != outputs:
        raise UserError(f"{manifest_of(opened.folder)} was altered: it lists other points than the program has")
    inputs = shapes_of(jax.tree.map(key_bits, next(iter(program.cases.values()))))
    for case, call in product(opened.record.cases, range(opened.record.calls)):
        where = f"{opened.folder} was altered: {case}, call {call}"
        if strange := _strange(opened.tensors(case, call, "taps"), points):
            raise UserError(f"{where} holds {strange}, which is none of the program's points")
        given = opened.tensors(case, call, "inputs")
        if given.keys() != {str(i) for i in range(len(inputs))} or (
            shapes_of(tuple(given[str(i)] for i in range(len(inputs)))) != inputs
        ):
            raise UserError(f"{where} has other inputs than the program takes")


def _table(points: Iterable[ProgramPoint]) -> Table:
    return {p.name: (p.stacked, p.shape, p.dtype) for p in points}


def _strange(taps: Mapping[str, Array], points: Table) -> str:
    """Return the first array that no point has, in words; a point that has none is unknown when it is judged."""
    for name, x in taps.items():
        if name in points:
            stacked, shape, dtype = points[name]
            if (x.shape, x.dtype.name) != ((*stacked, *shape), dtype):
                return f"{name}, {x.dtype.name} {list(x.shape)}"
        elif not name.startswith(STATE) and name.removesuffix(TAKEN) not in points:
            return name
    return ""
