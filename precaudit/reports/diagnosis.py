"""A diagnosis in the terminal: the verdict first, then each finding, then error growth over layers."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from precaudit.diagnosis.diagnose import Diagnosis
from precaudit.diagnosis.evidence.closure import Closure
from precaudit.diagnosis.evidence.records import Finding, Remedy, Shares
from precaudit.reports.findings import first_of
from precaudit.reports.mesh import cost_text
from precaudit.reports.report import Headline, Report, Section
from precaudit.schema.digits import count_text, digits, error_share, ratio, rough, short
from precaudit.schema.graphs.decoder import POINTS, STREAM
from precaudit.schema.limits.checks import disturbance, logit_noise
from precaudit.schema.places import point_text, spans
from precaudit.schema.policies import besides
from precaudit.schema.records.base import value
from precaudit.schema.records.devices import device_kind
from precaudit.schema.records.errors import ErrorRecord, ForwardError, LocalError
from precaudit.schema.records.runs import Neutrality

UNNAMED = "none reproduces it"
# what a layer hands on, attention's output, and the last sum's second term
GROWING = (STREAM, *(p.name for p in POINTS.values() if p.kind == "mix"), POINTS[STREAM].inputs[-1])
JUMP = 3.0  # growth from a layer to the next that is pointed out
ADDITIVE = 0.02  # share of a change that single errors may leave before it is not called additive


def diagnosis_report(found: Diagnosis, verbose: bool = False, among: str = "") -> Report:
    """Return the report of a diagnosis: the verdict, each finding, then what there is to know of a sound run.

    ``among``: what of the run was looked at, in words, where that is not all.
    """
    lines = [*_lines(found, verbose), *(growth_lines(found.compared.errors) if verbose else [])]
    sections = (findings_section(found.findings), Section(lines=tuple(lines)))
    return Report(verdict(found, among), sections, records=found.findings)


def findings_section(findings: Sequence[Finding]) -> Section:
    """Return the section of what diagnosis found: a part a finding."""
    parts = (Section(f"{i}. {finding_title(f)}", lines=tuple(details(f))) for i, f in enumerate(findings, 1))
    return Section("Findings", parts=tuple(parts), menu="Findings")


def _lines(found: Diagnosis, verbose: bool) -> list[str]:
    lines = [f"Unknown: {u}" for u in found.unknown]
    lines.append(f"Sound: {sound(found, verbose)}")
    lines.append(f"Formula: {formula_text(found)}")
    lines += [f"Views: {found.views}"] if found.views else []
    lines += [f"Tokens: {found.flips}."] if found.flips else []
    lines += [f"Growth: {grown}."] if (grown := jumps(found.compared.errors)) else []
    lines += [f"Mesh: {cost_text(c)}" for c in found.costs]
    lines += [f"Logits: {shares_text(s)}" for s in found.shares[: 1 if not verbose else None]]
    for i, r in enumerate(worthwhile_remedies(found)[:3]):
        lines.append(f"{'To change: ' if i == 0 else '           '}{remedy_text(r, verbose)}")
    if not verbose and (best := worthwhile_remedies(found)[:1]):
        lines.append(f"           in JAX: {best[0].code}")
    device = device_kind(found.compared.run.record.device)
    if found.remedies is None and device != "cpu":
        lines.append(f"To change: unknown: needs {device}")
    return lines


def verdict(found: Diagnosis, among: str = "") -> Headline:
    """Return the first sentence: the first finding, that there is none, or what is not known."""
    if found.findings:
        return first_of(found.findings)
    if not found.judged:
        return Headline("?", "nothing was judged.")
    if found.unknown:
        n = len(found.unknown)
        return Headline("?", f"{n} {'questions stay' if n > 1 else 'question stays'} unknown, and no fault was found.")
    other = besides(found.compared.run.record.policy)
    explains = f"rounding and {other} explain" if other else "rounding explains"
    return Headline("✓", f"{explains} all {found.judged:,} errors that were judged{among}.")


def sound(found: Diagnosis, verbose: bool = True) -> str:
    """Return whether capturing disturbed the program, and how well recorded inputs reproduce recorded outputs."""
    checks = found.compared.run.record.neutrality
    if not checks:
        capture = "whether recording changed the logits was not checked"
    elif all(n.bitwise for n in checks):
        capture = f"recording changed no bit of the logits ({_programs(checks)})"
    else:
        worst, noise = max(value(n.max_diff) for n in checks), logit_noise(found.compared.errors)
        times = max(disturbance(n, noise) for n in checks)
        beside = f", {digits(times, 2)} × the noise of their rounding" if math.isfinite(times) else ""
        capture = f"recording changed the logits by up to {short(worst)}{beside}: smaller findings are uncertain"
    told = [_closure_text(c, verbose) for c in found.closures]
    return f"{capture}; recorded inputs reproduce recorded outputs to {'; '.join(told)}" if told else capture


def _programs(checks: Sequence[Neutrality]) -> str:
    """Return how many compiled programs of each phase were checked."""
    return ", ".join(
        phase if n == 1 else f"{n} programs of {phase}" for phase, n in Counter(c.phase for c in checks).items()
    )


def _closure_text(c: Closure, verbose: bool) -> str:
    """Return what is left of one format, with excess precision and without."""
    if not verbose:
        return f"{digits(c.on[1])} u of {c.format}"
    on = f"{c.format}: {digits(c.on[0])} u (median), at most {digits(c.on[1])} u"
    if c.off is None:
        return on
    return (
        f"{on}, where {c.kept} of {c.operations} operations kept intermediate values unrounded "
        f"(taken as rounded: {digits(c.off[0])} u, at most {digits(c.off[1])} u)"
    )


def shares_text(s: Shares) -> str:
    """Return what makes the change of a prompt's margin, or that its parts do not add up."""
    if s.unknown is not None:
        return f"unknown: {s.unknown}"
    name, _, token = s.objective.partition(":")
    of = f"token {token}" if token else "FP64's top-1"
    what = {
        "margin": "top-1 margin",
        "logprob": f"log-probability of {of}",
        "kl": "KL from FP64",
        "distance": "distance from FP64",
    }[name]
    changed = f"is {short(s.fp64)} in FP64 and changed by {short(s.change)}"
    changed = f"is {short(s.change)}" if "FP64" in what and value(s.fp64) == 0 else changed
    head = f"the {what} of {s.prompt} {changed}; "
    if s.remainder > ADDITIVE:
        return f"{head}not additive: single errors do not explain {100 * s.remainder:.0f} % of it"
    parts = ", ".join(f"{point_text(x)} {short(x.share)}" for x in s.shares[:4])
    left = f"{100 * s.remainder:.1f} %"
    return f"{head}largest shares: {parts}; all add up to within {left}, their sizes to {short(s.absolute)}"


def worthwhile_remedies(found: Diagnosis) -> list[Remedy]:
    """Return the remedies that take away a tenth of the KL or more, best gain for its price first."""
    return [r for r in found.remedies or () if value(r.gain) >= 0.1]


def remedy_text(r: Remedy, verbose: bool = True) -> str:
    """Return what a change buys and costs."""
    if not verbose:
        return (
            f"{r.command}: KL from FP64 {short(r.kl[0])} to {short(r.kl[1])} (−{100 * value(r.gain):.0f} %), top-1 "
            f"flips {r.flips[0]} to {r.flips[1]} at {count_text(r.positions, 'position')} of prefill; prefill takes "
            f"{ratio(r.time)} × the time, decode {ratio(r.decode_time)} ×, {ratio(r.memory)} × the memory"
        )
    local = "" if r.local is None else f", own error of {r.point} {short(r.local[0])} to {short(r.local[1])}"
    return (
        f"{r.command}: KL from FP64 {short(r.kl[0])} to {short(r.kl[1])} (−{100 * value(r.gain):.0f} %), margin error "
        f"{short(r.margin[0])} to {short(r.margin[1])}{local}, top-1 flips {r.flips[0]} to {r.flips[1]} at "
        f"{count_text(r.positions, 'position')} of prefill; prefill takes {ratio(r.time)} × the time, a decode "
        f"step {ratio(r.decode_time)} ×, {ratio(r.memory)} × the memory; in JAX: {r.code}"
    )


def formula_text(found: Diagnosis) -> str:
    """Return what the program's FP64 shadow says."""
    f = found.formula
    if f.unknown is not None:
        return f"unknown: {f.unknown}"
    if not f.differs:
        return (
            f"in FP64 the program agrees with the reference, to {short(f.largest)} at every point (prompt {f.prompt})."
        )
    places = [f"{point_text(d)} in {d.phase} ({short(d.distance)})" for d in f.differs]
    return f"in FP64 the program differs from the reference first at {', '.join(places)} (prompt {f.prompt})."


def finding_title(f: Finding) -> str:
    """Return one line: what, where, since which layer."""
    return f"{f.kind}: {f.cause} — {point_text(f)}, {' and '.join(f.phases)}"


def details(f: Finding) -> list[str]:
    """Return the evidence."""
    lines = [f.says]
    if f.explained is not None and f.second is not None:
        equal = "" if f.equal is None else f", {_of_elements(value(f.equal))} bit for bit"
        what = "the nearest" if f.cause == UNNAMED else "it"
        lines.append(
            f"{what} reproduces {error_share(value(f.explained))} of the error{equal}; "
            f"next best: {f.second[0]}, {error_share(value(f.second[1]))}"
        )
    if f.fails:
        lines.append(f"fails: {f.fails}")
    if len(f.layers) > 1:
        lines.append(f"also in layers {spans(f.layers[1:])}")
    known = f.rel_l2 is not None and (f.worst is None or math.isfinite(value(f.worst.candidate)))
    which = "worst" if f.worst is not None else "first"
    size = f"; relative error of the {which} {digits(f.rel_l2)}" if known else ""
    lines.append(f"{count_text(f.records, 'record')}, {count_text(len(f.prompts), 'prompt')}{size}")
    if f.worst is not None:
        lines.append(
            f"worst element {list(f.worst.index)}: {digits(f.worst.candidate)}, FP64 {digits(f.worst.reference)}"
        )
    if f.positions:
        lines.append(f"by position: {f.positions}")
    if f.fix:
        lines.append(f"to change: {f.fix}")
    return lines


def _of_elements(share: float) -> str:
    """Return which part of the elements a share is."""
    return f"{error_share(share)} of the elements" if share > 0 else "no element"


def invariances(ways: Any) -> list[str]:
    """Return a line for every way of running the same prompts."""
    lines = []
    for w in ways:
        where = point_text(w)
        far = (
            ""
            if w.status == "bit-identical"
            else f", most at {where}: {short(w.distance)}, {digits(w.noises, 2)} × its noise"
        )
        lines.append(f"Invariance: {w.way}: {w.status}{far}")
    return lines


def growth_lines(errors: Sequence[ErrorRecord]) -> list[str]:
    """Return the median errors of the residual stream, attention and MLP over layers, jumps marked.

    Inherited: √(forward² − local²), what the inputs brought along if it is not correlated with the operation's own.
    """
    lines = []
    for point, rows in _by_layer(errors).items():
        lines.append(f"{point}: layer, forward, inherited, local (medians of relative error)")
        before = 0.0
        for layer, forward, local in rows:
            inherited = max(forward**2 - local**2, 0.0) ** 0.5
            jump = "  ← jumps" if before and forward > JUMP * before else ""
            lines.append(f"  {layer:4}  {digits(forward):>9}  {digits(inherited):>9}  {digits(local):>9}{jump}")
            before = forward
    return lines


def jumps(errors: Sequence[ErrorRecord]) -> str:
    """Return how the residual stream's error grows and where it jumps, in one sentence; nothing of one layer."""
    rows = [r for r in _by_layer(errors).get(STREAM, []) if r[1] == r[1]]
    if len(rows) < 2:
        return ""
    broken = [e.layer for e in errors if (e.kind, e.point) == ("forward", STREAM) and e.nonfinite]
    at = [f"{b[0]} (× {rough(b[1] / a[1])})" for a, b in pairwise(rows) if a[1] and b[1] > JUMP * a[1]]
    told = f", with a jump at layer {', '.join(at)}" if at else ", without a jump"
    first, last = rows[0], rows[-1]
    return (
        f"the error of the residual stream is {short(first[1])} after layer {first[0]} and {short(last[1])} after "
        f"layer {last[0]} (relative, median), of which the sums' own rounding is {short(last[2])}{told}"
        + (f"; not finite from layer {min(i for i in broken if i is not None)} on" if broken else "")
    )


def _by_layer(errors: Sequence[ErrorRecord]) -> dict[str, list[tuple[int, float, float]]]:
    """Return {point: [(layer, forward, local)]}, medians over prompts, phases and steps."""
    sizes: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for e in errors:
        if (
            isinstance(e, ForwardError | LocalError)
            and e.layer is not None
            and e.rel_l2 is not None
            and not e.nonfinite
        ):
            sizes[e.kind, e.point, e.layer].append(value(e.rel_l2))
    nothing = [float("nan")]
    return {
        point: [
            (i, median(sizes.get(("forward", point, i), nothing)), median(sizes.get(("local", point, i), nothing)))
            for i in sorted({k[2] for k in sizes if k[1] == point})
        ]
        for point in GROWING
        if any(k[1] == point for k in sizes)
    }
