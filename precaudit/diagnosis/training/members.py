"""A side of a training: its steps recorded, in FP64, and as correct makings of the same steps (JAX)."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.diagnosis.training.distances import spread_of
from precaudit.diagnosis.training.records import TrainingMember
from precaudit.diagnosis.training.values import EXACT, MEMBERS, NAMES, chains_folder, exact_file
from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.explicit import without_mesh
from precaudit.interpreters.jaxpr.keys import key_bits
from precaudit.interpreters.jaxpr.shadow import CannotLift, refusal
from precaudit.numbers.arrays import Array
from precaudit.recording.programs.loading import load_program, program_of
from precaudit.recording.programs.planning import ProgramSelection
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.runs.arrays import write_tensors
from precaudit.recording.runs.programs import Opened, open_program_run
from precaudit.references.comparison.program_pieces import traced_entries
from precaudit.references.traced.forward import CallValues, Chains, NotChained, recorded_calls
from precaudit.references.traced.units import flushes_of, units_of
from precaudit.schema.records.lines import write_lines
from precaudit.writing import write_whole

DRAWN = 8  # correct makings of A's steps beside its run; as many again where a compiler may leave roundings out


class Made(NamedTuple):
    """A step as the chains have it: points and outputs by name, and the state that it was given, by leaf."""

    values: dict[str, Array]
    state: dict[str, Array]


def record_side(
    reference: str, folder: Path, steps: int, like: Path | None, points: Sequence[str] | None, drawn: int
) -> None:
    """Record a side's steps, and what FP64 and ``drawn`` correct makings are of them; raises UserError.

    Of B, which needs no members, what has no FP64 is left without.
    """
    opened = record_steps(reference, folder, steps, like, points)
    try:
        write_chains(opened, reference, chains_folder(folder), drawn)
    except UserError:
        if drawn:
            raise


def record_steps(reference: str, folder: Path, steps: int, like: Path | None, points: Sequence[str] | None) -> Opened:
    """Run ``steps`` of a training and record them, and the state after the last one; raises UserError.

    ``like``: a run whose first state and batches this begins with, in formats of its own.
    """
    program = load_program(reference).altered(steps=steps)
    if program.then:
        raise UserError(f"{reference}: a training has one entry point; leave out then")
    if like is not None:
        program = program.altered(cases=_same_beginning(program, open_program_run(like)))
    options = ProgramTraceOptions(reference, force=True, command="precaudit bisect --steps")
    return trace_program(program, folder, ProgramSelection(points=points), options)


def _same_beginning(program: Program, opened: Opened) -> dict[str, tuple[Any, ...]]:
    """Return a program's cases with the values that another run began with; raises UserError where they do not fit."""
    found = {}
    if set(program.cases) != set(opened.record.cases):
        raise UserError(f"cases are {', '.join(opened.record.cases)} in A, {', '.join(program.cases)} in B")
    for case, inputs in program.cases.items():
        leaves, structure = jax.tree.flatten(inputs)
        given = opened.tensors(case, 0, "inputs")
        if [np.shape(key_bits(x)) for x in leaves] != [given[str(i)].shape for i in range(len(given))]:
            raise UserError(f"case {case!r}: the state of A and B are of other shapes: they begin from no one state")
        own = program.inputs({str(i): given[str(i)] for i in range(len(given))})
        cast = [jnp.asarray(x, y.dtype) if _floats(y) else x for x, y in zip(jax.tree.leaves(own), leaves, strict=True)]
        found[case] = jax.tree.unflatten(structure, cast)
    return found


def _floats(x: object) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def write_chains(opened: Opened, program: Program | str | None, folder: Path, drawn: int) -> None:
    """Write a run's steps in FP64 into a folder, and how far ``drawn`` correct makings of them are apart.

    Raises UserError where the program has no FP64 meaning, or does not come to its end in FP64.
    """
    folder.mkdir(parents=True, exist_ok=True)
    one = traced_entries(opened, program_of(opened, program))[0]
    found: list[TrainingMember] = []
    try:
        with jax.enable_x64(True), without_mesh():
            chains = Chains(one.program, one.made, units_of(opened.record), flushes_of(opened.record))
            for case in opened.record.cases:
                found += _case(opened, chains, case, folder, drawn)
    except (CannotLift, NotImplementedError) as error:
        raise UserError(f"no FP64 of the program: {refusal(error)}") from None
    except NotChained as error:
        raise UserError(f"the steps do not follow each other in FP64: {error}") from None
    write_lines(folder / MEMBERS, found)
    paths = jax.tree_util.tree_leaves_with_path(next(iter(one.program.cases.values())))
    names = {str(i): jax.tree_util.keystr(path) for i, (path, _) in enumerate(paths)}
    write_whole(folder / NAMES, "".join(f"{i} {name}\n" for i, name in names.items()))


def _case(opened: Opened, chains: Chains, case: str, folder: Path, drawn: int) -> Iterator[TrainingMember]:
    """Yield how far members are apart in every step of a case, and write FP64's values of it."""
    at = opened.record.cases.index(case)
    ways = [False, True] if drawn and chains.other else [False]
    for call, each in enumerate(zip(*(_steps(opened, chains, case, drawn, w) for w in ways), strict=True)):
        exact = each[0][0]
        members = [m for way in each for m in way[1:]]
        write_tensors(folder, exact_file(at, call), _flat(exact))
        taps, outputs, inputs = (opened.tensors(case, call, kind) for kind in ("taps", "outputs", "inputs"))
        for name, own in [*taps.items(), *outputs.items()] if call < opened.record.calls - 1 else ():
            if name in exact.values and members:
                where = "output" if name in outputs else "point"
                yield _member(case, call, where, name, own, [m.values[name] for m in members])
        for number, own in inputs.items() if call and members else ():
            if number in exact.state:
                yield _member(case, call - 1, "state", number, own, [m.state[number] for m in members])


def _steps(opened: Opened, chains: Chains, case: str, drawn: int, strictly: bool) -> Iterator[list[Made]]:
    """Yield every step as FP64 and each drawn chain has it."""
    for made in chains.calls(recorded_calls(opened, case), drawn, strictly):
        yield [Made(v, _state(end[0])) for v, end in zip(_values(made), chains.ends, strict=True)]


def _values(made: CallValues) -> list[dict[str, Array]]:
    return [made.exact, *made.drawn]


def _state(inputs: object) -> dict[str, Array]:
    leaves = jax.tree.leaves(inputs)
    return {str(i): np.asarray(x) for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)}


def _flat(made: Made) -> dict[str, Array]:
    every = {**made.values, **{f"{EXACT}{i}": x for i, x in made.state.items()}}
    return {n: np.ascontiguousarray(x) for n, x in every.items() if np.issubdtype(x.dtype, np.floating)}


def _member(case: str, step: int, where: Any, name: str, own: Array, drawn: Sequence[Array]) -> TrainingMember:
    norm, spread, gain = spread_of(own, drawn)
    return TrainingMember(case=case, step=step, where=where, name=name, norm=norm, spread=spread, gain=gain)
