"""What is said of a gradcheck: the verdict, a row an array and side, what is wrong with which; every case."""

from collections.abc import Sequence

from precaudit.checks.gradients import shipped
from precaudit.checks.gradients.awkward import kind_of
from precaudit.checks.gradients.case import KERNEL, REFERENCE, STRICT, ArrayFinding
from precaudit.checks.gradients.check import Checked
from precaudit.checks.gradients.shipped import Shipped
from precaudit.checks.gradients.sides import INTERPRETED
from precaudit.judging.verdicts import STATUSES
from precaudit.reports.fitting import Table
from precaudit.reports.report import Headline, Report, Section
from precaudit.schema.digits import digits

WORDS = ("excess", "gain", "mean", "componentwise", "limit", "nonfinite", "not run", "unknown", "scope", "ulp")


def gradient_report(c: Checked) -> Report:
    """Return the report of a gradcheck: distances from FP64, what does not pass, and every case."""
    counts = ", ".join(f"{n:,} {status}" for status, n in c.counts.items())
    on = f"{len(c.cases):,} cases on {c.device}"
    sections = (
        Section("How far from FP64", tables=_distances(c)),
        Section("What does not pass", tables=(failures(c),), only="pages"),
        Section("Every case", "Errors in roundings, or the verdict that is no pass.", (cases_table(c),), only="html"),
    )
    notes = (*(f"also: {text}" for text in c.conclusions[1:]), *(f"note: {text}" for text in c.notes))
    return Report(
        _verdict(c),
        sections,
        notes,
        command="gradcheck",
        title=c.name,
        subtitle=f"{on} · {counts}",
        words=WORDS,
        facts=(("cases", on), ("versions", ", ".join(f"{k} {v}" for k, v in c.versions.items()))),
        records=c.records,
    )


def _verdict(c: Checked) -> Headline:
    if c.exit_code == 0:
        declared = sum(f.declared for f in c.found)
        how = " rounds as its reference declares" if declared else " and its reference are as near FP64 as float32 is"
        what = "outputs and gradients" if any(f.record.phase == "backward" for f in c.found) else "outputs alone"
        return Headline("✓", f"{c.name}{how}, {what}, in {len(c.cases)} cases.")
    told = c.conclusions[0] if c.conclusions else "nothing was judged"
    return Headline("✗" if c.exit_code == 1 else "?", f"{c.name}: {told}.")


def distance_table(c: Checked) -> Table:
    """Return a row an array and side: its largest distance from FP64 in the plain cases, and its verdicts in all.

    The kernel without excess precision has one where that gives other bits.
    """
    rows = []
    for array in dict.fromkeys(f.array for f in c.found):
        for side in (KERNEL, STRICT, REFERENCE):
            mine = [f for f in c.found if f.array == array and f.side == side]
            if mine:
                rows.append((array, side, *_cells(mine)))
    return Table(
        "distance from FP64 (roundings: half ulps of the exact element; the worst of the seeds)",
        ("array", "side", "format", "roundings", "of the norm", "verdicts"),
        tuple(rows),
        left=("array", "side", "format", "verdicts"),
        keys=2,
    )


def _distances(c: Checked) -> tuple[Table, ...]:
    """Return the table of arrays, and that of kinds of inputs where there are several."""
    every = distance_table(c), inputs_table(c)
    return every if len(every[1].rows) > 1 else every[:1]


def inputs_table(c: Checked) -> Table:
    """Return a row a kind of inputs, ordinary ones first: of each side the worst array's distance, and its verdicts."""
    sides = [side for side in (KERNEL, STRICT, REFERENCE) if any(f.side == side for f in c.found)]
    rows = []
    for kind in dict.fromkeys(map(kind_of, c.cases)):
        cases = {case for case in c.cases if kind_of(case) == kind}
        mine = [[f for f in c.found if f.case in cases and f.side == side] for side in sides]
        rows.append((kind, f"{len(cases):,}", *map(_summary, mine)))
    title = "by kind of inputs (each side: roundings of its worst array, and its verdicts)"
    return Table(title, ("inputs", "cases", *sides), tuple(rows), ("inputs", *sides))


def _summary(found: Sequence[ArrayFinding]) -> str:
    most = [f.distance.componentwise for f in found if f.distance is not None and f.verdict.status != "not run"]
    return (f"{digits(max(most))}: " if most else "") + _told(found)


def _told(found: Sequence[ArrayFinding]) -> str:
    every = [f.verdict.status for f in found]
    return ", ".join(f"{every.count(s)} {s}" for s in STATUSES if s in every)


def cases_table(c: Checked) -> Table:
    """Return a row a case and a column an array and side: what is no pass, and how many roundings off a pass is."""
    sides = list(dict.fromkeys((f.array, f.side) for f in c.found))
    its: dict[tuple[str, str, str], list[ArrayFinding]] = {}
    for f in c.found:
        its.setdefault((f.case, f.array, f.side), []).append(f)
    rows = [(case, *(_cell(its.get((case, *of), [])) for of in sides)) for case in c.cases]
    columns = tuple(f"{array} of the {side}" for array, side in sides)
    return Table("", ("case", *columns), tuple(rows), ("case",))


def _cell(found: list[ArrayFinding]) -> str:
    if not found:
        return ""
    worst = min(found, key=lambda f: STATUSES.index(f.verdict.status))
    off = max((f.distance.componentwise for f in found if f.distance is not None), default=None)
    told = "" if off is None else digits(off)
    return told if worst.verdict.status == "pass" else f"{worst.verdict.status} {told}".strip()


def failures(c: Checked) -> Table:
    """Return a row a verdict that is no pass: where, which number is over which limit, the worst element."""
    rows = [_failure(f) for f in c.found if f.verdict.status != "pass"]
    columns = (
        "case",
        "array",
        "side",
        "verdict",
        "metric",
        "value",
        "limit",
        "roundings",
        "worst at",
        "it is",
        "FP64",
        "why",
    )
    left = ("case", "array", "side", "verdict", "metric", "worst at", "why")
    return Table("", columns, tuple(rows), left, keys=3)


def _failure(f: ArrayFinding) -> tuple[str, ...]:
    v, w = f.verdict, f.record.worst
    sizes = digits(v.value), digits(v.limit)
    off = "" if f.distance is None else digits(f.distance.componentwise)
    place = ("", "", "") if w is None else (str(list(w.index)), digits(w.candidate), digits(w.reference))
    return f.case, f.array, f.side, v.status, f"{v.metric} {v.scope}".strip(), *sizes, off, *place, f.cause or v.text


def shipped_report(found: Sequence[Shipped]) -> Report:
    """Return the report of the checks that ship: a row each."""
    rows = [(s.name, s.about, ", ".join(s.formats), ", ".join(s.gradients) or "outputs alone", s.here) for s in found]
    columns = ("check", "of", "formats", "gradients", "here")
    table = Table("checks that ship: precaudit gradcheck CHECK", columns, tuple(rows), left=columns)
    notes = (f"note: {INTERPRETED}",) if any(s.here == shipped.INTERPRETED for s in found) else ()
    return Report(None, (Section(tables=(table,)),), notes, records=found)


def _cells(found: list[ArrayFinding]) -> tuple[str, ...]:
    plain = [f.distance for f in found if " " not in f.case and f.distance is not None]
    formats = dict.fromkeys(f.record.dtype or "" for f in found if f.record.dtype)
    most = max((d.componentwise for d in plain), default=float("nan"))
    norm = max((d.normwise for d in plain), default=float("nan"))
    return ", ".join(formats), digits(most), digits(norm, 2), _told(found)
