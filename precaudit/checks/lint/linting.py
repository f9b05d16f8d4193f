"""The verb ``lint``: what rules say of a program, phase by phase."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from precaudit.checks.lint.exchanged import Exchange, exchanges
from precaudit.checks.lint.placing import missing_points_note, with_recorded_extents
from precaudit.checks.lint.recorded import Extents
from precaudit.checks.lint.rule import SEVERITIES, Hit, LintRecord, Rule, Severity
from precaudit.checks.lint.rules import every
from precaudit.checks.lint.view import CallView
from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.tag import TapChoice
from precaudit.interpreters.tpu import units
from precaudit.interpreters.tpu.grammar import parse_module
from precaudit.interpreters.tpu.target import (
    TESTED,
    CompiledProgram,
    Target,
    check_policy,
    compile_for,
    untested_version,
)
from precaudit.interpreters.tpu.units import count_products
from precaudit.models.jax_decoder.arithmetic import check_device, compiler_options
from precaudit.models.jax_decoder.sharding import cache_spec, call_specs, check_mesh
from precaudit.progress import Advance, silent
from precaudit.recording.programs.preparing import error_text, prepare_program
from precaudit.recording.programs.program import Program
from precaudit.recording.tracing.predicting import ChipLayout
from precaudit.recording.tracing.programs import CACHE
from precaudit.recording.tracing.subject import Subject, load
from precaudit.schema.lengths import bucket
from precaudit.schema.meshes import ONE, MeshShape
from precaudit.schema.policies import Policy

PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Linted:
    """What was found, worst first; what was read of every phase; notes a reader needs; what chips exchange."""

    findings: tuple[LintRecord, ...]
    views: tuple[CallView, ...]
    notes: tuple[str, ...] = ()
    exchanged: tuple[Exchange, ...] = ()

    def exit_code(self, fail_on: Severity = "error") -> int:
        """Return 1 where something is as severe as ``fail_on``, 3 where something is only unknown, 0 otherwise."""
        found = {f.severity for f in self.findings}
        worse = SEVERITIES[: SEVERITIES.index(fail_on) + 1] if fail_on != "unknown" else ("error", "unknown")
        if found & (set(worse) - {"unknown"} if fail_on != "unknown" else set(worse)):
            return 1
        return 3 if "unknown" in found else 0


@dataclass(frozen=True)
class Lowering:
    """For what a program is lowered: chips that are not here, a mesh of several that it is cut over, or a platform."""

    target: Target | None = None
    platform: str = "cpu"
    mesh: MeshShape = ONE


@dataclass(frozen=True)
class LintedCalls:
    """Which calls are linted; ``tokens``: length of the prompt, and of the cache with room for eight more."""

    phases: Sequence[str] = PHASES
    tokens: int = 64
    batch: int = 1


HERE, EVERY_CALL = Lowering(), LintedCalls()


def lint_model(
    name: str,
    policy: Policy,
    lowering: Lowering = HERE,
    calls: LintedCalls = EVERY_CALL,
    tell: Advance = silent,
    run: Extents | None = None,
) -> Linted:
    """Lint the shipped decoder on a model, without running it.

    ``run``: a recorded run, whose values these formats may not hold. Raises UserError for what cannot be loaded or
    compiled and for a run of other points, TooLarge where the chip's memory does not hold it.
    """
    target, mesh, phases = lowering.target, lowering.mesh, calls.phases
    if target is not None:
        check_policy(policy, target)
    else:
        check_device(policy, lowering.platform)
    if bad := [p for p in phases if p not in PHASES]:
        raise UserError(f"--phases {bad[0]}: known are {', '.join(PHASES)}")
    if mesh != ONE and target is None:
        raise UserError(f"--mesh {mesh} goes with --tpu, such as --tpu v5e:2x2")
    subject = replace(load(name, replace(policy, matmul="highest"), device="cpu"), policy=policy)
    check_mesh(mesh, subject.config, calls.batch)
    views = []
    for i, phase in enumerate(phases):
        tell(i, len(phases), f"compiling {phase}" if target else f"reading {phase}")
        given = arguments(subject, phase, calls.tokens, calls.batch)
        call = ViewedCall(phase, getattr(subject.decoder, phase), given, (CACHE,), compiler_options(policy))
        views.append(_view(call, lowering, policy, _cut(mesh, subject)))
    found = apply_rules(views if run is None else with_recorded_extents(views, run))
    each = ((v.phase, v.module) for v in views if v.module is not None and mesh != ONE)
    told = (x for phase, module in each for x in exchanges(phase, module, subject.config.layers))
    return replace(found, exchanged=tuple(told))


def _cut(mesh: MeshShape, subject: Subject) -> ChipLayout | None:
    """Return how a phase's arguments and results are cut over a mesh; None on one chip."""
    specs, take = call_specs(mesh, subject.config), jax.ShapeDtypeStruct((1,), jnp.int32)
    made = (None, cache_spec(mesh, subject.config))
    return None if mesh == ONE else ChipLayout(mesh.axes, lambda *given: specs(*given, take)[:-1], made)


def lint_program(
    program: Program, lowering: Lowering = HERE, tell: Advance = silent, run: Extents | None = None
) -> Linted:
    """Lint a program of the user's: its call, without running it. ``run``, and what it raises: as ``lint_model``."""
    tell(0, 1, "compiling call" if lowering.target else "reading call")
    shaped = _shapes((program.params, *next(iter(program.cases.values()))))
    view = _view(ViewedCall("call", traceable(program.call), shaped), lowering, None)
    if run is None:
        return apply_rules([view])
    made = prepare_program(program, TapChoice(run.taps, run.renamed or None), loops=())
    return apply_rules(with_recorded_extents([replace(view, taps=jax.make_jaxpr(made.call)(*shaped))], run))


def traceable(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's function that raises UserError, with the user's line, for what it raises."""

    def call_traced(*given: Any) -> Any:
        try:
            return call(*given)
        except Exception as error:
            raise UserError(f"the program cannot be traced: {error_text(error)}") from None

    return call_traced


def apply_rules(views: Sequence[CallView], rules: Iterable[Rule] | None = None) -> Linted:
    """Return what the rules that apply say of these views."""
    kinds = {"jaxpr"}
    kinds |= {"tpu"} if all(v.compiled is not None for v in views) else set()
    kinds |= {"run"} if all(v.extents is not None for v in views) else set()
    records = []
    for rule in every() if rules is None else rules:
        if rule.needs in kinds:
            records += _records(rule, list(rule.check(views)), views)
    notes = [note for v in views[:1] if v.compiled is not None and (note := untested_version(v.compiled.libtpu))]
    notes += missing_points_note(views)
    order = {s: i for i, s in enumerate(SEVERITIES)}
    return Linted(tuple(sorted(records, key=lambda r: order[r.severity])), tuple(views), tuple(notes))


def arguments(subject: Subject, phase: str, tokens: int, batch: int) -> tuple[Any, ...]:
    """Return the shapes of what a phase of the decoder is given, one row of logits a sequence."""
    length = bucket(tokens + 8)

    def ints(*dims: int) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    cache = jax.eval_shape(lambda: subject.decoder.init_cache(batch, length))
    own = (ints(batch, tokens), ints(batch), ints(batch, 1)) if phase == "prefill" else (ints(batch),) * 3
    return (*_shapes((subject.parameters, subject.tables(length))), *own, cache)


def phase_numbers(view: CallView) -> Mapping[str, Any]:
    """Return what a phase takes: seconds, bytes on the chip, flops, and products by the unit and passes that make them.

    Bytes of temporaries are the compiler's, which reads 0 of some programs that are instrumented.
    """
    c = view.compiled
    if c is None:
        return {"products": sum(e.primitive == "dot_general" for e in view.equations)}
    return {
        "seconds": c.seconds,
        "arguments": c.arguments,
        "outputs": c.outputs,
        "temporaries": c.temporaries,
        "flops": c.flops,
        **count_by_unit(view),
    }


def count_by_unit(view: CallView) -> dict[str, int]:
    """Return how many products the matrix unit makes in 1, 3 and 6 passes, and how many the vector unit makes."""
    assert view.module is not None
    return count_products(units.products_of(view.module))


@dataclass(frozen=True)
class ViewedCall:
    """A function and the shapes that it is given; ``donated``: arguments that it takes over."""

    phase: str
    function: Callable[..., Any]
    given: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def _view(call: ViewedCall, lowering: Lowering, policy: Policy | None, cut: ChipLayout | None = None) -> CallView:
    function, given, target = call.function, call.given, lowering.target
    size = sum(math.prod(x.shape) * x.dtype.itemsize for i in call.donated for x in jax.tree.leaves(given[i]))
    if target is None:
        jaxpr = jax.jit(function).trace(*given).jaxpr
        return CallView(call.phase, lowering.platform, jaxpr, policy, donated=size)
    placed, out = (given, None) if cut is None else cut.place(target, given)
    made: CompiledProgram = compile_for(target, function, placed, call.donated, call.options, out)
    return CallView(call.phase, "tpu", made.jaxpr, policy, target, made, parse_module(made.text), size)


def _shapes(tree: object) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def _layers(hit: Hit, views: Sequence[CallView]) -> int | None:
    """Return how many layers a hit is in, where the views of its phase agree; one of no phase is of all."""
    found = {v.layers(hit.source, hit.point) for v in views if hit.phase in ("", v.phase)}
    return found.pop() if len(found) == 1 else None


def _records(rule: Rule, hits: Sequence[Hit], views: Sequence[CallView]) -> list[LintRecord]:
    """Join the hits of one line, point and phase that say the same."""
    counted: dict[Hit, int] = {}
    for hit in hits:
        counted[hit] = counted.get(hit, 0) + 1
    on = {v.phase: v.target.name if v.target else v.platform for v in views}
    rests = f"{rule.rests}; libtpu {TESTED[-1]}" if rule.needs == "tpu" else rule.rests
    return [
        LintRecord(
            rule=rule.id,
            severity=hit.severity or rule.severity,
            phase=hit.phase,
            point=hit.point,
            source=hit.source,
            count=n,
            says=hit.says or rule.why,
            fix=hit.fix or rule.fix,
            rests=rests,
            target=on.get(hit.phase, ""),
            layers=_layers(hit, views),
        )
        for hit, n in counted.items()
    ]
