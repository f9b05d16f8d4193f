"""Recording a program: its jitted function with taps, call after call, and what tapping did to its outputs (JAX)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from precaudit.errors import UserError, enough_memory
from precaudit.interpreters.jaxpr.sketches import sketching
from precaudit.interpreters.jaxpr.subnormals import device_flushes
from precaudit.interpreters.jaxpr.tag import Tagged, capturing
from precaudit.interpreters.tpu.target import Target
from precaudit.mirrors import by_url
from precaudit.models.checkpoints.tensors import count_nonfinite
from precaudit.progress import Advance, silent
from precaudit.recording.programs.chips import chips_note
from precaudit.recording.programs.disturbance import note_disturbance, outputs_apart
from precaudit.recording.programs.entries import first_inputs
from precaudit.recording.programs.loop_room import Room, check_loops_ended, room_notes, with_room
from precaudit.recording.programs.planning import WHOLE_PROGRAM, Planned, ProgramSelection, entry_run, plan, size_of
from precaudit.recording.programs.preparing import code_hash, error_text, jit_for, next_inputs
from precaudit.recording.programs.program import OUTPUT, Program
from precaudit.recording.programs.resuming import STRICTLY, manifest_to_resume
from precaudit.recording.programs.writing import CallWriter
from precaudit.recording.runs.folders import check_space, prepare_folder
from precaudit.recording.runs.programs import (
    Disturbance,
    EntryRun,
    Opened,
    ProgramRun,
    open_program_run,
)
from precaudit.recording.tracing.conditions import now, run_conditions
from precaudit.recording.tracing.devices import devices_of_processes
from precaudit.recording.tracing.predicting import (
    assumptions,
    device_name,
)
from precaudit.schema.digits import digits
from precaudit.schema.policies import Policy
from precaudit.schema.records.manifests import SCHEMA

NARROWED = "jax_enable_x64 is on: parameters and inputs of 64 bits are rounded to 32 here"


@dataclass(frozen=True)
class ProgramTraceOptions:
    """How a program is run and recorded; ``reference``: the name by which it is found again.

    ``target``: a TPU that is not here, as which the program is run (None: JAX's device). ``strict``: compiled without
    excess precision; the run's warnings say what that changes. ``resume``: go on with a run that was cut off; the cases
    that it holds whole are not run again. ``sketch``: keep no tensors, and of each what the program makes of it
    (``interpreters/jaxpr/sketches.py``), with so many projections. ``unchecked``: the program without taps is not run
    beside it, so that the run does not say whether taps change its outputs.
    """

    reference: str = ""
    force: bool = False
    command: str = "precaudit.trace(...)"
    target: Target | None = None
    strict: bool = False
    resume: bool = False
    sketch: int | None = None
    unchecked: bool = False


@enough_memory()
def trace_program(
    program: Program,
    folder: Path | str,
    select: ProgramSelection = WHOLE_PROGRAM,
    options: ProgramTraceOptions | None = None,
    tell: Advance = silent,
) -> Opened:
    """Run every case of a program with taps and record them; return the run opened.

    Raises UserError before anything is written where the program cannot be traced, has no points, or the folder or the
    disk cannot take it.
    """
    options, folder = options or ProgramTraceOptions(), Path(folder)
    layers = None if select.layers is None else tuple(sorted(set(select.layers)))
    select = replace(select, layers=layers)

    def trace(room: Room, again: bool) -> Opened:
        how = replace(options, force=True, resume=False) if again else options
        return _trace(program, folder, select, how, room, tell)

    return with_room(trace, folder, options.resume)


def _trace(
    program: Program, folder: Path, select: ProgramSelection, options: ProgramTraceOptions, room: Room, tell: Advance
) -> Opened:
    """Run every case and record it, with ``room`` for iterations of loops; raises RanOnError where it is too little."""
    layers, target = select.layers, options.target
    planned = plan(program, select, target, room)
    kept, chips = [x for x in planned if x.calls], chips_note(planned, target)
    writer = CallWriter(folder)
    code = {f"the operations of {x.program.entry}": code_hash(x.made) for x in kept if x.made is not None}
    writer.hosts.agree("what is traced", {"the folder -o": str(folder), **code})
    held = [entry_run(x, layers) for x in kept]
    writer.hosts.agree("the program", {f"the parameters of {x.entry}": x.weights for x in held})
    size = 0 if options.sketch is not None else sum(map(size_of, kept, held))
    first, *then = held
    if writer.hosts.first:
        check_space(folder, len(program.cases) * size + (1 << 20), "give smaller inputs or fewer steps")
        if not options.resume:
            prepare_folder(folder, options.force)
    record = ProgramRun(
        schema=SCHEMA, id=folder.resolve().name, program=options.reference, taps=select.taps,
        cases=tuple(program.cases), layers=None if layers is None else tuple(layers),
        asked=None if select.points is None else tuple(select.points),
        policy=_announced_policy(program), origin=program.weights and by_url(program.weights),
        device=str(jax.devices()[0]) if target is None else device_name(target),
        command=options.command, flushes=True if target is not None else device_flushes(),
        warnings=(
            *([NARROWED] if jax.config.jax_enable_x64 else []), *_not_finite(program), *_unrecorded_calls_note(planned),
            *_without_floats("taps", (name for x in kept if x.made for name in x.made.aside)),
            *_without_floats("outputs", (name for x in kept if x.made for name in _other_outputs(x.program, x.made))),
            *room_notes(room, held), *(() if target is None else assumptions(target)), *chips,
        ),
        started=now(), then=tuple(then),
        processes=devices_of_processes(), sketch=options.sketch, **run_conditions(),
        **{name: getattr(first, name) for name in first.__struct_fields__},
    )  # fmt: skip
    if options.resume:
        record = manifest_to_resume(folder, record, options.strict)
        writer.hosts.agree("what goes on", {"the cases that are there": ", ".join(n.case for n in record.neutrality)})
    writer.manifest(record)
    writer.begin([n.case for n in record.neutrality])
    done = _record(_Running(program, planned, record, target, options.strict, options.unchecked), writer, tell)
    writer.finish(msgspec.structs.replace(done, finished=now()))
    return open_program_run(folder, options.sketch is not None)


@dataclass(frozen=True)
class _Running:
    """What is recorded, and how: ``record`` is the run's manifest before anything was run."""

    program: Program
    planned: Sequence[Planned]
    record: ProgramRun
    target: Target | None
    strict: bool
    unchecked: bool

    def functions(self, one: Planned) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return an entry point compiled with taps, and without."""
        bare = jit_for(one.program.call, self.target, self.strict)
        if one.made is None:
            return bare, bare
        layers, n = self.record.layers, self.record.sketch
        captured = capturing(one.made, layers)
        if n is not None:
            captured = sketching(one.made, one.program.named_outputs, n, layers)
        return jit_for(captured, self.target, self.strict), bare


def _record(run: _Running, writer: CallWriter, tell: Advance) -> ProgramRun:
    """Run every case that the manifest holds nothing of and write what its calls hold; return the whole manifest.

    The manifest is written after every case, so that a run that is cut off can go on.
    """
    record = run.record
    views = iter(Opened(writer.folder, record).entries)
    each = [_Compiled(one, next(views).record if one.calls else None, *run.functions(one)) for one in run.planned]
    calls = sum(len(one.calls) for one in run.planned)
    there = {n.case for n in record.neutrality}
    for i, case in enumerate(run.program.cases):
        if case in there:
            continue
        begins = i * calls

        def done(call: int, what: str, begins: int = begins) -> None:
            tell(begins + call, calls * len(run.program.cases), what)

        strict = run.strict and not any(w.startswith(STRICTLY) for w in record.warnings)
        record = _with_case(record, _case(run, writer, each, case, strict, done))
        writer.manifest(record)
    return record


@dataclass(frozen=True)
class _Compiled:
    """An entry point as it is run: its part of the manifest where it is recorded, compiled with taps, and without."""

    planned: Planned
    record: ProgramRun | None
    captured: Callable[..., Any]
    bare: Callable[..., Any]


@dataclass
class _Case:
    """What running a case gave: files by name with their hashes, bytes, what tapping did, by entry point, and notes."""

    hashes: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    notes: dict[str, Disturbance] = field(default_factory=dict)
    strictly: tuple[str, ...] = ()


def _with_case(record: ProgramRun, made: _Case) -> ProgramRun:
    """Return a manifest with what a case gave."""

    def noted(x: ProgramRun | EntryRun) -> tuple[Disturbance, ...]:
        return (*x.neutrality, made.notes[x.entry])

    return msgspec.structs.replace(
        record, neutrality=noted(record), warnings=(*made.strictly, *record.warnings),
        then=tuple(msgspec.structs.replace(x, neutrality=noted(x)) for x in record.then),
        hashes={**record.hashes, **made.hashes}, bytes=record.bytes + made.bytes,
    )  # fmt: skip


def _case(
    run: _Running, writer: CallWriter, each: Sequence[_Compiled], case: str, strict: bool,
    tell: Callable[[int, str], None],
) -> _Case:  # fmt: skip
    """Run a case and write what its calls hold; ``strict``: say what leaving out excess precision changes."""
    found, done, inputs, out = _Case(), 0, run.program.cases[case], None
    for i, one in enumerate(each):
        entry, record, calls = one.planned.program, one.record, one.planned.calls
        if i:
            inputs = first_inputs(run.program.then[entry.entry], entry.entry, inputs, out)
        end = calls.stop if i + 1 == len(each) else entry.steps + 1
        for number_of, call in enumerate(range(end), -calls.start):
            given = (run.program.params, *inputs)
            where = f"{case}, {record.phase if record else entry.entry} {call}"
            out, held = _ran(one.captured, one.bare, given, where, record)
            if record is not None and call in calls:
                check_loops_ended(record, held, case, number_of)
                if number_of == 0:
                    if strict and not found.strictly:
                        found.strictly = (_strictly(case, jit_for(entry.call, None)(*given), one.bare(*given)),)
                    found.notes[entry.entry] = note_disturbance(
                        case, one.captured, None if run.unchecked else one.bare, given, out
                    )
                found.hashes |= writer.write(record, (case, number_of), inputs, held, entry.named_outputs(out))
                done += 1
                tell(done, f"{case}, {record.phase} {number_of}")
            if call + 1 < end:
                inputs = next_inputs(entry, inputs, out)
    hashes, found.bytes = writer.end(case)
    found.hashes |= hashes
    return found


def _not_finite(program: Program) -> Iterator[str]:
    """Yield a note of the first parameter that holds NaN or infinity and how many do, and one of NaN in inputs.

    Nothing is said of infinite inputs, which masks are.
    """
    count, nans = jax.jit(lambda x: (~jnp.isfinite(x)).sum()), jax.jit(lambda x: jnp.isnan(x).sum())
    off = []
    for path, x in _floats_of(program.params):
        if n := count_nonfinite(np.asarray(x)) if _lies_here(x) else int(count(x)):  # NumPy compiles nothing
            off.append(f"{jax.tree_util.keystr(path, simple=True, separator='/')} holds {n} that are NaN or infinite")
    if off:
        yield f"parameters: {off[0]}{f', and {len(off) - 1} more parameters hold some' if len(off) > 1 else ''}"
    off = []
    for case, inputs in program.cases.items():
        for path, x in _floats_of(inputs):
            if n := int(np.isnan(np.asarray(x)).sum()) if _lies_here(x) else int(nans(x)):
                off.append(f"{jax.tree_util.keystr(path, simple=True, separator='/')} of case {case} holds {n} NaN")
    if off:
        yield f"inputs: {off[0]}{f', and {len(off) - 1} more inputs hold some' if len(off) > 1 else ''}"


def _floats_of(tree: object) -> Iterator[tuple[Any, Any]]:
    """Yield the arrays of floats in a tree, each with its path."""
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating):
            yield path, x


def _lies_here(x: object) -> bool:
    """Whether all of an array is in this host's memory, where NumPy reads it."""
    return not isinstance(x, jax.Array) or (x.is_fully_addressable and {d.platform for d in x.devices()} == {"cpu"})


def _unrecorded_calls_note(planned: Sequence[Planned]) -> Iterator[str]:
    """Yield notes of the calls, and of the entry points, that are run and not recorded."""
    for one in planned:
        calls = one.calls.start
        if not one.calls:
            yield f"{one.program.entry} was run and not recorded"
        elif calls:
            before = "call 0 was" if calls == 1 else f"calls 0 to {calls - 1} were"
            yield f"{before} run and not recorded: call 0 here is the program's call {calls}"


def _announced_policy(program: Program) -> dict[str, str] | None:
    return None if program.policy is None else asdict(cast("Policy", program.policy))


def _without_floats(what: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return a note of taps or named outputs that hold no floats, where there are any."""
    found = dict.fromkeys(names)
    return (f"{what} without floats are no points: {', '.join(found)}",) if found else ()


def _other_outputs(program: Program, made: Tagged) -> Iterator[str]:
    """Yield the named outputs that hold no floats."""
    out = jax.tree.unflatten(made.structure, made.jaxpr.out_avals)
    recorded = program.named_outputs(out)
    yield from (name.removeprefix(OUTPUT) for name in program.every_output(out) if name not in recorded)


def _ran(
    captured: Callable[..., Any], bare: Callable[..., Any], given: tuple[Any, ...], where: str,
    record: ProgramRun | None,
) -> tuple[Any, Any]:  # fmt: skip
    """Return what a program gives, and its taps where it is recorded.

    Raises UserError where the program does not run without them either.
    """
    try:
        found = jax.block_until_ready(captured(*given))
        return found if record is not None else (found, {})
    except Exception as error:
        with enough_memory():
            try:
                jax.block_until_ready(bare(*given))
            except (TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as own:
                raise UserError(f"{where}: the program does not run: {error_text(own)}") from error
        raise


def _strictly(case: str, usual: jax.Array, strict: jax.Array) -> str:
    """Return what a program's outputs are without excess precision beside those with it, in words."""
    off = outputs_apart(strict, usual)
    apart = (
        "has the same bits"
        if off is None
        else f"differs by up to {digits(off)} in {case}: declared roundings are left out"
    )
    return f"{STRICTLY} (--strict); with it, by XLA's default, the output {apart}"
