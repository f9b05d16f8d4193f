"""Which point of a program is which of its family's textbook, found by FP64 values alone.

A program's value is a point where some order of its axes makes it the textbook's. Steps of scans are layers, or a name
that is met again in each. Where no value is a point's, since a formula before or of it is another, the nearest one is
taken of those that have its size and are made of what its inputs are, and nothing between.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np

from precaudit.interpreters.jaxpr.reads import Reads
from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.recording.runs.programs import ProgramPoint
from precaudit.references.alignment.axes import NONE, UNTOLD, Fit, Wanted, arranged, fit
from precaudit.references.alignment.fed_tokens import FedTokens
from precaudit.references.alignment.vectors import Vectors
from precaudit.references.mutations.forms import Inputs, usual_form
from precaudit.schema.graphs.decoder import CACHES, POINTS, inputs_of

SAME = 1e-4  # relative distance of two values that are one but for constants, an epsilon, a table in float32
Own = Mapping[tuple[int | None, str], Array]
EXACT = 1e-6  # of values that are one but for constants in float32
KEPT = tuple(CACHES.values())  # of keys, then of values
ENOUGH = 0.98  # of the vectors of a value
FARTHEST = 1.3  # relative distance of the nearest value that is taken for a point that none equals
THROUGH = 3  # points between a sublayer's result and the next norm: what is added to, left, and read by the next
HALF = 0.5  # of the stream: as far as it may be and still be that


class Series(NamedTuple):
    """A program's value of every layer: its name in a map, and the point and step that hold each layer's."""

    name: str
    members: tuple[tuple[ProgramPoint, int | None], ...]


@dataclass(frozen=True)
class FoundPoint:
    """A point of the textbook: what shows it, by the name and axes of a map; how many layers of it are equal."""

    point: str
    series: Series
    axes: str
    equal: int
    off: float


@dataclass(frozen=True)
class Side:
    """What is known of a program's call: FP64 values by name, points in order, and which taps each tap reads."""

    values: Mapping[str, Array]
    points: Sequence[ProgramPoint]
    reads: Mapping[str, Reads]

    def value(self, member: tuple[ProgramPoint, int | None]) -> Array:
        """Return a value, in a step of the scans around it."""
        point, step = member
        return self.values[point.name].reshape(-1, *point.shape)[step or 0]

    def series(self, layers: int | None) -> Iterator[Series]:
        """Yield what may hold a point of every layer, or of none (None)."""
        own = {p.name: p for p in self.points if p.name in self.values}
        for name, p in own.items():
            if layers is None:
                if not p.stacked:
                    yield Series(name, ((p, None),))
            elif p.stacked and prod(p.stacked) == layers:
                yield Series(name, tuple((p, i) for i in range(layers)))
            elif not p.stacked and "#" not in name:
                each = [own.get(f"{name}#{i}" if i else name) for i in range(layers)]
                if all(x is not None and x.shape == p.shape for x in each):
                    yield Series(name + "{#}" * (layers > 1), tuple((x, None) for x in each if x is not None))


@dataclass(frozen=True)
class Textbook:
    """The textbook's FP64 values of one call, and what makes a value of it again.

    ``values``: [B, T, …] by (layer, point), NaN of padding; of caches [B, S, G, K], all rows so far, NaN of slots that
    hold none; of scores and probabilities [B, H, T, S], NaN where a key is masked.
    """

    model: Model
    values: Own
    fed: FedTokens

    @property
    def config(self) -> DecoderConfig:
        """The configuration."""
        return self.model.config

    def remake(self, layer: int | None, point: str, own: Own) -> Array | None:
        """Return a point of its inputs as the program has them, NaN of padding; None where one is not known."""
        inputs = []
        for name in inputs_of(point, self.config.sparse):
            at = None if not POINTS[name].per_layer else self.config.layers - 1 if layer is None else layer
            if (at, name) not in own:
                return None
            inputs.append(own[at, name])
        if not inputs:
            return None
        found = np.full(self.values[layer, point].shape, np.nan)
        for b, at in enumerate(self.fed.at):
            real, slots = at >= 0, self.fed.slots[b]
            if not real.any():
                continue
            names = inputs_of(point, self.config.sparse)
            its = [
                x[b][:, real, slots] if POINTS[n].over_keys else x[b][real] for n, x in zip(names, inputs, strict=True)
            ]
            if point in KEPT:
                found[b, slots] = self._keys(layer, point, b, its[0])
                continue
            if POINTS[point].reads_keys:
                its[1:] = [
                    own[layer, c][b, slots] if (layer, c) in own else self._keys(layer, c, b, x)
                    for c, x in zip(KEPT, its[1:], strict=False)
                ]
            probs = own.get((layer, "probs")) if point == "attn_out" else None
            held = None if probs is None else np.nan_to_num(probs[b][:, real, slots])
            turned = self.fed.turned[b]
            made = usual_form(Inputs(self.model, layer, point, at[real], tuple(its), probs=held, turned=turned), FP64)
            if POINTS[point].over_keys:
                found[b, :, real, slots] = made.transpose(1, 0, 2)  # NumPy puts the axis of a mask first
            else:
                found[b, real] = made
        return np.where(np.isnan(self.values[layer, point]), np.nan, found) if POINTS[point].over_keys else found

    def holds_more(self, layer: int | None, name: str) -> bool:
        """Whether a cache of keys or values has rows of earlier calls, so that it shows those of this one."""
        return self.values[layer, CACHES[name]].shape[1] > self.values[layer, name].shape[1]

    def _keys(self, layer: int | None, cache: str, b: int, rows: Array) -> Array:
        """Return a sequence's keys or values of all rows so far, those of the call as the program has them."""
        before = self.values[layer, cache][b, self.fed.slots[b]]
        return np.concatenate([before[: len(before) - len(rows)], rows])


def find_points(side: Side, book: Textbook) -> list[FoundPoint]:
    """Return the points that a program shows, in the textbook's order.

    First those whose values are the textbook's in a layer. Then, layer by layer, those that are what the textbook makes
    of the program's own values; what none equals, though what is made of it is not right either, is the nearest.
    """
    layers, sparse = book.config.layers, book.config.sparse
    every = {per_layer: list(side.series(layers if per_layer else None)) for per_layer in (True, False)}
    names = [p for p in POINTS if (0 if POINTS[p].per_layer else None, p) in book.values]
    found: dict[str, FoundPoint] = {}
    search = PointSearch(side, book, every)

    def free(name: str) -> list[Series]:
        used = {f.series.name for f in found.values()}
        return [s for s in every[POINTS[name].per_layer] if s.name not in used]

    for name in names:
        at = range(layers) if POINTS[name].per_layer else [None]
        wanted = Wanted(name, [book.values[i, name] for i in at], book.config.kv_heads)
        if (best := _best(side, free(name), wanted, SAME)) is not None:
            found[name] = best
    known = {n for n, f in found.items() if f.off <= EXACT}
    own: dict[tuple[int | None, str], Array] = {}
    for layer in (*range(layers), None):
        for name in (n for n in names if POINTS[n].per_layer == (layer is not None)):
            step = layer or 0
            made = book.remake(layer, name, own)
            y = own.get((layer, name), book.values[layer, name]) if made is None else made
            if name not in found and not _is_right(name, found, known, sparse):
                one = Wanted(name, [y], book.config.kv_heads)
                shown = [Series(s.name, s.members[step : step + 1]) for s in free(name)]
                best = _best(side, shown, one, SAME)
                # of an operation's parts probabilities alone: a product of q and k may not be scaled yet
                part = POINTS[name].within is not None and POINTS[name].kind != "softmax"
                part = part or not inputs_of(name, sparse)  # nor what enters a layer, which its norm may be parallel to
                with_it = own | {(layer, name): y}
                if best is None and not part and not _leads_on(search, layer, name, with_it):
                    if name in CACHES and book.holds_more(layer, name):
                        shown = [s for s in shown if _is_written(side, s, every[True], step)]
                    shown = [s for s in shown if _made_of_inputs(side, s, name, found, sparse)]
                    best = _nearest(search, shown, layer, name, with_it, found)
                if best is not None:
                    series = next(s for s in free(name) if s.name == best.series.name)
                    found[name] = replace(best, series=series)
            if name in found:
                f = found[name]
                x = arranged(side.value(f.series.members[step]), y, Wanted(name, [y], book.config.kv_heads))
                own[layer, name] = y if x is None else x
            else:
                own[layer, name] = y
            _hand_on(layer, name, own, layers)
    return [found[n] for n in names if n in found]


def _hand_on(layer: int | None, name: str, own: dict[tuple[int | None, str], Array], layers: int) -> None:
    """Give the next layer the stream that this one leaves."""
    if name == "resid_out" and layer is not None and layer + 1 < layers:
        own[layer + 1, "resid_in"] = own[layer, name]


@dataclass(frozen=True)
class PointSearch:
    """A side whose points are sought, what the textbook makes there, and the side's series: per layer, and others."""

    side: Side
    book: Textbook
    series: Mapping[bool, list[Series]]


def _leads_on(search: PointSearch, layer: int | None, name: str, own: Own, further: int = THROUGH) -> bool:
    """Whether something that is made of a point's value, as the textbook makes it, is a value of the program.

    ``further``: through so many points that are none, such as the stream that a layer leaves, before the next norm.
    """
    made: dict[tuple[int | None, str], Array] = {}
    book = search.book
    for other in POINTS:
        at = layer if POINTS[other].per_layer == (layer is not None) else None
        reads = name in inputs_of(other, book.config.sparse) or POINTS[name].within == other
        if reads and (at, other) in book.values and (y := book.remake(at, other, own)) is not None:
            shown = [Series(s.name, s.members[(at or 0) :][:1]) for s in search.series[POINTS[other].per_layer]]
            if _best(search.side, shown, Wanted(other, [y], book.config.kv_heads), SAME) is not None:
                return True
            made[at, other] = y
    if name == "resid_out" and layer is not None and (layer + 1, "resid_in") in book.values:
        made[layer + 1, "resid_in"] = own[layer, name]
    return further > 0 and any(
        _leads_on(search, at, other, {**own, (at, other): y}, further - 1) for (at, other), y in made.items()
    )


def _nearest(
    search: PointSearch,
    series: Sequence[Series],
    layer: int | None,
    name: str,
    own: Own,
    found: Collection[str],
) -> FoundPoint | None:
    """Return the series whose direction is nearest to a point's, and nearer to it than to any that is not found.

    Sizes are left out of account: a formula that is another may give another size. Those of the stream are not, to
    which a norm may be parallel. What a series is too far from to be taken for is nearer to nothing.
    """
    book, rivals = search.book, {name: own[layer, name]}
    for other in POINTS:
        at = layer if POINTS[other].per_layer == (layer is not None) else None
        if (at, other) in book.values and other != name and other not in found:
            y = book.remake(at, other, own) if name in inputs_of(other, book.config.sparse) else None
            rivals[other] = book.values[at, other] if y is None else y

    def fits(s: Series, point: str) -> Fit:
        x, y = search.side.value(s.members[0]), rivals[point]
        if x.size < y.size:
            return NONE
        x, y = (x, y) if POINTS[point].kind == "sum" else (_unit(x), _unit(y))
        return fit(x, y, Wanted(point, [y], book.config.kv_heads))

    for own_fit, s in sorted(((fits(s, name), s) for s in series), key=lambda f: f[0].off):
        others = ((o, fits(s, o).off) for o in rivals if o != name)
        nearer = own_fit.off <= _farthest(name) and all(own_fit.off <= x for o, x in others if x <= _farthest(o))
        if nearer and own_fit.axes != UNTOLD:
            return FoundPoint(name, s, own_fit.axes, 0, own_fit.off)
    return None


def _farthest(point: str) -> float:
    """Return how far the nearest value may be from a point to be taken for it."""
    return HALF if POINTS[point].kind == "sum" else FARTHEST


def _unit(x: Array) -> Array:
    size = float(np.linalg.norm(x[np.isfinite(x)]))
    return x / size if size else x


def _is_right(name: str, found: Mapping[str, FoundPoint], known: Collection[str], sparse: bool) -> bool:
    """Whether what is made of a point, or what it is a part of, is equal: then so is the point, and is not shown.

    ``known``: points that are the textbook's by themselves. What these are made of in turn is right, too, such as the
    sum that a norm reads and what is added to it.
    """
    equal = {f.point for f in found.values() if f.equal}
    if POINTS[name].within in equal or any(name in inputs_of(p, sparse) for p in equal):
        return True
    right = new = set(known)
    while new:
        new = {p for p in POINTS if POINTS[p].within in new} | {i for p in new for i in inputs_of(p, sparse)}
        new -= right
        right |= new
    return name in right


def _best(side: Side, series: Sequence[Series], wanted: Wanted, most: float) -> FoundPoint | None:
    """Return the series that is a point in most layers, and of these the nearest; None beyond ``most`` in all."""
    best: FoundPoint | None = None
    for s in series:
        if not s.members or side.value(s.members[0]).size < wanted.values[0].size:
            continue
        fits = [fit(side.value(m), y, wanted) for m, y in zip(s.members, wanted.values, strict=True)]
        equal = sum(f.off <= SAME for f in fits)
        closest = min(fits, key=lambda f: f.off)
        if closest.off > most or closest.axes == UNTOLD:
            continue
        if best is None or (equal, -closest.off) > (best.equal, -best.off):
            best = FoundPoint(wanted.point, s, closest.axes, equal, closest.off)
    return best


def _made_of_inputs(side: Side, s: Series, name: str, found: Mapping[str, FoundPoint], sparse: bool) -> bool:
    """Whether a series reads what shows the last points before this one, through nothing that shows another point."""
    wanted = _last_shown(name, found, sparse)
    shown = {m[0].name.partition("#")[0]: f.point for f in found.values() for m in f.series.members}
    known: set[str] = set()
    new, reached = set(side.reads.get(s.members[0][0].name.partition("#")[0], ())), set[str]()
    while new:
        known |= new
        reached |= {shown[n] for n in new if n in shown}
        new = {r for n in new if n not in shown for r in side.reads.get(n, ())} - known
    rows = {row for row, cache in CACHES.items() if cache in reached}
    within = {i for p in reached for q in (p, *inputs_of(p, sparse)) for i in inputs_of(q, sparse) if POINTS[p].within}
    return wanted <= reached | rows | within


def _is_written(side: Side, s: Series, series: Sequence[Series], step: int) -> bool:
    """Whether a larger value holds every vector of a series, as a cache holds the rows of a call."""
    x = side.value(s.members[0])
    larger = (side.value(o.members[step]) for o in series if len(o.members) > step)
    return any(y.size > x.size and Vectors([y]).share(x) > ENOUGH for y in larger)


def _last_shown(name: str, found: Mapping[str, FoundPoint], sparse: bool) -> set[str]:
    """Return the points before one, in its layer, that a program shows, and between which and it none is shown."""
    there = {*found, *(row for row, cache in CACHES.items() if cache in found)}
    last: set[str] = set()
    new, known = set(inputs_of(name, sparse)), set[str]()
    while new:
        known |= new
        last |= new & there
        new = {r for n in new - there for r in inputs_of(n, sparse)} - known
    return last
