"""Why drawn tokens' log-probabilities differ from a trainer's, in sentences."""

from collections.abc import Iterator, Sequence

from precaudit.checks.rollouts.causes import TokenCause
from precaudit.reports.fitting import Table
from precaudit.schema.digits import short, tenths
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.records.base import value

SHOWN = 4  # operations that are named
MOST = 12  # that have a row
FAR = 10.0  # times what decode makes: beyond it a mismatch is not decode's
SAYS = {
    "state": "state: a cache differs from what was written",
    "formula": "formula: the program is not the reference",
    "nonfinite": "values are not finite",
}


def cause_sentences(found: Sequence[TokenCause], formats: dict[str, str]) -> Iterator[str]:
    """Yield a sentence for each cause; ``formats``: the policy's keys and values, which name an operation's format."""
    for c in found:
        where = f"{c.id}, token {c.index} (id {c.token})"
        if c.unknown is not None:
            yield f"? {where}: {short(c.engine)} from the trainer; shares are unknown: {c.unknown}"
            continue
        yield f"{_mark(c)} {where}: {_sizes(c)}; {_verdict(c)}; {_parts(c, formats)}"


def cause_table(found: Sequence[TokenCause]) -> Table:
    """Return a row a token and operation: its share of the change over all layers, signed, and of its sizes."""
    rows = []
    for c in found:
        change = value(c.change)
        for point, share, size in c.points[:MOST] if change else ():
            signed, whole = 100 * value(share) / change, 100 * value(size) / abs(change)
            parts = (f"{'+' * (signed >= 0)}{tenths(signed)} %", f"{tenths(whole)} %")
            rows.append((c.policy, c.id, str(c.index), point, *parts))
    columns = ("policy", "sequence", "token", "operation", "share", "of sizes")
    return Table("", columns, tuple(rows), ("policy", "sequence", "operation"), 3)


def _mark(c: TokenCause) -> str:
    return "✓" if c.verdict == "rounding" and not _foreign(c) else "?" if c.verdict == "unknown" else "✗"


def _foreign(c: TokenCause) -> bool:
    """Whether an engine's mismatch is far more than this policy's decode makes."""
    return abs(value(c.engine)) > FAR * max(abs(value(c.change)), abs(value(c.decode)))


def _sizes(c: TokenCause) -> str:
    own = f"(from FP64's by {short(c.decode)} and {short(c.rescore)})"
    made = f"decode's log p differs from rescore's by {short(c.change)} {own}"
    if not _foreign(c):
        return made
    return f"{short(c.engine)} from the trainer, which this policy does not explain: {made}"


def _verdict(c: TokenCause) -> str:
    if c.verdict == "rounding":
        return f"rounding explains all {c.records:,} records"
    return SAYS.get(c.verdict, f"{c.verdict} records are not explained")


def _parts(c: TokenCause, formats: dict[str, str]) -> str:
    change, order = value(c.change), sorted(c.points, key=lambda p: -abs(value(p[1])))
    if not change:
        return "decode and rescore have the same log p"
    told = [f"{_operation_name(point, formats)} {100 * value(x) / change:+.0f} %" for point, x, _ in order[:SHOWN]]
    sizes = sum(value(size) for _, _, size in c.points) / abs(change)
    layers: dict[int, float] = {}
    for s in c.shares:
        if s.layer is not None:
            layers[s.layer] = layers.get(s.layer, 0.0) + abs(value(s.share))
    most = max(layers, key=lambda i: layers[i], default=None)
    where = "" if most is None else f", most in layer {most}"
    return f"of Δ log p {', '.join(told)} (sizes add up to {100 * sizes:.0f} %{where})"


def _operation_name(point: str, formats: dict[str, str]) -> str:
    key = POINTS[point].format if point in POINTS else ""
    return f"{point} in {formats[key]}" if key in formats else point
