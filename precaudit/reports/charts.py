"""Charts of records: records in, an altair chart out. Colours come from a ``Palette``, which the HTML page replaces."""

from array import array
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from math import ceil, floor, isfinite, isnan, log10
from statistics import median
from typing import TYPE_CHECKING, Any

from precaudit.diagnosis.evidence.records import LineRemedy, Remedy, Shares
from precaudit.errors import UserError
from precaudit.reports.cells import Cell, cells, first_cell, program_order
from precaudit.schema.digits import digits, ratio
from precaudit.schema.filed import of_kinds
from precaudit.schema.graphs.decoder import POINTS, STREAM
from precaudit.schema.places import point_text
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord, ForwardError
from precaudit.schema.records.runs import is_call

if TYPE_CHECKING:
    import altair as alt

MISSING = "charts need altair and vl-convert: pip install 'precaudit[html]'"
OUTSIDE = "end"  # the column of points outside layers
NONE = "no number"
WITHIN = 5  # steps of a scale up to the limit
OF_LIMIT = (0.1, 0.25, 0.5, 0.75, 1.0, 2.0, 10.0)
STEPS = {"local": OF_LIMIT, "forward": (0.5, 1.0, 2.0, 4.0, 7.5, 15.0, 75.0), "formula": OF_LIMIT}
TITLES = {"local": "× its limit", "forward": "× an emulated policy's error", "formula": "× its limit"}
MOST = 12  # bars of shares
LABEL, LINE, GAP = 0.3, 0.07, 0.01  # of a chart: a name's width, room between two lines of them, marks in one column
EDGE = 0.05  # of a chart: the room between its outermost marks and its edge
TICK = "replace(replace(datum.label, 'e+', 'e'), 'e0', '')"  # 1e-2, 1, 1e1: as numbers are written everywhere
POWERS: dict[str, Any] = {"format": ".0e", "labelExpr": TICK}  # of an axis
SHARES = {**POWERS, "format": "~e", "tickCount": 4}


@dataclass(frozen=True)
class Palette:
    """Colours as CSS names them; ``cool``: within limits, ``hot``: beyond, ``series``: lines."""

    ink: str = "#1c2430"
    muted: str = "#5d6776"
    line: str = "#d9dee6"
    paper: str = "#ffffff"
    none: str = "#e6e8ec"
    on_hot: str = "#ffffff"
    cool: tuple[str, ...] = ("#eef4fa", "#d3e3f2", "#aecbe6", "#82add5", "#588cbf")
    hot: tuple[str, ...] = ("#f2a65a", "#d9542b", "#8f1a1a")
    series: tuple[str, ...] = ("#2563a8", "#c2571a", "#3a7d44", "#8b4fa3", "#a8842c", "#4c8f8f")
    font: str = "system-ui, sans-serif"


LIGHT = Palette()


def plot(found: Any, what: str = "local") -> "alt.Chart":
    """Return a chart of what ``precaudit.compare`` found: a heat map by the kind of its records, or its ``growth``.

    ``what``: ``local``, ``forward``, ``formula`` or ``growth``.

    ``found``: a Comparison, or its error records.
    """
    errors = getattr(found, "errors", found)
    if what == "growth":
        return growth_chart(errors)
    if what not in STEPS:
        raise UserError(f"plot: {what!r} is none of {', '.join((*STEPS, 'growth'))}")
    return heat_map(errors, what)


def bands(kind: str) -> list[str]:
    """Return what the colours of a heat map mean, least first, ``NONE`` last."""
    steps = [digits(x, 6) for x in STEPS[kind]]
    return [f"< {steps[0]}", *(f"{a} – {b}" for a, b in pairwise(steps)), f"≥ {steps[-1]}", NONE]


def band(kind: str, size: float | None) -> str:
    """Return the band that a size lies in; up to the limit, and at it, it is not beyond."""
    names = bands(kind)
    if size is None or isnan(size):
        return names[-1]
    return names[sum(size > x if i == WITHIN - 1 else size >= x for i, x in enumerate(STEPS[kind]))]


def heat_map(
    errors: Sequence[ErrorRecord],
    kind: str = "local",
    palette: Palette = LIGHT,
    found: Sequence[Cell] | None = None,
    legend: bool = True,
    order: Sequence[str] | None = None,
) -> "alt.Chart":
    """Return layer × point: ``local``, ``formula``: the worst number over its limit, ``forward``: the largest ratio.

    A click selects a cell (``picked``, its place among ``found``: the cells of ``errors`` unless given); the one that
    is worst is selected at first. ``order``: of points; as the program makes them unless given.
    """
    alt = altair_of()
    shown = cells(errors, kind) if found is None else found
    rows = [_row(i, c, kind) for i, c in enumerate(shown)]
    layers = sorted({c.layer for c in shown if c.layer is not None})
    x = alt.X(
        "layer:N", sort=[*map(str, layers), OUTSIDE], title="layer",
        axis=alt.Axis(labelAngle=0, labelOverlap=True, domain=False, ticks=False),
    )  # fmt: skip
    y = alt.Y(
        "point:N",
        sort=list(order or program_order(shown)),
        title=None,
        axis=alt.Axis(labelLimit=150, domain=False, ticks=False),
    )
    names, colours = bands(kind), [*palette.cool, *palette.hot, palette.none]
    key = alt.Legend(orient="top", columns=5, symbolType="square", title=TITLES[kind]) if legend else None
    colour = alt.Color("band:N", scale=alt.Scale(domain=names, range=colours), legend=key)
    at_first = [{"cell": first_cell(shown)}] if shown else alt.Undefined
    picked = alt.selection_point(
        name="picked", fields=["cell"], on="click", clear=False, toggle=False, empty=False, value=at_first
    )
    base = alt.Chart(data_of(rows)).encode(
        x, y, tooltip=[alt.Tooltip(f"{k}:N") for k in ("layer", "point", "status", "size")]
    )
    squares = base.mark_rect(cornerRadius=2, cursor="pointer", stroke=palette.paper, strokeWidth=1).encode(colour)
    frame = base.mark_rect(cornerRadius=2, fill="transparent", stroke=palette.ink, strokeWidth=2.5)
    beyond = alt.FieldOneOfPredicate("band", names[-4:-1])
    marks = base.mark_text(fontSize=12, fontWeight="bold").encode(
        text="mark:N", color=alt.condition(beyond, alt.value(palette.on_hot), alt.value(palette.ink))
    )  # fmt: skip
    chosen = frame.transform_filter(picked)  # drawn last: no neighbour covers it
    return style(alt.layer(squares.add_params(picked), marks, chosen), palette, 22 * len({c.point for c in shown}))


def _row(i: int, c: Cell, kind: str) -> dict[str, Any]:
    layer = OUTSIDE if c.layer is None else str(c.layer)
    size = NONE if c.size is None else f"{digits(c.size)} {TITLES[kind]}"
    mark = "" if c.status == "pass" else c.mark
    return {
        "cell": i, "layer": layer, "point": c.point, "band": band(kind, c.size), "mark": mark, "status": c.status,
        "size": size,
    }  # fmt: skip


def growth_chart(errors: Sequence[ErrorRecord], palette: Palette = LIGHT) -> "alt.Chart":
    """Return the median forward error of the residual stream, or of a program's points, over layers or steps.

    Dashed: what rounding by the declared policy makes of it.
    """
    alt = altair_of()
    rows = _growing(errors)
    names = list(dict.fromkeys(str(r["point"]) for r in rows))
    layers = sorted({int(r["layer"]) for r in rows})
    log, sizes = alt.Scale(type="log", nice=True), [r["size"] for r in rows]
    base = alt.Chart(data_of(rows)).encode(
        alt.X("layer:Q", title="layer", axis=alt.Axis(values=layers, grid=False, format="d")),
        alt.Y(
            "size:Q",
            title="relative error",
            scale=log,
            axis=alt.Axis(**POWERS, values=powers(sizes)),
        ),
        alt.Color("point:N", scale=alt.Scale(domain=names, range=list(palette.series[: len(names)])), title=None),
        alt.StrokeDash(
            "of:N", legend=None, scale=alt.Scale(domain=["measured", "emulated policy"], range=[[1, 0], [4, 4]])
        ),
        tooltip=["point:N", "of:N", "layer:Q", alt.Tooltip("size:Q", format=".2e")],
    )
    lines = base.mark_line(strokeWidth=2)
    dots = base.transform_filter("datum.of == 'measured'").mark_point(filled=True, size=36, opacity=1)
    return style(alt.layer(lines, dots), palette, 260)


def powers(sizes: Sequence[float]) -> list[float]:
    """Return the powers of ten around sizes above 0."""
    logs = [log10(x) for x in sizes]
    return [10.0**i for i in range(floor(min(logs)), ceil(max(logs)) + 1)] if logs else []


def grows(errors: Sequence[ErrorRecord]) -> bool:
    """Whether there are two layers or steps of a point, so that ``growth_chart`` has something to show."""
    return len({r["layer"] for r in _growing(errors)}) > 1


def _growing(errors: Sequence[ErrorRecord]) -> list[dict[str, Any]]:
    """Return a row for each point, layer, and measured or emulated: of a model's stream, of the programs' that grow."""
    sizes: dict[tuple[str, int, str], array[float]] = defaultdict(lambda: array("d"))
    for e in of_kinds(errors, ForwardError):
        if e.layer is not None and e.rel_l2 is not None and not e.nonfinite:
            if not is_call(e.phase) and POINTS[e.point].kind not in ("stream", "sum"):
                continue
            sizes[e.point, e.layer, "measured"].append(value(e.rel_l2))
            if e.ratio is not None and value(e.ratio) > 0:
                sizes[e.point, e.layer, "emulated policy"].append(value(e.rel_l2) / value(e.ratio))
    middle = {key: median(x) for key, x in sizes.items()}
    chosen = _telling({key: x for key, x in middle.items() if key[2] == "measured"})
    return [
        {"point": point, "layer": layer, "of": of, "size": x}
        for (point, layer, of), x in sorted(middle.items())
        if point in chosen and x > 0 and isfinite(x)
    ]


def _telling(middle: Mapping[tuple[str, int, str], float]) -> Collection[str]:
    """Return what a layer hands on where that was recorded, else the points of three layers or more that err most."""
    steps: dict[str, list[float]] = defaultdict(list)
    for (point, _, _), x in middle.items():
        steps[point].append(x)
    if STREAM in steps:
        return [p for p in steps if p in POINTS]
    grown = [p for p, x in steps.items() if len(x) >= 3]
    return sorted(grown or (), key=lambda p: -max(steps[p]))[:4]


def shares_chart(found: Shares, palette: Palette = LIGHT) -> "alt.Chart":
    """Return the largest shares that operations have in a change of logits, or of another output, as bars."""
    alt = altair_of()
    rows = [
        {"operation": point_text(s), "share": value(s.share), "sign": "up" if value(s.share) >= 0 else "down"}
        for s in sorted(found.shares, key=lambda s: -abs(value(s.share)))[:MOST]
        if isfinite(value(s.share))
    ]
    bars = alt.Chart(data_of(rows)).mark_bar(cornerRadiusEnd=2).encode(
        alt.X("share:Q", title=f"share in the change of {found.objective}", axis=alt.Axis(**SHARES)),
        alt.Y("operation:N", sort=[str(r["operation"]) for r in rows], title=None, axis=alt.Axis(labelLimit=180)),
        alt.Color("sign:N", scale=alt.Scale(domain=["up", "down"], range=list(palette.series[:2])), legend=None),
        tooltip=["operation:N", alt.Tooltip("share:Q", format=".2e")],
    )  # fmt: skip
    return style(bars, palette, 20 * len(rows))


def remedies_chart(found: Sequence[Remedy | LineRemedy], palette: Palette = LIGHT) -> "alt.Chart":
    """Return what changes gain (share of the KL, or distance, from FP64 that is gone) against what they cost.

    The price of a part of the policy is the time of prefill, of a line of a program the bytes its results take more.
    """
    alt = altair_of()
    rows = [r for x in found if isfinite((r := _price_row(x))["gain"]) and isfinite(r["price"])]
    of_lines = any(isinstance(x, LineRemedy) for x in found)
    title = "price: bytes more, to the right" if of_lines else "price: prefill's time, × before (over 1: slower)"
    base = alt.Chart(data_of(named_apart(rows, "change", "price", "gain"))).encode(
        alt.X("price:Q", title=title, scale=alt.Scale(zero=of_lines, padding=30), axis=alt.Axis(tickCount=5)),
        alt.Y(
            "gain:Q",
            title="gain, up is nearer FP64",
            axis=alt.Axis(format="%", tickCount=5),
            scale=alt.Scale(padding=12),
        ),
        tooltip=["change:N", alt.Tooltip("gain:Q", format=".1%"), alt.Tooltip("price:Q", format=".3~g"), "kept:N"],
    )
    dots = base.mark_point(filled=True, size=80, opacity=1, color=palette.series[0])
    return style(alt.layer(dots, *named_marks(base, palette)), palette, 280)


def named_apart(rows: list[dict[str, Any]], name: str, price: str, gain: str) -> list[dict[str, Any]]:
    """Return rows with what their marks are called at the ``right``, at the ``left`` where another would be in the way.

    One that has room at neither side has no name; the highest are named first. ``name``, ``price``
    (along x) and ``gain`` (along y): keys of a row.
    """
    across, up = ([float(r[k]) for r in rows] for k in (price, gain))
    wide = max(across, default=0.0) - min(across, default=0.0) or 1.0
    high = LINE * (max(up, default=0.0) - min(up, default=0.0) or 1.0)
    gap = GAP * wide
    named: list[tuple[float, float, float]] = []  # where a name begins and ends, and how high it is
    least, most = min(across, default=0.0) - EDGE * wide, max(across, default=0.0) + EDGE * wide

    def is_free(begin: float, end: float, height: float) -> bool:
        if len(set(across)) > 1 and not (least <= begin and end <= most):
            return False  # the edge of the chart would cut it
        dots = ((x, x, h) for x, h in zip(across, up, strict=True) if min(abs(x - begin), abs(x - end)) > gap)
        return not any(a < end and b > begin and abs(h - height) < high for a, b, h in (*dots, *named))

    found = []
    for r in sorted(rows, key=lambda r: -float(r[gain])):
        at, height, sides = float(r[price]), float(r[gain]), {"left": "", "right": ""}
        for side, begin, end in (("right", at, at + LABEL * wide), ("left", at - LABEL * wide, at)):
            if is_free(begin, end, height):
                named.append((begin, end, height))
                sides[side] = r[name]
                break
        found.append({**r, **sides})
    return found


def named_marks(base: "alt.Chart", palette: Palette) -> list["alt.Chart"]:
    """Return the names of marks as layers, of rows of ``named_apart``."""
    return [
        base.mark_text(align="left", dx=8, color=palette.ink, limit=150).encode(text="right:N"),
        base.mark_text(align="right", dx=-8, color=palette.ink, limit=150).encode(text="left:N"),
    ]


def _price_row(x: Remedy | LineRemedy) -> dict[str, Any]:
    if isinstance(x, LineRemedy):
        name = x.sources[0] if len(x.sources) == 1 else f"{len(x.sources)} lines"
        return {"change": name, "gain": value(x.gain), "price": float(x.bytes), "kept": f"± {value(x.error):.1%}"}
    times = f"decode {ratio(x.decode_time)} ×, memory {ratio(x.memory)} ×"
    return {"change": x.part, "gain": value(x.gain), "price": value(x.time), "kept": times}


def data_of(rows: list[dict[str, Any]]) -> Any:
    """Return rows as a chart's data, written into it."""
    return altair_of().Data(values=rows)


def style(chart: Any, palette: Palette, height: Any) -> Any:
    """Return a chart as wide as where it is put, in a palette's colours."""
    axis = {
        "labelColor": palette.muted, "titleColor": palette.muted, "gridColor": palette.line, "tickColor": palette.line,
        "domainColor": palette.line, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal",
    }  # fmt: skip
    legend = {"labelColor": palette.ink, "titleColor": palette.muted, "orient": "top", "labelFontSize": 12,
              "columnPadding": 28}  # fmt: skip
    return (
        chart.properties(width="container", height=height, autosize={"type": "fit-x", "contains": "padding"})
        .configure(font=palette.font, background="transparent")
        .configure_view(stroke=None)
        .configure_axis(**axis)
        .configure_axisY(titlePadding=14)  # what measures text may know a narrower font than a browser has
        .configure_legend(**legend)
    )


def altair_of() -> Any:
    """Return altair, with rows written into the chart whatever their number; raises UserError without it."""
    try:
        import altair
    except ImportError:
        raise UserError(MISSING) from None
    return altair


def require_altair() -> None:
    """Raise UserError where altair or vl-convert is not installed; neither is imported, which takes 40 MB."""
    if not all(map(find_spec, ("altair", "vl_convert"))):
        raise UserError(MISSING)


def drawing() -> Any:
    """Return vl-convert; raises UserError where it or altair is not there."""
    altair_of()
    try:
        import vl_convert
    except ImportError:
        raise UserError(MISSING) from None
    return vl_convert
