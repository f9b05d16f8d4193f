"""The report of a judgement: a message a group of verdicts, worst first; for pages a table of them."""

from types import MappingProxyType

from precaudit.judging.judgement import Judgement
from precaudit.reports.findings import Causes
from precaudit.reports.fitting import Table
from precaudit.reports.headline import headline, how_far
from precaudit.reports.judgement import Group, drift_lines, groups, place_text_of, rest, tally, verdict_message
from precaudit.reports.report import Report, Section
from precaudit.schema.digits import digits

FEW = 8  # groups in a terminal
SHOWN = 20  # on pages; the rest are counted
COLUMNS = ("verdict", "where", "source", "kind", "metric", "value", "limit", "others", "budget's reason")


def gate_report(j: Judgement, run: str, verbose: bool = False, causes: Causes = MappingProxyType({})) -> Report:
    """Return the report of a judgement of ``run``, a folder or a file of records.

    ``verbose``: every group, also of those that only inherit; ``causes``: what diagnose found, first on pages.
    """
    found = groups(j.verdicts)
    own = found if verbose else [g for g in found if g.first.status != "input suspect"]
    shown = own if verbose else own[:FEW]
    lines = [verdict_message(g.first) + rest(g) for g in shown]
    if len(own) > len(shown):
        lines.append(f"and {len(own) - len(shown)} more groups (-v shows them, --json lists every verdict)")
    if inherit := sum(g.size for g in found if not any(g is one for one in own)):
        lines.append(f"input suspect: {inherit:,} records that a fault above may account for")
    far = [] if j.farthest is None else [f"size: {how_far(j.farthest, j.sources)}"]
    ending = (*drift_lines(j), *far, f"verdicts: {tally(j)}")
    rows = tuple(_row(j, g) for g in found[:SHOWN])
    more = (f"… and {len(found) - SHOWN} more groups.",) if len(found) > SHOWN else ()
    told = tuple(text for texts in causes.values() for text in texts)
    diagnosis = (Section("Diagnosis", lines=told, only="pages"),) if told else ()
    sections = (
        Section(lines=tuple(lines), only="terminal"),
        *diagnosis,
        Section(tables=(Table("", COLUMNS, rows, (*COLUMNS[:5], *COLUMNS[7:])),), lines=more, only="pages"),
        Section(lines=ending, only="pages"),
    )
    notes = tuple(f"note: {n}" for n in j.notes)
    return Report(headline(j, run), sections, notes, ending, command="gate", title=j.name, records=j.verdicts)


def _row(j: Judgement, g: Group) -> tuple[str, ...]:
    v = g.first
    return (
        v.status,
        place_text_of(v),
        j.sources.get(v.point, ""),
        v.kind,
        f"{v.metric} {v.scope}".strip() or v.text,
        digits(v.value),
        digits(v.limit),
        rest(g).strip(" ()"),
        v.why,
    )
