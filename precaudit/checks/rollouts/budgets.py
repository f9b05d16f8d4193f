"""Limits on a rollout's metrics: [[rollout]] entries of budgets.toml, and those of --fail-above and --fail-below."""

from collections.abc import Iterator, Sequence
from math import inf, isnan
from pathlib import Path
from typing import Literal, NamedTuple

from precaudit.checks.rollouts.frozen import FACTORS
from precaudit.checks.rollouts.limits import ANSWERS, ENGINE, RolloutRecord, Side
from precaudit.checks.rollouts.mismatch import METRICS, SMALLER_IS_WORSE
from precaudit.checks.rollouts.written import WrittenRecords
from precaudit.errors import UserError
from precaudit.judging.budgets import (
    Budget,
    LimitRange,
    TableEntry,
    Terms,
    checked_entry,
    entries,
    entry_problem,
    made_budget,
    match_globs,
)
from precaudit.schema.records.base import Number, value

SHARE = LimitRange(-1, 1, "a share from -1 to 1 is wanted; 2 points fewer are -0.02")
OF_ROLLOUTS = Terms((*METRICS, ANSWERS), FACTORS, LimitRange(-inf, inf, "a finite number is wanted"), {ANSWERS: SHARE})


class RolloutEntry(TableEntry, frozen=True, kw_only=True):
    """One [[rollout]] table: ``limit`` of ``metric``, or ``ratchet``: a factor over the baseline's value.

    ``ratchet`` true: 2, of k3_kl 4. ``policies``: globs. ``rollout``, ``against``: the sides of the pair, any trainer
    unless said. The limit of answers_difference is a share, of every policy's answers less the first's, and less the
    baseline's of the same.
    """

    metric: str
    policies: str | list[str] = "*"
    rollout: Literal["engine", "policy", "trainer"] = "engine"
    against: Literal["policy", "trainer", "fp64"] | None = None


class Pairs(NamedTuple):
    """Which policies, sides and metrics a budget is of; None: of all."""

    policies: frozenset[str] | None
    rollouts: frozenset[str]
    trainers: frozenset[str] | None
    metrics: frozenset[str]


RolloutBudget = Budget[RolloutEntry, Pairs]


def read_rollout_budgets(path: Path, found: WrittenRecords) -> tuple[RolloutBudget, ...]:
    """Read the [[rollout]] entries of budgets.toml; raises UserError, with the line, for one that matches nothing."""
    known, made = (*found.origin.policies, *found.origin.refused), []
    for line, raw in entries(path, "rollout"):
        where = f"{path}:{line}"
        entry = checked_entry(raw, RolloutEntry, OF_ROLLOUTS, where)
        named = match_globs(entry.policies, known, f"{where}: policies", f"none of {', '.join(known)}").values()
        if absent := _absent(entry, found):
            raise UserError(f"{where}: {absent}")
        against = None if entry.against is None else frozenset((entry.against,))
        of = Pairs(frozenset().union(*named), frozenset((entry.rollout,)), against, frozenset((entry.metric,)))
        made.append(made_budget(entry, line, of, OF_ROLLOUTS))
    return tuple(made)


def _absent(e: RolloutEntry, found: WrittenRecords) -> str | None:
    """Return why an entry can match nothing of a file."""
    if e.metric == ANSWERS:
        return None if found.answers else f"{ANSWERS} matches nothing: no questions were asked"
    if any(rollout == e.rollout and e.against in (None, trainer) for rollout, trainer in found.origin.sides):
        return None
    sides = ", ".join(f"{a} / {b}" for a, b in found.origin.sides)
    return f"{e.rollout} / {e.against or 'any'} matches nothing of {sides}"


def parse_limits(above: Sequence[str], below: Sequence[str]) -> tuple[RolloutBudget, ...]:
    """Return the budgets written ``kl=1e-3``; raises UserError for what is no metric, no number, or the wrong way."""
    found = []
    for option, text in (*(("--fail-above", x) for x in above), *(("--fail-below", x) for x in below)):
        name, _, written = text.partition("=")
        try:
            budget = engine_budget(name, float(written), f"{option} {text}")
        except ValueError:
            raise UserError(f"{option} {text}: a number is wanted, such as {name}=1e-3") from None
        if problem := entry_problem(budget.entry, OF_ROLLOUTS):
            raise UserError(f"{option} {text}: {problem}")
        if smaller_is_worse(name) != (option == "--fail-below"):
            raise UserError(f"{option} {text}: of {name}, {'smaller' if smaller_is_worse(name) else 'larger'} is worse")
        found.append(budget)
    return tuple(found)


class LimitOutcome(NamedTuple):
    """What a limit said of the engine against a trainer: pass, fail, nonfinite or unknown."""

    trainer: Side
    metric: str
    limit: float
    found: float
    status: Literal["pass", "fail", "nonfinite", "unknown"]


def engine_budget(metric: str, limit: float, why: str = "") -> RolloutBudget:
    """Return a limit on a metric of the engine against whatever it is held to."""
    entry = RolloutEntry(why=why, metric=metric, limit=limit)
    return RolloutBudget(entry, 0, Pairs(None, frozenset((ENGINE,)), None, frozenset((metric,))))


def outcomes(record: RolloutRecord, budgets: Sequence[RolloutBudget]) -> Iterator[LimitOutcome]:
    """Yield what limits say of a record."""
    for b in budgets:
        metric, limit = b.entry.metric, b.entry.limit
        if limit is not None and b.matches(record.policy, record.rollout, record.trainer, metric):
            given = getattr(record.mismatch, metric, None)
            yield LimitOutcome(record.trainer, metric, limit, value(given), status_of(metric, given, limit))


def smaller_is_worse(metric: str) -> bool:
    """Whether a smaller value of a metric is worse."""
    return metric in (*SMALLER_IS_WORSE, ANSWERS)


def status_of(metric: str, given: Number | None, limit: float) -> Literal["pass", "fail", "nonfinite", "unknown"]:
    """Return what a limit says of a metric; one that is not defined, or NaN, keeps none."""
    x = value(given)
    if given is None:
        return "unknown"
    worse = x < limit if smaller_is_worse(metric) else x > limit
    return "nonfinite" if isnan(x) else "fail" if worse else "pass"
