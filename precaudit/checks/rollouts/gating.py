"""``gate`` of a file of rollouts' records: faults, causes, budgets, and what got worse than a baseline. No JAX."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from precaudit.checks.rollouts.answers import MARGIN, Paired, answers_sentence, pair_answers, status_under_limit
from precaudit.checks.rollouts.budgets import RolloutBudget, read_rollout_budgets, status_of
from precaudit.checks.rollouts.engine_rounding import engine_sentence
from precaudit.checks.rollouts.frozen import (
    FACTORS,
    HELD,
    FrozenAnswers,
    FrozenMetric,
    RolloutBaseline,
    allowed_value,
    metric_drift,
    metric_in,
    pair_text,
    read_rollout_baseline,
    same_questions,
)
from precaudit.checks.rollouts.limits import ANSWERS
from precaudit.checks.rollouts.mismatch import METRICS
from precaudit.checks.rollouts.written import Pair, WrittenRecords, read_written
from precaudit.judging.baselines import stale, version_suspects
from precaudit.judging.budgets import NOT_FROZEN, stated_limit, under
from precaudit.judging.gate import path_of
from precaudit.judging.judgement import Judgement
from precaudit.judging.verdicts import STATUSES, Status, Verdict
from precaudit.schema.records.base import Number, json_number, value

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
    reasons = [] if frozen is None else stale(frozen.record.of, found.origin, across_devices)
    rules = _Rules(found, stated, frozen, tuple(reasons))
    verdicts = list(rules.verdicts())
    tally = Counter(v.status for v in verdicts)
    bad = sorted((v for v in verdicts if v.status != "pass"), key=lambda v: STATUSES.index(v.status))
    places = dict.fromkeys((None, v.point) for v in verdicts if v.point)
    counts: dict[Status, int] = {s: tally[s] for s in STATUSES if tally[s]}
    grown = () if frozen is None or reasons else metric_drift(frozen, found)
    return Judgement(
        source.name, tuple(bad), counts, tuple(_notes(found, frozen)), tuple(grown), tuple(places), of="rollouts"
    )


def _notes(found: WrittenRecords, frozen: RolloutBaseline | None) -> Iterator[str]:
    if frozen is None:
        return
    yield from version_suspects(frozen.record.of.versions, found.origin.versions)
    if new := [name for name in found.origin.policies if name not in frozen.record.of.policies]:
        yield f"the baseline knows nothing of policy {', '.join(new)}"


@dataclass(frozen=True)
class _Rules:
    """What a file is judged by; ``stale``: why the baseline does not hold."""

    found: WrittenRecords
    budgets: tuple[RolloutBudget, ...]
    frozen: RolloutBaseline | None
    stale: tuple[str, ...]

    def verdicts(self) -> Iterator[Verdict]:
        yield from self._origin()
        for pair, r in self.found.whole.items():
            for what, count in r.mismatch.faults.items():
                text = f"{count} {what}: no log-probability"
                yield Verdict(status="nonfinite", kind=KIND, point=pair_text(pair), text=text)
            for metric in METRICS:
                yield from self._metric(pair, metric, getattr(r.mismatch, metric))
        for c in self.found.causes:
            status: Status = "pass" if c.verdict == "rounding" else "unknown" if c.verdict == "unknown" else "fail"
            text = "" if status == "pass" else f"{c.id}, token {c.index}: {c.verdict}"
            yield Verdict(status=status, kind="cause", point=f"policy {c.policy}", text=text)
        if (engine := self.found.rounding) is not None:
            text = "" if engine.status == "pass" else engine_sentence(engine)
            yield Verdict(status=engine.status, kind="rounding", point="engine / fp64", text=text)
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
            its = (x for x in self.frozen.lines.values() if isinstance(x, FrozenMetric))
            wanted = {(x.policy, x.rollout, x.trainer): "the baseline has it" for x in its} | wanted
        for pair, text in wanted.items():
            if pair not in self.found.whole and pair[0] not in run.refused:
                yield Verdict(status="missing", kind=KIND, point=pair_text(pair), text=text)

    def _metric(self, pair: Pair, metric: str, given: Number | None) -> Iterator[Verdict]:
        line = None if self.frozen is None else metric_in(self.frozen, pair, metric)
        budgets = under(self.budgets, *pair, metric)
        for b in budgets:
            limit = stated_limit(
                b, bool(self.stale), lambda factor: None if line is None else allowed_value(line, factor)
            )
            yield _verdict(pair, metric, given, limit, b.entry.why)
        if line is not None and not self.stale and metric in HELD and not budgets:
            most = allowed_value(line, FACTORS[metric])
            yield _verdict(pair, metric, given, NOT_FROZEN if most is None else most, "")

    def _answers(self) -> Iterator[Verdict]:
        """Yield what intervals say of limits on answers: against the first policy's, and against the baseline's."""
        stated = [b for b in self.budgets if b.entry.metric == ANSWERS]
        for b in stated:
            for c in (c for c in self.found.changed if b.of.policies is None or c.policy in b.of.policies):
                assert b.entry.limit is not None
                yield _paired_verdict(
                    c.paired, b.entry.limit, f"answers of {c.policy} against {c.against}", b.entry.why
                )
        if self.frozen is None:
            return
        for line in (x for x in self.frozen.lines.values() if isinstance(x, FrozenAnswers)):
            name, point = line.policy, f"answers of {line.policy} against the baseline's"
            now = self.found.answers.get(name)
            if now is None or not same_questions(line, now.marks):
                text = "no answers of it" if now is None else "answers to other questions"
                yield Verdict(status="missing", kind="answers", point=point, text=text)
            elif not self.stale:
                paired = pair_answers([line.marks[q] for q in now.marks], list(now.marks.values()))
                own = [(b.entry.limit, b.entry.why) for b in stated if b.of.policies is None or name in b.of.policies]
                for limit, why in own or [(-MARGIN, "")]:
                    assert limit is not None
                    yield _paired_verdict(paired, limit, point, why)


def _verdict(pair: Pair, metric: str, given: Number | None, limit: float | tuple[Status, str], why: str) -> Verdict:
    """Return what a limit says of a metric, or what is said of one that has none."""
    if not isinstance(limit, tuple) and given is None:
        limit = "unknown", f"{metric} is not defined of these rollouts"
    if isinstance(limit, tuple):
        return Verdict(status=limit[0], kind=KIND, point=pair_text(pair), metric=metric, text=limit[1], why=why)
    return Verdict(
        status=status_of(metric, given, limit),
        kind=KIND,
        point=pair_text(pair),
        metric=metric,
        value=json_number(value(given)),
        limit=json_number(limit),
        why=why,
    )


def _paired_verdict(found: Paired, limit: float, point: str, why: str) -> Verdict:
    return Verdict(
        status=status_under_limit(found, limit),
        kind="answers",
        point=point,
        metric=ANSWERS,
        value=json_number(found.difference),
        limit=json_number(limit),
        text=answers_sentence(found),
        why=why,
    )
