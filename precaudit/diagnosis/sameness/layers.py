"""In which layers a program makes a point otherwise than another does of the other's own values (JAX)."""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from precaudit.diagnosis.sameness.observed import Observed, Site
from precaudit.diagnosis.sameness.others import ENOUGH, Others, replace_found
from precaudit.numbers.arrays import Array
from precaudit.recording.runs.programs import ProgramPoint
from precaudit.references.alignment.vectors import Vectors

AS_BEFORE = 1e-6  # of a value's norm, that what is taken from the other is off by in a layer before


class Layers:
    """Which of a program's sites is which layer's: steps of the innermost scan, or a name that is met again in each."""

    def __init__(self, points: Sequence[ProgramPoint], count: int) -> None:
        self.points, self.count = points, count

    def of(self, s: Site) -> int | None:
        """Return a site's layer; None of what is in none."""
        if s.step:
            return s.step[-1] if s.point.stacked[-1] == self.count else None
        again = self._again(s.point)
        return None if len(again) % self.count else again.index(s.point) * self.count // len(again)

    def at(self, s: Site, layer: int) -> Site:
        """Return the same site in another layer."""
        if s.step:
            return s._replace(step=(*s.step[:-1], layer))
        again = self._again(s.point)
        own = again.index(s.point)
        per = len(again) // self.count
        return s._replace(point=again[layer * per + own % per])

    def _again(self, p: ProgramPoint) -> list[ProgramPoint]:
        return [q for q in self.points if base(q.name) == base(p.name) and not q.stacked]


def base(name: str) -> str:
    """Return a name without the number of its occurrence."""
    return name.partition("#")[0]


def layers_apart(first: Site, one: Observed, others: Others, same: set[Site]) -> tuple[int, ...]:
    """Return the layers in which a program makes a point otherwise, where it reads the other's values in each.

    ``first``: where it does so first; ``same``: its sites whose values are the other's. Empty where it is not known:
    where something that it reads is not found in the other in any layer so far.
    """
    count = first.point.stacked[-1] if first.step else sum(base(p.name) == base(first.point.name) for p in one.points)
    mine, its = Layers(one.points, count), Layers(others.of.points, count)
    here = mine.of(first)
    if here is None or count < 2:
        return ()
    planted = _planted(first, one, others, same, mine, its)
    if planted is None:
        return ()
    own = {s.point.name: one.whole(s) for s in (mine.at(first, i) for i in range(count))}
    made = one.remake(first.call, own | planted)
    apart = [i for i in range(count) if not others.has(one.value(mine.at(first, i), made))]
    return tuple(apart) if apart and apart[0] == here else ()


def _planted(
    first: Site, one: Observed, others: Others, same: set[Site], mine: Layers, its: Layers
) -> dict[str, Array] | None:
    """Return what a point reads as the other has it in every layer, by names; None where that is not known."""
    sites = [s for s in one.sites() if s.call == first.call]
    planted: dict[str, Array] = {}
    here = mine.of(first)
    assert here is not None
    new, seen = set(one.reads(first)), set[str]()

    @cache
    def known(layer: int) -> tuple[list[Site], Vectors]:
        there = [s for s in others.sites if its.of(s) == layer]
        return there, Vectors(others.of.value(s) for s in there)

    def taken(s: Site) -> Mapping[Site, Array] | None:
        """Return a site's value in every layer as the other has it."""
        for layer in range(here, -1, -1):
            if (at := mine.at(s, layer)) in same:
                there, vectors = known(layer)
                found = vectors.find(one.value(at))
                if found.share < ENOUGH or not len(found.lines):
                    continue
                each = {}
                for i in range(mine.count):
                    values = {n: others.of.value(its.at(t, i)) for n, t in enumerate(there)}
                    each[mine.at(s, i)] = replace_found(one.value(mine.at(s, i)), found, vectors, values)
                before = [(x, one.value(t)) for i in range(here) if (x := each[t := mine.at(s, i)]) is not None]
                if all(np.linalg.norm(x - y) <= AS_BEFORE * np.linalg.norm(y) for x, y in before):
                    return each
        return None

    while new:
        name = new.pop()
        seen.add(name)
        if base(name) == base(first.point.name):
            return None
        at = next((s for s in sites if one.tap(s) == name and mine.of(s) is not None), None)
        if at is None:
            continue
        each = taken(at)
        if each is None:
            new |= set(one.reads(at)) - seen
            continue
        for s, x in each.items():
            planted.setdefault(s.point.name, one.whole(s).copy())[s.step] = x
    return planted
