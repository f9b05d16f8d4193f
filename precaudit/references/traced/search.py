"""What is tried of a call's places that do not close: layers, ways, inputs, in that order, until nothing is left.

One layer of a scan is tried before the others, and what closed one before all else. Inputs are read as they were before
they were rounded; then other ways are tried; then some inputs so and others as recorded.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from msgspec import structs

from precaudit.numbers.arrays import widen
from precaudit.recording.runs.programs import EQUATIONS
from precaudit.references.traced.excess_precision import EXCESS_PRECISION, least_residual
from precaudit.references.traced.infinities import few_infinite
from precaudit.references.traced.judged import CLEARLY, At, JudgedCall, Segments, closes, judge_places
from precaudit.references.traced.remade import IN_ORDER, INPUTS, Redrawn, Remade, Several
from precaudit.references.traced.unrounded import Left, Name, Place, Rows, Unrounded
from precaudit.schema.records.errors import LocalError

MOST_POINTS = 8  # of a call, that are searched read by read and do not close: then no more are
Closing = dict[str, list[Name]]  # ways that closed a point in steps before, none of the first, the last one first


class Search:
    """The records of a call's places (``found``), each made again where a try may close it.

    ``made``: what its segments make; of places that close at once it is let go. ``more``: what else they may make.
    """

    def __init__(self, call: JudgedCall, every: Sequence[At], made: Segments, more: Unrounded) -> None:
        self.call, self.every, self.more = call, every, more
        self.found = judge_places(call, every, made)
        self.made = made.only([(self.found[i].point, self.found[i].layer) for i in self._unclear()])

    def left(self, some: Collection[Place] | None = None) -> dict[str, list[int | None]]:
        """Return the places, of some or of all, that do not close: the layers of every point."""
        return self._layers(self._open(some))

    def noise(self, draws: Several) -> None:
        """Draw the noise of what the least of it does not close clearly; no record fails by more of it."""
        if unclear := self._unclear():
            left = self._layers(unclear)
            self.made = replace(self.made, drawn=self.more.drawn(draws, left), sizes=self.more.sizes(left))
            self._again(unclear)

    def ways(self, some: Collection[Place] | None = None) -> None:
        """Try every honest way, with narrow inputs as they were before they were rounded, then some of them so."""
        for others in (self.more.all_inputs, self.more.other_ways, self.more.some_inputs):
            self._try(partial(self._honest, others), some)

    def layers_first(self) -> None:
        """Try one layer of every scan: its layers are one compiled body, so that what closes one may close the others.

        Of a small program, all of whose segments are one compiled program, nothing is saved so.
        """
        several = {point: layers for point, layers in self.left().items() if len(layers) > 1}
        if not several or self.more.tapped.small:
            return
        first = {(point, layers[0]) for point, layers in several.items()}
        self.ways(first)
        for e in [e for e in self.found if (e.point, e.layer) in first and closes(e)]:
            name, rest = (e.elided or {}).get(EQUATIONS, ()), {e.point: several[e.point][1:]}
            if name and name not in self.more.first:
                self.made = replace(self.made, honest=self.made.honest | {name: self.more.made_as(name, rest)})
                self._again(self._open({(e.point, layer) for layer in rest[e.point]}))

    def as_before(self, closing: Closing) -> None:
        """Try of what does not close clearly the ways that closed it in a step before."""
        for i in self._unclear():
            point, layer = self.found[i].point, self.found[i].layer
            for name in closing.get(point, ()):
                made = self.made.honest.get(name, {}) | self.more.made_as(name, {point: [layer]})
                self.made = replace(self.made, honest=self.made.honest | {name: made})
                self._again([i])
                if closes(self.found[i], CLEARLY):
                    break

    def ways_noted(self, closing: Closing) -> None:
        """Try every way, and note those that close."""
        left = self._open()
        self.ways()
        for e in (self.found[i] for i in left):
            name = (e.elided or {}).get(EQUATIONS, ())
            if closes(e) and name not in self.more.first and name not in closing.setdefault(e.point, []):
                closing[e.point].insert(0, name)

    def inputs(self, drawn: Collection[Remade]) -> None:
        """Try the noise that narrow inputs have before they are rounded."""
        self._try(
            lambda left: replace(self.made, moved=self.more.differences(drawn, left, self.made.honest[(INPUTS,)]))
        )

    def more_noise(self, draws: Redrawn) -> None:
        """Draw more of the noise of what is left: of three draws a slice that few elements rule may have little."""
        self._try(lambda left: replace(self.made, drawn=(*self.made.drawn, *self.more.redrawn(draws, left))))

    def by_conversions(self, ways: Mapping[Name, Remade]) -> None:
        """Try narrow inputs unrounded where they are converted to a wider format, and rounded elsewhere."""
        self._try(lambda left: replace(self.made, honest=self.made.honest | self.more.by_conversions(ways, left)))

    def in_order(self, way: Remade) -> None:
        """Try products in float32 term after term: of three draws of a sum that cancels none may be as far off."""
        self._try(lambda left: replace(self.made, honest=self.made.honest | {IN_ORDER: self.more.made_by(way, left)}))

    def excess_precision(self, ways: Sequence[Remade]) -> None:
        """Try of points which results their segments read unrounded, until MOST_POINTS were tried that none closes."""
        lost = 0
        for point, layers in list(self.left().items()):
            if lost >= MOST_POINTS:
                return
            mine = self._open({(point, layer) for layer in layers})
            p = self.every[mine[0]][0]
            stored = {(point, layer): widen(self.call.rows(p, layer)(self.call.taps[point])) for layer in layers}

            def judged(rows: Rows, mine: Sequence[int] = mine) -> list[LocalError]:
                made = replace(self.made, honest=self.made.honest | {EXCESS_PRECISION: rows})
                return judge_places(self.call, [self.every[i] for i in mine], made)

            for way in ways:
                choices = self.more.choices(way, point, layers)
                found = least_residual(choices, stored, lambda rows: all(map(closes, judged(rows))))
                if found is not None:
                    for i, e in zip(mine, judged(found), strict=True):
                        self.found[i] = e
                    break
            else:
                lost += 1

    def narrow_products(self, way: Remade) -> None:
        """Note of what is left where sums of products in their own format make it; such a record still fails."""
        if not (left := self.left()):
            return
        open_places = self._open()
        made = replace(self.made, honest={(): self.more.made_by(way, left)}, gpu=False)
        for i, e in zip(open_places, judge_places(self.call, [self.every[i] for i in open_places], made), strict=True):
            if closes(e) and not closes(self.found[i]):
                summed = self.every[i][0].dtype
                self.found[i] = structs.replace(self.found[i], summed=summed)

    def on_gpu(self, apart: Mapping[Remade, Remade], tied: Mapping[Name, Remade]) -> None:
        """Try inputs that each of its fusions makes once more, and operands near a tie of TF32."""
        self._try(lambda left: replace(self.made, again=self.more.again(apart, left)))
        self._try(lambda left: replace(self.made, tied=self.more.tied(tied, left)))

    def _try(self, more: Callable[[Left], Segments], some: Collection[Place] | None = None) -> None:
        if left := self.left(some):
            self.made = more(left)
            self._again(self._open(some))

    def _honest(self, others: Callable[[Left], dict[Name, Rows]], left: Left) -> Segments:
        return replace(self.made, honest=self.made.honest | others(left))

    def _again(self, some: Sequence[int]) -> None:
        """Make the records of some places, by their numbers, once more."""
        for i, e in zip(some, judge_places(self.call, [self.every[i] for i in some], self.made), strict=True):
            self.found[i] = e

    def _layers(self, some: Sequence[int]) -> dict[str, list[int | None]]:
        """Return places, by their numbers, as the layers of every point."""
        found: dict[str, list[int | None]] = {}
        for i in some:
            found.setdefault(self.found[i].point, []).append(self.found[i].layer)
        return found

    def _unclear(self) -> list[int]:
        return [i for i, e in enumerate(self.found) if not closes(e, CLEARLY) or few_infinite(e)]

    def _open(self, some: Collection[Place] | None = None) -> list[int]:
        each = enumerate(self.found)
        left = [(i, e) for i, e in each if not closes(e) or few_infinite(e)]
        return [i for i, e in left if some is None or (e.point, e.layer) in some]
