"""Recording a program: its jitted function with taps, call after call, and what tapping did to its outputs (JAX)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from precaudit.errors import UserError, enough_memory
from precaudit.interpreters.gpu import units as gpu
from precaudit.interpreters.jaxpr.bounded import MORE
from precaudit.interpreters.jaxpr.keys import on_host
from precaudit.interpreters.jaxpr.sites import STATE
from precaudit.interpreters.jaxpr.subnormals import device_flushes
from precaudit.interpreters.jaxpr.tag import Which, capturing
from precaudit.interpreters.tpu import units as tpu
from precaudit.interpreters.tpu.hlo import Module
from precaudit.interpreters.tpu.target import Target
from precaudit.progress import Advance, silent
from precaudit.recording.programs.preparing import (
    code_of,
    following,
    jitted,
    loops_of,
    outputs_of,
    points,
    points_of,
    prepared,
    steps_of,
    support_of,
    told,
    weights_of,
)
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.folders import check_space, prepare_folder
from precaudit.recording.runs.programs import (
    SCHEMA,
    Disturbance,
    Opened,
    ProgramRun,
    file_name,
    open_program_run,
    write_manifest,
    write_tensors,
)
from precaudit.recording.tracing.predicting import Predicted, assumptions, device_name, made_of, predicted
from precaudit.schema.policies import Policy
from precaudit.schema.records.base import number
from precaudit.schema.records.devices import Way
from precaudit.schema.records.runs import Prediction
from precaudit.schema.selection import parse_positions

STRICTLY = "compiled without excess precision"  # how the note of such a run begins
__all__ = ["code_of", "points", "prepared", "steps_of", "trace", "weights_of"]


@enough_memory()
def trace(
    program: Program, folder: Path | str, reference: str = "", force: bool = False,
    command: str = "precaudit.trace(...)", tell: Advance = silent, layers: Sequence[int] | None = None,
    target: Target | None = None, strict: bool = False, taps: Which | None = None,
    asked: Collection[str] | None = None, positions: str | None = None,
) -> Opened:  # fmt: skip
    """Run every case of a program with taps and record them; return the run opened.

    ``layers``: the steps of the program's outermost scans that are recorded, ascending (None: all), with the states
    that they begin and end with. ``target``: a TPU that is not here, as which the program is run (None: JAX's device).
    ``strict``: compiled without excess precision; the run's warnings say what that changes.
    ``taps``: the program's own (``checkpoint_name``), automatic ones, or both (None: as ``tagged``). ``asked``: names
    of the points that are judged (None: all); what these are judged by is recorded as their support. ``positions``: of
    which calls (None: all), one after another; the first of them is call 0 of the run, whose inputs hold what came
    before.

    Raises UserError before anything is written where the program cannot be traced, has no points, or the folder or the
    disk cannot take it.
    """
    layers = None if layers is None else tuple(sorted(set(layers)))
    made = prepared(program, layers=layers, target=target, taps=taps)
    if asked is not None:
        support = support_of(program, made, asked)
        made = prepared(program, layers=layers, loops=loops_of(made), taps=taps, only={*asked, *support})
    if not made.sites:
        raise UserError("the program has no points: it holds no product, no cache write and no result of floats")
    chosen = _calls(positions, program.steps + 1)
    folder, calls, found = Path(folder), len(chosen), points_of(made, layers, asked)
    size = sum(int(np.prod((*p.stacked, *p.shape))) * jnp.dtype(p.dtype).itemsize for p in found)
    inputs_size = sum(on_host(x).nbytes for x in jax.tree.leaves(next(iter(program.cases.values()))))
    needed = len(program.cases) * calls * (size + inputs_size) + (1 << 20)
    check_space(folder, needed, "give smaller inputs or fewer steps")
    prepare_folder(folder, force)
    record = ProgramRun(
        schema=SCHEMA, id=folder.resolve().name, program=reference, code=code_of(made),
        weights=weights_of(program, made), automatic=made.automatic, taps=taps,
        renamed=dict(program.points or {}), cases=tuple(program.cases), calls=calls, points=found,
        outputs=outputs_of(program, asked), layers=layers, loops=loops_of(made),
        asked=None if asked is None else tuple(asked), policy=_announced(program),
        origin=program.weights, began=chosen.start,
        device=str(jax.devices()[0]) if target is None else device_name(target), command=command,
        flushes=True if target is not None else device_flushes(),
        warnings=(
            *_not_finite(program), *_unrecorded(chosen.start), *_aside(made.aside),
            *(() if target is None else assumptions(target)),
        ),
        versions={name: version(name) for name in ("jax", "jaxlib", "numpy")}, started=_now(),
    )  # fmt: skip
    write_manifest(folder, record)
    captured, bare = (jitted(f, target, strict) for f in (capturing(made, layers), program.call))
    outputs = {p.name for p in record.outputs}
    hashes: dict[str, str] = {}
    notes, written = [], 0
    strictly: tuple[str, ...] = ()
    for i, (case, first) in enumerate(program.cases.items()):
        inputs = first
        for call in range(-chosen.start, calls):
            given = (program.params, *inputs)
            out, held = _ran(captured, bare, given, f"{case}, call {chosen.start + call}")
            if call < 0:
                inputs = following(program, inputs, out)
                continue
            _ended(record, held, case, call)
            if call == 0:
                if strict and i == 0:
                    strictly = (_strictly(case, jitted(program.call, None)(*given), bare(*given)),)
                text = made_of(captured, given, jax.default_backend())
                noted = _disturbance(case, out, bare(*given), predicted(captured, given, bare, given))
                made_by = {} if text is None else _labelled(text, captured)
                notes.append(msgspec.structs.replace(noted, made=made_by))
            named = {n: x for n, x in program.named(out).items() if n in outputs}
            for kind, tensors in (("taps", held), ("inputs", _leaves(inputs)), ("outputs", named)):
                name = file_name(record, case, call, kind)
                arrays = {k: np.asarray(on_host(x, k), order="C") for k, x in tensors.items()}
                hashes[name], nbytes = write_tensors(folder, name, arrays)
                written += nbytes
            tell(i * calls + call + 1, calls * len(program.cases), f"{case}, call {call}")
            if call + 1 < calls:
                inputs = following(program, inputs, out)
    done = msgspec.structs.replace(
        record,
        neutrality=tuple(notes),
        warnings=(*strictly, *record.warnings),
        hashes=hashes,
        bytes=written,
        finished=_now(),
    )
    write_manifest(folder, done)
    return open_program_run(folder)


def _calls(positions: str | None, calls: int) -> range:
    """Return the calls that positions name, each a call; raises UserError for those that are not one after another."""
    found = parse_positions(positions, calls)
    if not found:
        raise UserError(f"positions {positions!r} name none of the program's {calls} calls (0 to {calls - 1})")
    if len(found) != found[-1] + 1 - found[0]:
        raise UserError(f"positions {positions!r}: calls of a program are recorded one after another, such as last:4")
    return range(found[0], found[-1] + 1)


def _not_finite(program: Program) -> tuple[str, ...]:
    """Return a note of the first parameter that holds NaN or infinity, and how many do; nothing where none does."""
    off = []
    for path, x in jax.tree_util.tree_flatten_with_path(program.params)[0]:
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) and (n := int((~jnp.isfinite(x)).sum())):
            off.append(f"{jax.tree_util.keystr(path, simple=True, separator='/')} holds {n} that are NaN or infinite")
    more = f", and {len(off) - 1} more parameters hold some" if len(off) > 1 else ""
    return (f"parameters: {off[0]}{more}",) if off else ()


def _unrecorded(calls: int) -> tuple[str, ...]:
    """Return a note of the calls before the first that is recorded, where there are any."""
    before = "call 0 was" if calls == 1 else f"calls 0 to {calls - 1} were"
    return (f"{before} run and not recorded: call 0 here is the program's call {calls}",) if calls else ()


def _announced(program: Program) -> dict[str, str] | None:
    return None if program.policy is None else asdict(cast("Policy", program.policy))


def _aside(names: Sequence[str]) -> tuple[str, ...]:
    """Return a note of taps that hold no floats, where there are any."""
    return (f"taps without floats are no points: {', '.join(names)}",) if names else ()


def _labelled(text: Module, captured: Callable[..., Any]) -> dict[str, tuple[Way, ...]]:
    """Return how each product of a compiled program is made, by its label: a TPU's, predicted ones too, or a GPU's."""
    on_gpu = jax.default_backend() == "gpu" and not isinstance(captured, Predicted)
    return gpu.labelled(text) if on_gpu else tpu.labelled(text)


def _ran(captured: Callable[..., Any], bare: Callable[..., Any], given: tuple[Any, ...], where: str) -> Any:
    """Return what a program with taps gives; raises UserError where the program does not run without them either."""
    try:
        return jax.block_until_ready(captured(*given))
    except Exception as error:
        with enough_memory():
            try:
                jax.block_until_ready(bare(*given))
            except (TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as own:
                raise UserError(f"{where}: the program does not run: {told(own)}") from error
        raise


def _ended(record: ProgramRun, taps: Mapping[str, Any], case: str, call: int) -> None:
    """Raise UserError where a while loop would have gone on after the iterations that were counted."""
    for loop in record.loops:
        if any(np.any(x) for name, x in taps.items() if name.startswith(f"{STATE}{loop.name}{MORE}")):
            raise UserError(
                f"{case}, call {call}: the while loop {loop.name} ({loop.source}) took {loop.iterations} iterations "
                "when they were counted and more when it was recorded: rounding decides when it ends; end it by a count"
            )


def _now() -> str:
    return datetime.now(UTC).isoformat("T", "seconds")


def _leaves(inputs: tuple[Any, ...]) -> dict[str, Any]:
    return {str(i): x for i, x in enumerate(jax.tree.leaves(inputs))}


def _disturbance(case: str, captured: Any, bare: Any, expected: Prediction | None) -> Disturbance:
    """Compare a case's outputs with those of the program without taps."""
    off = _apart(captured, bare)
    return Disturbance(case=case, bitwise=off is None, max_diff=number(off or 0.0), predicted=expected)


def _strictly(case: str, usual: Any, strict: Any) -> str:
    """Return what a program's outputs are without excess precision beside those with it, in words."""
    off = _apart(strict, usual)
    apart = "has the same bits" if off is None else f"is up to {off:.3g} off in {case}: declared roundings are left out"
    return f"{STRICTLY} (--strict); with it, by XLA's default, the output {apart}"


def _apart(ours: Any, theirs: Any) -> float | None:
    """Return the largest difference of two sets of outputs; None where all bits are the same."""
    pairs = [(on_host(a), on_host(b)) for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True)]
    if all(a.tobytes() == b.tobytes() for a, b in pairs):
        return None
    sizes = [float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)), initial=0.0)) for a, b in pairs]
    return max(sizes)
