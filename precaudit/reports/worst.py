"""A run of a model on one screen: a row a point, its worst layers as columns; or all layers."""

from array import array
from collections.abc import Sequence
from math import isfinite
from statistics import median

from precaudit.judging.rules import parts_beyond_rounding
from precaudit.reports.fitting import Table
from precaudit.reports.summary import SummaryLine, blame_text, row_place, share_text, size_text, worst_lines
from precaudit.schema.digits import rough, roundoffs, short
from precaudit.schema.filed import of_kinds
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.places import point_text
from precaudit.schema.records.base import value
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import ErrorRecord, ForwardError

SHOWN = 2  # layers a point, of each kind of error


def by_point(errors: Sequence[ErrorRecord]) -> Table | None:
    """Return a row a point: its largest local and forward errors and in which layers they are."""
    rows = []
    for point, found in _points(errors).items():
        local = sorted((x for x in found if x.local is not None), key=_local, reverse=True)
        forward = sorted((x for x in found if x.forward is not None), key=_forward, reverse=True)
        cells = [_cell(size_text(x.local), x.layer) for x in local[:SHOWN]]
        others = [_cell(size_text(x.forward), x.layer) for x in forward[:SHOWN]]
        least = min((x for x in found if x.blame is not None), key=_least, default=None)
        known = (x.forward for x in forward if x.forward is not None and not x.forward.nonfinite)
        ratio = max((value(e.ratio) for e in known if e.ratio is not None), default=None)
        rows.append(
            (
                point,
                *_pad(cells or [_absent(found)]),
                "" if least is None else _least_explained(least),
                *_pad(others),
                "" if ratio is None else rough(ratio),
            )
        )
    columns = ("point", "local", "2nd", "explained", "forward", "2nd ", "× emul.")
    title = (
        "Largest errors of each point, relative, L its layer. Local: one operation on its recorded inputs; "
        "forward: the whole model, and × the emulated policy's"
    )
    return Table(title, columns, tuple(rows), ("point",)) if rows else None


def matrices(errors: Sequence[ErrorRecord]) -> list[Table]:
    """Return local and forward errors with a row a point and a column a layer, of all layers."""
    found = _points(errors)
    layers = sorted({x.layer for rows in found.values() for x in rows if x.layer is not None})
    if not layers:
        return []
    tables = []
    for title, cell in (("Local error and the share explained", _local_cell), ("Forward error", _forward_cell)):
        rows = []
        for point, xs in found.items():
            by = {x.layer: cell(x) for x in xs}
            if by.keys() != {None}:
                rows.append((point, *(by.get(i, "") for i in layers)))
        tables.append(Table(f"{title}, by layer", ("point", *(f"L{i}" for i in layers)), tuple(rows), ("point",)))
    return tables


def largest(errors: Sequence[ErrorRecord]) -> str:
    """Say where the largest forward error is, and how large the usual one."""
    worst, sizes = None, array("d")
    for e in of_kinds(errors, ForwardError):
        if e.numberless is None and not e.nonfinite:
            sizes.append(value(e.rel_l2))
            worst = e if worst is None or value(e.rel_l2) > value(worst.rel_l2) else worst
    if worst is None:
        return ""
    at, usual = point_text(worst), short(median(sizes))
    return f"Forward errors: {usual} in the median; the largest is {short(worst.rel_l2)} at {at} ({row_place(worst)})."


def top1_disagreements(pairs: Sequence[PrefillDecodeRecord]) -> list[PrefillDecodeRecord]:
    """Return where views and FP64 do not all have one top-1, or KL is beyond rounding: what agrees is counted."""
    return [p for p in pairs if not p.match or p.f64_match is False or parts_beyond_rounding(p)]


def _points(errors: Sequence[ErrorRecord]) -> dict[str, list[SummaryLine]]:
    found: dict[str, list[SummaryLine]] = {p: [] for p in POINTS}
    for x in worst_lines(errors):
        found[x.point].append(x)
    return {p: xs for p, xs in found.items() if xs}


def _local(x: SummaryLine) -> tuple[bool, bool, float]:
    return (x.blame is not None and not x.blame.passes, *_size(x.local))


def _forward(x: SummaryLine) -> tuple[bool, float]:
    return _size(x.forward)


def _size(e: ErrorRecord | None) -> tuple[bool, float]:
    return (False, 0.0) if e is None else (e.nonfinite > 0, value(e.rel_l2))


def _least(x: SummaryLine) -> tuple[bool, float]:
    assert x.blame is not None
    return (x.blame.passes, x.blame.share)


def _cell(text: str, layer: int | None) -> str:
    return text if layer is None else f"{text} L{layer}"


def _pad(cells: Sequence[str]) -> list[str]:
    return [*cells[:SHOWN], *[""] * (SHOWN - len(cells))]


def _absent(found: Sequence[SummaryLine]) -> str:
    """Return why a point has no local error."""
    off = sum(x.nonfinite for x in found)
    return f"{off} NaN" if off else "unknown" if any(x.unknown for x in found) else ""


def _least_explained(x: SummaryLine) -> str:
    """Return the least share explained of a point's local errors; marked where more is left than rounding leaves."""
    a = x.blame
    assert a is not None
    if a.inherits is not None:
        return f"from {a.inherits}"
    if a.name == "none of these":
        return f"{'' if a.passes else '✗ '}all but {roundoffs(a.left_u)}u" if isfinite(a.left_u) else "✗ none"
    return f"{'' if a.passes else '✗ '}{share_text(a)}"


def _local_cell(x: SummaryLine) -> str:
    if x.nonfinite:
        return f"{x.nonfinite} NaN"
    return ("unknown" if x.unknown else "") if x.local is None else f"{short(x.local.rel_l2)} {share_text(x.blame)}"


def _forward_cell(x: SummaryLine) -> str:
    if x.forward is None:
        return "unknown" if x.unknown else ""
    return size_text(x.forward)


def explained_by(errors: Sequence[ErrorRecord]) -> str:
    """Say who explains the local errors of each point, those of one name together."""
    by: dict[str, list[str]] = {}
    for point, found in _points(errors).items():
        texts = (blame_text(x.blame).split(",")[0].split(" (")[0] for x in found if x.blame is not None)
        for name in dict.fromkeys(texts):
            by.setdefault(name, []).append(point)
    if not by:
        return ""
    most = max(by, key=lambda name: len(by[name]))
    others = "; ".join(f"{name}: {', '.join(points)}" for name, points in by.items() if name != most)
    return f"Explained by {most}" + (f"; by {others}." if others else ".")
