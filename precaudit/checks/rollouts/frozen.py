"""Baselines of rollouts: every metric of a run frozen to a file, with answers, that later runs are held against."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from precaudit.checks.rollouts.answers import wilson
from precaudit.checks.rollouts.limits import ANSWERS, Side
from precaudit.checks.rollouts.mismatch import METRICS
from precaudit.checks.rollouts.origin import RolloutRun
from precaudit.checks.rollouts.written import Pair, WrittenRecords, read_written
from precaudit.errors import UserError
from precaudit.judging.baselines import (
    Baseline,
    BaselineForm,
    Drift,
    Link,
    largest_drift,
    read_baseline,
    write_baseline,
)
from precaudit.judging.budgets import ratchet
from precaudit.schema.records.base import Count, Number, Record, value

# Log-probabilities are made in float32 of logits up to 32, whose unit in the last place is 2^-19: a difference of two
# of them is no mismatch. k3 is half its square, a difference of probabilities at most as large.
FLOOR = 2.0**-18
SIZES = {
    "k3_kl": FLOOR * FLOOR / 2,
    "log_ppl_abs_diff": FLOOR,
    "rollout_probs_diff_mean": FLOOR,
    "rollout_probs_diff_max": FLOOR,
    "rollout_probs_diff_std": FLOOR,
    "abs_diff_p50": FLOOR,
    "abs_diff_p90": FLOOR,
    "abs_diff_p99": FLOOR,
    "abs_diff_max": FLOOR,
}
FRACTIONS = ("rollout_is_ratio_fraction_high", "rollout_is_ratio_fraction_low", "clip_fraction")
# Over the baseline's value, unless a budget says: other seeds stay within twice it (docs/rollouts.md). k3, where it is
# small, is a square of |Δ log p|: twice that is four times these.
FACTORS = dict.fromkeys((*SIZES, *FRACTIONS), 2.0) | {"k3_kl": 4.0}
HELD = ("k3_kl", "rollout_probs_diff_mean", "abs_diff_p90", "abs_diff_p99", "clip_fraction")  # unless a budget says

Place = tuple[str, Side | None, Side | None, str]  # a pair and a metric, or a policy's answers


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

    @property
    def place(self) -> Place:
        """What identifies it."""
        return self.policy, self.rollout, self.trainer, self.metric


class FrozenAnswers(Record, frozen=True, omit_defaults=False, tag_field="kind", tag="marks"):
    """A policy's answers: {question: whether its first sequence was right}."""

    policy: str
    marks: dict[str, bool]

    @property
    def place(self) -> Place:
        """What identifies it."""
        return self.policy, None, None, ANSWERS


Line = FrozenMetric | FrozenAnswers
RolloutBaseline = Baseline[FrozenRun, Line]
OF_ROLLOUTS = BaselineForm[FrozenRun, Line](FrozenRun, Line, "a baseline of rollouts")


def freeze_rollouts(source: Path, path: Path, accept: bool = False, why: str = "") -> FrozenRun:
    """Write a baseline of a file of rollouts' records; raises UserError for what is missing or no number in it."""
    found = read_written(source)
    if unfit := next(_unfit(found), None):
        raise UserError(f"{source}: {unfit}: no baseline")
    return write_baseline(path, OF_ROLLOUTS, FrozenRun(of=found.origin), lambda b: _frozen(found, b), accept, why)


def _unfit(found: WrittenRecords) -> Iterator[str]:
    """Yield why a run is none to hold others against."""
    run = found.origin
    yield from (f"policy {name} could not run" for name in run.refused)
    yield from (f"the loops of policy {name} drew other tokens" for name in run.apart)
    for pair in ((name, *sides) for name in run.policies for sides in run.sides):
        if pair not in found.whole:
            yield f"{pair_text(pair)} is missing"
            continue
        m = found.whole[pair].mismatch
        if m.faults or not m.tokens:
            yield f"{pair_text(pair)} has values that are no log-probability, or no token"
        if bad := next((k for k in METRICS if getattr(m, k) in ("nan", "inf", "-inf")), None):
            yield f"{pair_text(pair)} has a {bad} that is not finite"


def pair_text(pair: Pair) -> str:
    """Return a pair in words."""
    return f"policy {pair[0]}, {pair[1]} / {pair[2]}"


def _frozen(found: WrittenRecords, before: RolloutBaseline | None) -> Iterator[Line]:
    for pair, r in found.whole.items():
        for metric in METRICS:
            x = getattr(r.mismatch, metric)
            old = None if before is None else metric_in(before, pair, metric)
            if x is not None:
                yield FrozenMetric(
                    policy=r.policy,
                    rollout=r.rollout,
                    trainer=r.trainer,
                    metric=metric,
                    value=x,
                    first=x if old is None else old.first,
                    tokens=r.mismatch.tokens,
                )
    for a in found.answers.values():
        yield FrozenAnswers(policy=a.policy, marks=a.marks)


def metric_in(baseline: RolloutBaseline, pair: Pair, metric: str) -> FrozenMetric | None:
    """Return a baseline's line of a metric of a pair."""
    line = baseline.lines.get((*pair, metric))
    return line if isinstance(line, FrozenMetric) else None


def read_rollout_baseline(path: Path) -> RolloutBaseline:
    """Read a baseline of rollouts; raises UserError when it is not one or was altered."""
    return read_baseline(path, OF_ROLLOUTS)


def allowed_value(line: FrozenMetric, factor: float) -> float | None:
    """Return how large a metric may be: the factor times the baseline's value, or what chance makes of that.

    Of a share of tokens that is the upper end of its Wilson interval; a difference of log-probabilities may be as
    large as their float32 rounding. Raises KeyError for a metric that has no size.
    """
    if line.metric not in FRACTIONS:
        return ratchet(line.value, factor, SIZES[line.metric])
    return ratchet(line.value, factor, wilson(min(value(line.value) * line.tokens, line.tokens), line.tokens)[1])


def metric_drift(baseline: RolloutBaseline, found: WrittenRecords) -> list[Drift]:
    """Return which metrics with a size grew most against the baseline."""
    rows = []
    for line in baseline.lines.values():
        if isinstance(line, FrozenMetric) and line.metric in HELD:
            pair = line.policy, line.rollout, line.trainer
            now = None if pair not in found.whole else getattr(found.whole[pair].mismatch, line.metric)
            x, before, first = value(now), value(line.value), value(line.first)
            if now is not None and before > 0 and first > 0:
                rows.append((x / before, x / first, f"{pair_text(pair)}: {line.metric}"))
    return largest_drift(rows, str)


def same_questions(line: FrozenAnswers, marks: Mapping[str, bool]) -> bool:
    """Whether answers are to the baseline's questions."""
    return line.marks.keys() == marks.keys() and bool(line.marks)
