"""The tables every report shows, as header and rows of text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING

from precaudit.judging.rules import parts_beyond_rounding
from precaudit.reports.fitting import Table
from precaudit.reports.summary import SummaryLine, blame_text, row_place, share_text, size_text, worst_lines
from precaudit.schema.digits import digits, rough, short
from precaudit.schema.filed import of_kinds
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.records.base import Number, value
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import AccumulationError, ErrorRecord, PairError

if TYPE_CHECKING:
    from precaudit.references.comparison.between import ReportedNumber


def _layer(layer: int | None) -> str:
    return "" if layer is None else str(layer)


def detail(errors: Sequence[ErrorRecord]) -> Table:
    """Return one row a layer and point: sizes, what explains them, worst token and head."""
    rows = []
    for x in worst_lines(errors):
        for kind, e in (("forward", x.forward), ("local", x.local)):
            if e is not None:
                blame = _blame(x) if kind == "local" else f"×{rough(value(e.ratio))}"
                rows.append(
                    (
                        _layer(x.layer),
                        x.point,
                        kind,
                        short(e.mae),
                        short(e.max_diff),
                        short(e.rel_l2),
                        str(e.nonfinite or ""),
                        blame,
                        row_place(e),
                    )
                )
        if x.unknown:
            rows.append((_layer(x.layer), x.point, "unknown", "", "", "", "", "; ".join(x.unknown), ""))
    columns = ("layer", "point", "kind", "mae", "max_diff", "rel_l2", "NaN", "explained by", "worst")
    return Table(
        "Every layer and point, by its worst", columns, tuple(rows), ("point", "kind", "explained by", "worst")
    )


def _blame(x: SummaryLine) -> str:
    """Return who explains a local error, how much of it, and what the compiler left unrounded."""
    text = blame_text(x.blame)
    if x.blame is None or x.blame.name in ("exact", "none of these") or x.local is None:
        return text
    kept = [place for places in (x.local.elided or {}).values() for place in places]
    return f"{text} {share_text(x.blame)}" + (f", {'+'.join(kept)} unrounded" if kept else "")


def accumulation(errors: Sequence[ErrorRecord]) -> Table | None:
    """Return the size of each emulated accumulation's own error in attn_out, by layer."""
    worst: dict[tuple[int, str], ErrorRecord] = {}
    for e in of_kinds(errors, AccumulationError):
        if e.layer is not None and POINTS[e.point].kind == "mix":
            key = (e.layer, e.candidate)
            if key not in worst or value(e.mae) > value(worst[key].mae):
                worst[key] = e
    if not worst:
        return None
    names = sorted({name for _, name in worst})
    table = []
    for layer in sorted({layer for layer, _ in worst}):
        here = [worst.get((layer, name)) for name in names]
        table.append((str(layer), *(x for e in here for x in (("", "") if e is None else _both(e)))))
    columns = [f"{n.removeprefix('accum:')} {m}" for n in names for m in ("mae", "max_diff")]
    title = "attn_out under emulated accumulation against FP64 (sizes alone: they name no cause)"
    return Table(title, ("layer", *columns), tuple(table))


def _both(e: ErrorRecord) -> tuple[str, str]:
    return short(e.mae), short(e.max_diff)


def _match(p: PrefillDecodeRecord) -> str:
    """Return how two top-1 go together; by length: each is FP64's with its own lengths in RoPE."""
    if p.f64_apart is not None:
        return "other function"
    if parts_beyond_rounding(p):
        return "KL beyond rounding"
    return "yes" if p.match else "near tie" if p.near_tie else "by length" if p.agree else "NO"


def prefill_decode_table(
    pairs: Sequence[PrefillDecodeRecord], names: Mapping[int, str] | None = None, every: bool = False
) -> Table | None:
    """Return the positions that two views see: prefill's last for every prompt, and where views differ.

    ``names``: what tokens say, shown beside their ids; ``every``: all positions.
    """
    rows = []

    def token(i: int | None, gap: Number | None) -> str:
        if gap is not None and isnan(value(gap)):  # its logits are NaN: none is the largest
            return "NaN"
        return "?" if i is None else f"{i} {(names or {}).get(i, '')}".rstrip()

    for p in pairs:
        first = p.prefill_last_top1 is not None
        if every or first or not p.match or p.f64_match is False or p.f64_apart is not None or parts_beyond_rounding(p):
            views = p.against if p.view == "decode" else f"{p.against} ({p.view})"
            rows.append(
                (
                    p.prompt,
                    views if first else f"{views} {p.step}",
                    str(p.position),
                    *(token(x, gap) for x, gap in ((p.prefill_top1, p.prefill_gap), (p.decode_top1, p.decode_gap))),
                    token(p.f64_top1, p.f64_gap),
                    digits(p.prefill_gap),
                    digits(p.decode_gap),
                    digits(p.f64_gap),
                    _match(p),
                    short(p.kl),
                    short(p.max_diff),
                )
            )
    columns = ("prompt", "against", "position", "top-1", "decode", "FP64", "gap", "decode", "FP64", "match", "KL")
    title = "Prefill against decode at the same position: top-1 tokens and gaps to the second"
    left = ("prompt", "against", "match")
    return Table(title, (*columns, "max_diff"), tuple(rows), left) if rows else None


@dataclass
class _Pairs:
    """Records of a group that were seen: how many have numbers, are equal, have none; its worst and what is not finite.

    ``off``: elements that are NaN or infinite, which are in none of the sizes.
    """

    known: int = 0
    same: int = 0
    unknown: int = 0
    off: int = 0
    worst: ErrorRecord | None = None

    def add(self, e: ErrorRecord) -> None:
        """Count a record."""
        if e.numberless is not None:
            self.unknown += 1
            return
        same = e.max_diff == 0 and not e.nonfinite
        self.known, self.same, self.off = self.known + 1, self.same + same, self.off + e.nonfinite
        if self.worst is None or _size(e) > _size(self.worst):
            self.worst = e


def _size(e: ErrorRecord) -> tuple[bool, float]:
    return e.nonfinite > 0, value(e.rel_l2)


def pair_by_point(errors: Sequence[ErrorRecord]) -> Table:
    """Return two runs against each other, one row a point with numbers: its layers that differ most, and how much."""
    groups: dict[str, dict[int | None, _Pairs]] = {}
    for e in errors:
        if isinstance(e, PairError) and e.numberless is None:
            groups.setdefault(e.point, {}).setdefault(e.layer, _Pairs()).add(e)
    rows = []
    for point, by in groups.items():
        worst = sorted((p.worst for p in by.values() if p.worst is not None), key=_size, reverse=True)
        cells = [f"{size_text(e)}{'' if e.layer is None else f' L{e.layer}'}" for e in worst[:3]]
        first = worst[0]
        known, same, off = (sum(getattr(p, name) for p in by.values()) for name in ("known", "same", "off"))
        rows.append(
            (
                point,
                *cells,
                *[""] * (3 - len(cells)),
                *(size_text(first, name) for name in ("mae", "max_diff")),
                f"{same} of {known}",
                f"{off:,}" if off else "",
                row_place(first),
            )
        )
    columns = ("point", "rel_l2", "2nd", "3rd", "mae", "max_diff", "bit-equal", "NaN or inf", "worst")
    return Table(
        "Run against reference run, by the layers (L) that differ most", columns, tuple(rows), ("point", "worst")
    )


def pair_table(errors: Sequence[ErrorRecord]) -> Table:
    """Return two runs against each other, one row a layer and point, by the worst."""
    groups: dict[tuple[int | None, str], _Pairs] = {}
    for e in errors:
        if isinstance(e, PairError):
            groups.setdefault((e.layer, e.point), _Pairs()).add(e)
    rows = []
    for (layer, point), p in groups.items():
        sizes = [size_text(p.worst, name) for name in ("mae", "max_diff", "rel_l2")]
        off = f"{p.off:,}" if p.off else ""
        rows.append((_layer(layer), point, *sizes, off, str(p.unknown or ""), row_place(p.worst)))
    columns = ("layer", "point", "mae", "max_diff", "rel_l2", "NaN or inf", "unknown", "worst")
    return Table("Candidate against reference run", columns, tuple(rows), ("point", "worst"))


def reported_table(beside: "Sequence[ReportedNumber]") -> Table:
    """Return the numbers that a dump reports beside what compare found of the other run."""
    rows = []
    for x, here in beside:
        step = f" {x.step}" if x.phase == "decode" else ""
        whole = value(x.value).is_integer()
        theirs, ours = ("" if v is None else f"{value(v):.0f}" if whole else short(v) for v in (x.value, here))
        times = "" if here is None or whole or not value(here) else f"{digits(value(x.value) / value(here))} ×"
        rows.append((x.prompt, f"{x.phase}{step}", _layer(x.layer), x.name, theirs, ours, times))
    columns = ("case", "call", "layer", "number", "dump", "here", "dump / here")
    return Table("Numbers that the dump reports", columns, tuple(rows), ("case", "call", "number"))
