"""The report as one HTML file that needs no network, of what is written beside a run (templates/report.html)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from precaudit.diagnosis.evidence.records import LineRemedy, Remedy
from precaudit.judging.verdicts import STATUSES
from precaudit.recording.runs.unique import Seen
from precaudit.reports import charts, program, templates
from precaudit.reports.cells import KINDS, Cell, cells, story
from precaudit.reports.diagnosis import details, first_of, headline, shared
from precaudit.reports.escaping import script
from precaudit.reports.fitting import Table
from precaudit.reports.gathered import Gathered, gather
from precaudit.reports.headline import Headline
from precaudit.reports.headline import headline as judged
from precaudit.reports.meanings import words
from precaudit.reports.provenance import facts, subtitle, title
from precaudit.reports.summary import sentences
from precaudit.reports.tables import detail, prefill_decode, short
from precaudit.reports.tokens import text_of, worst
from precaudit.schema.records.base import value

ROWS = 3000  # of a table; what is more is counted
POINTS = 80  # of a heat map: those that err most
MAPS = {
    "local": ("Local error, unexplained", "Each operation by itself, from its own recorded inputs: the worst of its "
              "numbers over its limit. Above 1 it is more than rounding."),
    "forward": ("Forward error", "The whole model against FP64 on the same tokens: the largest error over the error "
                "that rounding by the declared policy makes."),
}  # fmt: skip
THEMED = charts.Palette(
    **{name: f"var(--{name})" for name in ("ink", "muted", "line", "paper", "none", "on_hot")},
    cool=tuple(f"var(--cool{i})" for i in range(5)), hot=tuple(f"var(--hot{i})" for i in range(3)),
    series=tuple(f"var(--series{i})" for i in range(6)),
    font="system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif",
)  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """A chart on the page: the element it is drawn in, its heading, and what it shows."""

    id: str
    title: str
    says: str = ""
    width: int = 1120


def render(folder: Path) -> str:
    """Return the page of a compared run; raises UserError where it was not compared, or an extra is missing."""
    charts.check()
    return page(gather(folder))


def page(found: Gathered) -> str:
    """Return the page of what was gathered of a run; raises UserError where an extra is missing."""
    shown = _shown(found)
    specs, drawn = _charts(found, shown)
    data = {"charts": specs, **_stories(found, shown)}
    scripts = [_libraries(), templates.text("report.js")]
    made = templates.page("report.html").render(
        title=title(found), subtitle=subtitle(found), verdict=_verdict(found), run=str(found.folder), charts=drawn,
        maps=[drawn[kind] for kind in MAPS if kind in drawn], bands={k: charts.bands(k)[:-1] for k in MAPS},
        shares=[c for c in drawn.values() if c.id.startswith("share")], sentences=_sentences(found),
        tokens=_tokens(found), pairs=_pairs(found), remedies=_remedies(found), diagnosed=found.findings is not None,
        findings=[(headline(f), details(f)) for f in found.findings or ()], notes=_notes(found),
        details=_details(found), facts=facts(found), words=words(), data=script(data), scripts=scripts,
        style=templates.text("report.css"), policy=templates.policy(scripts), of_model=found.compared is not None,
    )  # fmt: skip
    return str(made)


def _verdict(found: Gathered) -> Headline:
    """Return the verdict: the first finding where there is one, else what the gate says."""
    if found.findings:
        return first_of(found.findings)
    said = judged(found.judgement, str(found.folder))
    if said.mark == "✓" and found.findings is None:
        return replace(said, next=f"precaudit diagnose {found.folder}")
    return said


def _shown(found: Gathered) -> dict[str, list[Cell]]:
    """Return the cells of both maps."""
    suspects = found.suspects()
    return {kind: _cells(found, kind, suspects) for kind in KINDS}


def _cells(found: Gathered, kind: str, suspects: Seen) -> list[Cell]:
    """Return the cells of a map, of at most so many points: those that err most."""
    every = cells(found.errors, kind, suspects)
    bad = {p: max(_weight(c) for c in every if c.point == p) for p in {c.point for c in every}}
    kept = set(sorted(bad, key=lambda p: bad[p], reverse=True)[:POINTS])
    return [c for c in every if c.point in kept]


def _weight(c: Cell) -> tuple[int, float]:
    """Return how much a cell deserves to be looked at first."""
    return -STATUSES.index(c.status), -1.0 if c.size is None else c.size


def _charts(found: Gathered, shown: Mapping[str, Sequence[Cell]]) -> tuple[dict[str, Any], dict[str, Chart]]:
    """Return {id: specification} and {id: what the page says of it}, in the order of the page."""
    specs, drawn = {}, {}
    for made, chart in _drawn(found, shown):
        spec = made.to_dict()
        spec.pop("$schema")
        specs[chart.id], drawn[chart.id] = spec, chart
    return specs, drawn


def _drawn(found: Gathered, shown: Mapping[str, Sequence[Cell]]) -> Iterator[tuple[Any, Chart]]:
    for kind, (name, says) in MAPS.items():
        if shown[kind]:
            layers = len({c.layer for c in shown[kind]})
            chart = Chart(kind, name, says, min(1120, 150 + 72 * layers))
            yield charts.heat_map((), kind, THEMED, shown[kind], legend=False), chart
    if charts.grows(found.errors):
        yield charts.growth(found.errors, THEMED), Chart("growth", "Growth")
    if found.remedies:
        yield charts.remedies(found.remedies, THEMED), Chart("remedies", "Remedies", width=760)
    for i, s in enumerate(x for x in found.shares or () if x.unknown is None and x.shares):
        yield charts.shares(s, THEMED), Chart(f"share{i}", f"{s.prompt}: {s.objective}", shared(s), 760)


def _stories(found: Gathered, shown: Mapping[str, Sequence[Cell]]) -> dict[str, Any]:
    """Return the stories of all cells, and which of each map is told first: the worst."""
    stories: dict[str, Any] = {}
    first: dict[str, int] = {}
    for kind, its in shown.items():
        if its:
            weights = [_weight(c) for c in its]
            first[kind] = weights.index(max(weights))
            told = [(c, story(c, found.sources)) for c in its]
            stories[kind] = [[c.mark, lines[0], *_causes(found, c), *lines[1:]] for c, lines in told]
    return {"stories": stories, "first": first}


def _causes(found: Gathered, c: Cell) -> list[tuple[str, str]]:
    """Return what diagnosis says of a cell that fails."""
    here = [f for f in found.findings or () if f.point == c.point and c.layer in (f.layer, *f.layers)]
    return [("cause", f"{f.kind}: {f.cause}; {f.says}") for f in here if c.status != "pass"]


def _sentences(found: Gathered) -> list[str]:
    """Return what a reader should take away of the records."""
    if found.program is not None:
        return [
            *program.sentences(found.program, found.errors),
            *(f"Growth: {x}." for x in program.growth(found.errors)[:1]),
        ]
    assert found.compared is not None
    return sentences(found.errors, found.compared.prefill_decode)


def _tokens(found: Gathered) -> list[Any]:
    return [] if found.compared is None else worst(found.compared, text_of(found.compared.run))


def _pairs(found: Gathered) -> Table | None:
    return None if found.compared is None else prefill_decode(found.compared.prefill_decode)


def _notes(found: Gathered) -> list[str]:
    warned = () if found.compared is None else found.compared.run.record.warnings
    return list(dict.fromkeys([*found.judgement.notes, *warned]))


def _details(found: Gathered) -> tuple[Table, int]:
    """Return the table of every layer and point, and how many rows were left out."""
    if found.program is not None:
        left = ("point", "format", "verdicts", "at")
        table = Table("Every point", program.COLUMNS, tuple(program.rows(found.program, found.errors)), left)
    else:
        table = detail(found.errors)
    return Table(table.title, table.columns, table.rows[:ROWS], table.left), max(0, len(table.rows) - ROWS)


def _remedies(found: Gathered) -> Table | None:
    """Return what changes gain and cost as a table."""
    rows = [_line(r) if isinstance(r, LineRemedy) else _part(r) for r in found.remedies or ()]
    if not rows:
        return None
    of_lines = isinstance((found.remedies or ())[0], LineRemedy)
    columns = ("line", "gain", "±", "before", "after", "flips", "bytes more", "text") if of_lines else (
        "change", "gain", "KL before", "KL after", "prefill", "decode", "memory", "flips", "how"
    )  # fmt: skip
    return Table("What changes gain, and cost", columns, tuple(rows), ("change", "line", "how", "text"))


def _part(r: Remedy) -> tuple[str, ...]:
    times = (f"{value(x):.2f} ×" for x in (r.time, r.decode_time, r.memory))
    return r.part, f"{100 * value(r.gain):.0f} %", *map(short, r.kl), *times, f"{r.flips[0]} → {r.flips[1]}", r.code


def _line(r: LineRemedy) -> tuple[str, ...]:
    gains = (f"{100 * value(x):.0f} %" for x in (r.gain, r.error))
    flips = f"{r.flips[0]} → {r.flips[1]}" if r.rows else ""
    return " + ".join(r.sources), *gains, *map(short, r.size), flips, f"{r.bytes:,}", " + ".join(r.text)


@cache
def _libraries() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script; raises UserError without vl-convert or altair."""
    # the text of a script element ends where it says so, whatever language it is in
    return str(charts.drawing().javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")
