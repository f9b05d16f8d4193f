"""What has to be there: tensors of a run, and records of its errors, down to prompt, phase, step and position."""

import math
from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from precaudit.judging.baselines import Judged
from precaudit.judging.verdicts import Status, Verdict, other_products
from precaudit.recording.runs.positions import positions_of
from precaudit.recording.runs.reader import Run
from precaudit.schema.coverage import (
    ExpectedTensor,
    config_of,
    entry_format,
    expected_tensors,
    formula_keys,
    has_inputs,
    is_handed_on,
    misfit,
    recorded_in,
    summed_places,
)
from precaudit.schema.digits import digits
from precaudit.schema.graphs.decoder import LOGITS, POINTS
from precaudit.schema.limits import Limits
from precaudit.schema.limits.checks import disturbance, logit_noise
from precaudit.schema.policies import KEYS, Policy
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import ErrorRecord
from precaudit.schema.records.runs import PointRecord, Requested

if TYPE_CHECKING:
    from precaudit.models.configs import DecoderConfig


def missing_records(run: Run, seen: Container[Judged]) -> Iterator[Verdict]:
    """Yield a verdict for everything run.json requested that is not there or not as requested.

    A tensor that is absent or holds other positions is missing, one of another shape or format than the policy's a
    failure; a tensor without its error records (``seen``) is missing too: it was not compared.
    """
    config = config_of(run.record.model.config)
    policy = Policy(name=run.record.policy["name"], **{k: run.record.policy[k] for k in KEYS})
    index, cut_off = _index(run.points), run.record.finished is None
    for prompt in run.record.requested.prompts:
        if prompt not in run.prompts:
            yield Verdict(status="missing", kind="coverage", prompt=prompt, text="the prompt is not in prompts.jsonl")
            continue
        for e in expected_tensors(run.record.requested, len(run.prompts[prompt].tokens)):
            found = index.get(hash((prompt, *e.key)))
            problem = _problem(e, found, config, policy)
            if problem is not None:
                yield Verdict(
                    status=problem[0],
                    kind="coverage",
                    prompt=prompt,
                    phase=e.phase,
                    step=e.step,
                    layer=e.layer,
                    point=e.point,
                    text=f"{problem[1]}, which was cut off" if found is None and cut_off else problem[1],
                )
            elif e.phase in run.record.requested.phases and (not e.support or POINTS[e.source].state):
                yield from _missing_errors(prompt, e, seen, run.record.requested, config)
        yield from _missing_sums(run.record.requested, prompt, config, seen)


def _index(points: Iterable[PointRecord]) -> dict[int, PointRecord]:
    """Return a record for the hash of every place, by which alone its shape, format and rows are told.

    Records of one form stand for each other: half a million of their own would take 600 MB.
    """
    forms: dict[Any, PointRecord] = {}
    return {
        hash((p.prompt, p.phase, p.step, p.layer, p.point)): forms.setdefault(
            (p.shape, p.dtype, p.positions, p.rows), p
        )
        for p in points
    }


def _problem(
    e: ExpectedTensor, found: PointRecord | None, config: "DecoderConfig", policy: Policy
) -> tuple[Status, str] | None:
    if found is None:
        return "missing", "requested, not in the run"
    problem = misfit(e, positions_of(found), found.shape, config)
    if problem is not None:
        return "missing" if problem.absent else "fail", problem.text
    point = POINTS[e.source]
    cast_up = e.phase == "decode" and policy.decode_attention == "float32" and point.over_keys and not e.summed
    wanted = "float32" if cast_up else entry_format(policy, e)
    return None if found.dtype == wanted else ("fail", f"format {found.dtype}, the policy says {wanted}")


def _missing_errors(
    prompt: str, e: ExpectedTensor, seen: Container[Judged], asked: Requested, config: "DecoderConfig"
) -> Iterator[Verdict]:
    point = POINTS[e.point]
    local = bool(point.inputs) and has_inputs(asked, config, e.key)
    kinds: tuple[str, ...] = ("state",) if point.state else ("local", "forward") if local else ("forward",)
    if point.handed is not None and is_handed_on(asked, e.phase, e.step, e.layer):
        kinds = ("state", *kinds)
    for kind in kinds:
        if (kind, prompt, *e.key) not in seen:
            yield Verdict(
                status="missing",
                kind=kind,
                prompt=prompt,
                phase=e.phase,
                step=e.step,
                layer=e.layer,
                point=e.point,
                text="no such record in errors.jsonl; compare again without filters",
            )


def _missing_sums(asked: Requested, prompt: str, config: "DecoderConfig", seen: Container[Judged]) -> Iterator[Verdict]:
    """Yield ``missing`` for everything that sums of rows judge and no record holds.

    A program need not show what lies within an operation.
    """
    if not asked.row_sums:
        return
    handed = [p.name for p in POINTS.values() if p.handed is not None and p.name not in asked.points]
    states = [("state", i, name) for i in asked.layers for name in handed if i == 0 or i - 1 in asked.layers]
    wanted = [
        (phase, *place)
        for phase in asked.phases
        for place in (*(("sums", *at) for at in summed_places(asked, config.layers, config.sparse, phase)), *states)
    ]
    for phase, kind, layer, point in wanted:
        if kind == "sums" and POINTS[point].within is not None:
            continue
        if (kind, prompt, phase, 0, layer, point) not in seen:
            yield Verdict(
                status="missing",
                kind=kind,
                prompt=prompt,
                phase=phase,
                layer=layer,
                point=point,
                text="no such record in errors.jsonl; compare again without filters",
            )


def missing_formulas(run: Run, prompts: Iterable[str], seen: Container[Judged]) -> Iterator[Verdict]:
    """Yield ``missing`` for every place whose formula was asked for (of ``prompts``) and has no record."""
    config = config_of(run.record.model.config)
    for prompt in prompts:
        for phase, step, layer, point in formula_keys(run.record.requested, config, run.record.requested.phases):
            if ("formula", prompt, phase, step, layer, point) not in seen:
                yield Verdict(
                    status="missing",
                    kind="formula",
                    prompt=prompt,
                    phase=phase,
                    step=step,
                    layer=layer,
                    point=point,
                    text="no such record in errors.jsonl; compare again with --formula and without filters",
                )


def disturbances(run: Run, errors: Iterable[ErrorRecord], limits: Limits) -> Iterator[Verdict]:
    """Yield ``unknown`` for every program whose logits capturing changed, ``missing`` for a phase never checked.

    What was recorded is then of another program than the one that runs without the audit. A change within the limit
    of forward errors, in units of the noise of the same logits, is another honest rounding of the same program: fine.
    """
    asked = run.record.requested
    noise = logit_noise(errors)
    for n in run.record.neutrality:
        if not n.bitwise and not disturbance(n, noise) <= limits.ratio.at(1):
            size = f"step {n.step}, {' × '.join(map(str, n.shape))}" if n.shape else f"step {n.step}"
            yield Verdict(
                status="unknown",
                kind="neutrality",
                prompt=", ".join(n.prompts),
                phase=n.phase,
                step=n.step,
                text=f"recording changed the {n.phase} logits ({size}) by up to {digits(n.max_diff)}"
                f"{_more(disturbance(n, noise), limits)}: the audit disturbs the program; record fewer points, or set "
                "excess_precision=off, and look again",
            )
        yield from other_products(n.predicted, n.prompts, n.phase, n.step)
    if run.record.program == "dump":
        return  # nothing was captured here
    checked = {n.phase for n in run.record.neutrality}
    captured = {p.phase for p in run.points if p.point != LOGITS}
    for phase in asked.phases:
        if phase in captured and phase not in checked:
            yield Verdict(
                status="missing",
                kind="neutrality",
                phase=phase,
                text=f"whether recording changed the {phase} logits was not checked; trace again",
            )


def _more(times: float, limits: Limits) -> str:
    """Return how a change compares with rounding, in words."""
    if math.isinf(times):
        return ", and there is no noise of their rounding to compare that with (it needs recorded logits, and weights)"
    return f", {digits(times)} × the noise of their rounding (at most {digits(limits.ratio.at(1), 6)})"


def missing_pairs(run: Run, pairs: Iterable[PrefillDecodeRecord]) -> Iterator[Verdict]:
    """Yield ``missing`` for every position that decode and prefill or rescore had to see and no record compares."""
    seen = {(p.prompt, p.against, p.step) for p in pairs}
    asked = run.record.requested
    if "decode" not in asked.phases:
        return
    wanted = [("prefill", 0)] if "prefill" in asked.phases and _seen_twice(asked) else []
    wanted += [("rescore", s) for s in range(asked.decode_steps + 1)] if "rescore" in asked.phases else []
    for prompt in run.prompts:
        for against, step in wanted:
            if (prompt, against, step) not in seen:
                yield Verdict(
                    status="missing",
                    kind=f"{against}/decode",
                    prompt=prompt,
                    phase="decode",
                    step=step,
                    point=LOGITS,
                    metric="top1",
                    text="the two views of this position were not compared",
                )


def _seen_twice(asked: Requested) -> bool:
    """Whether decode0 makes the logits of prefill's last position again; of a dump, where it has both."""
    held = [recorded_in(asked, *call) for call in (("prefill", 0), ("decode", 0))]
    return not asked.calls or all(LOGITS in points for points in held)


def absent(expected: Iterable[Judged], seen: Container[Judged], where: str) -> Iterator[Verdict]:
    """Yield ``missing`` for every place a baseline holds and the errors do not."""
    for kind, prompt, phase, step, layer, point in expected:
        if (kind, prompt, phase, step, layer, point) not in seen:
            yield Verdict(
                status="missing",
                kind=kind,
                prompt=prompt,
                phase=phase,
                step=step,
                layer=layer,
                point=point,
                text=f"in the baseline {where}, not here",
            )
