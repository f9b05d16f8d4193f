"""Does it matter, and what helps: what changed a program's outputs, and what its lines gain in float32 (JAX).

What changed them is of the last call that was recorded, on the inputs it had then; what lines gain is of the last calls
one after another, each on what the one before makes: a line may round what is handed on. Both are kept beside the run.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from precaudit.diagnosis.evidence.kept import read_kept, write_kept
from precaudit.diagnosis.evidence.last_call import NOT_FINITE, Last, call_outputs
from precaudit.diagnosis.evidence.raised_lines import line_remedies
from precaudit.diagnosis.evidence.records import LineRemedy, Shares
from precaudit.diagnosis.evidence.shares import Goal, LiftedProgram, RecordedTaps, goal_of, split_change, unknown_shares
from precaudit.interpreters.jaxpr import CannotLift
from precaudit.interpreters.jaxpr.emulate import emulate_program
from precaudit.interpreters.jaxpr.sites import TAKEN
from precaudit.interpreters.jaxpr.tag import Tagged
from precaudit.numbers.arrays import Array, widen
from precaudit.progress import Advance
from precaudit.recording.programs.program import OUTPUT_LOGITS, Program
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import manifest_of
from precaudit.recording.runs.programs import Opened
from precaudit.references.traced.forward import effort
from precaudit.schema.metrics.logits import is_distribution, kl
from precaudit.schema.metrics.sizes import norm
from precaudit.schema.records.base import value

NO_ARRAY = "no output that is named is an array of floats: of a tree, name its keys or its parts"
SHARED = 3  # cases whose outputs are shared out
DISTANCE = "distance"
NOT_ASKED = "the run holds no output: trace it without --points, or with an output among them"
UNNAMED = 'no output is named: Program(..., outputs="logits"), or another name, says what matters'
UNLIFTED = (CannotLift, NotImplementedError, TypeError, ValueError, jax.errors.JaxRuntimeError)


class Effects(NamedTuple):
    """What changed the outputs, and what lines gain, best first; ``unknown``: why the latter is not told."""

    shares: tuple[Shares, ...] = ()
    lines: tuple[LineRemedy, ...] = ()
    unknown: str = ""


def effects(opened: Opened, program: Program, made: Tagged, objective: str, tell: Advance) -> Effects:
    """Return what changed the outputs of a program's run, and what its lines gain."""
    names = [p.name for p in opened.record.outputs]
    if not names:
        why = UNNAMED if program.outputs is None else NO_ARRAY
        return Effects(unknown=why if opened.record.asked is None else NOT_ASKED)
    last = Last(opened, program, made, OUTPUT_LOGITS if OUTPUT_LOGITS in names else names[0])
    objective = objective if last.distributions else DISTANCE
    found = read_kept(opened.folder, "shares.jsonl", Shares)
    if not found or any(s.objective != objective or s.unknown for s in found):
        cases = opened.record.cases[:SHARED]
        found = tuple(
            msgspec.structs.replace(x, run=file_hash(manifest_of(opened.folder)))
            for x in output_shares(last, cases, objective, tell)
        )
        write_kept(opened.folder, "shares.jsonl", found)
    lines = read_kept(opened.folder, "lines.jsonl", LineRemedy)
    if lines is None:
        try:
            lines = tuple(line_remedies(last, tell))
        except UNLIFTED as error:
            return Effects(found, unknown=_first(error))
        write_kept(opened.folder, "lines.jsonl", lines)
    return Effects(found, lines)


def output_shares(last: Last, cases: Sequence[str], objective: str, tell: Advance) -> Iterator[Shares]:
    """Yield what changed the output that is looked at, of every case."""
    ways = [partial(jax.jit, compiler_options=how) for how in (effort(last.made), None)]
    with jax.enable_x64(True):
        exactly = [compiled(emulate_program(last.jaxpr, None)) for compiled in ways]
        for i, case in enumerate(cases):
            tell(i, len(cases), "gradients of the output")
            try:
                each = (_output_shares(last, case, objective, *way) for way in zip(exactly, ways, strict=True))
                yield next(
                    (x for x in each if x.unknown or _all_finite(x)), unknown_shares(case, NOT_FINITE, objective)
                )
            except UNLIFTED as error:
                yield unknown_shares(case, _first(error), objective)


def _all_finite(found: Shares) -> bool:
    """Whether all numbers are finite; of a program that XLA optimises little they may not be, and are by default."""
    numbers = [found.fp64, found.change, found.explained, *(s.share for s in found.shares)]
    return bool(np.isfinite([value(x) for x in numbers]).all())


def _output_shares(last: Last, case: str, objective: str, exactly: Any, compiled: Callable[..., Any]) -> Shares:
    """Return the shares in the row of logits that is farthest from FP64's, or in the whole output."""
    if last.opened.record.layers is not None:
        return unknown_shares(case, "some layers were not recorded; trace without --layers", objective)
    recorded = last.recorded_output(case)
    values = {n: x for n, x in last.opened.tensors(case, last.call, "taps").items() if _floats(n, x)}
    if any(np.isnan(widen(x)).any() for x in values.values()):
        return unknown_shares(case, "values that were recorded are NaN", objective)
    if not (all(map(is_distribution, recorded)) if last.distributions else np.isfinite(recorded).all()):
        return unknown_shares(case, "the output that was recorded is not finite", objective)
    steps = {p.name: prod(p.stacked) for p in last.opened.record.points if p.stacked and p.name in values}
    given = (last.program.params, *last.inputs(case))
    row, goal = None, _along(recorded.reshape(-1))
    if last.distributions:
        exact = np.asarray(
            last.of(call_outputs(last, exactly(0, *jax.tree.leaves(given), held=last.loop_decisions(case))))
        )
        row, goal = _worst(exact, recorded), partial(goal_of, objective)

    def flat(*args: Any) -> Any:
        x = last.of(last.made.call(*args))
        return x.reshape(-1) if row is None else x[row]

    kept = recorded.reshape(-1) if row is None else recorded[row]
    taps = RecordedTaps(values, steps, last.loop_decisions(case))
    found = split_change(LiftedProgram(flat, compiled=compiled), given, taps, kept, goal)
    return found.record(case, objective, last.output)


def _along(recorded: Array) -> Callable[[Array], Goal]:
    """Return the distance from FP64 along the direction in which the output was off: linear, so that shares add up."""

    def goal(exact: Array) -> Goal:
        off = recorded - exact
        unit = off / size if (size := norm(off)) else off
        return lambda x: jnp.dot(x - exact, unit)

    return goal


def _worst(exact: Array, recorded: Array) -> int:
    """Return the row of logits that is farthest from FP64's, in KL."""
    each = [kl(e, r) for e, r in zip(exact, recorded, strict=True)]
    return int(np.nanargmax(each)) if np.isfinite(each).any() else 0


def _floats(name: str, x: Array) -> bool:
    """Whether a recorded tensor is a point's values, which an error may be added to."""
    return not name.endswith(TAKEN) and bool(jnp.issubdtype(x.dtype, jnp.floating))


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
