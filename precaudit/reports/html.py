"""The report as one HTML file that needs no network, of what is written beside a run (templates/report.html)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from precaudit.diagnosis.evidence.records import LineRemedy, Remedy
from precaudit.recording.runs.written import Comparison
from precaudit.reports import charts, program, templates
from precaudit.reports.cells import Cell, first_cell, first_map, map_cells, program_order, story, weight
from precaudit.reports.diagnosis import findings_section, shares_text
from precaudit.reports.escaping import escape_html, script
from precaudit.reports.findings import Causes, causes_at, causes_by_place, first_of
from precaudit.reports.fitting import Table
from precaudit.reports.gathered import Gathered, gather_run
from precaudit.reports.headline import headline as judged
from precaudit.reports.meanings import SHOWN
from precaudit.reports.pages import as_html
from precaudit.reports.provenance import facts_of, subtitle, title
from precaudit.reports.report import Chart, Headline, Report, Section
from precaudit.reports.summary import comparison_sentences, prefill_decode_sentence
from precaudit.reports.tables import detail, prefill_decode_table
from precaudit.reports.tokens import has_tokens, text_of, worst_ratios
from precaudit.schema.digits import digits, ratio, short
from precaudit.schema.records.base import Number, value

POINTS = 80  # of a heat map: those that err most
MAPS = {
    "local": (
        "Local error, unexplained",
        "Each operation by itself, from its own recorded inputs: the worst of its "
        "numbers over its limit. Above 1 it is more than rounding.",
    ),
    "forward": (
        "Forward error",
        "The whole model against FP64 on the same tokens: the largest error over the "
        "error of the declared policy's rounding.",
    ),
    "formula": (
        "Formula",
        "The program's formulas in FP64 against those of the reference: the distance over the limit "
        "of what is the same formula. No rounding is in it.",
    ),
}
THEMED = charts.Palette(
    **{name: f"var(--{name})" for name in ("ink", "muted", "line", "paper", "none", "on_hot")},
    cool=tuple(f"var(--cool{i})" for i in range(5)),
    hot=tuple(f"var(--hot{i})" for i in range(3)),
    series=tuple(f"var(--series{i})" for i in range(6)),
    font="system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif",
)


def render(folder: Path) -> str:
    """Return the page of a compared run; raises UserError where it was not compared, or an extra is missing."""
    charts.require_altair()
    return gathered_page(gather_run(folder))


def gathered_page(found: Gathered) -> str:
    """Return the page of what was gathered of a run; raises UserError where an extra is missing."""
    shown, r = _map_cells(found), run_report(found)
    maps = list(_maps(shown))
    parts = (c for s in r.sections for x in (s, *s.parts) for c in x.charts)
    data = {"charts": {c.id: c.spec for c in (*maps, *parts)}, **_stories(found, shown)}
    scripts = [_libraries(), templates.template_file("report.js")]
    return as_html(
        r,
        "report.html",
        maps=maps,
        bands={k: charts.bands(k)[:-1] for k in MAPS},
        units=charts.TITLES,
        at_first=first_map(shown),
        sentences=_sentences(found),
        data=script(data),
        scripts=scripts,
        policy=templates.policy(scripts),
    )


def run_report(found: Gathered) -> Report:
    """Return the report of all that is written beside a run, for a page that has its heat maps."""
    warned = () if found.program is not None else found.compared.run.record.warnings
    sections = tuple(_sections(found))
    lacking = (f"{s.heading}: {' '.join(filter(None, s.missing))}" for s in sections if s.empty and s.missing[0])
    notes = [f"note: {n}" for n in dict.fromkeys([*lacking, *found.judgement.notes, *warned])]
    return Report(
        _verdict(found),
        sections,
        tuple(notes),
        command="report",
        title=title(found.record),
        subtitle=subtitle(found.record),
        facts=facts_of(found.record),
        words=SHOWN,
    )


def _sections(found: Gathered) -> Iterator[Section]:
    of_model, diagnosed = found.program is None, found.findings is not None
    none = ("none: diagnosis found nothing that rounding does not explain.", "")
    part = " --partial" if found.record.finished is None else ""
    again = f"precaudit diagnose {found.folder}{part}"
    none = none if diagnosed else ("not known yet, nor what would help. Run:", again)
    yield replace(findings_section(found.findings or ()), leads=True, missing=none)
    if charts.grows(found.errors):
        yield Section(
            "How the error of the residual stream grows" if of_model else "How errors grow over steps",
            "Forward error, relative, the median of all records of a layer; dashed: the error of the declared "
            "policy's rounding.",
            menu="Growth",
            charts=(_chart("growth", "Growth", charts.growth_chart(found.errors, THEMED)),),
        )
    if has_tokens(found.compared.run):
        yield Section(
            "The worst tokens",
            "Where the forward error of a token is largest, over that of rounding (ratio). KL: "
            "of the prediction after it, where its logits were recorded.",
            (_tokens(found.compared),),
            menu="Tokens",
        )
        pairs = found.compared.prefill_decode
        apart, said = prefill_decode_table(pairs), prefill_decode_sentence(pairs)
        yield Section(
            "Prefill against decode",
            f"{apart.title}." if apart else "",
            (replace(apart, title=""),) if apart else (),
            lines=() if apart or said is None else (said,),
            menu="Prefill and decode",
            missing=("no position was recorded in two phases (--phases).", ""),
        )
    if diagnosed:
        gains = charts.remedies_chart(found.remedies, THEMED) if found.remedies else None
        yield Section(
            "What would help, and what it costs",
            _remedies_say(found.remedies or ()),
            tuple(_remedies(found)),
            menu="Remedies",
            charts=() if gains is None else (_chart("remedies", "Remedies", gains, width=760),),
            missing=("diagnosis measured no change of this run.", ""),
        )
        known = [s for s in found.shares or () if s.unknown is None and s.shares]
        yield Section(
            "Which operations change the output",
            "Share: what each operation's own error adds to the change of an output; the largest are shown."
            if known
            else "",
            parts=tuple(
                Section(
                    f"{s.prompt}: {s.objective}",
                    f"{said[:1].upper()}{said[1:]}.",
                    charts=(_chart(f"share{i}", "", charts.shares_chart(s, THEMED), width=760),),
                )
                for i, s in enumerate(known)
                for said in [shares_text(s)]
            ),
            menu="Shares",
            missing=("diagnosis could not share out the change of this run's outputs.", ""),
        )
    yield Section("Every layer and point", tables=(replace(_details(found), title=""),), menu="Details", folded=True)


def _remedies_say(found: Sequence[Remedy | LineRemedy]) -> str:
    """Return what gains and prices are: of what, in which direction, how sure, and on which device."""
    if not found:
        return ""
    said = "Gain: the share of the error of the output that a change takes away; more is nearer FP64. "
    dots = " A dot without a name is named in the table."
    if isinstance(found[0], LineRemedy):
        return f"{said}±: its standard error. Emulated, not timed: the price is how many bytes more results take.{dots}"
    devices = " or ".join(dict.fromkeys(r.device for r in found if isinstance(r, Remedy) and r.device))
    where = f" on {devices}" if devices else ""
    return (
        f"{said}Prefill, decode and memory: after over before{where}, beyond 1 costs more; times are medians of paired "
        f"calls, in brackets the least and the most.{dots}"
    )


def _chart(name: str, heading: str, made: Any, says: str = "", width: int = 1120) -> Chart:
    spec = made.to_dict()
    spec.pop("$schema")
    return Chart(name, heading, spec, says, width)


def _maps(shown: Mapping[str, Sequence[Cell]]) -> Iterator[Chart]:
    order = program_order([c for its in shown.values() for c in its])  # of all maps, so that each has the same
    for kind, (name, says) in MAPS.items():
        if shown[kind]:
            width = min(1120, 150 + 72 * len({c.layer for c in shown[kind]}))
            made = charts.heat_map((), kind, THEMED, shown[kind], legend=False, order=order)
            yield _chart(kind, name, made, says, width)


def _verdict(found: Gathered) -> Headline:
    """Return the verdict: the first finding where there is one, else what the gate says."""
    if found.findings:
        return first_of(found.findings)
    said = judged(found.judgement, str(found.folder), found.among)
    if said.mark == "✓" and found.findings is None:
        return replace(said, next=f"precaudit diagnose {found.folder}")
    return said


def _map_cells(found: Gathered) -> dict[str, list[Cell]]:
    """Return the cells of all maps, each of at most so many points: those that err most."""
    every = map_cells(found.errors, found.suspects(), found.judgement.verdicts)
    return {kind: _of_points(its) for kind, its in every.items()}


def _of_points(every: Sequence[Cell]) -> list[Cell]:
    bad: dict[str, tuple[int, float]] = {}
    for c in every:
        bad[c.point] = max(bad.get(c.point, weight(c)), weight(c))
    kept = set(sorted(bad, key=lambda p: bad[p], reverse=True)[:POINTS])
    return [c for c in every if c.point in kept]


def _stories(found: Gathered, shown: Mapping[str, Sequence[Cell]]) -> dict[str, Any]:
    """Return the stories of all cells, and which of each map is told first: the first that fails, else the worst."""
    causes = causes_by_place(found.judgement, found.findings or ())
    stories: dict[str, Any] = {}
    first: dict[str, int] = {}
    for kind, its in shown.items():
        if its:
            first[kind] = first_cell(its)
            told = [(c, story(c, found.sources)) for c in its]
            stories[kind] = [[c.mark, lines[0], *_causes(found, causes, c), *lines[1:]] for c, lines in told]
    return {"stories": stories, "first": first}


def _causes(found: Gathered, causes: Causes, c: Cell) -> list[tuple[str, str]]:
    """Return what diagnosis says of a cell that does not pass."""
    here = causes_at(causes, found.findings, c.layer, c.point) if c.status != "pass" else []
    return [("cause", text) for text in here]


def _sentences(found: Gathered) -> list[str]:
    """Return what a reader should take away of the records."""
    if found.program is not None:
        return [
            *program.program_sentences(found.program, found.errors),
            *(f"Growth: {x}." for x in program.growth_sentences(found.errors)[:1]),
        ]
    assert found.compared is not None
    return comparison_sentences(found.errors, found.compared.prefill_decode)


def _tokens(found: Comparison[Any]) -> Table:
    """Return the table of the tokens with the largest ratios, each marked in its context."""
    rows = []
    for t in worst_ratios(found, text_of(found.run)):
        before, text, after = map(escape_html, (t.before, t.text, t.after))
        quiet = '<span class="quiet">{}</span>'
        context = f'<span class="token mono">{quiet.format(before)}<mark>{text}</mark>{quiet.format(after)}</span>'
        kl = "" if t.kl is None else digits(t.kl, 2)
        rows.append((t.prompt, str(t.position), templates.markup(context), digits(t.ratio), kl, t.at.text))
    columns = ("prompt", "position", "token, in its context", "ratio", "KL", "largest at")
    return Table("", columns, tuple(rows), ("prompt", "token, in its context", "largest at"))


def _details(found: Gathered) -> Table:
    """Return the table of every layer and point."""
    if found.program is None:
        return detail(found.errors)
    left = ("point", "format", "verdicts", "at")
    return Table("", program.COLUMNS, tuple(program.rows(found.program, found.errors)), left)


def _remedies(found: Gathered) -> Iterator[Table]:
    """Yield what changes gain and cost as a table."""
    if rows := [_line(r) if isinstance(r, LineRemedy) else _part(r) for r in found.remedies or ()]:
        of_lines = isinstance((found.remedies or ())[0], LineRemedy)
        columns = (
            ("line", "gain", "±", "before", "after", "flips", "bytes more", "text")
            if of_lines
            else ("change", "gain", "KL", "prefill", "decode", "memory", "flips", "how")
        )
        yield Table("", columns, tuple(rows), ("change", "line", "how", "text"))


def _part(r: Remedy) -> tuple[str, ...]:
    prefill, decode = (_times(x, r.ranges.get(kind)) for kind, x in (("prefill", r.time), ("decode", r.decode_time)))
    sizes = f"{r.flips[0]} → {r.flips[1]}", r.code
    fallen = " → ".join(map(short, r.kl))
    return r.part, f"{100 * value(r.gain):.0f} %", fallen, prefill, decode, _times(r.memory), *sizes


def _times(x: Number, spread: tuple[Number, Number] | None = None) -> str:
    between = "" if spread is None else f" ({ratio(spread[0])} – {ratio(spread[1])})"
    return f"{ratio(x)} ×{between}"


def _line(r: LineRemedy) -> tuple[str, ...]:
    gains = (f"{100 * value(x):.0f} %" for x in (r.gain, r.error))
    flips = f"{r.flips[0]} → {r.flips[1]}" if r.rows else ""
    return " + ".join(r.sources), *gains, *map(short, r.size), flips, f"{r.bytes:,}", " + ".join(r.text)


@cache
def _libraries() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script; raises UserError without vl-convert or altair."""
    # the text of a script element ends where it says so, whatever language it is in
    return str(charts.drawing().javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")
