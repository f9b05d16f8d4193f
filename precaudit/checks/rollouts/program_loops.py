"""A user's program in both loops: ``call`` jitted and called from Python, and all its calls in one while loop."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax

from precaudit.checks.rollouts.generation import Loop
from precaudit.checks.rollouts.timing import Spread
from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.keys import on_host
from precaudit.progress import Advance, silent
from precaudit.recording.programs.program import Program
from precaudit.recording.tracing.programs import Compiled, compile_program
from precaudit.schema.records.base import Record


class ProgramTiming(Record, frozen=True, omit_defaults=False, tag_field="kind", tag="program_timing"):
    """What a program's ``calls`` took in a loop, over all its cases, in ``rounds`` rounds.

    ``compile``: seconds; ``call_ms``: milliseconds of a call; ``ratio``: the first loop's over it, round by round.
    ``same``: whether the last call's outputs are the first loop's, bit for bit. ``why``: why the loop cannot run.
    """

    program: str
    loop: Loop
    calls: int
    rounds: int
    compile: float | None = None
    call_ms: Spread | None = None
    ratio: Spread | None = None
    same: bool | None = None
    why: str = ""


@dataclass(frozen=True)
class _Way:
    """A loop that is compiled: ``run(inputs)`` returns the last call's outputs."""

    run: Callable[[tuple[Any, ...]], Any]
    seconds: float


def measure_program(
    program: Program, name: str, loops: Sequence[Loop], rounds: int, tell: Advance = silent
) -> list[ProgramTiming]:
    """Run a program's cases in each loop, one after the other, in every second round backwards.

    Raises UserError for a program of a single call. A loop that cannot run is a record that says why.
    """
    if not program.steps:
        raise UserError(f"{name}: one call has no loop; give the Program steps and advance")
    ways, refused = _ways(program, loops)
    for way in ways.values():  # what ``advance`` does outside of compiled programs is compiled on its first call, too
        jax.block_until_ready(way.run(next(iter(program.cases.values()))))
    took: dict[Loop, list[float]] = {loop: [] for loop in ways}
    last: dict[Loop, Any] = {}
    for r in range(rounds):
        tell(r, rounds, f"round {r + 1} of {rounds}")
        for loop in list(ways)[:: -1 if r % 2 else 1]:
            began = time.perf_counter()
            last[loop] = [jax.block_until_ready(ways[loop].run(inputs)) for inputs in program.cases.values()]
            took[loop].append(time.perf_counter() - began)
    calls = (program.steps + 1) * len(program.cases)
    first = next(iter(ways), None)
    made = []
    for loop in loops:
        if first is None or loop not in ways:
            made.append(ProgramTiming(program=name, loop=loop, calls=calls, rounds=rounds, why=refused[loop]))
            continue
        made.append(
            ProgramTiming(
                program=name,
                loop=loop,
                calls=calls,
                rounds=rounds,
                compile=ways[loop].seconds,
                call_ms=Spread.of([1e3 * t / calls for t in took[loop]]),
                ratio=Spread.of([f / t for f, t in zip(took[first], took[loop], strict=True)]),
                same=_bits(last[loop]) == _bits(last[first]),
            )
        )
    return made


def _ways(program: Program, loops: Sequence[Loop]) -> tuple[dict[Loop, _Way], dict[Loop, str]]:
    """Return the loops that compile, and why the others do not."""
    inputs = next(iter(program.cases.values()))
    ways: dict[Loop, _Way] = {}
    refused: dict[Loop, str] = {}
    for loop in loops:
        function = program.call if loop == "python" else partial(_whole, program)
        try:
            made = compile_program(jax.jit(function), program.params, *inputs)
        except Exception as error:  # the user's code, traced, raises what it likes
            refused[loop] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            continue
        ways[loop] = _Way(partial(_run_steps if loop == "python" else _once, program, made), made.seconds)
    return ways, refused


def _whole(program: Program, params: object, *inputs: Any) -> Any:
    """Return what the last of all calls returns, made in one while loop."""
    assert program.advance is not None
    advance = program.advance

    def step(_: object, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        following = advance(*carry)
        return following, program.call(params, *following)

    return lax.fori_loop(0, program.steps, step, (inputs, program.call(params, *inputs)))[1]


def _once(program: Program, made: Compiled, inputs: tuple[Any, ...]) -> Any:
    return made(program.params, *inputs)


def _run_steps(program: Program, made: Compiled, inputs: tuple[Any, ...]) -> Any:
    assert program.advance is not None
    out = made(program.params, *inputs)
    for _ in range(program.steps):
        inputs = program.advance(inputs, out)
        out = made(program.params, *inputs)
    return out


def _bits(outputs: object) -> list[bytes]:
    return [on_host(x).tobytes() for x in jax.tree.leaves(outputs)]
