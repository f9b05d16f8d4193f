"""The finding of an operation that fails: made again from its recorded inputs, in other ways, until one closes."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from precaudit.diagnosis.advice import record_more
from precaudit.diagnosis.by_sums import by_sums
from precaudit.diagnosis.evidence.between import recorded_probs
from precaudit.diagnosis.evidence.caches import cache_state
from precaudit.diagnosis.evidence.exchanged import whose
from precaudit.diagnosis.evidence.formula import right_until
from precaudit.diagnosis.evidence.misread import misread
from precaudit.diagnosis.evidence.positions import by_position
from precaudit.diagnosis.evidence.record import broken_limit, describe_unrecognised, worst_inside
from precaudit.diagnosis.evidence.records import Finding, FormulaRecord
from precaudit.diagnosis.evidence.streams import stream_state
from precaudit.judging.verdicts import Verdict
from precaudit.models.numpy_decoder.model import Model
from precaudit.numbers.arrays import Array
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.mutations.replay import KnownBeside, Replay, replay
from precaudit.references.mutations.variants import Class, Variant
from precaudit.references.textbook.alternatives import unrounded_inputs
from precaudit.references.textbook.handover import POINT as HANDED
from precaudit.references.textbook.operations import Operation, parts, prepare
from precaudit.references.textbook.units import policy_at, tpu_chooses
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.places import LAST, ORDER, Place, spans
from precaudit.schema.policies import recorded_policy
from precaudit.schema.records.base import json_number
from precaudit.schema.records.errors import ErrorRecord, StateError, SumError

OF_WEIGHTS = "weights not finite"
CAME_IN = "came in not finite"
BITS = 0.9  # share of elements that a format makes bit for bit, from which a shadow of another formula is its operands'


def by_operation(bad: Sequence[Verdict]) -> list[tuple[tuple[Any, ...], list[Verdict]]]:
    """Group what failed by kind, point, phase and layer, in program order."""
    found: dict[tuple[Any, ...], list[Verdict]] = {}
    for v in bad:
        key = (LAST if v.layer is None else v.layer, ORDER.get(v.point, LAST), v.phase != "prefill", v.phase, v.kind)
        found.setdefault(key, []).append(v)
    return sorted(found.items(), key=lambda item: item[0])


def finding_of(
    recorded: Recorded,
    model: Model,
    group: Sequence[Verdict],
    records: dict[tuple[Any, ...], ErrorRecord],
    known: dict[str, list[Variant]],
    formula: FormulaRecord | None,
) -> Finding:
    """Replay the worst record of a group and name its cause; ``known``: numbers fitted so far, by point.

    ``formula``: that of the program that was run, where it is at hand.
    """
    worst = max(group, key=_badness)
    e = records[(worst.kind, *worst.place)]
    shared: dict[str, Any] = {
        "layer": worst.layer,
        "point": worst.point,
        "layers": () if worst.layer is None else (worst.layer,),
        "phases": (worst.phase,),
        "prompts": tuple(sorted({v.prompt for v in group})),
        "records": len(group),
        "rel_l2": e.rel_l2,
        "worst": e.worst,
    }
    if isinstance(e, StateError):
        return _state(recorded, model, e, group, shared)
    if isinstance(e, SumError):
        return by_sums(e, broken_limit(worst), record_more(recorded), shared)
    shared["fails"] = broken_limit(worst)
    never: tuple[Class, ...] = ("semantics",) if formula is not None and right_until(formula, worst.place) else ()
    replayed = _replay(recorded, model, worst, known.get(worst.point, []), never)
    if replayed is None:
        return Finding(
            kind="unknown",
            cause="inputs were not recorded",
            says=record_more(recorded),
            explained=None,
            equal=None,
            second=None,
            **shared,
        )
    found, at, rows, finite, operation = replayed
    axes = POINTS[worst.point].axes
    shared["positions"] = by_position(found.left, found.made, at)
    shared["worst"] = worst_inside(found, axes, at, rows, worst) or e.worst
    broken = [w for w in recorded.run.record.warnings if w.startswith("weights:") and _of_layer(w, worst.layer)]
    if worst.status == "nonfinite" and broken:
        return Finding(
            kind="semantics",
            cause=OF_WEIGHTS,
            says="; ".join(broken),
            explained=None,
            equal=None,
            second=None,
            **shared,
        )
    if worst.status == "nonfinite" and (found.announced.closes or found.announced.explained == 1.0):
        return _overflow(recorded, finite, shared, found)
    second = found.second
    rest: dict[str, Any] = {
        "explained": json_number(found.best.explained),
        "equal": json_number(found.best.equal),
        "second": None if second is None else (second.variant.name, json_number(second.explained)),
        **shared,
    }
    nameless = found.named is None or found.named.variant is found.announced.variant
    if nameless and finite and worst.status == "fail":
        other = whose(recorded, model, operation)
        if other is not None:
            rest["explained"] = json_number(other.explained)
            return Finding(kind="state", cause=other.cause, says=other.says, **rest | {"equal": None})
        place, policy = operation.place, recorded_policy(recorded.run.record)
        here, settled = policy_at(recorded, policy, place), tpu_chooses(recorded, policy, place)
        if "semantics" not in never and (read := misread(recorded, model, operation, here, settled)) is not None:
            rest |= {"explained": json_number(read.explained), "equal": json_number(read.equal)}
            return Finding(kind="semantics", cause=read.cause, says=read.says, **rest)
    if found.named is None:
        return Finding(kind="unknown", cause="none reproduces it", says=describe_unrecognised(found, axes, at), **rest)
    if found.named.variant is found.announced.variant:
        says = "over all recorded rows together the announced policy closes; the record alone does not"
        return Finding(kind="unknown", cause="only one record fails", says=says, **rest)
    named = found.named.variant
    if named.kind == "format" and found.named.equal < BITS and formula is not None and _leaves(formula, worst):
        says = f"{describe_unrecognised(found, axes, at)}; no format explains a difference in FP64"
        return Finding(kind="unknown", cause="none reproduces it", says=says, **rest)
    if named.fitted and named.carries:
        known.setdefault(worst.point, []).append(replace(named, fitted=False))
    return Finding(kind=named.kind, cause=named.name, says=named.says, fix=_fix(named.kind, worst.point), **rest)


def _leaves(formula: FormulaRecord, v: Verdict) -> bool:
    """Whether the shadow first leaves the reference at a verdict's place."""
    return any((d.phase, d.layer, d.point) == (v.phase, v.layer, v.point) for d in formula.differs)


def _overflow(recorded: Recorded, finite: bool, shared: dict[str, Any], found: Replay) -> Finding:
    """Say what NaN and infinities are that the announced policy reproduces: made here, or brought in."""
    kind: Any = "format" if finite else "unknown"
    cause = "overflow" if finite else CAME_IN
    says = (
        "finite inputs overflow under the announced policy"
        if finite
        else f"its recorded inputs have NaN or infinities already; look at what comes before: {record_more(recorded)}"
    )
    best = found.announced
    return Finding(
        kind=kind,
        cause=cause,
        says=says,
        explained=json_number(best.explained),
        equal=json_number(best.equal),
        second=None,
        **shared,
    )


def _of_layer(warning: str, layer: int | None) -> bool:
    """Whether a warning names a tensor of a layer, or one outside layers."""
    return f"model.layers.{layer}." in warning if layer is not None else "model.layers." not in warning


def _fix(kind: str, point: str) -> str:
    """Return how JAX is kept from a foreign rounding at a point."""
    product = "preferred_element_type=jnp.float32 in the dot, one cast of its result to the announced format"
    inside = "jnp.float32 inside the operation, one cast of its result to the announced format"
    if kind != "format":
        return ""
    return product if POINTS[point].sums else inside


def follows(f: Finding, earlier: Sequence[Finding]) -> bool:
    """Whether a cache holds foreign rows because a layer before computed something else while it was filled."""
    if f.cause != "foreign rows" or f.layer is None:
        return False
    return any("prefill" in e.phases and e.layer is not None and e.layer < f.layer for e in earlier)


def _badness(v: Verdict) -> float:
    size = float(v.value) if v.value is not None else float("inf")
    return size if size == size else float("inf")


def _replay(
    recorded: Recorded, model: Model, v: Verdict, known: Sequence[Variant], never: Collection[Class] = ()
) -> tuple[Replay, Array, Array, bool, Operation] | None:
    """Replay the operation behind a verdict; return its positions, the verdict's rows, if inputs are finite, and it."""
    place = Place(v.prompt, v.phase, v.step, v.layer, v.point)
    policy = recorded_policy(recorded.run.record)
    for part in parts(recorded, place):
        if v.step in [step for step, _ in part.steps]:
            operation = prepare(recorded, model, place, part)
            if operation is None:
                return None
            finite = all(bool(np.isfinite(x).all()) for x in operation.inputs)
            at = np.asarray(operation.positions)
            of_step = part.positions[dict(part.steps)[v.step]]
            unrounded = [x for _, x in unrounded_inputs(recorded, model, operation, policy)]
            rows = np.flatnonzero(np.isin(at, of_step))
            probs = recorded_probs(recorded, operation)
            here, settled = policy_at(recorded, policy, place), tpu_chooses(recorded, policy, place)
            found = replay(operation, model, here, KnownBeside(known, unrounded, probs, never), settled)
            return found, at, rows, finite, operation
    return None


def _state(
    recorded: Recorded, model: Model, e: StateError, group: Sequence[Verdict], shared: dict[str, Any]
) -> Finding:
    """Say what a cache, or a layer's input, holds instead of the rows written, and at which steps."""
    place = Place.of(e)
    state = stream_state(recorded, model, e) if e.point == HANDED else cache_state(recorded, place)
    steps = tuple(sorted({g.step for g in group if g.prompt == e.prompt}))
    when = f"at step {steps[0]}" if len(steps) == 1 else f"at steps {spans(steps)}"
    return Finding(
        kind=state.kind,
        cause=state.cause,
        says=f"{state.says}; {when}",
        explained=json_number(state.explained),
        equal=None,
        second=None,
        **shared,
    )


def merge_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Join findings of one cause at one point: the first stays, with every layer, phase and prompt.

    Scores, probs and attn_out are made by one operation on q, k and v where no other kernel is known: one cause in them
    is one finding, at the first.
    """
    found: dict[tuple[str, str], Finding] = {}
    for f in findings:
        key = (POINTS[f.point].whole if f.kind != "unknown" else f.point, f.cause)
        if key not in found:
            found[key] = f
            continue
        old = found[key]
        found[key] = msgspec.structs.replace(
            old,
            layers=tuple(sorted({*old.layers, *f.layers})),
            phases=tuple(dict.fromkeys((*old.phases, *f.phases))),
            prompts=tuple(sorted({*old.prompts, *f.prompts})),
            records=old.records + f.records,
        )
    return list(found.values())
