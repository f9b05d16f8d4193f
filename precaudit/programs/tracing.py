"""Recording a program: its jitted function with taps, call after call, and what tapping did to its outputs (JAX)."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from precaudit.errors import UserError, enough_memory
from precaudit.programs.program import Program
from precaudit.progress import Advance, silent
from precaudit.records import Prediction, number
from precaudit.runs.programs import (
    SCHEMA,
    Disturbance,
    Opened,
    ProgramPoint,
    ProgramRun,
    file_name,
    open_program_run,
    write_manifest,
    write_tensors,
)
from precaudit.store import check_space, prepare_folder, tensor_hash
from precaudit.tpu.target import Target
from precaudit.tracing.predicting import assumptions, device_name, predicted, program_for
from precaudit.transforms import reap
from precaudit.transforms.sites import numbered
from precaudit.transforms.tag import Tagged, tagged


def prepared(program: Program, renamed: Mapping[str, str] | None = None, layers: Sequence[int] | None = None) -> Tagged:
    """Return a program with its taps; raises UserError where it cannot be traced, or its cases differ in shape.

    ``renamed``: names that a run was recorded under, in place of the program's ``points``; ``layers``: the steps of its
    outermost scans that are recorded, with the states these begin and end with.
    """
    for x in jax.tree.leaves((program.params, dict(program.cases))):
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended):
            raise UserError(
                "Program: a typed PRNG key cannot be recorded; give jax.random.key_data(key), wrapped inside"
            )
    shapes = {name: _shapes(inputs) for name, inputs in program.cases.items()}
    first, *rest = shapes.items()
    for name, found in rest:
        if found != first[1]:
            raise UserError(
                f"case {name!r} has other shapes or formats than {first[0]!r}: give it a Program of its own"
            )
    inputs = next(iter(program.cases.values()))
    try:
        made = tagged(
            program.call,
            program.params,
            *inputs,
            carried=layers is not None,
            renamed=program.points if renamed is None else renamed,
        )
    except UserError:
        raise
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"the program cannot be traced: {type(error).__name__}: {said[0]}") from None
    _outputs(program)
    inside = next((s for s in made.sites if s.inside), None)
    if inside is not None:
        raise UserError(
            f"tap {inside.name!r} lies inside {inside.inside}, where it has no value of its own; leave it out"
        )
    if layers is not None:
        _within(made, layers)
    return made


def _within(made: Tagged, layers: Sequence[int]) -> None:
    """Raise UserError unless a program scans over steps that have points, the layers asked for among them."""
    most = _steps(made)
    if outside := [i for i in layers if not 0 <= i < most]:
        raise UserError(f"--layers: layer {outside[0]} is out of range: the program's scans have {most} steps at most")


def _steps(made: Tagged) -> int:
    found = [s.stacked[0] for s in made.sites if s.stacked]
    if not found:
        raise UserError("--layers: this program scans over nothing; points of its layers have names of their own")
    return max(found)


def steps_of(program: Program) -> int:
    """Return how many steps the longest outermost scan of a program with points has; raises UserError without one."""
    return _steps(prepared(program))


def points(program: Program) -> tuple[ProgramPoint, ...]:
    """Return the points of a program, in its order."""
    return _points(prepared(program), None)


def _points(made: Tagged, layers: Sequence[int] | None) -> tuple[ProgramPoint, ...]:
    def stacked(lengths: tuple[int, ...]) -> tuple[int, ...]:
        return lengths if layers is None or not lengths else (sum(i < lengths[0] for i in layers), *lengths[1:])

    return tuple(
        ProgramPoint(
            name=name, shape=s.shape, stacked=stacked(s.stacked), dtype=np.dtype(s.dtype).name,
            source=made.tags[s.name].source, scope=made.tags[s.name].scope, primitive=made.tags[s.name].primitive,
        )
        for name, s in zip(numbered(made.sites), made.sites, strict=True)
    )  # fmt: skip


def code_of(made: Tagged) -> str:
    """Return the SHA-256 of a program's jaxpr, addresses of functions in it aside."""
    return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "0x", str(made.jaxpr)).encode()).hexdigest()


def weights_of(program: Program, made: Tagged) -> str:
    """Return the hash of a program's parameters and of the arrays it closes over: format, shape and bytes of each."""
    digest = hashlib.sha256()
    for x in (*jax.tree.leaves(program.params), *made.jaxpr.consts):
        array = np.asarray(x)
        digest.update(f"{array.dtype} {array.shape} {tensor_hash(array)}\n".encode())
    return digest.hexdigest()


@enough_memory()
def trace(
    program: Program, folder: Path | str, reference: str = "", force: bool = False,
    command: str = "precaudit.trace(...)", tell: Advance = silent, layers: Sequence[int] | None = None,
    target: Target | None = None,
) -> Opened:  # fmt: skip
    """Run every case of a program with taps and record them; return the run opened.

    ``layers``: the steps of the program's outermost scans that are recorded, ascending (None: all), with the states
    that they begin and end with. ``target``: a TPU that is not here, as which the program is run (None: JAX's device).

    Raises UserError before anything is written where the program cannot be traced, has no points, or the folder or the
    disk cannot take it.
    """
    layers = None if layers is None else tuple(sorted(set(layers)))
    made = prepared(program, layers=layers)
    if not made.sites:
        raise UserError("the program has no points: it holds no product, no cache write and no result of floats")
    folder, calls, found = Path(folder), program.steps + 1, _points(made, layers)
    size = sum(int(np.prod((*p.stacked, *p.shape))) * jnp.dtype(p.dtype).itemsize for p in found)
    inputs_size = sum(np.asarray(x).nbytes for x in jax.tree.leaves(next(iter(program.cases.values()))))
    needed = len(program.cases) * calls * (size + inputs_size) + (1 << 20)
    check_space(folder, needed, "give smaller inputs or fewer steps")
    prepare_folder(folder, force)
    record = ProgramRun(
        schema=SCHEMA, id=folder.resolve().name, program=reference, code=code_of(made),
        weights=weights_of(program, made), automatic=made.automatic,
        renamed=dict(program.points or {}), cases=tuple(program.cases), calls=calls, points=found,
        outputs=_outputs(program), layers=layers,
        device=str(jax.devices()[0]) if target is None else device_name(target), command=command,
        warnings=() if target is None else assumptions(target),
        versions={name: version(name) for name in ("jax", "jaxlib", "numpy")}, started=_now(),
    )  # fmt: skip
    write_manifest(folder, record)
    captured, bare = (_jitted(f, target) for f in (reap(made.call, layers=layers), program.call))
    hashes: dict[str, str] = {}
    told, written = [], 0
    for i, (case, first) in enumerate(program.cases.items()):
        inputs = first
        for call in range(calls):
            out, taps = captured(program.params, *inputs)
            if call == 0:
                given = (program.params, *inputs)
                told.append(_disturbance(case, out, bare(*given), predicted(captured, given, bare, given)))
            named = program.named(out)
            for kind, tensors in (("taps", taps), ("inputs", _leaves(inputs)), ("outputs", named)):
                name = file_name(record, case, call, kind)
                arrays = {k: np.asarray(x, order="C") for k, x in tensors.items()}
                hashes[name], nbytes = write_tensors(folder, name, arrays)
                written += nbytes
            tell(i * calls + call + 1, calls * len(program.cases), f"{case}, call {call}")
            if call + 1 < calls:
                inputs = _next(program, inputs, out)
    done = msgspec.structs.replace(
        record,
        neutrality=tuple(told),
        hashes=hashes,
        bytes=written,
        finished=_now(),
    )
    write_manifest(folder, done)
    return open_program_run(folder)


def _jitted(function: Callable[..., Any], target: Target | None) -> Callable[..., Any]:
    return jax.jit(function) if target is None else program_for(target, function)


def _outputs(program: Program) -> tuple[ProgramPoint, ...]:
    """Return the outputs that a program names, as points; raises UserError where it names others than it has."""
    if program.outputs is None:
        return ()
    inputs = next(iter(program.cases.values()))
    named = jax.eval_shape(lambda *given: program.named(program.call(*given)), program.params, *inputs)
    return tuple(
        ProgramPoint(
            name=n, shape=x.shape, stacked=(), dtype=np.dtype(x.dtype).name, source="", scope="", primitive="output"
        )
        for n, x in named.items()
    )


def _now() -> str:
    return datetime.now(UTC).isoformat("T", "seconds")


def _shapes(inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [(np.shape(x), str(jnp.result_type(x))) for x in jax.tree.leaves(inputs)]


def _leaves(inputs: tuple[Any, ...]) -> dict[str, Any]:
    return {str(i): x for i, x in enumerate(jax.tree.leaves(inputs))}


def _next(program: Program, inputs: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
    """Return the next call's inputs; raises UserError where their shapes are not those of this one's."""
    assert program.advance is not None
    following = program.advance(inputs, out)
    if not isinstance(following, tuple) or _shapes(following) != _shapes(inputs):
        raise UserError("Program: advance gave inputs of other shapes or formats than those it was given")
    return following


def _disturbance(case: str, captured: Any, bare: Any, expected: Prediction | None) -> Disturbance:
    """Compare a case's outputs with those of the program without taps."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, (captured, bare)), strict=True)]
    if all(a.tobytes() == b.tobytes() for a, b in pairs):
        return Disturbance(case=case, bitwise=True, max_diff=0.0, predicted=expected)
    sizes = [float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)), initial=0.0)) for a, b in pairs]
    return Disturbance(case=case, bitwise=False, max_diff=number(max(sizes)), predicted=expected)
