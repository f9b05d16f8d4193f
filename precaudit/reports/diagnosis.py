"""A diagnosis in the terminal: the verdict first, then each finding, then error growth over layers."""

from collections import defaultdict
from statistics import median
from typing import Any

from precaudit.diagnosis.diagnose import Diagnosis
from precaudit.diagnosis.records import Finding, Remedy, Share, Shares
from precaudit.records import ErrorRecord, value
from precaudit.reports.tables import short

ADDITIVE = 0.02  # share of a change that single errors may leave before it is not called additive


def show(found: Diagnosis, console: Any, verbose: bool) -> None:
    """Print what was found."""
    for line in text(found, verbose):
        console.print(line, soft_wrap=True)
    if verbose:
        for line in growth(found.compared.errors):
            console.print(line)


def text(found: Diagnosis, verbose: bool = False) -> list[str]:
    """Return the verdict and the findings as lines."""
    if not found.findings:
        lines = [] if found.unknown else [f"Rounding explains all: {found.judged} records judged, none left over."]
    else:
        n = len(found.findings)
        lines = [f"{n} finding{'s' if n > 1 else ''}, first in program order:"]
    for i, f in enumerate(found.findings, 1):
        lines += [f"{i}. {headline(f)}", *(f"   {line}" for line in details(f))]
    lines += [f"Unknown: {u}" for u in found.unknown]
    lines.append(f"Sound: {sound(found)}")
    lines.append(f"Formula: {formula(found)}")
    lines += [f"Views: {found.views}"] if found.views else []
    lines += [f"Logits: {shared(s)}" for s in found.shares[: 1 if not verbose else None]]
    lines += [f"{'To change: ' if i == 0 else '           '}{remedy(r)}" for i, r in enumerate(worth(found)[:3])]
    return lines


def sound(found: Diagnosis) -> str:
    """Return whether capturing disturbed the program, and how well recorded inputs reproduce recorded outputs."""
    checks = found.compared.run.record.neutrality
    if not checks:
        capture = "whether capturing changed the logits was not checked"
    elif all(n.bitwise for n in checks):
        capture = f"capturing left the logits as they are, bit for bit ({', '.join(n.phase for n in checks)})"
    else:
        worst = max(value(n.max_diff) for n in checks)
        capture = f"capturing changed the logits by up to {short(worst)}: smaller findings are not sure"
    left: dict[str, list[float]] = defaultdict(list)
    for e in found.compared.errors:
        if e.kind == "local" and e.unexplained is not None and e.dtype is not None:
            left[e.dtype].append(value(e.unexplained.u))
    told = [f"{name} {short(median(x))} u, at most {short(max(x))} u" for name, x in sorted(left.items())]
    return f"{capture}; recorded inputs reproduce recorded outputs to (median) {'; '.join(told) or 'nothing recorded'}"


def shared(s: Shares) -> str:
    """Return what makes the change of a prompt's margin, or that its parts do not add up."""
    if s.unknown is not None:
        return f"unknown: {s.unknown}"
    head = f"the top-1 margin of {s.prompt} is {short(s.fp64)} in FP64 and changed by {short(s.change)}; "
    if s.remainder > ADDITIVE:
        return f"{head}not additive: single errors leave {100 * s.remainder:.0f} % of it unexplained"
    parts = ", ".join(f"{_named(x)} {short(x.share)}" for x in s.shares[:4])
    left = f"{100 * s.remainder:.1f} %"
    return f"{head}largest shares: {parts}; all add up to within {left}, their sizes to {short(s.absolute)}"


def _named(x: Share) -> str:
    return x.point if x.layer is None else f"{x.point} of layer {x.layer}"


def worth(found: Diagnosis) -> list[Remedy]:
    """Return the remedies that take away a tenth of the KL or more, best gain for its price first."""
    return [r for r in found.remedies if value(r.gain) >= 0.1]


def remedy(r: Remedy) -> str:
    """Return what a change buys and costs."""
    return (
        f"{r.command}: KL from FP64 {short(r.kl[0])} to {short(r.kl[1])} (−{100 * value(r.gain):.0f} %), top-1 flips "
        f"{r.flips[0]} to {r.flips[1]} of {r.positions}; prefill takes {value(r.time):.2f} × the time, "
        f"{value(r.memory):.2f} × the memory; in JAX: {r.code}"
    )


def formula(found: Diagnosis) -> str:
    """Return what the program's FP64 shadow says."""
    f = found.formula
    if f.unknown is not None:
        return f"unknown: {f.unknown}"
    if not f.differs:
        return (
            f"the program's FP64 shadow is the reference's, to {short(f.largest)} at every point (prompt {f.prompt})."
        )
    places = []
    for d in f.differs:
        where = d.point if d.layer is None else f"{d.point} of layer {d.layer}"
        places.append(f"{where} in {d.phase} ({short(d.distance)})")
    return f"the program's FP64 shadow leaves the reference first at {', '.join(places)} (prompt {f.prompt})."


def headline(f: Finding) -> str:
    """Return one line: what, where, since which layer."""
    where = f"{f.point} of layer {f.layer}" if f.layer is not None else f.point
    return f"{f.kind}: {f.cause} — {where}, {' and '.join(f.phases)}"


def details(f: Finding) -> list[str]:
    """Return the evidence."""
    lines = [f.says]
    if f.explained is not None and f.second is not None:
        equal = "" if f.equal is None else f", {100 * value(f.equal):.2f} % of the elements bit for bit"
        lines.append(
            f"it reproduces {share(f.explained)} of the error{equal}; next best: {f.second[0]}, {share(f.second[1])}"
        )
    if len(f.layers) > 1:
        lines.append(f"also in layers {spans(f.layers[1:])}")
    size = "" if f.rel_l2 is None else f"; relative error of the worst {short(f.rel_l2)}"
    lines.append(f"{f.records} records, {len(f.prompts)} prompt{'s' if len(f.prompts) > 1 else ''}{size}")
    if f.worst is not None:
        lines.append(
            f"worst element {list(f.worst.index)}: {short(f.worst.candidate)}, FP64 {short(f.worst.reference)}"
        )
    if f.fix:
        lines.append(f"to change: {f.fix}")
    return lines


def share(x: Any) -> str:
    """Return a share of an error as a percentage; none of it where it is negative."""
    return "none of it" if value(x) <= 0 else f"{100 * value(x):.2f} %"


def spans(layers: tuple[int, ...]) -> str:
    """Return layer numbers, runs of them as ``a to b``."""
    runs: list[list[int]] = []
    for i in layers:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def invariances(ways: Any) -> list[str]:
    """Return a line for every way of running the same prompts."""
    lines = []
    for w in ways:
        where = w.point if w.layer is None else f"{w.point} of layer {w.layer}"
        far = (
            "" if w.status == "bit-identical" else f", most at {where}: {short(w.distance)}, {w.noises:.2g} × its noise"
        )
        lines.append(f"Invariance: {w.way}: {w.status}{far}")
    return lines


def growth(errors: list[ErrorRecord]) -> list[str]:
    """Return the median forward and local error of the residual stream and attention over layers, jumps marked."""
    sizes: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for e in errors:
        if e.kind in ("forward", "local") and e.layer is not None and e.rel_l2 is not None:
            sizes[e.kind, e.point, e.layer].append(value(e.rel_l2))
    points = [p for p in ("resid_out", "attn_out", "mlp_out") if any(k[1] == p for k in sizes)]
    lines = []
    for point in points:
        layers = sorted({k[2] for k in sizes if k[1] == point})
        lines.append(f"{point}: layer, forward, local (medians of relative error)")
        before = 0.0
        for layer in layers:
            forward = median(sizes.get(("forward", point, layer), [float("nan")]))
            local = median(sizes.get(("local", point, layer), [float("nan")]))
            jump = "  ← jumps" if before and forward > 3 * before else ""
            lines.append(f"  {layer:4}  {forward:9.2e}  {local:9.2e}{jump}")
            before = forward
    return lines
