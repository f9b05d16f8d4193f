"""The report of a rollout: what it came to under each policy, what explains it, its answers, and its pictures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from precaudit.checks.rollouts.causes import TokenCause
from precaudit.checks.rollouts.drawn import Drawn
from precaudit.checks.rollouts.limits import ENGINE
from precaudit.checks.rollouts.mismatch import METRICS
from precaudit.checks.rollouts.origin import RolloutRun
from precaudit.checks.rollouts.parity import Parity
from precaudit.checks.rollouts.program_loops import ProgramTiming
from precaudit.numbers.arrays import Array
from precaudit.reports import drawn, rollout_charts, rollouts
from precaudit.reports.causes import cause_sentences, cause_table
from precaudit.reports.html import THEMED
from precaudit.reports.report import Facts, Only, Report, Section
from precaudit.schema.policies import load_policy

WORDS = ("mismatch", *METRICS, "mcnemar", "pass@k", "near tie", "limit", "nonfinite", "unknown", "share", "fp64")


@dataclass(frozen=True)
class RolloutStory:
    """What a rollout came to: where it comes from, a Parity for every policy, causes, and what was drawn, if it was."""

    origin: RolloutRun
    parities: tuple[Parity, ...]
    causes: tuple[TokenCause, ...] = ()
    drawn: Drawn | None = None


def rollout_report(t: RolloutStory) -> Report:
    """Return the report of rollouts that were drawn here or made elsewhere."""
    policies = f"{len(t.parities)} {'policy' if len(t.parities) == 1 else 'policies'}"
    verdict = rollouts.parity_verdict(t.parities[0]) if t.drawn is None else drawn.drawn_verdict(t.drawn)
    notes = rollouts.parity_notes(t.parities[0]) if t.drawn is None else drawn.drawing_notes(t.drawn)
    return Report(
        verdict,
        tuple(_sections(t)),
        tuple(notes),
        command="rollout",
        title=t.origin.model,
        subtitle=f"{policies} on {t.origin.device}",
        facts=_facts(t.origin),
        words=WORDS,
        records=_records(t),
    )


def loops_report(found: Sequence[ProgramTiming]) -> Report:
    """Return the report of a program's loops."""
    return Report(drawn.loops_verdict(found), (Section(tables=(drawn.loops(found),)),), records=found)


def _records(t: RolloutStory) -> tuple[Any, ...]:
    """Return every record of a rollout, those of the whole before those of single sequences."""
    whole, each = ([r for p in t.parities for r in getattr(p, name)] for name in ("whole", "each"))
    whole += [p.rounding for p in t.parities if p.rounding is not None]
    if (d := t.drawn) is None:
        return (t.origin, *whole, *each, *t.causes)
    return (t.origin, *d.timings, *d.answers, *d.changed, *whole, *d.divergences, *each, *t.causes)


def _sections(t: RolloutStory) -> Iterator[Section]:
    yield Section("How far log-probabilities are apart", pictures=partial(_pictures, t.parities), only="html")
    yield Section("Limits", tables=tuple(h for p in t.parities if (h := rollouts.limits_table(p)).rows), only="pages")
    if t.drawn is not None:
        yield Section("What sampling takes", tables=(drawn.timing_table(t.drawn),))
        yield Section(tables=(drawn.parity_table(t.drawn),), only="terminal")
    yield Section(
        "Quantiles of |Δ log p|",
        "Nats; first clipped: the smallest index of a token with ρ outside [0.8, 1.2].",
        (rollouts.quantiles(t.parities),),
        only="pages",
    )
    yield Section(
        "Mismatch, under verl's names",
        "First the side that sampled, then the one it is compared with.",
        tuple(rollouts.metrics(p) for p in t.parities),
        only="pages" if t.drawn is not None else "",
    )
    if t.drawn is not None and t.drawn.answers:
        yield Section("Answers", tables=(drawn.answers_table(t.drawn),), lines=tuple(drawn.answer_lines(t.drawn)))
    farthest = tuple((p, w) for p in t.parities if (w := rollouts.worst_sequences(p)).rows)
    alone: Only = "" if len(t.parities) == 1 else "pages"
    tables = tuple(w if not alone else replace(w, title=f"policy {p.policy}: {w.title}") for p, w in farthest)
    yield Section("Sequences that differ most", tables=tables, only=alone)
    why = tuple(line for c in t.causes for line in cause_sentences([c], load_policy(c.policy).settings()))
    yield Section(
        "What explains the worst tokens",
        "Each operation's share of decode's log p less a trainer's prefill's.",
        (cause_table(t.causes),),
        lines=why,
        only="pages",
    )
    if why:
        head = "why the worst tokens differ between decode and a trainer's prefill:"
        yield Section(lines=("", head, *why), only="terminal")


def _pictures(parities: Sequence[Parity]) -> Iterator[tuple[str, str]]:
    """Yield (title, SVG) of where |Δ log p| lies and how it drifts, where a token is judged."""
    apart = lines_of(parities)
    for title, chart in (
        ("Share of tokens that are farther apart", rollout_charts.distribution_chart),
        ("Mean over positions of the sequence", rollout_charts.drift_chart),
    ):
        if any((abs(x) > 0).any() for x in apart.values()):
            yield title, rollout_charts.svg(chart(apart, THEMED))


def lines_of(parities: Sequence[Parity]) -> dict[str, Array]:
    """Return {name: Δ log p [sequences, tokens]}: of one policy a line a pair, of several the engine's last a policy.

    The engine's last is the pair that the worst sequences are of: against FP64 where that was asked for.
    """
    if len(parities) == 1:
        p = parities[0]
        return {f"{r.rollout} / {r.trainer}": p.apart(r.rollout, r.trainer) for r in p.whole}
    lasts = [(p, next(r for r in reversed(p.whole) if r.rollout == ENGINE)) for p in parities]
    return {f"{p.policy}: {r.rollout} / {r.trainer}": p.apart(r.rollout, r.trainer) for p, r in lasts}


def _facts(run: RolloutRun) -> Facts:
    """Return what was run, as (name, value)."""
    trainer = [("trainer", run.trainer["name"])] if run.trainer else []
    return (
        ("model", f"{run.model}, weights {run.weights[:12]}…"),
        ("policies", ", ".join(run.policies)),
        *trainer,
        *((name.replace("_", " "), told) for name, told in run.asked.items()),
        ("device", run.device),
        *run.versions.items(),
    )
