"""A gradcheck as Markdown, such as for a pull request, and as one HTML page that needs no network."""

from collections.abc import Iterator

from precaudit.checks.gradients.check import Checked
from precaudit.reports import gradients, markdown, templates
from precaudit.reports.escaping import markdown as escaped
from precaudit.reports.fitting import Table
from precaudit.reports.meanings import meaning

SHOWN = 50  # rows of a Markdown table; what is more is counted
ROWS = 3000  # of one of a page
WORDS = ("excess", "gain", "mean", "componentwise", "limit", "nonfinite", "not run", "unknown", "scope", "ulp")


def as_markdown(c: Checked) -> str:
    """Return the report as Markdown: the verdict, distances from FP64, what does not pass."""
    out = [f"### precaudit gradcheck: {escaped(c.name)}", "", escaped(gradients.headline(c).text), ""]
    out += [*(f"- {escaped(line)}" for line in gradients.lines(c)), ""]
    for table in (gradients.table(c), gradients.failures(c)):
        if table.rows:
            rest = "`precaudit gradcheck` with `--html FILE` or `-o FILE`"
            out += [f"#### {escaped(table.title)}", "", *markdown.cut(table, SHOWN, rest), ""]
    out += [f"{escaped(told)}  " for told in _provenance(c)]
    return "\n".join(out).rstrip() + "\n"


def _provenance(c: Checked) -> Iterator[str]:
    yield f"{len(c.cases):,} cases on {c.device}; {', '.join(f'{k} {v}' for k, v in c.versions.items())}"


def as_html(c: Checked) -> str:
    """Return the report as one HTML page, whole by itself, without a script."""
    tables = [t for t in (gradients.failures(c), gradients.cases(c)) if t.rows]
    cut = [(Table(t.title, t.columns, t.rows[:ROWS], t.left), max(0, len(t.rows) - ROWS)) for t in tables]
    counts = ", ".join(f"{n:,} {status}" for status, n in c.counts.items())
    facts = (("device", c.device), *c.versions.items())
    made = templates.page("gradients.html").render(
        title=c.name, subtitle=f"{len(c.cases):,} cases on {c.device} · {counts}", verdict=gradients.headline(c),
        distances=gradients.table(c), conclusions=c.conclusions, tables=cut, notes=c.notes, facts=facts,
        words={word: meaning(word) for word in WORDS}, style=templates.text("report.css"), policy=templates.policy(),
    )  # fmt: skip
    return str(made)
