"""Calls that a script made, as a Program: parameters, state handed on, and what each call was given anew (JAX)."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.errors import CannotJudge, UserError
from precaudit.interpreters.jaxpr.keys import is_key, key_bits
from precaudit.recording.programs.disturbance import largest_difference
from precaudit.recording.programs.planning import ProgramSelection, entry_run, longest_scan, plan, size_of
from precaudit.recording.programs.preparing import error_text
from precaudit.recording.programs.program import OUTPUT, Program
from precaudit.recording.runs.programs import Opened
from precaudit.recording.watching.calls import Kept
from precaudit.recording.watching.functions import name_and_place
from precaudit.schema.digits import digits
from precaudit.schema.selection import names_in, parse_layers

SMALL = 64  # elements: fewer are no parameters, where one call tells nothing


class Roles(NamedTuple):
    """What the input leaves of calls are: parameters, state of the call before {input: output}, and given anew."""

    parameters: tuple[int, ...]
    state: dict[int, int]
    given: tuple[int, ...]


def program_of_calls(calls: Sequence[Kept], name: str) -> Program:
    """Return the calls as one case of a program, each after the first on what the one before it left.

    Constants that the function closes over are parameters. Raises CannotJudge where the arguments that were kept are
    not those that JAX traced.
    """
    closed = calls[0].traced.jaxpr
    shapes = [(tuple(a.shape), a.dtype) for a in closed.in_avals]
    for one in calls:
        found = [tuple(np.shape(x)) for x in one.inputs]
        if found != [shape for shape, _ in shapes]:
            raise CannotJudge(f"{name}: call {one.number} was kept with arguments {found}, JAX traced {shapes}")
    roles = roles_of(calls)
    arrays = [[_array(x, d) for x, (_, d) in zip(one.inputs, shapes, strict=True)] for one in calls]
    params = {"arguments": [arrays[0][j] for j in roles.parameters], "constants": list(closed.consts)}
    moving = [*roles.state, *roles.given]

    def call(params: Any, *inputs: Any) -> Any:
        leaves: list[Any] = [None] * len(shapes)
        for j, x in [*zip(roles.parameters, params["arguments"], strict=True), *zip(moving, inputs, strict=False)]:
            leaves[j] = x
        return tuple(jax.core.eval_jaxpr(closed.jaxpr, params["constants"], *leaves))

    call.__name__ = name
    first = tuple(arrays[0][j] for j in moving)
    outputs = tuple(f"out{i}" for i in range(len(closed.out_avals)))
    case = f"call{calls[0].number}" + (f"to{calls[-1].number}" if len(calls) > 1 else "")
    if len(calls) == 1:
        return Program(call, params, {case: first}, outputs=outputs)
    anew = [jnp.stack([a[j] for a in arrays]) for j in roles.given]

    def advance(inputs: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        step = inputs[-1] + 1
        return (*(out[i] for i in roles.state.values()), *(x[step] for x in anew), step)

    return Program(call, params, {case: (*first, jnp.int32(0))}, steps=len(calls) - 1, advance=advance, outputs=outputs)


def program_of_call(f: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Program:
    """Return one call of a function, jitted or not, as a Program; raises UserError with what it raised."""
    name = name_and_place(f)[0].replace("<lambda>", "function")
    try:
        traced = (f if hasattr(f, "trace") else jax.jit(f)).trace(*args, **kwargs)
        leaves = [x if is_key(x) else np.asarray(x) for x in jax.tree.leaves((args, dict(kwargs)))]
    except Exception as error:
        raise UserError(f"{name} cannot be traced: {error_text(error)}") from None
    return program_of_calls([Kept(0, traced, leaves)], name)


def roles_of(calls: Sequence[Kept]) -> Roles:
    """Return what the input leaves are.

    State: in every call after the first the very object, or bit for bit the array, that the call before gave.
    Parameters: the same bits in every call. Of one call alone: floats of two axes and more, where others are left.
    """
    n = len(calls[0].inputs)
    if len(calls) == 1:
        large = [j for j, x in enumerate(calls[0].inputs) if np.ndim(x) > 1 and np.size(x) > SMALL and _floats(x)]
        large = large if len(large) < n else []  # what depends on no input has no points
        return Roles(tuple(large), {}, tuple(j for j in range(n) if j not in large))
    same = [j for j in range(n) if all(_equal(one.inputs[j], calls[0].inputs[j]) for one in calls[1:])]
    state: dict[int, int] = {}
    for j in range(n):
        if j not in same:
            pairs = list(pairwise(calls))
            links = {after.linked.get(j) for _, after in pairs}
            candidates = [i for i in links if i is not None] if len(links) == 1 else []
            candidates = candidates or [
                i
                for i in range(len(calls[0].outputs))
                if i not in state.values()
                and np.size(calls[0].outputs[i]) > 1
                and all(_equal(before.outputs[i], after.inputs[j]) for before, after in pairs)
            ]
            if candidates:
                state[j] = candidates[0]
    return Roles(tuple(same), state, tuple(j for j in range(n) if j not in same and j not in state))


def _equal(a: object, b: Any) -> bool:
    x, y = (np.asarray(jax.random.key_data(v) if is_key(v) else v) for v in (a, b))
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def _floats(x: object) -> bool:
    return bool(jnp.issubdtype(np.asarray(x).dtype, jnp.floating))


def _array(x: object, dtype: object) -> Any:
    return x if is_key(x) else jnp.asarray(x, dtype)


def size_of_calls(
    program: Program, layers: str | None = None, points: str | None = None, positions: str | None = None
) -> tuple[int, int]:
    """Return the bytes that recording a program's case takes, and of how many calls; filters are as of ``trace``."""
    chosen = None if layers is None else parse_layers(layers, longest_scan(program))
    asked = None if points is None else names_in(points, "point")
    (one,) = plan(program, ProgramSelection(chosen, asked, positions=positions, taps="both"))
    return size_of(one, entry_run(one, chosen)), len(one.calls)


def outputs_apart(opened: Opened, calls: Sequence[Kept]) -> str | None:
    """Return how far recorded outputs are from what the script was given, in words; None where all bits are the same.

    Calls after the first are chained through outputs of the program with taps, which may round otherwise.
    """
    case, began = opened.record.cases[0], opened.record.began
    for call in range(opened.record.calls):
        for name, x in opened.tensors(case, call, "outputs").items():
            y = np.asarray(calls[began + call].outputs[int(name.removeprefix(f"{OUTPUT}out"))])
            if x.tobytes() != y.tobytes():
                off = largest_difference(x, y)
                which = f"output {name.removeprefix(f'{OUTPUT}out')} of call {call}"
                return f"{which} differs from the script's by up to {digits(off)}"
    return None


def check_same_calls(opened: Opened, calls: Sequence[Kept]) -> None:
    """Raise UserError where a script's calls are given other values than those of a run were."""
    roles = roles_of(calls)
    moving = [*roles.state, *roles.given]
    for call, one in enumerate(calls[opened.record.began :][: opened.record.calls]):
        given = opened.tensors(opened.record.cases[0], call, "inputs")
        for i, j in enumerate(moving):
            recorded, now = given.get(str(i)), np.asarray(key_bits(one.inputs[j]))
            if call and j in roles.state:  # what the call before left, as it was recorded
                continue
            if recorded is None or recorded.tobytes() != now.astype(recorded.dtype).tobytes():
                raise UserError(
                    f"argument {j} of call {one.number} is another than in {opened.folder}: what is sampled without a "
                    "seed, or read anew, cannot be compared again"
                )
