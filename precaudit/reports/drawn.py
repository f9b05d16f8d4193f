"""Drawn rollouts in a terminal: what they took, and how far they are from a trainer and FP64."""

from collections.abc import Iterator

from precaudit.records import value
from precaudit.reports import rollouts
from precaudit.reports.fitting import Table
from precaudit.reports.headline import Headline
from precaudit.rollouts.drawn import Drawn
from precaudit.rollouts.timing import Spread, Timing

METRICS = (
    "kl", "k3_kl", "ppl_ratio", "rollout_is_eff_sample_size", "rollout_probs_diff_mean", "abs_diff_p99", "abs_diff_max",
    "clip_fraction",
)  # fmt: skip


def headline(d: Drawn) -> Headline:
    """Return the first sentence: what is broken, else what was measured."""
    if d.apart:
        return Headline("✗", f"policy {d.apart[0]}: the while loop and the Python loop drew other tokens.")
    bad = [p for p in d.parities if p.exit_code == 1] or [p for p in d.parities if p.exit_code]
    first = bad[0] if bad else d.parities[0]
    found = rollouts.headline(first)
    name = f"policy {first.policy}: " if len(d.parities) > 1 else ""
    return Headline(found.mark, f"{name}{found.sentence}")


def timing(d: Drawn) -> Table:
    """Return a row for every policy and loop, and for every policy that cannot run."""
    columns = (
        "policy", "loop", "compile s", "prefill s", "decode ms a token", "first / it", "host", "tokens/s", "speed / first",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [
        (
            t.policy, t.loop, f"{t.compile:.1f}", _spread(t.prefill), _spread(t.decode_ms), _spread(t.decode_ratio),
            _host(t),
            _spread(t.tokens_per_second), _spread(t.ratio),
        )
        for t in d.timings
    ]  # fmt: skip
    rows += [(r.policy, "cannot run", *[""] * 7) for r in d.refused]
    t = d.timings[0]
    title = (
        f"drawing {t.sequences} sequences in batches of {t.batch} on {t.device}, {t.tokens} tokens: median of "
        f"{t.rounds} rounds, interleaved (smallest, largest)"
    )
    return Table(title, columns, tuple(rows), ("policy", "loop"), 2)


def parity(d: Drawn) -> Table:
    """Return a row for every policy and comparison, of the metrics that say most."""
    rows = [
        (r.policy, f"{r.rollout} / {r.trainer}", *(rollouts.cell(r, name) for name in METRICS))
        for p in d.parities
        for r in p.whole
    ]
    return Table(f"rollout / trainer ({d.model})", ("policy", "sides", *METRICS), tuple(rows), ("policy", "sides"), 2)


def lines(d: Drawn) -> Iterator[str]:
    """Yield what else is to be said."""
    for r in d.refused:
        yield f"{r.policy} cannot run: {r.why}"
    for p in d.parities:
        for line in rollouts.lines(p):
            yield f"{p.policy}: {line}" if len(d.parities) > 1 else line


def _host(t: Timing) -> str:
    return "" if t.host is None else f"{100 * t.host.median:.1f} %"


def _spread(s: Spread | None) -> str:
    """Return a median with its smallest and largest, three digits each."""
    return "" if s is None else f"{value(s.median):.3g} ({s.low:.3g}, {s.high:.3g})"
