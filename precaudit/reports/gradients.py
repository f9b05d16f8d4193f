"""What is said of a gradcheck: the first sentence, a row an array and side, what is wrong with which; every case."""

from collections.abc import Iterator, Sequence

from precaudit.checks.gradients.case import KERNEL, REFERENCE, STRICT, Found
from precaudit.checks.gradients.check import Checked
from precaudit.checks.gradients.shipped import Shipped
from precaudit.judging.verdicts import STATUSES
from precaudit.reports.fitting import Table
from precaudit.reports.headline import Headline
from precaudit.schema.records.base import value


def headline(c: Checked) -> Headline:
    """Return the verdict in one sentence."""
    if c.exit_code == 0:
        declared = sum(f.declared for f in c.found)
        how = " rounds as its reference declares" if declared else " and its reference are as near FP64 as float32 is"
        what = "outputs and gradients" if any(f.record.phase == "backward" for f in c.found) else "outputs alone"
        return Headline("✓", f"{c.name}{how}, {what}, in {len(c.cases)} cases.")
    if c.exit_code == 1:
        return Headline("✗", f"{c.name}: {c.conclusions[0]}.")
    return Headline("?", f"{c.name}: {c.conclusions[0] if c.conclusions else 'nothing was judged'}.")


def table(c: Checked) -> Table:
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
        ("array", "side", "format", "roundings", "of the norm", "verdicts"), tuple(rows),
        left=("array", "side", "format", "verdicts"), keys=2,
    )  # fmt: skip


def cases(c: Checked) -> Table:
    """Return a row a case and a column an array and side: what is no pass, and how many roundings off a pass is."""
    sides = list(dict.fromkeys((f.array, f.side) for f in c.found))
    its: dict[tuple[str, str, str], list[Found]] = {}
    for f in c.found:
        its.setdefault((f.case, f.array, f.side), []).append(f)
    rows = [(case, *(_cell(its.get((case, *of), [])) for of in sides)) for case in c.cases]
    columns = tuple(f"{array} of the {side}" for array, side in sides)
    return Table(
        "Every case: roundings off, or the verdict that is no pass", ("case", *columns), tuple(rows), ("case",)
    )


def _cell(found: list[Found]) -> str:
    if not found:
        return ""
    worst = min(found, key=lambda f: STATUSES.index(f.verdict.status))
    off = max((f.distance.componentwise for f in found if f.distance is not None), default=None)
    told = "" if off is None else f"{off:.3g}"
    return told if worst.verdict.status == "pass" else f"{worst.verdict.status} {told}".strip()


def failures(c: Checked) -> Table:
    """Return a row a verdict that is no pass: where, which number is over which limit, the worst element."""
    rows = [_failure(f) for f in c.found if f.verdict.status != "pass"]
    columns = ("case", "array", "side", "verdict", "metric", "value", "limit", "roundings", "worst at", "it is", "FP64",
               "why")  # fmt: skip
    left = ("case", "array", "side", "verdict", "metric", "worst at", "why")
    return Table("What does not pass", columns, tuple(rows), left, keys=3)


def _failure(f: Found) -> tuple[str, ...]:
    v, w = f.verdict, f.record.worst
    sizes = tuple("" if x is None else f"{value(x):.3g}" for x in (v.value, v.limit))
    off = "" if f.distance is None else f"{f.distance.componentwise:.3g}"
    place = (
        ("", "", "") if w is None else (str(list(w.index)), f"{value(w.candidate):.6g}", f"{value(w.reference):.6g}")
    )
    return f.case, f.array, f.side, v.status, f"{v.metric} {v.scope}".strip(), *sizes, off, *place, v.text


def listed(found: Sequence[Shipped]) -> Table:
    """Return a row a check that ships."""
    rows = [(s.name, s.about, ", ".join(s.formats), ", ".join(s.gradients) or "outputs alone", s.here) for s in found]
    columns = ("check", "of", "formats", "gradients", "here")
    return Table("checks that ship: precaudit gradcheck CHECK", columns, tuple(rows), left=columns)


def _cells(found: list[Found]) -> tuple[str, ...]:
    plain = [f.distance for f in found if " " not in f.case and f.distance is not None]
    formats = dict.fromkeys(f.record.dtype or "" for f in found if f.record.dtype)
    every = [f.verdict.status for f in found]
    told = ", ".join(f"{every.count(s)} {s}" for s in STATUSES if s in every)
    most = max((d.componentwise for d in plain), default=float("nan"))
    norm = max((d.normwise for d in plain), default=float("nan"))
    return ", ".join(formats), f"{most:.3g}", f"{norm:.2g}", told


def lines(c: Checked) -> Iterator[str]:
    """Yield every conclusion after the first, and the notes."""
    yield from (f"also: {text}" for text in c.conclusions[1:])
    yield from (f"note: {text}" for text in c.notes)
