"""The verb ``diagnose``: the cause of every local error and state that honest rounding does not make."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from precaudit.diagnosis.advice import record_more
from precaudit.diagnosis.by_sums import by_sums
from precaudit.diagnosis.evidence.between import recorded_probs
from precaudit.diagnosis.evidence.caches import cache_state
from precaudit.diagnosis.evidence.closure import Closure, closure
from precaudit.diagnosis.evidence.exchanged import whose
from precaudit.diagnosis.evidence.flips import flips, sentence
from precaudit.diagnosis.evidence.formula import establish, right_until
from precaudit.diagnosis.evidence.misread import misread
from precaudit.diagnosis.evidence.positions import by_position
from precaudit.diagnosis.evidence.program import Program
from precaudit.diagnosis.evidence.record import broken_limit, unrecognised, worst_inside
from precaudit.diagnosis.evidence.records import Differs, Finding, FormulaRecord, Remedy, Shares, findings_frame
from precaudit.diagnosis.evidence.streams import stream_state
from precaudit.diagnosis.evidence.views import summary
from precaudit.errors import UserError
from precaudit.judging.pooled import METRICS, pooled
from precaudit.judging.rules import judge, judge_pair
from precaudit.judging.verdicts import Verdict, inheriting
from precaudit.models.checkpoints import open_checkpoint, recorded_source
from precaudit.models.configs import attended
from precaudit.models.numpy_decoder.model import Model
from precaudit.numbers.arrays import Array
from precaudit.numbers.threads import one_blas_thread
from precaudit.progress import Advance, silent
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.runs.written import Comparison, written
from precaudit.recording.store import Run, open_run
from precaudit.references.comparison.compare import Options, compare
from precaudit.references.mutations.replay import Replay, replay
from precaudit.references.mutations.variants import Class, Variant
from precaudit.references.textbook.alternatives import unrounded_inputs
from precaudit.references.textbook.formula import recorded_program
from precaudit.references.textbook.handover import POINT as HANDED
from precaudit.references.textbook.operations import Operation, parts, prepare
from precaudit.references.textbook.units import chosen, policy_at
from precaudit.schema.brief import Brief
from precaudit.schema.coverage import config_of
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.limits import default_limits
from precaudit.schema.places import LAST, ORDER, Place, spans
from precaudit.schema.policies import declared_policy, held_weights, recorded_policy
from precaudit.schema.records import ErrorRecord, number, value, write_lines
from precaudit.schema.selection import Selection

BITS = 0.9  # share of elements that a format makes bit for bit, from which a shadow of another formula is its operands'


PLACED = ("local", "state", "sums")  # kinds of records that place a fault at an operation


@dataclass(frozen=True, repr=False)
class Diagnosis(Brief):
    """Findings in program order, what stayed unknown, and the comparison they rest on."""

    compared: Comparison
    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]
    judged: int
    formula: FormulaRecord
    shares: tuple[Shares, ...] = ()
    remedies: tuple[Remedy, ...] | None = ()
    views: str | None = None
    flips: str | None = None
    closures: tuple[Closure, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 if a finding stands, 3 if something is unknown, 0 if rounding explains all."""
        return 1 if self.findings else 3 if self.unknown or not self.judged else 0

    def frame(self) -> Any:
        """Return the findings as a pandas DataFrame, always with the same columns."""
        return findings_frame(self.findings)


@np.errstate(all="ignore")  # what is not finite has its own status
def diagnose(
    run: Run | Path | str,
    select: Selection | None = None,
    options: Options | None = None,
    tell: Advance = silent,
    subject: Any = None,
    lift: Mapping[str, Callable[..., Any]] | None = None,
    objective: str = "margin",
) -> Diagnosis:
    """Find the causes of a run's errors; compares it first where that was not done. Writes findings.jsonl beside it.

    ``subject``: the program that was recorded, where it is not the shipped decoder. ``lift``: FP64 meanings, by name,
    of primitives and Pallas kernels in it; ``objective``: what the shares are of, margin, kl, logprob or logprob:TOKEN.
    Raises UserError as ``compare`` does.
    """
    options = options or Options(accum=())
    opened = run if isinstance(run, Run) else open_run(run, options.partial)
    check_objective(objective, opened.record.model.config["vocab"])
    compared = compare(opened, None, select, options, tell)
    recorded = Recorded.of(compared.run)
    program_on = recorded_program(recorded, subject, options.model)
    if lift and (lifted := program_on("cpu")) is not None:
        subject = replace(lifted, lift=lift)
        program_on = recorded_program(recorded, subject)
    records = {_key(e): e for e in compared.errors if e.kind in PLACED}
    verdicts = [v for e in compared.errors if (v := judge(e, default_limits())) is not None and v.status != "pass"]
    verdicts += pooled(compared.errors, default_limits())
    standing = list(inheriting(verdicts))
    bad = [v for v in standing if v.status in ("fail", "nonfinite") and v.kind in PLACED]
    # A cache that holds NaN because an operation before it made them is as it should be.
    made = {v.prompt: v.depth for v in sorted(bad, key=lambda v: v.depth, reverse=True) if _broken_operation(v)}
    bad = [
        v
        for v in bad
        if v.kind in ("local", "sums")
        or records[("state", *v.place)].mismatched
        or not (v.prompt in made and made[v.prompt] <= v.depth)
    ]
    model = _model(recorded, options)
    findings: list[Finding] = []
    known: dict[str, list[Variant]] = {}
    with one_blas_thread():
        groups = _groups(bad)
        prompt = (
            min(v.prompt for v in groups[0][1])
            if groups
            else min(recorded.run.prompts, key=lambda p: len(recorded.run.prompts[p].tokens))
        )
        formula = establish(recorded, model, prompt, program_on, kept=subject is None)
        for i, (_, group) in enumerate(groups):
            found = _finding(recorded, model, group, records, known, formula if subject is not None else None)
            if not _follows(found, findings):
                findings.append(found)
            tell(i + 1, len(groups), "replaying operations")
    findings = _with_formula(_merged(findings), formula)
    findings = findings or list(_unplaced(standing, compared, record_more(recorded)))
    write_lines(compared.folder / "findings.jsonl", findings)
    unknown = list(_unknown(standing))
    judged = sum(e.kind in (*PLACED, "forward") for e in compared.errors) + len(compared.prefill_decode)
    whole = select is None
    program = Program(recorded, model, program_on, whole, objective)
    shared = program.shares(tell)
    remedies = program.remedies(tell, shared)
    return Diagnosis(
        compared, tuple(findings), tuple(unknown), judged, formula, shared, remedies,
        _views(recorded, findings) if whole else None, _flips(recorded, options) if whole else None,
        tuple(closure(recorded, model, compared.errors)) if whole else (),
    )  # fmt: skip


def _broken_operation(v: Verdict) -> bool:
    return v.kind == "local" and v.status == "nonfinite"


def check_objective(text: str, vocab: int) -> None:
    """Raise UserError for an objective that is not one, or a token outside the vocabulary (0: there are no logits)."""
    name, colon, token = text.partition(":")
    if name not in ("margin", "kl", "logprob") or (colon and not (name == "logprob" and token.isdigit())):
        raise UserError(f"objective {text!r} is none of margin, kl, logprob or logprob:TOKEN, such as logprob:42")
    if token and not vocab:
        raise UserError(f"objective {text!r}: this run has no logits; leave out --objective")
    if token and int(token) >= vocab:
        raise UserError(f"objective {text!r}: token {token} is out of range: there are {vocab} (0 to {vocab - 1})")


def _views(recorded: Recorded, findings: Sequence[Finding]) -> str | None:
    decode = any(set(f.phases) == {"decode"} for f in findings)
    return summary(recorded, decode, any(f.kind == "state" for f in findings))


def _flips(recorded: Recorded, options: Options) -> str | None:
    """Return what flipped among top tokens, from the references compare left."""
    record, before = recorded.run.record, written(recorded.run)
    weights = f"{record.model.sha256}:{held_weights(declared_policy(record))}"
    sigma = value(None if before is None else before.sigma)
    rows = flips(recorded, recorded.config, weights, options.cache, sigma)
    steps = recorded.requested.decode_steps + 1 if "decode" in recorded.requested.phases else 0
    return sentence(rows, steps)


def _key(e: ErrorRecord) -> tuple[Any, ...]:
    return (e.kind, e.prompt, e.phase, e.step, e.layer, e.point)


def _model(recorded: Recorded, options: Options) -> Model:
    record = recorded.run.record
    where = options.model or recorded_source(record.model.reference)
    opened = open_checkpoint(where, record.model.allowed).under(declared_policy(record))
    return Model(attended(config_of(record.model.config), declared_policy(record)), opened.tensors.read)


def _groups(bad: Sequence[Verdict]) -> list[tuple[tuple[Any, ...], list[Verdict]]]:
    """Group what failed by kind, point, phase and layer, in program order."""
    found: dict[tuple[Any, ...], list[Verdict]] = {}
    for v in bad:
        key = (LAST if v.layer is None else v.layer, ORDER.get(v.point, LAST), v.phase != "prefill", v.phase, v.kind)
        found.setdefault(key, []).append(v)
    return sorted(found.items(), key=lambda item: item[0])


def _finding(
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
        "layer": worst.layer, "point": worst.point, "layers": () if worst.layer is None else (worst.layer,),
        "phases": (worst.phase,), "prompts": tuple(sorted({v.prompt for v in group})), "records": len(group),
        "rel_l2": e.rel_l2, "worst": e.worst,
    }  # fmt: skip
    if worst.kind == "state":
        return _state(recorded, model, e, group, shared)
    if worst.kind == "sums":
        return by_sums(e, broken_limit(worst), record_more(recorded), shared)
    shared["fails"] = broken_limit(worst)
    never: tuple[Class, ...] = ("semantics",) if formula is not None and right_until(formula, worst.place) else ()
    replayed = _replay(recorded, model, worst, known.get(worst.point, []), never)
    if replayed is None:
        return Finding(
            kind="unknown", cause="inputs were not recorded", says=record_more(recorded), explained=None,
            equal=None, second=None, **shared,
        )  # fmt: skip
    found, at, rows, finite, operation = replayed
    axes = POINTS[worst.point].axes
    shared["positions"] = by_position(found.left, found.made, at)
    shared["worst"] = worst_inside(found, axes, at, rows, worst) or e.worst
    broken = [w for w in recorded.run.record.warnings if w.startswith("weights:") and _of_layer(w, worst.layer)]
    if worst.status == "nonfinite" and broken:
        return Finding(
            kind="semantics", cause="weights not finite", says="; ".join(broken), explained=None, equal=None,
            second=None, **shared,
        )  # fmt: skip
    if worst.status == "nonfinite" and found.announced.closes:
        return _overflow(recorded, finite, shared, found)
    second = found.second
    rest: dict[str, Any] = {
        "explained": number(found.best.explained), "equal": number(found.best.equal),
        "second": None if second is None else (second.variant.name, number(second.explained)), **shared,
    }  # fmt: skip
    nameless = found.named is None or found.named.variant is found.announced.variant
    if nameless and finite and worst.status == "fail":
        other = whose(recorded, model, operation)
        if other is not None:
            rest["explained"] = number(other.explained)
            return Finding(kind="state", cause=other.cause, says=other.says, **rest | {"equal": None})
        place, policy = operation.place, recorded_policy(recorded.run.record)
        here, settled = policy_at(recorded, policy, place), chosen(recorded, policy, place)
        if "semantics" not in never and (read := misread(recorded, model, operation, here, settled)) is not None:
            rest |= {"explained": number(read.explained), "equal": number(read.equal)}
            return Finding(kind="semantics", cause=read.cause, says=read.says, **rest)
    if found.named is None:
        return Finding(kind="unknown", cause="none reproduces it", says=unrecognised(found, axes, at), **rest)
    if found.named.variant is found.announced.variant:
        says = "over all recorded rows together the announced policy closes; the record alone does not"
        return Finding(kind="unknown", cause="only one record fails", says=says, **rest)
    named = found.named.variant
    if named.kind == "format" and found.named.equal < BITS and formula is not None and _leaves(formula, worst):
        says = f"{unrecognised(found, axes, at)}; no format makes the program's FP64 shadow another formula"
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
    cause = "overflow" if finite else "came in not finite"
    says = (
        "finite inputs overflow under the announced policy"
        if finite
        else f"its recorded inputs hold NaN or infinities already; look at what comes before: {record_more(recorded)}"
    )
    best = found.announced
    return Finding(
        kind=kind, cause=cause, says=says, explained=number(best.explained), equal=number(best.equal), second=None,
        **shared,
    )  # fmt: skip


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


def _follows(f: Finding, earlier: Sequence[Finding]) -> bool:
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
            here, settled = policy_at(recorded, policy, place), chosen(recorded, policy, place)
            found = replay(operation, model, here, known, unrounded, probs, settled, never)
            return found, at, rows, finite, operation
    return None


def _state(
    recorded: Recorded, model: Model, e: ErrorRecord, group: Sequence[Verdict], shared: dict[str, Any]
) -> Finding:
    """Say what a cache, or a layer's input, holds instead of the rows written, and at which steps."""
    place = Place.of(e)
    state = stream_state(recorded, model, e) if e.point == HANDED else cache_state(recorded, place)
    steps = tuple(sorted({g.step for g in group if g.prompt == e.prompt}))
    when = f"at step {steps[0]}" if len(steps) == 1 else f"at steps {spans(steps)}"
    return Finding(
        kind=state.kind, cause=state.cause, says=f"{state.says}; {when}", explained=number(state.explained),
        equal=None, second=None, **shared,
    )  # fmt: skip


def _merged(findings: Sequence[Finding]) -> list[Finding]:
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
            old, layers=tuple(sorted({*old.layers, *f.layers})), phases=tuple(dict.fromkeys((*old.phases, *f.phases))),
            prompts=tuple(sorted({*old.prompts, *f.prompts})), records=old.records + f.records,
        )  # fmt: skip
    return list(found.values())


def _with_formula(findings: Sequence[Finding], formula: FormulaRecord) -> list[Finding]:
    """Call what nothing reproduces semantics where the shadow leaves the reference; that alone is a finding of its own.

    A shadow that is the reference names no format: only an emulation that reproduces the error does.
    """
    if formula.unknown is not None:
        return list(findings)
    found = []
    for f in findings:
        here = next((d for d in formula.differs if _same_place(f, d)), None)
        if here is not None:
            kind = "semantics" if f.kind == "unknown" else f.kind
            f = msgspec.structs.replace(f, kind=kind, shadow=here.distance)
        elif not formula.differs and f.kind == "unknown" and f.cause == "none reproduces it":
            says = f"the program's FP64 shadow is the reference, which names no format; {f.says}"
            f = msgspec.structs.replace(f, shadow=0.0, says=says)
        found.append(f)
    if not found:
        for d in formula.differs[:1]:
            found.append(
                Finding(
                    kind="semantics", cause="formula differs", says="its FP64 shadow is not the reference here",
                    layer=d.layer, point=d.point, layers=() if d.layer is None else (d.layer,), phases=(d.phase,),
                    prompts=(formula.prompt,), records=1, rel_l2=None, explained=None, equal=None, second=None,
                    worst=None, shadow=d.distance,
                )
            )  # fmt: skip
    return found


def _same_place(f: Finding, d: Differs) -> bool:
    same = POINTS[f.point].whole == POINTS[d.point].whole
    return same and f.layer == d.layer and d.phase in f.phases


def _unknown(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield what could not be established."""
    for status in ("missing", "unknown"):
        some = [v for v in verdicts if v.status == status]
        if some:
            yield f"{len(some)} records are {status}, first {some[0].point} of layer {some[0].layer}: {some[0].text}"


def _unplaced(verdicts: Sequence[Verdict], compared: Comparison, more: str) -> Iterator[Finding]:
    """Yield a finding where the gate fails sizes or tokens, and no operation that was recorded makes them."""
    far = [v for v in verdicts if v.kind == "forward" and v.status in ("fail", "nonfinite")]
    pairs = [p for v, p in ((judge_pair(p), p) for p in compared.prefill_decode) if v.status == "fail"]
    if not far and not pairs:
        return
    together = next((v for v in far if v.metric in METRICS), None)
    size = "" if together is None else f", {value(together.value or 0.0):.2g} × what rounding makes {together.text}"
    single = sum(v.metric not in METRICS for v in far)
    off = f"{single} forward errors and {len(pairs)} top-1 tokens are off{size}"
    says = f"{off}, and no recorded operation is: {more}"
    first = far[0] if far else judge_pair(pairs[0])
    prompts = dict.fromkeys([*(v.prompt for v in far), *(p.prompt for p in pairs)])
    yield Finding(
        kind="unknown", cause="no operation that was recorded", says=says, layer=first.layer, point=first.point,
        layers=tuple(sorted({v.layer for v in far if v.layer is not None})),
        phases=tuple(dict.fromkeys([*(v.phase for v in far), *("decode" for _ in pairs[:1])])),
        prompts=tuple(sorted(prompts)), records=len(far) + len(pairs), rel_l2=first.rel_l2, explained=None, equal=None,
        second=None, worst=first.worst,
    )  # fmt: skip
