"""Two runs of sketches side by side: a row a point, its value that is farthest off."""

from collections.abc import Sequence

from precaudit.references.comparison.sketches import SketchComparison
from precaudit.reports.fitting import Table
from precaudit.reports.report import Headline, Report, Section
from precaudit.schema.digits import digits
from precaudit.schema.records.base import value
from precaudit.schema.records.sketches import SketchRecord

MOST = 5  # caches that are listed one by one
COLUMNS = ("point", "values", "equal", "rel_l2", "within", "where", "largest", "of", "NaN, inf", "of ")


def sketch_report(found: SketchComparison) -> Report:
    """Return the report of two runs of sketches."""
    points = list(dict.fromkeys(r.point for r in found.records))
    rows = tuple(_row(name, [r for r in found.records if r.point == name]) for name in points)
    table = Table("", COLUMNS, rows, left=("point", "where"))
    unknown = dict.fromkeys(r.unknown for r in found.records if r.unknown)
    each = (_no_estimate(sum(r.unknown == why for r in found.records), why) for why in unknown)
    faults = [f"state: {f.point}{_layer(f.layer)} ({f.case}, {f.phase} {f.call}): {f.why}" for f in found.faults[:MOST]]
    if len(found.faults) > MOST:
        faults.append(f"state: {len(found.faults) - MOST} more caches do not hold them")
    state = f"state: {found.caches - len(found.faults)} of {found.caches} caches hold the rows that were written"
    ending = (f"Records: {folder}/sketches.jsonl" for folder in found.folders)
    notes = (*each, *found.lacking, *([state] if found.caches else []), *faults)
    return Report(_headline(found), (Section(tables=(table,)),), notes, tuple(ending), records=found.records)


def _headline(found: SketchComparison) -> Headline:
    every, off = found.records, [r for r in found.records if not r.equal]
    if found.faults:
        return Headline("✗", f"{len(found.faults)} of {found.caches} caches do not hold what was written.")
    if not every:
        return Headline("?", "no value is in both runs.")
    for r in off:
        ours, theirs = r.nonfinite
        if theirs is not None and ours > theirs:
            return Headline("✗", f"{_place(r)}: {ours} elements are NaN or infinite, {theirs} in the other run.")
    if not off:
        return _same_bits(every, found.lacking)
    worst = max(off, key=_size)
    how = "by an amount that has no estimate" if worst.rel_l2 is None else f"by {_rel(worst)} of its size"
    return Headline(
        "?",
        f"{len(off)} of {len(every)} values differ in bits, {_place(worst)} {how}; "
        "sketches cannot show whether rounding explains it.",
    )


def _no_estimate(n: int, why: str) -> str:
    return f"{'1 value has' if n == 1 else f'{n} values have'} no estimate: {why}"


def _same_bits(every: Sequence[SketchRecord], lacking: Sequence[str]) -> Headline:
    """Return the headline of values that all have the same bits, of which some may be no numbers."""
    said = f"all {len(every)} values have the same bits"
    if odd := [r for r in every if r.nonfinite[0]]:
        return Headline("?", f"{said}, and {len(odd)} of them hold NaN or infinity: the first is {_place(odd[0])}.")
    return Headline("?" if lacking else "✓", f"{said}.")


def _row(name: str, records: list[SketchRecord]) -> tuple[str, ...]:
    worst = max(records, key=_size)
    where = f"{worst.case}, {worst.phase} {worst.call}{_layer(worst.layer)}"
    spots = [f"{what} {i}" for what, i in (("row", worst.row), ("head", worst.head)) if i is not None]
    largest = [[value(x) for r in records if (x := r.largest[i]) is not None] for i in (0, 1)]
    odd = [[x for r in records if (x := r.nonfinite[i]) is not None] for i in (0, 1)]
    return (
        name,
        str(len(records)),
        str(sum(r.equal for r in records)),
        _rel(worst),
        "" if not worst.within else f"{worst.within:.0%}",
        ", ".join([where, *spots]) if not worst.equal else "",
        *(digits(max(x)) if x else "" for x in largest),
        *(str(sum(x)) if x else "" for x in odd),
    )


def _size(r: SketchRecord) -> float:
    return -1.0 if r.equal else 0.0 if r.rel_l2 is None else float(value(r.rel_l2))


def _rel(r: SketchRecord) -> str:
    return "0" if r.equal else "unknown" if r.rel_l2 is None else digits(r.rel_l2, 2)


def _place(r: SketchRecord) -> str:
    return f"{r.point}{_layer(r.layer)}"


def _layer(layer: int | None) -> str:
    return "" if layer is None else f" of layer {layer}"
