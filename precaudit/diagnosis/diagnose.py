"""The verb ``diagnose``: the cause of every local error and state that honest rounding does not make."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from precaudit.diagnosis.advice import record_more
from precaudit.diagnosis.evidence.closure import Closure, closure
from precaudit.diagnosis.evidence.flips import flips, flips_sentence
from precaudit.diagnosis.evidence.formula import first_parting
from precaudit.diagnosis.evidence.mesh_costs import MeshCost, mesh_costs
from precaudit.diagnosis.evidence.program import RecordedModel
from precaudit.diagnosis.evidence.records import Differs, Finding, FormulaRecord, Remedy, Shares, findings_frame
from precaudit.diagnosis.evidence.views import summary
from precaudit.diagnosis.replayed import CAME_IN, OF_WEIGHTS, by_operation, finding_of, follows, merge_findings
from precaudit.errors import UserError
from precaudit.judging.pooled import METRICS, pooled_verdicts
from precaudit.judging.rules import judge, judge_pair
from precaudit.judging.verdicts import Verdict, inheriting
from precaudit.models.checkpoints import open_checkpoint, recorded_source
from precaudit.models.configs import with_window
from precaudit.models.numpy_decoder.model import Model
from precaudit.numbers.threads import one_blas_thread
from precaudit.progress import Advance, silent
from precaudit.recording.runs.reader import Run, open_run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.runs.written import Comparison, read_compare_record
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.references.mutations.variants import Variant
from precaudit.references.textbook.formula import recorded_program
from precaudit.schema.brief import Brief
from precaudit.schema.coverage import config_of
from precaudit.schema.digits import digits
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.limits import default_limits
from precaudit.schema.places import LAST, ORDER, point_text
from precaudit.schema.policies import declared_policy, held_weights
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord, StateError
from precaudit.schema.records.lines import write_lines
from precaudit.schema.selection import Selection

PLACED = ("local", "state", "sums")  # kinds of records that place a fault at an operation


@dataclass(frozen=True, repr=False)
class Diagnosis(Brief):
    """Findings in program order, what stayed unknown, and the comparison they rest on."""

    compared: Comparison[Run]
    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]
    judged: int
    formula: FormulaRecord
    shares: tuple[Shares, ...] = ()
    remedies: tuple[Remedy, ...] | None = ()
    views: str | None = None
    flips: str | None = None
    closures: tuple[Closure, ...] = ()
    costs: tuple[MeshCost, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 if a finding stands, 3 if something is unknown, 0 if rounding explains all."""
        return 1 if self.findings else 3 if self.unknown or not self.judged else 0

    def frame(self) -> Any:
        """Return the findings as a pandas DataFrame, always with the same columns."""
        return findings_frame(self.findings)


def lift_subject(
    run: Run | Path | str, subject: Any, options: CompareOptions, lift: Mapping[str, Callable[..., Any]] | None
) -> Any:
    """Return the program that was recorded with FP64 meanings, by name, of primitives and Pallas kernels in it."""
    if not lift:
        return subject
    recorded = Recorded.of(run if isinstance(run, Run) else open_run(run, options.partial))
    found = recorded_program(recorded, subject, options.model)("cpu")
    return subject if found is None else replace(found, lift=lift)


@np.errstate(all="ignore")  # what is not finite has its own status
def diagnose(
    run: Run | Path | str,
    select: Selection | None = None,
    options: CompareOptions | None = None,
    tell: Advance = silent,
    subject: Any = None,
    objective: str = "margin",
) -> Diagnosis:
    """Find the causes of a run's errors; compares it first where that was not done. Writes findings.jsonl beside it.

    ``subject``: the program that was recorded, where it is not the shipped decoder, or has meanings that
    ``lift_subject`` gave it; ``objective``: what the shares are of, margin, kl, logprob or logprob:TOKEN. Raises
    UserError as ``compare`` does.
    """
    options = options or CompareOptions(accum=())
    opened = run if isinstance(run, Run) else open_run(run, options.partial)
    check_objective(objective, opened.record.model.config["vocab"])
    compared = compare(opened, None, select, options, tell)
    recorded = Recorded.of(compared.run)
    program_on = recorded_program(recorded, subject, options.model)
    records = {_key(e): e for e in compared.errors if e.kind in PLACED}
    verdicts = [v for e in compared.errors if (v := judge(e, default_limits())) is not None and v.status != "pass"]
    verdicts += pooled_verdicts(compared.errors, default_limits())
    standing = list(inheriting(verdicts))
    bad = [v for v in standing if v.status in ("fail", "nonfinite") and v.kind in PLACED]
    # A cache that holds NaN because an operation before it made them is as it should be.
    made = {v.prompt: v.depth for v in sorted(bad, key=lambda v: v.depth, reverse=True) if _broken_operation(v)}
    bad = [
        v
        for v in bad
        if v.kind in ("local", "sums")
        or _differing(records[("state", *v.place)])
        or not (v.prompt in made and made[v.prompt] <= v.depth)
    ]
    model = _model(recorded, options)
    findings: list[Finding] = []
    known: dict[str, list[Variant]] = {}
    with one_blas_thread():
        groups = by_operation(bad)
        prompt = (
            min(v.prompt for v in groups[0][1])
            if groups
            else min(recorded.run.prompts, key=lambda p: len(recorded.run.prompts[p].tokens))
        )
        formula = first_parting(recorded, model, prompt, program_on, kept=subject is None)
        for i, (_, group) in enumerate(groups):
            found = finding_of(recorded, model, group, records, known, formula if subject is not None else None)
            if not follows(found, findings):
                findings.append(found)
            tell(i + 1, len(groups), "replaying operations")
    findings = _with_formula([_of_weights(f, recorded, formula) for f in merge_findings(findings)], formula)
    findings = findings or list(_findings_without_place(standing, compared, record_more(recorded)))
    write_lines(compared.folder / "findings.jsonl", findings)
    unknown = list(_unknown(standing))
    judged = sum(e.kind in (*PLACED, "forward") for e in compared.errors) + len(compared.prefill_decode)
    whole = select is None
    program = RecordedModel(recorded, model, program_on, whole, objective)
    shared = program.shares(tell)
    remedies = program.remedies(tell, shared)
    return Diagnosis(
        compared,
        tuple(findings),
        tuple(unknown),
        judged,
        formula,
        shared,
        remedies,
        _views(recorded, findings) if whole else None,
        _flips(recorded, options) if whole else None,
        tuple(closure(recorded, model, compared.errors)) if whole else (),
        mesh_costs(recorded, model) if whole else (),
    )


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


def _flips(recorded: Recorded, options: CompareOptions) -> str | None:
    """Return what flipped among top tokens, from the references compare left."""
    record, before = recorded.run.record, read_compare_record(recorded.run)
    weights = f"{record.model.sha256}:{held_weights(declared_policy(record))}"
    sigma = value(None if before is None else before.sigma)
    rows = flips(recorded, recorded.config, weights, options.cache, sigma)
    steps = recorded.requested.decode_steps + 1 if "decode" in recorded.requested.phases else 0
    return flips_sentence(rows, steps)


def _differing(e: ErrorRecord) -> bool:
    return isinstance(e, StateError) and bool(e.mismatched)


def _key(e: ErrorRecord) -> tuple[Any, ...]:
    return (e.kind, e.prompt, e.phase, e.step, e.layer, e.point)


def _model(recorded: Recorded, options: CompareOptions) -> Model:
    record = recorded.run.record
    where = options.model or recorded_source(record.model.reference)
    opened = open_checkpoint(where, record.model.allowed).under(declared_policy(record))
    return Model(with_window(config_of(record.model.config), declared_policy(record)), opened.tensors.read_tensor)


def _of_weights(f: Finding, recorded: Recorded, formula: FormulaRecord) -> Finding:
    """Name weights that are not finite as what made a finding's inputs so, where FP64 is NaN before it, too."""
    broken = [w for w in recorded.run.record.warnings if w.startswith("weights:")]
    before = [d for d in formula.differs if isnan(value(d.distance)) and _depth(d) <= _depth(f)]
    if f.cause != CAME_IN or not broken:
        return f
    if not before:
        return msgspec.structs.replace(f, says=f"{f.says}; {'; '.join(broken)}")
    says = f"{'; '.join(broken)}; FP64 of the model is NaN from {point_text(before[0])} on"
    return msgspec.structs.replace(f, kind="semantics", cause=OF_WEIGHTS, says=says)


def _depth(x: Finding | Differs) -> tuple[int, int]:
    return LAST if x.layer is None else x.layer, ORDER[x.point]


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
            says = f"in FP64 the program agrees with the reference, which names no format; {f.says}"
            f = msgspec.structs.replace(f, shadow=0.0, says=says)
        found.append(f)
    if not found:
        for d in formula.differs[:1]:
            found.append(
                Finding(
                    kind="semantics",
                    cause="formula differs",
                    says="in FP64 the program differs from the reference here",
                    layer=d.layer,
                    point=d.point,
                    layers=() if d.layer is None else (d.layer,),
                    phases=(d.phase,),
                    prompts=(formula.prompt,),
                    records=1,
                    rel_l2=None,
                    explained=None,
                    equal=None,
                    second=None,
                    worst=None,
                    shadow=d.distance,
                )
            )
    return found


def _same_place(f: Finding, d: Differs) -> bool:
    same = POINTS[f.point].whole == POINTS[d.point].whole
    return same and f.layer == d.layer and d.phase in f.phases


def _unknown(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield what could not be established."""
    for status in ("missing", "unknown"):
        some = [v for v in verdicts if v.status == status]
        if some:
            many = "1 record is" if len(some) == 1 else f"{len(some)} records are"
            yield f"{many} {status}, first {point_text(some[0])}: {some[0].text}"


def _findings_without_place(verdicts: Sequence[Verdict], compared: Comparison[Run], more: str) -> Iterator[Finding]:
    """Yield a finding where the gate fails sizes or tokens, and no operation that was recorded makes them."""
    far = [v for v in verdicts if v.kind == "forward" and v.status in ("fail", "nonfinite")]
    pairs = [p for v, p in ((judge_pair(p), p) for p in compared.prefill_decode) if v.status == "fail"]
    if not far and not pairs:
        return
    together = next((v for v in far if v.metric in METRICS), None)
    size = "" if together is None else f", {digits(together.value or 0.0, 2)} × the error of rounding {together.text}"
    single = sum(v.metric not in METRICS for v in far)
    off = f"{single} forward errors and {len(pairs)} predictions of two views fail{size}"
    says = f"{off}, and no recorded operation does: {more}"
    first = far[0] if far else judge_pair(pairs[0])
    prompts = dict.fromkeys([*(v.prompt for v in far), *(p.prompt for p in pairs)])
    yield Finding(
        kind="unknown",
        cause="no operation that was recorded",
        says=says,
        layer=first.layer,
        point=first.point,
        layers=tuple(sorted({v.layer for v in far if v.layer is not None})),
        phases=tuple(dict.fromkeys([*(v.phase for v in far), *("decode" for _ in pairs[:1])])),
        prompts=tuple(sorted(prompts)),
        records=len(far) + len(pairs),
        rel_l2=first.rel_l2,
        explained=None,
        equal=None,
        second=None,
        worst=first.worst,
    )
