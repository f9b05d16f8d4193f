"""Pictures of a mismatch: how it is distributed over tokens, and how it grows along a sequence."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.reports.charts import LIGHT, TICK, Palette, altair_of, data_of, drawing, powers, style
from precaudit.reports.escaping import terminal_line

MOST = 6  # lines of a chart, as many as a palette has series
STEPS = 160  # points of a line
WIDTH = 900  # pixels of a picture; a page makes it as wide as there is room
NARROW = 337  # pixels of the picture on a phone of 390, less the margins of a page
BINS = 32  # of positions
LEAST = 8  # tokens of a bin, where sequences are long enough


def beyond(apart: Array) -> tuple[Array, Array]:
    """Return (x, share of tokens with |Δ log p| of at least x), ascending, of Δ [sequences, tokens], NaN: no token.

    At most ``STEPS`` of the sizes that occur, evenly by rank; 0 is among the tokens and has no x: the axis is
    logarithmic.
    """
    sizes = np.sort(np.abs(apart[np.isfinite(apart)]))
    shares = np.arange(len(sizes), 0, -1) / max(len(sizes), 1)
    first = int(np.searchsorted(sizes, 0.0, side="right"))
    sizes, shares = sizes[first:], shares[first:]
    kept = np.unique(np.linspace(0, len(sizes) - 1, min(STEPS, len(sizes))).round().astype(int))
    return sizes[kept], shares[kept]


def along(apart: Array) -> tuple[Array, Array]:
    """Return (position, mean |Δ log p|) of Δ [sequences, tokens], NaN: no token; positions in bins of equal width.

    A position is that of the bin's first token, counted from 0. Bins without a token are left out.
    """
    length = apart.shape[1]
    tokens = int(np.isfinite(apart).sum())
    bins = int(np.clip(tokens // LEAST, 1, min(BINS, max(length, 1))))
    edges = np.linspace(0, length, bins + 1).astype(int)
    found = [(at, apart[:, at:end]) for at, end in pairwise(edges)]
    kept = [(at, np.abs(x[np.isfinite(x)]).mean()) for at, x in found if np.isfinite(x).any()]
    return np.array([at for at, _ in kept]), np.array([mean for _, mean in kept])


def distribution_chart(apart: Mapping[str, Array], palette: Palette = LIGHT) -> Any:
    """Return the share of tokens beyond |Δ log p|, both axes logarithmic, a line for each of ``apart``."""
    alt = altair_of()
    rows = [
        {"of": name, "size": float(x), "share": float(y)}
        for name, delta in _first_lines(apart)
        for x, y in zip(*beyond(delta), strict=True)
    ]
    base = alt.Chart(data_of(rows)).mark_line(strokeWidth=2, interpolate="step-before")
    return _lines(base, apart, palette, 260).encode(
        alt.X("size:Q", title="|Δ log p|, nats", scale=alt.Scale(type="log"), axis=_axis(rows, "size", ".0e")),
        alt.Y("share:Q", title="share of tokens beyond", scale=alt.Scale(type="log"), axis=_axis(rows, "share", "~%")),
    )


def drift_chart(apart: Mapping[str, Array], palette: Palette = LIGHT) -> Any:
    """Return mean |Δ log p| over positions, a line for each of ``apart``; means that are 0 are left out."""
    alt = altair_of()
    rows = [
        {"of": name, "at": int(at), "size": float(mean)}
        for name, delta in _first_lines(apart)
        for at, mean in zip(*along(delta), strict=True)
        if mean > 0
    ]
    base = alt.Chart(data_of(rows)).mark_line(strokeWidth=2, point=True)
    return _lines(base, apart, palette, 220).encode(
        alt.X("at:Q", title="token of the sequence", axis=alt.Axis(format="d", grid=False)),
        alt.Y("size:Q", title="mean |Δ log p|, nats", scale=alt.Scale(type="log"), axis=_axis(rows, "size", ".0e")),
    )


def _axis(rows: list[dict[str, Any]], name: str, form: str) -> Any:
    """Return a logarithmic axis with a mark at every power of ten."""
    return altair_of().Axis(format=form, labelExpr=TICK, values=powers([r[name] for r in rows]))


def _first_lines(apart: Mapping[str, Array]) -> list[tuple[str, Array]]:
    """Return the first lines, their names without control characters, at some of which vl-convert aborts."""
    return [(terminal_line(name), x) for name, x in list(apart.items())[:MOST]]


def _lines(base: Any, apart: Mapping[str, Array], palette: Palette, height: int) -> Any:
    alt = altair_of()
    names = [name for name, _ in _first_lines(apart)]
    scale = alt.Scale(domain=names, range=list(palette.series[: len(names)]))
    return style(base.encode(alt.Color("of:N", title=None, scale=scale)), palette, height)


def svg(chart: Any) -> str:
    """Return a chart as two SVG elements, for wide windows and for phones: a page shows the one that fits.

    Each is whole by itself. Raises UserError without vl-convert.
    """
    spec = chart.to_dict()
    config = spec["config"] | {
        "legend": spec["config"]["legend"] | {"columns": 1},
        "axisX": {"labelSeparation": 6, "labelOverlap": "greedy"},
    }
    made = {"wide": spec | {"width": WIDTH}, "narrow": spec | {"width": NARROW, "config": config}}
    return "".join(f'<div class="{name}">{drawing().vegalite_to_svg(x)}</div>' for name, x in made.items())
