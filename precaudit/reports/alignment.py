"""What an alignment says: which parameter is which tensor, what is missing, and what a conversion did wrong."""

from precaudit.references.alignment.points_text import EntryPoints
from precaudit.references.alignment.records import Aligned, Unaligned
from precaudit.reports.fitting import Table
from precaudit.reports.report import Headline, Report, Section
from precaudit.schema.digits import digits


def alignment_report(aligned: Aligned) -> Report:
    """Return the report of an alignment, mistakes first."""
    parts, mistakes, lost = aligned.parts, aligned.mistakes, aligned.unaligned
    a, b = aligned.alignment.own.label, aligned.alignment.theirs.label
    if mistakes:
        first = Headline("✗", f"{len(mistakes)} mistake{'s' * (len(mistakes) > 1)} of conversion between {a} and {b}")
    elif lost:
        first = Headline("?", f"{len(lost)} parameters of {a} are nowhere in {b}; the others are there, every one")
    else:
        first = Headline("✓", f"every parameter of {a} is in {b}, and the other way round")
    rows = tuple((p.parameter, p.tensors, p.how, digits(p.found, 4)) for p in parts)
    words = ("parameter", "tensors", "how")
    sections = (
        Section(lines=tuple(m.sentence for m in mistakes)),
        Section("Parameters", tables=(Table("", ("parameter", "tensors", "how", "found"), rows, words),)),
        Section("Not found", lines=tuple(map(_lost_line, lost))),
        Section("Points", tables=tuple(map(_points_table, aligned.points))),
    )
    return Report(first, sections, records=(*mistakes, *parts, *lost))


def _points_table(one: EntryPoints) -> Table:
    rows = tuple(
        (p.point, p.series.name, p.axes, f"{p.equal} of {len(p.series.members)}", digits(p.off, 2)) for p in one.points
    )
    title = f"points of the reference implementation that {one.entry} shows; error: of the nearest layer, in FP64"
    return Table(title, ("point", "shown by", "axes", "layers equal", "error"), rows, ("point", "shown by", "axes"))


def _lost_line(lost: Unaligned) -> str:
    near = (
        ""
        if lost.distance is None
        else f"; the nearest vector is of {lost.nearest}, with a relative L2 error of {digits(lost.distance, 2)}"
    )
    return f"{lost.parameter} {list(lost.shape)} is no tensor{near}"
