"""The tables every report shows, as header and rows of text."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from precaudit.reports.fitting import Table
from precaudit.reports.summary import Line, blame_text, lines, place_text, share_text
from precaudit.schema.filed import of_kinds
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.records.base import Number, value
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import ErrorRecord

if TYPE_CHECKING:
    from precaudit.references.comparison.between import Beside


def short(x: Number | None) -> str:
    """Return a number in two digits."""
    if x is None:
        return ""
    return f"{value(x):.1e}".replace("e-0", "e-").replace("e+0", "e+") if value(x) else "0"


def _layer(layer: int | None) -> str:
    return "" if layer is None else str(layer)


def overview(errors: Sequence[ErrorRecord], shown: Sequence[Line] | None = None) -> list[Table]:
    """Return, one row a layer and one column a point, local error with the share explained, and forward error."""
    found = lines(errors) if shown is None else list(shown)
    points = [p for p in POINTS if any(x.point == p and x.layer is not None for x in found)]
    by = {(x.layer, x.point): x for x in found}
    layers = sorted({x.layer for x in found if x.layer is not None})
    local, forward = [], []
    for layer in layers:
        row = [by[layer, p] for p in points if (layer, p) in by]
        names = sorted({blame_text(x.blame).split(",")[0] for x in row})
        local.append((str(layer), *(_local_cell(by.get((layer, p))) for p in points), ", ".join(names)))
        forward.append((str(layer), *(_forward_cell(by.get((layer, p))) for p in points), _worst(row)))
    tables = []
    if local:
        title = "Local error: each operation against FP64 on its own recorded inputs, and the share explained"
        tables.append(Table(title, ("layer", *points, "explained by"), tuple(local), ("explained by",)))
        title = "Forward error against FP64 of the whole model on the same tokens, × an emulated policy's"
        tables.append(Table(title, ("layer", *points, "largest at"), tuple(forward), ("largest at",)))
    return tables


def _local_cell(x: Line | None) -> str:
    if x is None:
        return ""
    if x.nonfinite:
        return f"{x.nonfinite} nonfinite"
    return "unknown" if x.local is None else f"{short(x.local.rel_l2)} {share_text(x.blame)}"


def _forward_cell(x: Line | None) -> str:
    if x is None:
        return ""
    if x.forward is None:
        return "unknown"
    ratio = x.forward.ratio
    return f"{short(x.forward.rel_l2)} ×{value(ratio):.2g}" if ratio is not None else short(x.forward.rel_l2)


def _worst(row: list[Line]) -> str:
    largest = max((x.forward for x in row if x.forward is not None), key=lambda e: value(e.rel_l2), default=None)
    return "" if largest is None else f"{largest.point} {place_text(largest)}"


def detail(errors: Sequence[ErrorRecord]) -> Table:
    """Return one row a layer and point: sizes, what explains them, worst token and head."""
    rows = []
    for x in lines(errors):
        for kind, e in (("forward", x.forward), ("local", x.local)):
            if e is not None:
                blame = _blame(x) if kind == "local" else f"×{value(e.ratio):.2g}"
                rows.append((
                    _layer(x.layer), x.point, kind, short(e.mae), short(e.max_diff), short(e.rel_l2),
                    str(e.nonfinite or ""), blame, place_text(e),
                ))  # fmt: skip
        if x.unknown:
            rows.append((_layer(x.layer), x.point, "unknown", "", "", "", "", "; ".join(x.unknown), ""))
    columns = ("layer", "point", "kind", "mae", "max_diff", "rel_l2", "NaN", "explained by", "worst")
    return Table(
        "Every layer and point, by its worst", columns, tuple(rows), ("point", "kind", "explained by", "worst")
    )


def _blame(x: Line) -> str:
    """Return who explains a local error, how much of it, and what the compiler left unrounded."""
    text = blame_text(x.blame)
    if x.blame is None or x.blame.name in ("exact", "none of these") or x.local is None:
        return text
    kept = [place for places in (x.local.elided or {}).values() for place in places]
    return f"{text} {share_text(x.blame)}" + (f", {'+'.join(kept)} unrounded" if kept else "")


def outside(errors: Sequence[ErrorRecord]) -> Table | None:
    """Return the points outside layers."""
    rows = []
    for x in lines(errors):
        if x.layer is None:
            rows.append((x.point, _local_cell(x), blame_text(x.blame), _forward_cell(x), place_text(x.forward)))
    columns = ("point", "local", "explained by", "forward", "largest at")
    return Table("After the layers", columns, tuple(rows), ("explained by", "largest at")) if rows else None


def accumulation(errors: Sequence[ErrorRecord]) -> Table | None:
    """Return the size of each emulated accumulation's own error in attn_out, by layer."""
    worst: dict[tuple[int, str], ErrorRecord] = {}
    for e in of_kinds(errors, "accum"):
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
    return "yes" if p.match else "near tie" if p.near_tie else "by length" if p.agree else "NO"


def prefill_decode(pairs: Sequence[PrefillDecodeRecord], names: Mapping[int, str] | None = None) -> Table | None:
    """Return prefill's last position against decode0 for every prompt, and rescore against decode where they differ.

    ``names``: what tokens say, shown beside their ids.
    """
    rows = []

    def token(i: int | None) -> str:
        return "?" if i is None else f"{i} {(names or {}).get(i, '')}".rstrip()

    for p in pairs:
        if p.against == "prefill" or not p.match or p.f64_match is False:
            rows.append((
                p.prompt, p.against if p.against == "prefill" else f"rescore {p.step}",
                token(p.prefill_top1), token(p.decode_top1), token(p.f64_top1),
                _gap(p.prefill_gap), _gap(p.decode_gap),
                _gap(p.f64_gap), _match(p), short(p.kl), short(p.max_diff),
            ))  # fmt: skip
    columns = ("prompt", "against", "top-1", "decode", "FP64", "gap", "decode", "FP64", "match", "KL")
    title = "Prefill against decode at the same position: top-1 tokens and gaps to the second"
    left = ("prompt", "against", "match")
    return Table(title, (*columns, "max_diff"), tuple(rows), left) if rows else None


def _gap(x: Number | None) -> str:
    return "" if x is None else f"{value(x):.3g}"


def pair_by_point(errors: Sequence[ErrorRecord]) -> Table:
    """Return two runs against each other, one row a point with numbers: its layers that differ most, and how much."""
    groups: dict[str, list[ErrorRecord]] = {}
    for e in errors:
        if e.kind == "pair" and e.numberless is None:
            groups.setdefault(e.point, []).append(e)
    rows = []
    for point, found in groups.items():
        by: dict[int | None, ErrorRecord] = {}
        for e in sorted(found, key=lambda e: (e.nonfinite > 0, value(e.rel_l2))):
            by[e.layer] = e
        worst = sorted(by.values(), key=lambda e: (e.nonfinite > 0, value(e.rel_l2)), reverse=True)
        cells = [f"{short(e.rel_l2)}{'' if e.layer is None else f' L{e.layer}'}" for e in worst[:3]]
        first, off = worst[0], sum(e.nonfinite for e in found)
        same = sum(e.max_diff == 0 for e in found)
        rows.append((
            point, *cells, *[""] * (3 - len(cells)), short(first.mae), short(first.max_diff),
            f"{same} of {len(found)}", str(off or ""), place_text(first),
        ))  # fmt: skip
    columns = ("point", "rel_l2", "2nd", "3rd", "mae", "max_diff", "bit-equal", "NaN or inf", "worst")
    return Table(
        "Run against reference run, by the layers (L) that differ most", columns, tuple(rows), ("point", "worst")
    )


def pair_table(errors: Sequence[ErrorRecord]) -> Table:
    """Return two runs against each other, one row a layer and point, by the worst."""
    groups: dict[tuple[int | None, str], list[ErrorRecord]] = {}
    for e in errors:
        if e.kind == "pair":
            groups.setdefault((e.layer, e.point), []).append(e)
    rows = []
    for (layer, point), records in groups.items():
        known = [e for e in records if e.numberless is None]
        unknown = len(records) - len(known)
        worst = max(known, key=lambda e: (e.nonfinite > 0, value(e.rel_l2)), default=None)
        sizes = [short(getattr(worst, k)) for k in ("mae", "max_diff", "rel_l2")] if worst else ["", "", ""]
        off = sum(e.nonfinite for e in known)  # which are in none of the sizes
        rows.append((_layer(layer), point, *sizes, str(off or ""), str(unknown or ""), place_text(worst)))
    columns = ("layer", "point", "mae", "max_diff", "rel_l2", "NaN or inf", "unknown", "worst")
    return Table("Candidate against reference run", columns, tuple(rows), ("point", "worst"))


def reported_table(beside: "Sequence[Beside]") -> Table:
    """Return the numbers that a dump reports beside what compare found of the other run."""
    rows = []
    for x, here in beside:
        step = f" {x.step}" if x.phase == "decode" else ""
        whole = value(x.value).is_integer()
        theirs, ours = ("" if v is None else f"{value(v):.0f}" if whole else short(v) for v in (x.value, here))
        times = "" if here is None or whole or not value(here) else f"{value(x.value) / value(here):.3g} ×"
        rows.append((x.prompt, f"{x.phase}{step}", _layer(x.layer), x.name, theirs, ours, times))
    columns = ("case", "call", "layer", "number", "dump", "here", "dump / here")
    return Table("Numbers that the dump reports", columns, tuple(rows), ("case", "call", "number"))
