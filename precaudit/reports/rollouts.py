"""Parity of rollouts in a terminal: the first sentence, a row a metric, the sequences that differ most."""

from collections.abc import Iterator, Sequence

from precaudit.checks.rollouts.budgets import LimitOutcome, smaller_is_worse
from precaudit.checks.rollouts.engine_rounding import EngineRounding, engine_sentence
from precaudit.checks.rollouts.limits import RolloutRecord
from precaudit.checks.rollouts.mismatch import CLIP, METRICS, SMALLER_IS_WORSE, Mismatch
from precaudit.checks.rollouts.parity import Parity
from precaudit.reports.fitting import Table
from precaudit.reports.report import Headline
from precaudit.schema.digits import count_text, digits, near_one
from precaudit.schema.records.base import Number, value

SEQUENCES = 5
QUANTILES = ("abs_diff_p50", "abs_diff_p90", "abs_diff_p99", "abs_diff_max", "clip_fraction")
NEAR_ONE = (*SMALLER_IS_WORSE, "ppl_ratio")  # what differs from 1 by what matters


def parity_verdict(p: Parity) -> Headline:
    """Return what the limits say, or that none was given, in one sentence."""
    if p.faults:
        told = ", ".join(f"{n} {name.partition(': ')[2]} ({name.partition(': ')[0]})" for name, n in p.faults.items())
        left = max(r.mismatch.left_out for r in p.whole)
        return Headline("✗", f"values that are no log-probability: {told}; {count_text(left, 'sequence')} left out.")
    bad = [h for h in p.held if h.status in ("fail", "nonfinite")]
    if bad:
        rest = f" {len(bad) - 1} more limits are broken." if len(bad) > 1 else ""
        return Headline("✗", f"{_outcome_text(bad[0])}.{rest}")
    open_ = [h for h in p.held if h.status == "unknown"]
    if open_:
        return Headline("?", f"{open_[0].metric} is not defined of these rollouts.")
    last = next(r for r in reversed(p.whole) if r.rollout == "engine")
    found = (
        f"{last.trainer}: kl {cell(last, 'kl')}, k3 {cell(last, 'k3_kl')}, |Δ log p| {cell(last, 'abs_diff_mean')} on "
        f"average, {cell(last, 'abs_diff_max')} at most"
    )
    if p.rounding is not None and p.rounding.status == "fail":
        return Headline("✗", f"{engine_sentence(p.rounding)}.")
    if p.held:
        hold = "the limit holds" if len(p.held) == 1 else f"all {len(p.held)} limits hold"
        return Headline("✓", f"{hold}; engine against {found}.")
    if p.rounding is not None and p.rounding.status == "pass":
        return Headline("✓", f"{engine_sentence(p.rounding)}; {found}.")
    return Headline("?", f"measured, not judged: engine against {found}. Give limits with --fail-above.")


def _outcome_text(h: LimitOutcome) -> str:
    side = "below" if smaller_is_worse(h.metric) else "above"
    return f"engine against {h.trainer}: {h.metric} is {_metric_text(h.metric, h.found)}, {side} {digits(h.limit, 6)}"


def metrics(p: Parity) -> Table:
    """Return a row a metric and a column a comparison."""
    columns = tuple(f"{r.rollout} / {r.trainer}" for r in p.whole)
    rows = [(name, *(cell(r, name) for r in p.whole)) for name in METRICS]
    return Table(f"rollout / trainer ({p.model}, policy {p.policy})", ("metric", *columns), tuple(rows), ("metric",))


def worst_sequences(p: Parity) -> Table:
    """Return the sequences whose log-probabilities are farthest from the last trainer's, a row each."""
    trainer = next(r.trainer for r in reversed(p.whole) if r.rollout == "engine")
    mine = [r for r in p.each if r.rollout == "engine" and r.trainer == trainer and r.worst is not None]
    mine.sort(key=lambda r: -value(r.mismatch.abs_diff_max))
    rows = []
    for r in mine[:SEQUENCES]:
        assert r.worst is not None
        at, token, ours, theirs = r.worst
        first = r.mismatch.first_divergence
        rows.append(
            (
                r.id or "",
                str(r.mismatch.tokens),
                cell(r, "kl"),
                cell(r, "abs_diff_max"),
                f"{at} (id {token})",
                digits(ours),
                digits(theirs),
                "" if first is None else str(first),
            )
        )
    columns = ("sequence", "tokens", "kl", "max |Δ log p|", "at token", "engine", trainer, "first clipped")
    return Table(f"sequences whose log-probabilities are farthest from {trainer}", columns, tuple(rows), ("sequence",))


def quantiles(parities: Sequence[Parity]) -> Table:
    """Return a row a policy and comparison: quantiles of |Δ log p|, what is clipped, and where first."""
    rows = []
    for p in parities:
        for r in p.whole:
            first = r.mismatch.first_divergence
            sizes = (cell(r, name) for name in QUANTILES)
            rows.append((r.policy, f"{r.rollout} / {r.trainer}", *sizes, "none" if first is None else str(first)))
    columns = ("policy", "sides", "50 %", "90 %", "99 %", "largest", "clipped", "first clipped")
    return Table("", columns, tuple(rows), ("policy", "sides"), 2)


def limits_table(p: Parity) -> Table:
    """Return a row a limit and trainer: what was found, and the verdict."""
    rows = [
        (f"engine / {h.trainer}", h.metric, _metric_text(h.metric, h.found), digits(h.limit, 6), h.status)
        for h in p.held
    ]
    columns = ("sides", "metric", "value", "limit", "verdict")
    return Table(f"policy {p.policy}", columns, tuple(rows), ("sides", "metric", "verdict"))


def parity_notes(p: Parity) -> Iterator[str]:
    """Yield every limit that does not pass, after the first, and what was left out or overflowed."""
    yield from (f"also: {_outcome_text(h)}" for h in [h for h in p.held if h.status == "fail"][1:])
    for r in p.whole:
        m, name = r.mismatch, f"{r.rollout} / {r.trainer}"
        if m.overflowed:
            yield f"note: {name}: inf in {', '.join(m.overflowed)}"
        if m.saturated:
            yield f"note: {name}: {m.saturated} log ratios are beyond ±20, where verl's chi2 stops growing"
        if telescopes(m):
            yield (
                f"note: {name}: differences of opposite signs cancel in kl ({cell(r, 'kl')}), log_ppl_diff and "
                f"ppl_ratio; k3_kl ({cell(r, 'k3_kl')}) and |Δ log p| ({cell(r, 'abs_diff_mean')}) do not"
            )
    yield from _rounding_notes(p.rounding)
    m = p.whole[0].mismatch
    judged = f"{count_text(m.sequences, 'sequence')} of {count_text(m.tokens, 'token')} judged"
    yield f"{judged}; {m.empty} without tokens, {m.left_out} left out"


def telescopes(m: Mismatch) -> bool:
    """Whether the signed mean of Δ log p says a twentieth of its mean size or less, of differences that clip."""
    mean, size = m.kl, m.abs_diff_mean
    return mean is not None and size is not None and value(size) > CLIP and abs(value(mean)) < value(size) / 20


def _rounding_notes(r: EngineRounding | None) -> Iterator[str]:
    """Yield what to change, or what was tried, where an engine is off beyond rounding."""
    if r is None or r.status != "fail":
        return
    if r.change is not None:
        yield f"change: {r.change}"
        return
    tried = ", ".join(f"{kind} {digits(x, 2)} ×" for kind, x in sorted(r.tried.items(), key=lambda t: value(t[1])))
    if tried:
        yield f"note: under each kind of mistake there remains, of {digits(r.rms)} ×: {tried}"
    yield (
        "note: what remains are other weights (--trainer MODEL tries a checkpoint), another formula, or formats "
        f"narrower than {r.policy} (--engine-policy says them)"
    )


def cell(r: RolloutRecord, name: str) -> str:
    """Return a metric of a record as tables have it."""
    given = getattr(r.mismatch, name)
    return "undefined" if given is None else _metric_text(name, given)


def _metric_text(name: str, x: Number | None) -> str:
    return digits(x) if x is None or name not in NEAR_ONE else near_one(x)
