"""Whether a run holds what its program would record today: its operations, parameters, points, inputs (JAX)."""

from collections.abc import Iterable, Mapping
from itertools import product

import jax

from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.keys import bits
from precaudit.interpreters.jaxpr.sites import STATE, TAKEN
from precaudit.interpreters.jaxpr.tag import Tagged
from precaudit.numbers.arrays import Array
from precaudit.recording.programs.preparing import code_of, outputs_of, points_of, prepared, shapes_of, weights_of
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.programs import Opened, ProgramPoint

Table = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], str]]  # of points: stacked, shape, dtype


def tagged_as(opened: Opened, program: Program) -> Tagged:
    """Return a run's program with the taps that it was recorded with; raises UserError where it is another."""
    record = opened.record
    recorded = None if record.asked is None else {*record.asked, *(p.name.partition("#")[0] for p in record.points)}
    made = prepared(program, record.renamed, record.layers, record.loops, taps=record.taps, only=recorded)
    check(opened, program, made)
    return made


def check(opened: Opened, program: Program, made: Tagged) -> None:
    """Raise UserError where ``program``, and ``made`` of it with taps, are not what the run was recorded of."""
    if code_of(made) != opened.record.code:
        raise UserError(
            f"{opened.folder}: the program is not the one that was traced (its operations differ); trace again"
        )
    if weights_of(program, made) != opened.record.weights:
        raise UserError(
            f"{opened.folder}: the parameters are not those that were traced (their hash differs); are they drawn "
            "without a seed? Trace again"
        )
    points = _table(points_of(made, opened.record.layers))
    outputs = _table(outputs_of(program, opened.record.asked))
    if _table(opened.record.points) != points or _table(opened.record.outputs) != outputs:
        raise UserError(f"{opened.folder}/program.json was altered: it lists other points than the program has")
    inputs = shapes_of(jax.tree.map(bits, next(iter(program.cases.values()))))
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
