"""What one run is against another, in sentences: tokens that flip, KL, and the first difference beyond rounding."""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from math import hypot, inf, isfinite
from typing import Any

from precaudit.judging.pooled import PairMedian, PairPool
from precaudit.judging.verdicts import STATUSES, Status
from precaudit.reports.cells import Cell
from precaudit.reports.report import Headline
from precaudit.schema.digits import count_text, digits, short
from precaudit.schema.filed import of_kinds
from precaudit.schema.limits import default_limits
from precaudit.schema.places import Place, point_text
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord, ForwardError, PairError, StateError

Known = Sequence[ErrorRecord] | None


def difference_verdict(
    pairs: Sequence[ErrorRecord],
    mine: Known,
    other: Known,
    unjudged: str = "",
    asked: Container[str] | None = None,
    weights: str = "",
) -> Headline:
    """Return the first sentence on run A against run B.

    ``mine``, ``other``: the records of each against FP64, None where it was not compared (``unjudged``: the command
    that does). ``asked``: the points that both runs were asked for, None for all: those recorded for the sake of
    others have no forward error, and neither have caches; what is made of them has. ``weights``: what is known of the
    two runs' weights where these are not the same; then nothing is called fine. A difference is beyond rounding where
    it is larger than what the two policies' emulated rounding makes of either forward error, together, times the limit
    of forward errors; and where the median of a layer and point over all prompts is larger than that of correct runs.
    """
    known = apart = lacking = 0
    for e in pairs:
        if e.nonfinite:
            return Headline("✗", f"{_at(e)}: {count_text(e.nonfinite, 'element')} NaN or infinite in one of the runs.")
        known, apart = known + (e.numberless is None), apart + _differs(e)
        lacking += e.missing is not None or e.unknown is not None
    if not known:
        return Headline("?", "the runs have no tensor in common that can be compared.")
    if not apart and lacking:
        return Headline("?", f"{known:,} tensors are equal, and {lacking:,} could not be compared.")
    if not apart:
        return Headline("✓", f"all {known:,} tensors that were compared are equal.")
    told = f"{apart:,} of {known:,} tensors differ"
    if mine is None or other is None:
        return Headline("?", f"{told}; whether beyond rounding is known once both are compared with FP64.", unjudged)
    noises, caches = (_Noises(mine), _Noises(other)), _caches(mine) | _caches(other)
    limit, first, times, largest, open_ = default_limits().ratio.value, None, 0, 0.0, 0
    pool = PairPool()
    for e in filter(_differs, pairs):
        x = _times(e, *noises)
        if x is not None:
            pool.add(e, x, all(n.wide(Place.of(e)) for n in noises))
        if x is None:
            open_ += e.point not in caches and (asked is None or e.point in asked)
        elif x <= limit:
            times, largest = times + 1, max(largest, x)
        elif first is None or _order(e) < _order(first[0]):  # NaN is within no limit
            first = e, x
    if first is not None:
        e, size = first
        much = (
            "where rounding has none"
            if size == inf
            else f"{digits(size)} × the error of rounding (limit {digits(limit, 6)})"
        )
        return Headline("✗", f"{told}, first beyond rounding: {_at(e)}, {much}.")
    if (together := _median_sentence(pool.medians(default_limits()))) is not None:
        return Headline("✗", f"{told}, {together}.")
    if open_:
        return Headline("?", f"{told}; for {open_:,} the error of rounding is not known.", unjudged)
    if lacking or not times:
        n = lacking or apart
        why = "could not be compared" if lacking else "have no error from FP64"
        return Headline("?", f"{told}, none beyond rounding; {n:,} {why}.", unjudged)
    told += f", by no more than rounding: at most {digits(largest)} × its error (limit {digits(limit, 6)})"
    return Headline("?", f"{told}; but {weights}.") if weights else Headline("✓", f"{told}.")


def pair_cells(pairs: Sequence[ErrorRecord], mine: Known, other: Known) -> list[Cell]:
    """Return a cell for each layer and point of run A against run B: the record that differs most.

    ``size``: times what both policies' rounding makes, as ``difference_verdict`` has it; ``mine``, ``other``: the
    records of each against FP64, None where that is not known.
    """
    noises = None if mine is None or other is None else (_Noises(mine), _Noises(other))
    limit, worst = default_limits().ratio.value, dict[tuple[int | None, str], tuple[tuple[int, float], Cell]]()
    counts: dict[tuple[int | None, str], Counter[str]] = {}
    for e in pairs:
        size = None if e.numberless is not None else 0.0 if not _differs(e) else _times(e, *noises) if noises else None
        status: Status = (
            "nonfinite" if e.nonfinite else "unknown" if size is None else ("pass" if size <= limit else "fail")
        )
        key, known = (e.layer, e.point), e.numberless is None
        told = f"relative difference {digits(e.rel_l2)}" if known else ""
        cell = Cell(e.layer, e.point, status, size, e, {}, told)
        found = counts.setdefault(key, Counter())
        found[status] += 1
        rank = -STATUSES.index(status), -1.0 if size is None else size
        if key not in worst or rank > worst[key][0]:
            worst[key] = rank, cell
    return [replace(cell, counts=counts[key]) for key, (_, cell) in worst.items()]


def _median_sentence(medians: Sequence[PairMedian]) -> str | None:
    """Return how far apart two runs are in the median of every layer and point; None where within the limits."""
    beyond = [m for m in medians if m.ratio > m.limit]
    if not beyond:
        return None
    worst, last = max(beyond, key=lambda m: m.ratio / m.limit), medians[-1]
    prompts = f"{worst.prompts} prompt{'s' if worst.prompts > 1 else ''}"
    of = f"limit {digits(worst.limit)}; {worst.records} records of {prompts}"
    text = (
        f"beyond rounding in the median at {len(beyond)} of {len(medians)} layers and points: {point_text(worst)} by "
        f"{digits(worst.ratio)} × the error of rounding ({of})"
    )
    return text if last is worst else f"{text}, {point_text(last)} by {digits(last.ratio)} ×"


def _differs(e: ErrorRecord) -> bool:
    return e.numberless is None and e.max_diff != 0


def _order(e: ErrorRecord) -> tuple[bool, Any]:
    return e.phase not in ("prefill", "call"), Place.of(e).order


def difference_sentences(pairs: Iterable[PairError]) -> list[str]:
    """Say how often the top-1 token differs and how far the distributions are, and what could not be compared."""
    out: list[str] = []
    rows = flips = finite = lacking = 0
    where, why, most, total, points = "", "", 0.0, 0.0, dict[str, None]()
    for e in pairs:
        if e.numberless is not None:
            lacking, why = lacking + 1, why or e.numberless
            points[e.point] = None
        if (d := e.distribution) is None:
            continue
        rows += len(d.positions)
        for position, top1, kl in zip(d.positions, d.top1, map(value, d.kl), strict=True):
            if top1 != 1.0:
                flips, where = flips + 1, where or f", first at position {position} of {e.prompt} ({e.phase})"
            if isfinite(kl):
                finite, most, total = finite + 1, kl if not finite else max(most, kl), total + kl
    if rows:
        text = f"Top-1 tokens differ at {flips} of {rows} positions{where}"
        if finite:
            text += f"; KL from the reference run is {short(most)} at most, {short(total / finite)} on average"
        out.append(text + ("." if finite == rows else f"; {rows - finite} rows are NaN or infinite."))
    if lacking:
        out.append(f"Not compared: {lacking:,} tensors of {', '.join(points)} ({why}).")
    return out


def _times(e: ErrorRecord, mine: "_Noises", other: "_Noises") -> float | None:
    """Return how many times what rounding makes a difference is; None where that is not known."""
    a, b = mine[Place.of(e)], other[Place.of(e)]
    if a is None or b is None:
        return None
    return value(e.rel_l2) / hypot(a, b) if a or b else inf


def _caches(errors: Sequence[ErrorRecord]) -> set[str]:
    """Return the points that are judged as state alone."""
    return {e.point for e in of_kinds(errors, StateError)} - {e.point for e in of_kinds(errors, ForwardError)}


class _Noises:
    """What the emulated policy's rounding makes of each forward error, relative to FP64, by its place.

    By 64-bit hashes of places, in order (precaudit/recording/runs/unique.py): a dict of a million takes 300 MB.
    """

    def __init__(self, errors: Sequence[ErrorRecord]) -> None:
        places, noises, wide = array("q"), array("d"), array("b")
        for e in of_kinds(errors, ForwardError):
            if e.numberless is None and e.ratio is not None and isfinite(ratio := value(e.ratio)):
                places.append(hash(Place.of(e)))
                noises.append(value(e.rel_l2) / ratio if ratio else 0.0)
                wide.append(e.dtype in ("float32", "float64"))
        order = sorted(range(len(places)), key=places.__getitem__)
        self._places, self._noises, self._wide = (
            array(x.typecode, map(x.__getitem__, order)) for x in (places, noises, wide)
        )

    def __getitem__(self, place: Place) -> float | None:
        at = self._at(place)
        return None if at is None else self._noises[at]

    def wide(self, place: Place) -> bool:
        """Whether a place holds float32."""
        at = self._at(place)
        return at is not None and bool(self._wide[at])

    def _at(self, place: Place) -> int | None:
        at = bisect_left(self._places, hash(place))
        return at if at < len(self._places) and self._places[at] == hash(place) else None


def _at(e: ErrorRecord) -> str:
    return f"{point_text(e)}, {e.phase} of {e.prompt}"
