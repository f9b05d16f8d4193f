"""A program made ready to be recorded: checked, with its taps, and its loops given room for their iterations (JAX)."""

import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.errors import UserError, nearest
from precaudit.interpreters.jaxpr.bounded import counting
from precaudit.interpreters.jaxpr.keys import on_host
from precaudit.interpreters.jaxpr.reads import reads
from precaudit.interpreters.jaxpr.sites import unique_names
from precaudit.interpreters.jaxpr.strict import STRICTLY
from precaudit.interpreters.jaxpr.sums import float_bits
from precaudit.interpreters.jaxpr.tag import ANY_TAPS, Tagged, TapChoice, tag_program
from precaudit.interpreters.jaxpr.wide import halve_widths
from precaudit.interpreters.mesh.sums import split_sums
from precaudit.interpreters.tpu.grammar import parse_module
from precaudit.interpreters.tpu.scanner import HloError
from precaudit.interpreters.tpu.target import Target
from precaudit.interpreters.tpu.texts import hlo_text
from precaudit.recording.programs.loading import raising_line
from precaudit.recording.programs.program import OUTPUT, Program
from precaudit.recording.runs.hashes import tensor_hash
from precaudit.recording.runs.programs import ProgramLoop, ProgramPoint
from precaudit.recording.tracing.predicting import program_for
from precaudit.schema.records.devices import SplitSum

RAISED = re.compile(r"(?:\w+\.)*\w+(?:Error|Exception)(?:: |$)")  # a line that ends a traceback


def prepare_program(
    program: Program,
    choice: TapChoice = ANY_TAPS,
    layers: Sequence[int] | None = None,
    loops: Sequence[ProgramLoop] | None = None,
    target: Target | None = None,
) -> Tagged:
    """Return a program with its taps; raises UserError where it cannot be traced, or its cases differ in shape.

    ``choice``: its names are those that a run was recorded under (None: the program's ``points``). ``layers``: the
    steps of its outermost loops that are recorded, with the states these begin and end with. ``loops``: what a run has
    of its while loops that hold points; None: every call of every case is run, on ``target``, to count their
    iterations.
    """
    shapes = {name: shapes_of(inputs) for name, inputs in program.cases.items()}
    first, *rest = shapes.items()
    for name, found in rest:
        if found != first[1]:
            raise UserError(
                f"case {name!r} has other shapes or formats than {first[0]!r}: give it a Program of its own"
            )
    names = program.points if choice.renamed is None else choice.renamed
    choice = replace(choice, renamed=names, carried=layers is not None)
    made = _tag(program, replace(choice, iterations={x.name: x.iterations for x in loops or ()}))
    outputs_of(program)
    if made.loops and loops is None:
        made = _tag(program, replace(choice, iterations=_count_iterations(program, made, target)))
    if bare := [s.name for s in made.sites if 0 in (*s.stacked, *s.shape)]:
        raise UserError(f"Program: the tap {bare[0]!r} is of an array without elements")
    if layers is not None:
        _within(made, layers)
    return made


def _tag(program: Program, choice: TapChoice) -> Tagged:
    try:
        return tag_program(program.call, program.params, *next(iter(program.cases.values())), choice=choice)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the program cannot be traced: {error_text(error)}") from None


def error_text(error: Exception) -> str:
    """Return what a user's code raised, in a line, and where."""
    said = str(error).strip().splitlines() or [""]
    raised = [line for line in said if RAISED.match(line)]  # by a callback, whose traceback is what JAX's error says
    return raised[-1] if raised else f"{type(error).__name__}: {said[0]}{raising_line(error)}"


def _count_iterations(program: Program, made: Tagged, target: Target | None) -> dict[str, int]:
    """Return the most iterations that each while loop takes in any call of any case; one at least."""
    run = jit_for(counting(made.jaxpr, made.loops), target)
    most = {loop.name: 1 for loop in made.loops.values()}
    for first in program.cases.values():
        inputs = first
        for call in range(program.steps + 1):
            out, counts = run(*jax.tree.leaves((program.params, *inputs)))
            most = {name: max(n, int(counts[name])) for name, n in most.items()}
            if call < program.steps:
                inputs = next_inputs(program, inputs, jax.tree.unflatten(made.structure, out))
    return most


def recorded_loops(made: Tagged) -> tuple[ProgramLoop, ...]:
    """Return a program's while loops that hold points, with the iterations that are recorded of each."""
    return tuple(
        ProgramLoop(name=loop.name, source=loop.source, iterations=made.iterations[loop.name])
        for loop in made.loops.values()
    )


def _within(made: Tagged, layers: Sequence[int]) -> None:
    """Raise UserError unless a program scans over steps that have points, the layers asked for among them."""
    if any(s.sharded for s in made.sites):
        raise UserError(
            "--layers: points of this program lie inside shard_map, whose shards are no steps; leave it out"
        )
    most = most_steps(made)
    if outside := [i for i in layers if not 0 <= i < most]:
        raise UserError(f"--layers: layer {outside[0]} is out of range: the program's scans have {most} steps at most")


def most_steps(made: Tagged) -> int:
    """Return how many steps the longest outermost scan with points has; raises UserError without one."""
    found = [s.stacked[0] for s in made.sites if s.stacked]
    if not found:
        raise UserError("--layers: this program scans over nothing; points of its layers have names of their own")
    return max(found)


def support_of(program: Program, made: Tagged, asked: Collection[str]) -> frozenset[str]:
    """Return the names of the taps that those ``asked`` for are judged by: what they read, and what that is made of.

    What is narrow may have been handed on before it was rounded, and is made again for it. Raises UserError for a name
    that no tap has.
    """
    known = {s.name for s in made.sites}
    every = known | {p.name.removeprefix(OUTPUT) for p in outputs_of(program)}
    if unknown := sorted({*asked} - every):
        raise UserError(f"no point of the program is named {unknown[0]!r}{nearest(unknown[0], sorted(every))}")
    args = (program.params, *next(iter(program.cases.values())))
    read = reads(jax.make_jaxpr(made.call)(*args).jaxpr)[0]
    narrow = {s.name for s in made.sites if float_bits(s.dtype) == 16}
    direct = frozenset().union(*(read.get(name, ()) for name in asked))
    before = frozenset().union(*(read.get(name, ()) for name in direct & narrow))
    return ((direct | before) & known) - {*asked}


def points_of(
    made: Tagged, layers: Sequence[int] | None, asked: Collection[str] | None = None
) -> tuple[ProgramPoint, ...]:
    """Return the points of a program with taps, stacked over some layers where those alone are recorded.

    ``asked``: names of those that were asked for, None for all; the others are support.
    """

    def recorded_axes(lengths: tuple[int, ...]) -> tuple[int, ...]:
        return lengths if layers is None or not lengths else (sum(i < lengths[0] for i in layers), *lengths[1:])

    return tuple(
        ProgramPoint(
            name=name,
            shape=s.shape,
            stacked=recorded_axes(s.stacked),
            dtype=np.dtype(s.dtype).name,
            source=made.tags[s.name].source,
            scope=made.tags[s.name].scope,
            primitive=made.tags[s.name].primitive,
            whole=made.tags[s.name].whole,
            support=asked is not None and s.name not in asked,
        )
        for name, s in zip(unique_names(made.sites), made.sites, strict=True)
    )


def code_hash(made: Tagged) -> str:
    """Return the SHA-256 of a program's jaxpr, addresses of functions in it aside."""
    return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "0x", str(made.jaxpr)).encode()).hexdigest()


def weights_hash(program: Program, made: Tagged) -> str:
    """Return the hash of a program's parameters and of the arrays it closes over: format, shape and bytes of each."""
    digest = hashlib.sha256()
    for x in (*jax.tree.leaves(program.params), *made.jaxpr.consts):
        array = on_host(x)
        digest.update(f"{array.dtype} {array.shape} {tensor_hash(array)}\n".encode())
    return digest.hexdigest()


def outputs_of(program: Program, asked: Collection[str] | None = None) -> tuple[ProgramPoint, ...]:
    """Return the outputs that a program names, as points; raises UserError where it names others than it has.

    ``asked``: names of the points and outputs that were asked for, None for all.
    """
    if program.outputs is None:
        return ()
    inputs = next(iter(program.cases.values()))
    named = jax.eval_shape(lambda *given: program.named_outputs(program.call(*given)), program.params, *inputs)
    return tuple(
        ProgramPoint(
            name=n, shape=x.shape, stacked=(), dtype=np.dtype(x.dtype).name, source="", scope="", primitive="output"
        )
        for n, x in named.items()
        if asked is None or n.removeprefix(OUTPUT) in asked
    )


def shapes_of(inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the shape and the format of each array of a call's inputs, as a jitted function has them."""
    return [(np.shape(x), str(jnp.result_type(x))) for x in jax.tree.leaves(inputs)]


def next_inputs(program: Program, inputs: tuple[Any, ...], out: object) -> tuple[Any, ...]:
    """Return the next call's inputs; raises UserError where their shapes are not those of this one's."""
    assert program.advance is not None
    made = halve_widths(program.advance(inputs, out))
    if not isinstance(made, tuple) or shapes_of(made) != shapes_of(inputs):
        raise UserError("Program: advance gave inputs of other shapes or formats than those it was given")
    return made


def jit_for(function: Callable[..., Any], target: Target | None, strict: bool = False) -> Callable[..., Any]:
    """Return a function compiled for JAX's device, or as a TPU that is not here would run it.

    ``strict``: without excess precision, for JAX's device.
    """
    if target is not None:
        return program_for(target, function)
    return jax.jit(function, compiler_options=STRICTLY if strict else None)


def partitioned_sums(program: Any, given: Sequence[Any]) -> dict[str, SplitSum]:
    """Return how products in parts of several devices are made; nothing where the compiled text cannot be read."""
    try:
        return split_sums(parse_module(hlo_text(program.lower(*given).compile())))
    except HloError:
        return {}
