"""A gradcheck in a terminal: the first sentence, a row an array and side, what is wrong with which."""

from collections.abc import Iterator, Sequence

from precaudit.gradients.check import KERNEL, REFERENCE, Checked, Found
from precaudit.gradients.shipped import Shipped
from precaudit.judging.verdicts import STATUSES
from precaudit.reports.fitting import Table
from precaudit.reports.headline import Headline


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
    """Return a row an array and side: its largest distance from FP64 in the plain cases, and its verdicts in all."""
    rows = []
    for array in dict.fromkeys(f.array for f in c.found):
        for side in (KERNEL, REFERENCE):
            mine = [f for f in c.found if f.array == array and f.side == side]
            if mine:
                rows.append((array, side, *_cells(mine)))
    return Table(
        "distance from FP64 (roundings: half ulps of the exact element; the worst of the seeds)",
        ("array", "side", "format", "roundings", "of the norm", "verdicts"), tuple(rows),
        left=("array", "side", "format", "verdicts"), keys=2,
    )  # fmt: skip


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
