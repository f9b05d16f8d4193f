"""report.md: sentences, then tables."""

from precaudit.recording.runs.written import Comparison
from precaudit.reports.escaping import code, markdown
from precaudit.reports.fitting import Table
from precaudit.reports.summary import sentences
from precaudit.reports.tables import accumulation, detail, outside, overview, pair_table, prefill_decode


def render(comparison: Comparison) -> str:
    """Return the report of a comparison as Markdown."""
    run = comparison.run.record
    head = [
        f"# precaudit: {markdown(run.model.id)}, policy {markdown(run.policy['name'])}, {markdown(run.device)}",
        "",
        f"Run {code(run.id)}, {len(run.requested.prompts)} prompts, layers {len(run.requested.layers)}, "
        f"{run.finished}.",
        "",
    ]
    if comparison.against is not None:
        against = comparison.against.record
        head.insert(3, f"Against run {code(against.id)}, policy {markdown(against.policy['name'])}.")
    notes = [f"- **{markdown(note)}**" for note in comparison.notes]
    said = [] if comparison.against is not None else sentences(comparison.errors, comparison.prefill_decode)
    body = [*notes, *(f"- {markdown(s)}" for s in said), ""]
    tables: list[Table | None]
    if comparison.against is not None:
        tables = [pair_table(comparison.errors)]
    else:
        errors = comparison.errors
        tables = [*overview(errors), outside(errors), prefill_decode(comparison.prefill_decode), accumulation(errors)]
        tables.append(detail(errors))
    for table in tables:
        if table is not None:
            body += [f"## {table.title}", "", *rows_of(table), ""]
    return "\n".join([*head, *body])


def rows_of(table: Table) -> list[str]:
    """Return a table's head and rows in Markdown, their texts escaped."""
    rule = " | ".join(":--" if c in table.left else "--:" for c in table.columns)
    return [_row(table.columns), f"| {rule} |", *(_row(r) for r in table.rows)]


def cut(table: Table, shown: int, rest: str) -> list[str]:
    """Return a table's first rows in Markdown, and how many more there are; ``rest``: what shows them."""
    rows = rows_of(Table(table.title, table.columns, table.rows[:shown], table.left))
    more = len(table.rows) - shown
    return rows if more <= 0 else [*rows, "", f"… and {more:,} more rows: {rest}."]


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(markdown(c) for c in cells) + " |"
