"""Two runs of sketches side by side: a row a point, its value that is farthest off."""

from precaudit.references.comparison.sketches import SketchComparison
from precaudit.reports.fitting import Table
from precaudit.reports.report import Headline, Report, Section
from precaudit.schema.records.base import value
from precaudit.schema.records.sketches import SketchRecord

COLUMNS = ("point", "values", "equal", "rel_l2", "within", "where", "largest", "of", "NaN, inf", "of ")


def sketch_report(found: SketchComparison) -> Report:
    """Return the report of two runs of sketches."""
    points = list(dict.fromkeys(r.point for r in found.records))
    rows = tuple(_row(name, [r for r in found.records if r.point == name]) for name in points)
    table = Table("", COLUMNS, rows, left=("point", "where"))
    unknown = dict.fromkeys(r.unknown for r in found.records if r.unknown)
    each = (f"{sum(r.unknown == why for r in found.records)} values have no estimate: {why}" for why in unknown)
    faults = [
        f"state: {f.point}{_layer(f.layer)} ({f.case}, {f.phase} {f.call}): {f.why}" for f in found.faults[:5]
    ]  # fmt: skip
    state = f"state: {found.caches - len(found.faults)} of {found.caches} caches hold the rows that were written"
    ending = (f"Records: {folder}/sketches.jsonl" for folder in found.folders)
    notes = (*each, *found.lacking, *([state] if found.caches else []), *faults)
    return Report(_headline(found), (Section(tables=(table,)),), notes, tuple(ending), records=found.records)


def _headline(found: SketchComparison) -> Headline:
    every, off = found.records, [r for r in found.records if not r.equal]
    odd = [r for r in off if r.nonfinite[0] > r.nonfinite[1]]
    if found.faults:
        return Headline("✗", f"{len(found.faults)} of {found.caches} caches do not hold what was written.")
    if odd:
        return Headline(
            "✗", f"{odd[0].point}{_layer(odd[0].layer)} holds NaN or infinity, and the other run's does not."
        )
    if not off:
        return Headline("✓" if not found.lacking else "?", f"all {len(every)} values have the same bits.")
    worst = max(off, key=_size)
    return Headline(
        "?",
        f"{len(off)} of {len(every)} values differ in bits, {worst.point}{_layer(worst.layer)} by {_rel(worst)} of its "
        "size; sketches do not tell whether rounding explains it.",
    )


def _row(name: str, records: list[SketchRecord]) -> tuple[str, ...]:
    worst = max(records, key=_size)
    where = f"{worst.case}, {worst.phase} {worst.call}{_layer(worst.layer)}"
    spots = [f"{what} {i}" for what, i in (("row", worst.row), ("head", worst.head)) if i is not None]
    largest = [max(value(r.largest[i]) for r in records if not r.unknown or i == 0) for i in (0, 1) if records]
    odd = [sum(r.nonfinite[i] for r in records) for i in (0, 1)]
    return (
        name, str(len(records)), str(sum(r.equal for r in records)), _rel(worst),
        "" if not worst.within else f"{worst.within:.0%}", ", ".join([where, *spots]) if not worst.equal else "",
        f"{largest[0]:.6g}", f"{largest[1]:.6g}", str(odd[0]), str(odd[1]),
    )  # fmt: skip


def _size(r: SketchRecord) -> float:
    return -1.0 if r.equal else 0.0 if r.rel_l2 is None else float(value(r.rel_l2))


def _rel(r: SketchRecord) -> str:
    return "0" if r.equal else "unknown" if r.rel_l2 is None else f"{value(r.rel_l2):.2g}"


def _layer(layer: int | None) -> str:
    return "" if layer is None else f" of layer {layer}"
