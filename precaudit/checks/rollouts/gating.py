"""``gate`` of a file of rollouts' records: faults, causes, budgets, and what got worse than a baseline. No JAX."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path

from precaudit.checks.rollouts.answers import MARGIN, Paired, compared, kept, sentence
from precaudit.checks.rollouts.budgets import Budget, read_rollout_budgets, under
from precaudit.checks.rollouts.frozen import (
    HELD,
    FrozenMetric,
    RolloutBaseline,
    allowed,
    factor_of,
    grown,
    read_rollout_baseline,
    same_questions,
    stale,
    told,
)
from precaudit.checks.rollouts.limits import ANSWERS, smaller_is_worse
from precaudit.checks.rollouts.mismatch import METRICS
from precaudit.checks.rollouts.written import Pair, Written, read_written
from precaudit.judging.baselines import version_suspects
from precaudit.judging.gate import path_of
from precaudit.judging.judgement import Judgement
from precaudit.judging.verdicts import STATUSES, Status, Verdict
from precaudit.schema.records.base import Number, number, value

KIND = "mismatch"


def gate_rollouts(
    source: Path | str,
    budgets: Path | str | None = None,
    baseline: Path | str | None = None,
    across_devices: bool = False,
) -> Judgement:
    """Judge the records of a rollout; raises UserError for a file, budgets or a baseline that are wrong.

    Without budgets and baseline only faults and causes are judged: where there are none, nothing is.
    """
    source = path_of(source, "source")
    found = read_written(source)
    stated = () if budgets is None else read_rollout_budgets(path_of(budgets, "budgets"), found)
    frozen = None if baseline is None else read_rollout_baseline(path_of(baseline, "baseline"))
    reasons = [] if frozen is None else stale(frozen, found.origin, across_devices)
    rules = _Rules(found, stated, frozen, tuple(reasons))
    verdicts = list(rules.verdicts())
    tally = Counter(v.status for v in verdicts)
    bad = sorted((v for v in verdicts if v.status != "pass"), key=lambda v: STATUSES.index(v.status))
    places = dict.fromkeys((None, v.point) for v in verdicts if v.point)
    counts: dict[Status, int] = {s: tally[s] for s in STATUSES if tally[s]}
    return Judgement(source.name, tuple(bad), counts, tuple(_notes(found, frozen, reasons)), (), tuple(places),
                     of="rollouts")  # fmt: skip


def _notes(found: Written, frozen: RolloutBaseline | None, reasons: Sequence[str]) -> Iterator[str]:
    if frozen is None:
        return
    if changed := version_suspects(frozen.record.of.versions, found.origin.versions):
        yield f"versions differ from the baseline's, first suspects of any change: {', '.join(changed)}"
    if new := [name for name in found.origin.policies if name not in frozen.record.of.policies]:
        yield f"the baseline knows nothing of policy {', '.join(new)}"
    if not reasons:
        yield from grown(frozen, found)


@dataclass(frozen=True)
class _Rules:
    """What a file is judged by; ``stale``: why the baseline does not hold."""

    found: Written
    budgets: tuple[Budget, ...]
    frozen: RolloutBaseline | None
    stale: tuple[str, ...]

    def verdicts(self) -> Iterator[Verdict]:
        yield from self._origin()
        for pair, r in self.found.whole.items():
            for what, count in r.mismatch.faults.items():
                text = f"{count} {what}: no log-probability"
                yield Verdict(status="nonfinite", kind=KIND, point=told(pair), text=text)
            for metric in METRICS:
                yield from self._metric(pair, metric, getattr(r.mismatch, metric))
        for c in self.found.causes:
            status: Status = "pass" if c.verdict == "rounding" else "unknown" if c.verdict == "unknown" else "fail"
            text = "" if status == "pass" else f"{c.id}, token {c.index}: {c.verdict}"
            yield Verdict(status=status, kind="cause", point=f"policy {c.policy}", text=text)
        yield from self._answers()
        yield from (Verdict(status="stale", kind="baseline", text=text) for text in self.stale)

    def _origin(self) -> Iterator[Verdict]:
        """Yield what the first line says is wrong, or names and the file lacks; and what the baseline has beyond it."""
        run = self.found.origin
        for name, why in run.refused.items():
            yield Verdict(status="unknown", kind=KIND, point=f"policy {name}", text=f"cannot run: {why}")
        for name in run.apart:
            yield Verdict(status="fail", kind="loops", point=f"policy {name}", text="its loops drew other tokens")
        wanted: dict[Pair, str] = {(name, *sides): "no record of it" for name in run.policies for sides in run.sides}
        if self.frozen is not None:
            wanted = {pair: "the baseline has it" for pair, _ in self.frozen.metrics} | wanted
        for pair, text in wanted.items():
            if pair not in self.found.whole and pair[0] not in run.refused:
                yield Verdict(status="missing", kind=KIND, point=told(pair), text=text)

    def _metric(self, pair: Pair, metric: str, given: Number | None) -> Iterator[Verdict]:
        budgets = under(self.budgets, pair, metric)
        for b in budgets:
            yield self._stated(pair, metric, given, b)
        line = None if self.frozen is None or self.stale else self.frozen.metrics.get((pair, metric))
        if line is not None and metric in HELD and not budgets:
            yield _against(pair, line, given, factor_of(metric), "")

    def _stated(self, pair: Pair, metric: str, given: Number | None, b: Budget) -> Verdict:
        why = b.entry.why
        if b.entry.limit is not None:
            return _verdict(pair, metric, given, b.entry.limit, why)
        if self.stale:
            return _open("stale", pair, metric, "the baseline to ratchet from is stale", why)
        line = None if self.frozen is None else self.frozen.metrics.get((pair, metric))
        if line is None or b.factor is None:
            return _open("missing", pair, metric, "the baseline has no value to ratchet from", why)
        return _against(pair, line, given, b.factor, why)

    def _answers(self) -> Iterator[Verdict]:
        """Yield what intervals say of limits on answers: against the first policy's, and against the baseline's."""
        stated = [b for b in self.budgets if b.entry.metric == ANSWERS]
        for b in stated:
            for c in (c for c in self.found.changed if c.policy in b.policies):
                assert b.entry.limit is not None
                yield _paired(c.paired, b.entry.limit, f"answers of {c.policy} against {c.against}", b.entry.why)
        if self.frozen is None:
            return
        for name, line in self.frozen.answers.items():
            point = f"answers of {name} against the baseline's"
            now = self.found.answers.get(name)
            if now is None or not same_questions(line, now.marks):
                text = "no answers of it" if now is None else "answers to other questions"
                yield Verdict(status="missing", kind="answers", point=point, text=text)
            elif not self.stale:
                paired = compared([line.marks[q] for q in now.marks], list(now.marks.values()))
                own = [(b.entry.limit, b.entry.why) for b in stated if name in b.policies]
                for limit, why in own or [(-MARGIN, "")]:
                    assert limit is not None
                    yield _paired(paired, limit, point, why)


def _against(pair: Pair, line: FrozenMetric, given: Number | None, factor: float, why: str) -> Verdict:
    return _verdict(pair, line.metric, given, allowed(line, factor), why)


def _verdict(pair: Pair, metric: str, given: Number | None, limit: float, why: str) -> Verdict:
    """Return what a limit says of a metric; one that is not defined, or NaN, keeps none."""
    if given is None:
        return _open("unknown", pair, metric, f"{metric} is not defined of these rollouts", why)
    x = value(given)
    worse = x < limit if smaller_is_worse(metric) else x > limit
    status: Status = "nonfinite" if isnan(x) else "fail" if worse else "pass"
    return Verdict(
        status=status, kind=KIND, point=told(pair), metric=metric, value=number(x), limit=number(limit), why=why,
    )  # fmt: skip


def _open(status: Status, pair: Pair, metric: str, text: str, why: str) -> Verdict:
    return Verdict(status=status, kind=KIND, point=told(pair), metric=metric, text=text, why=why)


def _paired(found: Paired, limit: float, point: str, why: str) -> Verdict:
    return Verdict(
        status=kept(found, limit), kind="answers", point=point, metric=ANSWERS, value=number(found.difference),
        limit=number(limit), text=sentence(found), why=why,
    )  # fmt: skip
