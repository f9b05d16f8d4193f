"""A sweep in a terminal and as a picture: a row a policy, and the front of those worth having."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite, log10
from pathlib import Path
from typing import Any

from precaudit.errors import UserError
from precaudit.reports.charts import (
    LIGHT,
    POWERS,
    Palette,
    altair_of,
    data_of,
    drawing,
    named_apart,
    named_marks,
    powers,
    style,
)
from precaudit.reports.escaping import terminal_line
from precaudit.reports.fitting import Table
from precaudit.reports.policies import STORED, STORED_KL, PolicyRow, all_explained
from precaudit.reports.report import Headline, Report, Section
from precaudit.reports.rollout_charts import svg
from precaudit.schema.digits import digits, short
from precaudit.schema.graphs.decoder import LOGITS
from precaudit.schema.records.base import Count, Number, Record, value


class SweepRow(Record, frozen=True, omit_defaults=False):
    """A policy: its row against FP64 (``errors``), and what drawing tokens under it takes. ``why``: it is not known.

    ``prefill_ms``: milliseconds a prompt token, ``decode_ms`` a drawn token, ``prefill_ratio`` and ``decode_ratio``
    over the first policy's, medians of rounds; ``memory``: bytes. ``k3_kl``, ``abs_diff_max``: what was drawn against
    the policy's own prefill. ``predicted``: the largest forward error of logits that a TPU is predicted to make.
    ``rounds``: how many the medians are of; ``decode_spread``: the largest over the smallest.
    ``front``: no other policy that passes has both a smaller KL from FP64 and a shorter decode.
    """

    policy: str
    errors: PolicyRow | None = None
    why: str | None = None
    prefill_ms: Number | None = None
    prefill_ratio: Number | None = None
    decode_ms: Number | None = None
    decode_ratio: Number | None = None
    memory: Count | None = None
    k3_kl: Number | None = None
    abs_diff_max: Number | None = None
    predicted: Number | None = None
    predicted_why: str | None = None
    front: bool = False
    rounds: Count = 0
    decode_spread: Number | None = None


KEY = (
    "ms: a prompt token and a sampled one, × the first policy's (below 1 is faster); MB: weights, cache, temporaries",
    "excess: the local error farthest over its limit (1: at it); logits, KL: from FP64 of its own weights",
    "k3_kl: sampled tokens against the policy's own prefill",
    "front: nothing that passes is both nearer FP64 of the stored weights and faster",
)

WIDTH = 640  # pixels of the picture
FRONT = "Orange: no policy that passes is both nearer and faster. A mark without a name is named in the table."


def front(rows: Sequence[SweepRow]) -> list[str]:
    """Return the Pareto front of policies that pass: none has both less KL from FP64 and less time a drawn token.

    KL is from FP64 of the weights as they are stored, of a policy with integers, too.
    """
    known = [(r.policy, *_costs(r)) for r in rows if r.why is None and r.errors is not None]
    sound = [k for k in known if k[1] == k[1] and k[2] == k[2]]
    return [name for name, kl, ms in sound if not any(a <= kl and b <= ms and (a, b) != (kl, ms) for _, a, b in sound)]


def _costs(row: SweepRow) -> tuple[float, float]:
    """Return KL from FP64 and milliseconds a sampled token; NaN where one is not known, or the policy does not pass."""
    assert row.errors is not None
    if not row.errors.verdict.startswith("✓"):
        return float("nan"), float("nan")
    return _price(row.errors), value(row.decode_ms)


def _price(errors: PolicyRow) -> float:
    """Return KL from FP64 of the weights as they are stored: integer ones are a model of their own."""
    return value(errors.kl if errors.stored_kl is None else errors.stored_kl)


def sweep_report(rows: Sequence[SweepRow], tpu: str | None = None) -> Report:
    """Return the report of a sweep: a row a policy, and what its columns are."""
    lines = [
        *KEY,
        *_more_keys(rows),
        *(f"{r.policy} is not predicted: {r.predicted_why}" for r in rows if r.predicted_why is not None),
    ]
    return Report(_verdict(rows), (Section(tables=(_table(rows, tpu),), lines=tuple(lines)),), records=rows)


def _more_keys(rows: Sequence[SweepRow]) -> Iterator[str]:
    """Yield what the front rests on, and what a column is that not every sweep has."""
    if any(r.errors is not None and r.errors.stored_kl is not None for r in rows):
        yield STORED
    rounds = {r.rounds for r in rows if r.rounds}
    spreads = [value(r.decode_spread) for r in rows if r.front and r.decode_spread is not None]
    if rounds and spreads:
        how = f"{max(rounds)} rounds" if max(rounds) > 1 else "1 round"
        yield f"front: from {how}, whose decode times are up to {digits(max(spreads))} × one another"


def _verdict(rows: Sequence[SweepRow]) -> Headline:
    """Return the first sentence: the policies on the front, or those that fail or cannot run."""
    failing = [r.policy for r in rows if r.errors is not None and r.errors.verdict.startswith("✗")]
    unknown = [r.policy for r in rows if r.policy not in failing and (r.why or not _is_judged(r))]
    best = ", ".join(r.policy for r in rows if r.front)
    kept = f" Worth having, by KL and time: {best}." if best else ""
    if failing:
        return Headline("✗", f"{len(failing)} of {len(rows)} policies fail: {', '.join(failing)}.{kept}")
    if unknown:
        return Headline("?", f"{len(unknown)} of {len(rows)} policies cannot be judged: {', '.join(unknown)}.{kept}")
    return Headline("✓", f"{all_explained([r.errors for r in rows if r.errors is not None])}{kept}")


def _is_judged(row: SweepRow) -> bool:
    return row.errors is not None and row.errors.verdict.startswith("✓")


def _table(rows: Sequence[SweepRow], tpu: str | None) -> Table:
    """Return a row a policy."""
    columns = [
        "policy",
        "prefill ms",
        "×",
        "decode ms",
        "×",
        "MB",
        "excess",
        LOGITS,
        "KL",
        "top-1",
        "first flip",
        "k3_kl",
        "front",
        "verdict",
    ]
    cells = [_cells(r) for r in rows]
    if any(r.errors is not None and r.errors.stored_kl is not None for r in rows):
        columns.insert(9, STORED_KL)
        for row, r in zip(cells, rows, strict=True):
            row.insert(9, "" if r.errors is None else short(r.errors.stored_kl, ""))
    if tpu is not None:
        columns.insert(9, tpu)
        for row, r in zip(cells, rows, strict=True):
            row.insert(9, short(r.predicted, "unknown") if r.predicted_why is None else "?")
    return Table("", tuple(columns), tuple(map(tuple, cells)), ("policy", "first flip", "front", "verdict"))


def _cells(r: SweepRow) -> list[str]:
    e = r.errors
    if r.why is not None or e is None:
        return [r.policy, *[""] * 12, f"? {r.why}"]
    equal = e.positions - e.flips
    return [
        r.policy,
        *map(digits, (r.prefill_ms, r.prefill_ratio, r.decode_ms, r.decode_ratio)),
        "" if r.memory is None else f"{r.memory / 1e6:,.0f}",
        digits(e.excess),
        short(e.logits, "unknown"),
        short(e.kl, "unknown"),
        f"{equal:,} of {e.positions:,}" if e.positions else "unknown",
        e.flip or "none",
        short(r.k3_kl, "unknown"),
        "●" if r.front else "",
        e.verdict,
    ]


def chart(rows: Sequence[SweepRow], palette: Palette = LIGHT) -> Any:
    """Return KL from FP64 against milliseconds a sampled token, a mark a policy, the front in another colour."""
    alt = altair_of()
    data: list[dict[str, Any]] = [
        {
            "policy": _plainly(r.policy),
            "kl": kl,
            "ms": value(r.decode_ms),
            "front": r.front,
            "log": log10(kl),
        }
        for r in rows
        if r.errors is not None and r.why is None and (kl := _price(r.errors)) > 0 and isfinite(value(r.decode_ms))
    ]
    marks = powers([x["kl"] for x in data])
    base = alt.Chart(data_of(named_apart(data, "policy", "ms", "log"))).encode(
        alt.X(
            "ms:Q",
            title="milliseconds a sampled token",
            scale=alt.Scale(zero=False, padding=30),
            axis=alt.Axis(tickCount=6),
        ),
        alt.Y(
            "kl:Q",
            title="largest KL from FP64 of the stored weights, nats",
            scale=alt.Scale(type="log"),
            axis=alt.Axis(**POWERS, values=marks),
        ),
        tooltip=["policy:N", alt.Tooltip("kl:Q", format=".2e"), alt.Tooltip("ms:Q", format=".3~g")],
    )
    color = alt.condition("datum.front", alt.value(palette.series[1]), alt.value(palette.series[0]))
    dots = base.mark_point(filled=True, size=90, opacity=1).encode(color=color)
    return style(alt.layer(dots, *named_marks(base, palette)), palette, 340)


def _plainly(name: str) -> str:
    """Return a name without control characters, at some of which vl-convert aborts, and without markup."""
    return terminal_line(name).replace("<", "‹")


def picture(rows: Sequence[SweepRow], path: Path, subject: str = "", tpu: str | None = None) -> bytes:
    """Return the chart as the file's ending says: .html, a page with its table, or .png; raises UserError for others.

    ``subject``: what was swept; ``tpu``: of which a column is.
    """
    if path.suffix == ".html":
        return sweep_page(rows, subject, tpu).encode()
    if path.suffix == ".png":
        made = style(chart(rows), LIGHT, 340).configure(background="white")
        return bytes(drawing().vegalite_to_png({**made.to_dict(), "width": WIDTH}, scale=2))
    raise UserError(f"{path}: a plot is written as .html or .png")


def sweep_page(rows: Sequence[SweepRow], subject: str, tpu: str | None = None) -> str:
    """Return the page of a sweep: verdict, picture and table, in light and dark."""
    from precaudit.reports.html import THEMED
    from precaudit.reports.pages import as_html

    def drawn() -> list[tuple[str, str]]:
        return [("", svg(chart(rows, THEMED)))] if any(r.errors is not None and r.why is None for r in rows) else []

    report = sweep_report(rows, tpu)
    sections = (
        Section("What a faster policy costs", f"Down is nearer FP64, left is faster. {FRONT}", pictures=drawn),
        Section("Every policy", tables=report.sections[0].tables, lines=report.sections[0].lines),
    )
    policies = f"{len(rows)} {'policy' if len(rows) == 1 else 'policies'}"
    return as_html(replace(report, sections=sections, command="sweep", title=subject or "sweep", subtitle=policies))
