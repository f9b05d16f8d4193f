"""Baselines of rollouts: every metric of a run frozen to a file, with answers, that later runs are held against."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from precaudit.checks.rollouts.answers import wilson
from precaudit.checks.rollouts.limits import Side
from precaudit.checks.rollouts.mismatch import METRICS
from precaudit.checks.rollouts.origin import RolloutRun
from precaudit.checks.rollouts.written import Pair, Written, read_written
from precaudit.errors import UserError
from precaudit.judging.baselines import Link, read_sealed, replaces, write_sealed
from precaudit.schema.policies import completed
from precaudit.schema.records.base import Count, Number, Record, value
from precaudit.schema.records.devices import device_kind

FACTOR = 2.0  # over the baseline's value: other seeds stay within it (docs/rollouts.md)
SQUARES = ("k3_kl",)  # of |Δ log p|, where it is small: twice that is four times these
# Log-probabilities are made in float32 of logits up to 32, whose unit in the last place is 2^-19: a difference of two
# of them is no mismatch. k3 is half its square, a difference of probabilities at most as large.
FLOOR = 2.0**-18
SIZES = {
    "k3_kl": FLOOR * FLOOR / 2, "log_ppl_abs_diff": FLOOR, "rollout_probs_diff_mean": FLOOR,
    "rollout_probs_diff_max": FLOOR, "rollout_probs_diff_std": FLOOR, "abs_diff_p50": FLOOR, "abs_diff_p90": FLOOR,
    "abs_diff_p99": FLOOR, "abs_diff_max": FLOOR,
}  # fmt: skip
FRACTIONS = ("rollout_is_ratio_fraction_high", "rollout_is_ratio_fraction_low", "clip_fraction")
HELD = ("k3_kl", "rollout_probs_diff_mean", "abs_diff_p90", "abs_diff_p99", "clip_fraction")  # unless a budget says


class FrozenRun(Record, frozen=True, omit_defaults=False, tag_field="kind", tag="rollout baseline"):
    """The first line of a baseline of rollouts. ``sha256``: of this line without it, and of all after it."""

    of: RolloutRun
    created: str = ""
    sha256: str = ""
    chain: tuple[Link, ...] = ()


class FrozenMetric(Record, frozen=True, omit_defaults=False, tag_field="kind", tag="metric"):
    """A metric of a policy's pair of sides over ``tokens`` tokens; ``first``: its value in the chain's first baseline.

    That is the first one from which it is in all of them.
    """

    policy: str
    rollout: Side
    trainer: Side
    metric: str
    value: Number
    first: Number
    tokens: Count


class FrozenAnswers(Record, frozen=True, omit_defaults=False, tag_field="kind", tag="marks"):
    """A policy's answers: {question: whether its first sequence was right}."""

    policy: str
    marks: dict[str, bool]


@dataclass(frozen=True)
class RolloutBaseline:
    """A baseline of rollouts opened for reading: its metrics by pair and name, its answers by policy."""

    path: Path
    record: FrozenRun
    metrics: Mapping[tuple[Pair, str], FrozenMetric]
    answers: Mapping[str, FrozenAnswers]


def freeze_rollouts(source: Path, path: Path, accept: bool = False, why: str = "") -> FrozenRun:
    """Write a baseline of a file of rollouts' records; raises UserError for what is missing or no number in it."""
    found = read_written(source)
    before = read_rollout_baseline(path) if replaces(path, accept, why) else None
    if unfit := next(_unfit(found), None):
        raise UserError(f"{source}: {unfit}: no baseline")
    lines = list(_lines(found, before))
    return write_sealed(path, FrozenRun(of=found.origin), lines, None if before is None else before.record, why)


def _unfit(found: Written) -> Iterator[str]:
    """Yield why a run is none to hold others against."""
    run = found.origin
    yield from (f"policy {name} could not run" for name in run.refused)
    yield from (f"the loops of policy {name} drew other tokens" for name in run.apart)
    for pair in ((name, *sides) for name in run.policies for sides in run.sides):
        if pair not in found.whole:
            yield f"{told(pair)} is missing"
            continue
        m = found.whole[pair].mismatch
        if m.faults or not m.tokens:
            yield f"{told(pair)} has values that are no log-probability, or no token"
        if bad := next((k for k in METRICS if getattr(m, k) in ("nan", "inf", "-inf")), None):
            yield f"{told(pair)} has a {bad} that is not finite"


def told(pair: Pair) -> str:
    """Return a pair in words."""
    return f"policy {pair[0]}, {pair[1]} / {pair[2]}"


def _lines(found: Written, before: RolloutBaseline | None) -> Iterator[FrozenMetric | FrozenAnswers]:
    for pair, r in found.whole.items():
        for metric in METRICS:
            x = getattr(r.mismatch, metric)
            old = None if before is None else before.metrics.get((pair, metric))
            if x is not None:
                yield FrozenMetric(
                    policy=r.policy, rollout=r.rollout, trainer=r.trainer, metric=metric, value=x,
                    first=x if old is None else old.first, tokens=r.mismatch.tokens,
                )  # fmt: skip
    for a in found.answers.values():
        yield FrozenAnswers(policy=a.policy, marks=a.marks)


def read_rollout_baseline(path: Path) -> RolloutBaseline:
    """Read a baseline of rollouts; raises UserError when it is not one or was altered."""
    lines: list[FrozenMetric | FrozenAnswers] = []
    record = read_sealed(
        path, FrozenRun, FrozenMetric | FrozenAnswers, lambda x, *_: lines.append(x), "a baseline of rollouts"
    )
    metrics = {((x.policy, x.rollout, x.trainer), x.metric): x for x in lines if isinstance(x, FrozenMetric)}
    answers = {x.policy: x for x in lines if isinstance(x, FrozenAnswers)}
    return RolloutBaseline(path, record, metrics, answers)


def factor_of(metric: str) -> float:
    """Return how many times the baseline's value a metric may be unless a budget says."""
    return FACTOR * FACTOR if metric in SQUARES else FACTOR


def allowed(line: FrozenMetric, factor: float) -> float:
    """Return how large a metric may be: the factor times the baseline's value, or what chance makes of that.

    Of a share of tokens that is the upper end of its Wilson interval; a difference of log-probabilities may be as
    large as their float32 rounding. Raises KeyError for a metric that has no size.
    """
    x = value(line.value)
    if line.metric in FRACTIONS:
        return max(factor * x, wilson(min(x * line.tokens, line.tokens), line.tokens)[1])
    return max(factor * x, SIZES[line.metric])


def stale(baseline: RolloutBaseline, run: RolloutRun, across_devices: bool = False) -> list[str]:
    """Return why a baseline does not hold for a run: other weights, prompts, policies, drawing, or kind of device."""
    b, found = baseline.record.of, []
    if b.schema != run.schema:
        found.append(f"schema {b.schema}, now {run.schema}")
    if b.weights != run.weights:
        found.append(f"weights {b.weights[:12]}…, now {run.weights[:12]}…")
    for name in sorted(b.policies.keys() & run.policies.keys()):
        found += _differ(f"policy {name}", completed(b.policies[name]), completed(run.policies[name]))
    found += _differ("trainer", b.trainer, run.trainer)
    found += _differ("drawn with", b.asked, run.asked)
    found += [f"the {what} are others" for what in ("prompts", "questions") if getattr(b, what) != getattr(run, what)]
    if not across_devices and device_kind(b.device) != device_kind(run.device):
        found.append(f"device {b.device}, now {run.device} (--across-devices allows it)")
    return found


def _differ(what: str, was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    changed = sorted(k for k in {*was, *now} if was.get(k) != now.get(k))
    return [f"{what}: " + ", ".join(f"{k} {was.get(k)}, now {now.get(k)}" for k in changed)] if changed else []


def grown(baseline: RolloutBaseline, found: Written) -> list[str]:
    """Return the three metrics with a size that grew most against the baseline, in words."""
    rows = []
    for (pair, metric), line in baseline.metrics.items():
        now = None if pair not in found.whole else getattr(found.whole[pair].mismatch, metric)
        x, before, first = value(now), value(line.value), value(line.first)
        if metric in HELD and before > 0 and first > 0 and max(x / before, x / first) > 1:
            sizes = f"{x / before:.3g} × the baseline's, {x / first:.3g} × the first baseline's"
            rows.append((x / before, f"drift: {told(pair)}: {metric} {sizes}"))
    return [text for _, text in sorted(rows, key=lambda r: -r[0])[:3]]


def same_questions(line: FrozenAnswers, marks: Mapping[str, bool]) -> bool:
    """Whether answers are to the baseline's questions."""
    return line.marks.keys() == marks.keys() and bool(line.marks)
