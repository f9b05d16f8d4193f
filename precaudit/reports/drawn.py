"""Drawn rollouts in a terminal: what they took, and how far they are from a trainer and FP64."""

from collections.abc import Iterator, Sequence

from precaudit.checks.rollouts.answers import answers_sentence, percentage_points
from precaudit.checks.rollouts.drawn import Drawn
from precaudit.checks.rollouts.program_loops import ProgramTiming
from precaudit.checks.rollouts.questions import HeldAnswers
from precaudit.checks.rollouts.timing import Spread, Timing
from precaudit.checks.rollouts.warmup import Warmed
from precaudit.reports import rollouts
from precaudit.reports.fitting import Table
from precaudit.reports.report import Headline, Report, Section
from precaudit.schema.digits import count_text, digits, speed, tenths
from precaudit.schema.records.base import value

METRICS = (
    "kl",
    "k3_kl",
    "ppl_ratio",
    "rollout_is_eff_sample_size",
    "rollout_probs_diff_mean",
    "abs_diff_p99",
    "abs_diff_max",
    "clip_fraction",
)


def drawn_verdict(d: Drawn) -> Headline:
    """Return the first sentence: what is broken, else what was measured."""
    if d.apart:
        return Headline("✗", f"policy {d.apart[0]}: the while loop and the Python loop drew other tokens.")
    codes = [p.exit_code for p in d.parities]
    answers_ = {h.status: h for h in reversed(d.held)}
    if 1 not in codes and "fail" in answers_:
        return _of_answers(answers_["fail"])
    if not any(codes) and "unknown" in answers_:
        return _of_answers(answers_["unknown"])
    if d.held and not any(codes) and not any(p.held for p in d.parities):
        return _of_answers(d.held[0])
    worst = 1 if 1 in codes else max(codes)
    first = d.parities[codes.index(worst)]
    found = rollouts.parity_verdict(first)
    name = f"policy {first.policy}: " if len(d.parities) > 1 else ""
    return Headline(found.mark, f"{name}{found.sentence}")


def _of_answers(h: HeldAnswers) -> Headline:
    """Return what a limit says of answers, with their interval."""
    told, at = f"answers of {h.changed.policy} against {h.changed.against}", f"{percentage_points(h.limit)} points"
    if h.status == "fail":
        return Headline("✗", f"{told} are below the limit of {at}: {answers_sentence(h.changed.paired)}.")
    if h.status == "unknown":
        return Headline(
            "?",
            f"{told} cannot be judged by {at}, which lies inside the interval: {answers_sentence(h.changed.paired)}.",
        )
    return Headline("✓", f"{told} are not below the limit of {at}: {answers_sentence(h.changed.paired)}.")


def timing_table(d: Drawn) -> Table:
    """Return a row for every policy and loop, and for every policy that cannot run."""
    columns = (
        "policy",
        "loop",
        "compile s",
        "prefill s",
        "decode ms a token",
        "first / it",
        "host",
        "tokens/s",
        "speed / first",
    )
    rows: list[tuple[str, ...]] = [
        (
            t.policy,
            t.loop,
            digits(t.compile),
            _spread(t.prefill),
            _spread(t.decode_ms),
            _spread(t.decode_ratio),
            _host(t),
            _spread(t.tokens_per_second),
            _spread(t.ratio),
        )
        for t in d.timings
    ]
    rows += [(r.policy, "cannot run", *[""] * 7) for r in d.refused]
    t = d.timings[0]
    title = f"sampling {t.sequences} sequences in batches of {t.batch} on {t.device}, {t.tokens} tokens: " + (
        "one round, so no spread" if t.rounds == 1 else f"median of {t.rounds} rounds (smallest, largest)"
    )
    return Table(title, columns, tuple(rows), ("policy", "loop"), 2)


def parity_table(d: Drawn) -> Table:
    """Return a row for every policy and comparison, of the metrics that say most."""
    rows = [
        (r.policy, f"{r.rollout} / {r.trainer}", *(rollouts.cell(r, name) for name in METRICS))
        for p in d.parities
        for r in p.whole
    ]
    return Table(f"rollout / trainer ({d.model})", ("policy", "sides", *METRICS), tuple(rows), ("policy", "sides"), 2)


def loops(found: Sequence[ProgramTiming]) -> Table:
    """Return a row for every loop of a program."""
    rows = [
        (
            t.loop,
            digits(t.compile),
            _spread(t.call_ms),
            _spread(t.ratio),
            t.why or ("the first's" if t.same else "other bits"),
        )
        for t in found
    ]
    title = f"{found[0].program}: {found[0].calls} calls, median of {found[0].rounds} rounds (smallest, largest)"
    return Table(title, ("loop", "compile s", "ms a call", "first / it", "outputs"), tuple(rows), ("loop", "outputs"))


def loops_verdict(found: Sequence[ProgramTiming]) -> Headline:
    """Return how the loops of a program compare, in a sentence."""
    if any(t.why for t in found):
        bad = next(t for t in found if t.why)
        return Headline("?", f"the {bad.loop} loop cannot run: {bad.why}")
    if len(found) == 1 or found[1].ratio is None:
        return Headline("?", "one loop was timed; compare two with --loops python,while.")
    s, same = found[1].ratio, "the same bits" if found[1].same else "other bits"
    words = (
        f"{digits(s.median)} times the {found[0].loop} loop's speed ({digits(s.low)} to {digits(s.high)}), and {same}."
    )
    return Headline("✓" if found[1].same else "✗", f"the {found[1].loop} loop: {words}")


def warmup_report(found: Sequence[Warmed]) -> Report:
    """Return the report of what was compiled: a row each."""
    rows = [(w.policy, w.what, digits(w.seconds), str(w.compiled), str(w.read)) for w in found]
    table = Table("programs compiled", ("policy", "what", "s", "compiled", "read"), tuple(rows), ("policy", "what"), 2)
    seconds, compiled, read = (sum(getattr(w, name) for w in found) for name in ("seconds", "compiled", "read"))
    ending = f"{compiled} programs compiled, {read} read from the cache, in {digits(seconds)} s"
    return Report(None, (Section(tables=(table,)),), ending=(ending,))


def answers_table(d: Drawn) -> Table:
    """Return a row for every policy: pass@k with its interval, and the right ones of every group."""
    groups = [name for name in d.answers[0].groups if name]
    rates = [f"pass@{r.k}" for r in d.answers[0].rates]
    rows = [
        (
            a.policy,
            *(f"{tenths(100 * r.value)} % ({tenths(100 * r.low)} to {tenths(100 * r.high)})" for r in a.rates),
            *("{} of {}".format(*a.groups[name]) for name in groups),
            str(a.unparsed),
        )
        for a in d.answers
    ]
    asked = f"{d.answers[0].questions} questions, {d.answers[0].n} of each"
    return Table(f"answers: {asked} (95 %)", ("policy", *rates, *groups, "unparsed"), tuple(rows), ("policy",))


def divergences(d: Drawn) -> Iterator[str]:
    """Yield for every policy after the first how many sequences it drew otherwise, and of what kind the first is."""
    first = d.firsts[0].timing.policy
    for m in d.firsts[1:]:
        t = m.timing
        some = [x for x in d.divergences if x.policy == t.policy]
        if not some:
            yield f"{t.policy} samples the same tokens as {first} in all {t.sequences} sequences"
            continue
        x = min(some, key=lambda x: x.index)
        near = sum(bool(x.near) for x in some)
        known = "" if any(x.near is None for x in some) else f", {near} of them at a near tie"
        takes = t.policy if value(x.gap) > 0 else first
        apart = (
            ""
            if x.gap is None
            else (f"; FP64 agrees with {takes}, by {digits(abs(value(x.gap)), 2)} (sigma {digits(x.sigma, 2)})")
        )
        yield (
            f"{t.policy} samples other tokens than {first} in {len(some)} of {t.sequences} sequences{known}; first "
            f"{x.id} at token {x.index}: {x.tokens[0]} for {x.tokens[1]}{apart}"
        )


def answer_lines(d: Drawn) -> Iterator[str]:
    """Yield what became of answers: every policy after the first against it, and what holds no number."""
    for c in d.changed:
        yield f"answers of {c.policy} against {c.against}: {answers_sentence(c.paired)}"
    for h in d.held:
        whose = f"answers of {h.changed.policy} against {h.changed.against}"
        yield f"{whose}, limit of {percentage_points(h.limit)} points: {h.status}"
    for a in d.answers:
        if a.unparsed:
            yield f"{a.policy}: {count_text(a.unparsed, 'answer')} without a number, counted as wrong"


def drawing_notes(d: Drawn) -> Iterator[str]:
    """Yield where policies part, which cannot run, and what was left out."""
    yield from divergences(d)
    for r in d.refused:
        yield f"{r.policy} cannot run: {r.why}"
    for p in d.parities:
        for line in rollouts.parity_notes(p):
            yield f"{p.policy}: {line}" if len(d.parities) > 1 else line


def _host(t: Timing) -> str:
    return "" if t.host is None else f"{tenths(100 * t.host.median)} %"


def _spread(s: Spread | None) -> str:
    """Return a median with its smallest and largest where they differ, three digits each."""
    if s is None:
        return ""
    median, low, high = (speed(x) for x in (s.median, s.low, s.high))
    return median if s.low == s.high else f"{median} ({low}, {high})"
