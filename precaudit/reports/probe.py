"""A probe in a terminal: the first sentence, a table a shape of the ways that differ, what was refused."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from precaudit.checks.probing.probe import Probed
from precaudit.judging.verdicts import Verdict
from precaudit.reports.fitting import Table
from precaudit.reports.headline import how_bad
from precaudit.reports.report import Headline, Report, Section
from precaudit.schema.digits import digits, ratio
from precaudit.schema.records.base import value
from precaudit.schema.records.probe import ProbeRecord

FIRST = "@"
LEFT = ("operands", "way", "result", "arithmetic", "as asked")


def probe_report(p: Probed, every: bool = False) -> Report:
    """Return the report of a probe; ``every``: a row a way, the refused ones among them."""
    return Report(
        _verdict(p),
        (Section(tables=tuple(_tables(p, every))),),
        tuple(_notes(p)),
        command="probe",
        title=f"attention scores on {p.device}",
        words=("rel_l2", "max_diff", "FP64", "unknown"),
        records=p.records,
    )


def _verdict(p: Probed) -> Headline:
    """Return what the sentences of --fail-on say, or what was measured, in one sentence."""
    if p.judgement is None:
        said = "".join((_price(p), _replacements_text(p), _elsewhere(p)))
        return Headline("?", f"measured, not judged: {said}. Give limits with --fail-on.")
    bad = [v for v in p.judgement.verdicts if v.status in ("fail", "nonfinite")]
    if bad:
        others = f" {len(bad) - 1} more fail." if len(bad) > 1 else ""
        return Headline("✗", f"{_verdict_text(bad[0])}.{others}")
    if p.judgement.verdicts:
        return Headline("?", f"{_verdict_text(p.judgement.verdicts[0])}.")
    if not p.judgement.counts:
        return Headline("?", "nothing was judged: no way that was taken is under a limit.")
    return Headline("✓", f"all {p.judgement.counts['pass']:,} products under a limit keep it; {_price(p)}.")


def _verdict_text(v: Verdict) -> str:
    what = how_bad(v) if v.metric else v.text
    return f"{v.phase} {v.point} ({v.prompt}): {what}"


def _price(p: Probed) -> str:
    """Return what scores in float32 gain over scores in the format of the operands, and cost."""
    mine = [r for r in p.records if r.target is None and r.rel_l2 is not None]
    for first in (r for r in mine if r.way == FIRST and r.rel_l2):
        wide = next((r for r in mine if _same(r, first) and r.way.startswith("preferred_element_type")), first)
        if wide.dtype != first.dtype:
            cost = "" if wide.time is None or first.time is None else f" at {digits(_over(wide, first), 2)} × its time"
            gain = f", {_digits(first, wide)}" if wide.rel_l2 else ", exact"
            return (
                f"{first.operands} {FIRST} ({first.shape}) has an error of {digits(first.rel_l2, 2)}, {wide.way} "
                f"of {digits(wide.rel_l2, 2)}{gain}{cost}"
            )
    return f"{len(mine):,} products on {p.platform}"


def _same(a: ProbeRecord, b: ProbeRecord) -> bool:
    return (a.shape, a.operands) == (b.shape, b.operands)


def _over(r: ProbeRecord, first: ProbeRecord) -> float:
    assert r.seconds is not None
    assert first.seconds is not None
    return value(r.seconds[1]) / value(first.seconds[1])


def _digits(first: ProbeRecord, wide: ProbeRecord) -> str:
    return f"{math.log10(value(first.rel_l2) / value(wide.rel_l2)):.1f} digits more"


def _replacements_text(p: Probed) -> str:
    taken = {r.way for r in p.records if r.target is None and r.asked is not None and r.unknown is None}
    others = sorted({r.way for r in p.records if r.target is None and r.honoured == "replaced"})
    if not others:
        return ""
    return f"; {p.platform} silently replaces {len(others)} of the {len(taken)} settings that it takes by name"


def _elsewhere(p: Probed) -> str:
    """Return where the target would be farthest from FP64 of where the device is, in a way that both choose."""
    here = {(r.shape, r.operands, r.way): value(r.rel_l2) for r in p.records if r.target is None and r.rel_l2}
    both = [r for r in p.records if r.target and r.asked is None and r.rel_l2 and (r.shape, r.operands, r.way) in here]
    if not both:
        return ""
    r = max(both, key=lambda r: value(r.rel_l2) / here[r.shape, r.operands, r.way])
    found = here[r.shape, r.operands, r.way]
    return f"; {r.operands} {r.point} ({r.shape}) would have an error of {digits(r.rel_l2, 2)}, here {digits(found, 2)}"


def _tables(p: Probed, every: bool) -> Iterator[Table]:
    """Yield a table a shape; ways that make the same scores are one row, and ``every``: each has its own."""
    target = p.target
    timed = any(r.time is not None for r in p.records)
    for shape in dict.fromkeys(r.shape for r in p.records):
        rows = [_cells(its, target, timed) for its in _rows(p, shape, every)]
        columns = ["operands", "way", "result", "rel_l2", "max_diff", "arithmetic", "as asked", "temp bytes"]
        columns += ["× time"] * timed + ([f"on {target}", "rel_l2 there"] if target else [])
        left = (*LEFT, f"on {target}")
        yield Table(f"{shape} (B,H,Q,DxS) on {p.device}", tuple(columns), tuple(rows), left, keys=2)


Row = list[tuple[ProbeRecord, ProbeRecord | None]]


def _rows(p: Probed, shape: str, every: bool) -> list[Row]:
    """Return the records of a shape, each beside the target's, those that say the same together."""
    there = {(r.operands, r.way): r for r in p.records if r.shape == shape and r.target is not None}
    found: dict[object, Row] = {}
    for r in (r for r in p.records if r.shape == shape and r.target is None):
        other = there.get((r.operands, r.way))
        if r.unknown is not None and (other is None or other.unknown is not None) and not every:
            continue
        alone = r.way if every or r.way == FIRST or r.way.startswith("preferred") else ""
        key = (r.operands, alone, _result_text(r), None if other is None else _result_text(other))
        found.setdefault(key, []).append((r, other))
    return list(found.values())


def _result_text(r: ProbeRecord) -> object:
    return (r.dtype, r.rel_l2, r.max_diff, r.made, _honoured_text(r), r.memory, r.unit, r.passes, r.unknown is None)


def _cells(its: Row, target: str | None, timed: bool) -> tuple[str, ...]:
    r, other = its[0]
    ways = ", ".join(x.way for x, _ in its)
    cells = [
        r.operands,
        ways,
        r.dtype or "refused",
        _size(r.rel_l2),
        _size(r.max_diff),
        " or ".join(r.made),
        _honoured_text(r),
    ]
    cells.append("" if r.memory is None else f"{r.memory[2]:,}")
    if timed:
        cells.append(_times([x for x, _ in its]))
    if target:
        cells += ["", ""] if other is None else [_there(other), _size(other.rel_l2)]
    return tuple(cells)


def _size(x: object) -> str:
    return "" if x is None else digits(x, 2)  # type: ignore[arg-type]


def _honoured_text(r: ProbeRecord) -> str:
    """Return whether what was asked for was made; nothing where that was left to the device."""
    if r.honoured is None:
        return ""
    return "yes" if r.honoured == "yes" else f"no, asked {r.asked}" if r.honoured == "replaced" else "not known"


def _times(its: Iterable[ProbeRecord]) -> str:
    """Return the smallest lower and the largest upper quartile of the ratios of some ways."""
    found = [r.time for r in its if r.time is not None]
    if not found:
        return ""
    return f"{ratio(min(value(t[0]) for t in found))}–{ratio(max(value(t[2]) for t in found))}"


def _there(r: ProbeRecord) -> str:
    if r.unit is None:
        return "refused" if (r.unknown or "").startswith("refused") else "not known"
    passes = "" if r.passes is None else f", {r.passes} pass{'' if r.passes == 1 else 'es'}"
    return f"{r.unit} unit{passes}"


def _notes(p: Probed) -> Iterator[str]:
    """Yield what else fails, what was refused and in which words, and notes."""
    if p.judgement is not None:
        yield from (f"also: {_verdict_text(v)}" for v in p.judgement.verdicts[1:])
    for target in dict.fromkeys(r.target for r in p.records):
        refused = [r for r in p.records if r.target == target and r.unknown is not None]
        yield from _refusals(refused, target or p.platform)
    if any(r.time is not None for r in p.records):
        yield "× time: quartiles of the ratio to a call of the first way in the same round, all ways in turn"
    yield from (f"note: {text}" for text in p.notes)


def _refusals(refused: Sequence[ProbeRecord], on: str) -> Iterator[str]:
    """Yield a line for each thing that was said, the name of the way left out of it."""
    found: dict[str, dict[str, set[str]]] = {}
    for r in refused:
        form = re.escape(r.operands)
        said = re.sub(form, "…", (r.unknown or "").replace(r.way, "…"))
        found.setdefault(said, {}).setdefault(r.way, set()).add(r.operands)
    for said, ways in found.items():
        kind, _, message = said.partition(": ")
        told = []
        for forms in dict.fromkeys(tuple(sorted(x)) for x in ways.values()):
            its = ", ".join(way for way, x in ways.items() if tuple(sorted(x)) == forms)
            told.append(f"{its} ({', '.join(forms)})")
        yield f"{kind} on {on}: {'; '.join(told)}: {message}"
