"""A report as Markdown, such as for a pull request, as one HTML page that needs no network, and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from precaudit.reports import templates
from precaudit.reports.escaping import code_span
from precaudit.reports.escaping import escape_markdown as escaped
from precaudit.reports.fitting import Table
from precaudit.reports.meanings import meaning
from precaudit.reports.report import Report, Section
from precaudit.schema.records.lines import encode

SHOWN = 50  # rows of a Markdown table; what is more is counted
ROWS = 3000  # of one of a page


def as_markdown(r: Report, level: int = 3, shown: int | None = SHOWN) -> str:
    """Return a report as Markdown: the verdict, notes, sections, and what was run.

    ``level``: of its title; ``shown``: rows of a table, None for all.
    """
    head = [] if r.headline is None else [escaped(r.headline.text), ""]
    title = f"{'#' * level} precaudit {r.command}: {code_span(r.title)}"
    out = [title, "", *head, *_list_items(_notes(r))]
    for s in r.shown_on("markdown"):
        out += [f"{'#' * (level + 1)} {escaped(s.heading)}", ""] if s.heading else _list_items(s.lines)
        for table in s.filled_tables:
            named = escaped(table.title) if s.heading else f"{'#' * (level + 1)} {escaped(table.title)}"
            out += [named, ""] if table.title else []
            rest = f"`precaudit {r.command}` with `--html FILE` or `-o FILE`"
            out += [*_grid(table, shown or len(table.rows), rest), ""]
        out += _list_items(s.lines) if s.heading else []
        for p in s.parts:
            out += [f"{'#' * (level + 2)} {escaped(p.heading)}", "", *_list_items(p.lines)]
    out += [f"{escaped(name)}: {escaped(told)}  " for name, told in r.facts]
    return "\n".join(out).rstrip() + "\n"


def _list_items(lines: Sequence[str]) -> list[str]:
    return [*(f"- {escaped(line.removeprefix('- '))}" for line in lines), ""] if lines else []


def _notes(r: Report) -> list[str]:
    return [n.removeprefix("note: ") for n in r.notes]


def _grid(t: Table, shown: int, rest: str) -> list[str]:
    """Return a table's head and first rows in Markdown, and how many more there are; ``rest``: what shows them."""
    head, *rows = ("| " + " | ".join(map(escaped, row)) + " |" for row in (t.columns, *t.rows[:shown]))
    rule = " | ".join(":--" if c in t.left else "--:" for c in t.columns)
    more = len(t.rows) - shown
    return [head, f"| {rule} |", *rows, *(["", f"… and {more:,} more rows: {rest}."] if more > 0 else [])]


def as_html(r: Report, template: str = "sections.html", **more: Any) -> str:
    """Return a report as one HTML page, whole by itself; without a script, unless ``template`` takes some in ``more``.

    Raises UserError without altair, where there are pictures.
    """
    sections = [x for s in r.shown_on("html") if (x := _section(s))]
    given = {
        "command": r.command,
        "title": r.title,
        "subtitle": r.subtitle,
        "verdict": r.headline,
        "sections": sections,
        "notes": _notes(r),
        "facts": r.facts,
        "words": _meanings((*r.words, *_columns(sections))),
    }
    return str(templates.page(template).render(**given, **more))


def _section(s: Section) -> dict[str, Any] | None:
    """Return what a template shows of a section; None of one whose pictures are none."""
    drawn = list(s.pictures()) if s.pictures else []
    if s.pictures and not drawn and replace(s, pictures=None).empty:
        return None
    tables = [(replace(t, rows=t.rows[:ROWS]), max(0, len(t.rows) - ROWS)) for t in s.filled_tables]
    parts = [x for p in s.parts if (x := _section(p))]
    return {"of": s, "tables": tables, "pictures": drawn, "parts": parts}


def _columns(sections: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the headings of all tables of sections and their parts, each once."""
    own = [c for s in sections for t, _ in s["tables"] for c in t.columns]
    return tuple(dict.fromkeys((*own, *(c for s in sections for c in _columns(s["parts"])))))


@cache
def _meanings(words: tuple[str, ...]) -> dict[str, str]:
    return {w: said for w in words if (said := meaning(w))}


def as_json(r: Report) -> Iterator[str]:
    """Yield a report's records, a line each."""
    return (encode(x).decode() for x in r.records)
