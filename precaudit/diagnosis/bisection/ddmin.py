"""Delta debugging: a small set of changes that has an effect (Zeller & Hildebrandt, IEEE TSE 28(2), 2002).

``ask(changes)`` says whether these changes have the effect: True, False, or None where that cannot be told. All of
them together have it, none of them has not. Nothing here says that more changes have what fewer have.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Literal

Changes = tuple[str, ...]
Ask = Callable[[Changes], bool | None]
Strength = Callable[[Changes], float | None]  # of the effect, as far as it is a number
Ahead = Callable[[Sequence[Changes]], None]  # is told the sets that are asked for next, in order
Proof = Literal["smallest", "1-minimal", "open"]


@dataclass(frozen=True)
class Smallest:
    """Sets of changes that have the effect, all of one size, and what is known of that size.

    ``proof``: ``smallest``, no set of fewer changes has it; ``1-minimal``, none of these sets without one of its
    changes has it; ``open``, some of those sets could not be told.
    """

    sets: tuple[Changes, ...]
    proof: Proof


def tell_nobody(sets: Sequence[Changes]) -> None:
    """Begin with nothing ahead."""


def ddmin(changes: Changes, ask: Ask, ahead: Ahead = tell_nobody) -> Changes:
    """Return some of the changes that have the effect, and lose it without any one of them.

    Section 3.2 of the paper: halves, then finer parts, then what is left without a part. What cannot be told is taken
    as without the effect.
    """
    parts = 2
    while len(changes) >= 2:
        cut = list(_split(changes, parts))
        rests = [_without(changes, part) for part in cut] if parts > 2 else []
        ahead([*cut, *rests])
        if (part := _first(cut, ask)) is not None:
            changes, parts = part, 2
        elif (rest := _first(rests, ask)) is not None:
            changes, parts = rest, max(parts - 1, 2)
        elif parts >= len(changes):
            break
        else:
            parts = min(2 * parts, len(changes))
    return changes


def strongest_first(changes: Changes, ask: Ask, strength: Strength, ahead: Ahead = tell_nobody) -> Changes | None:
    """Return a 1-minimal set of the changes that do most alone; None where that is no number for some.

    The strongest are taken until they have the effect: how many is found by halving. Then each is
    taken out, the weakest first, until none can be. What cannot be told is taken as without the effect.
    """
    each = {c: x for c in changes if (x := strength((c,))) is not None}
    if len(each) < len(changes):
        return None
    ranked = sorted(changes, key=lambda c: -each[c])
    low, high = 1, len(ranked)  # the strongest ``low`` have not the effect, ``high`` have it
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if ask(_in_order(changes, ranked[:middle])) else (middle, high)
    found, weakest = _in_order(changes, ranked[:high]), ranked[high - 1 :: -1]
    while True:
        rests = [_without(found, (c,)) for c in weakest if c in found and len(found) > 1]
        ahead(rests)
        rest = _first(rests, ask)
        if rest is None:
            return found
        found = rest


def smallest_sets(
    changes: Changes, ask: Ask, singles: int, most: int, ahead: Ahead = tell_nobody, strength: Strength = lambda _: None
) -> Smallest:
    """Return smallest sets of changes that have the effect, or one that is only 1-minimal.

    Every change is tried alone where there are at most ``singles`` of them: all that have the effect alone are
    returned. Else ``strongest_first`` finds a set, or ``ddmin`` where the effect is no number; smaller ones are tried
    as long as no more than ``most`` of them are new.
    """
    answers: dict[Changes, bool | None] = {}

    def remember(some: Changes) -> bool | None:
        if some not in answers:
            answers[some] = ask(some)
        return answers[some]

    if len(changes) <= singles:
        ahead([(c,) for c in changes])
        alone = tuple((c,) for c in changes if remember((c,)))
        if alone:
            return Smallest(alone, "smallest")
    found = strongest_first(changes, remember, strength, ahead) if len(changes) <= singles else None
    found = ddmin(changes, remember, ahead) if found is None else found
    return _prove(changes, found, remember, answers, most, ahead)


def _prove(
    changes: Changes, found: Changes, ask: Ask, answers: dict[Changes, bool | None], most: int, ahead: Ahead
) -> Smallest:
    """Try every set that is smaller than the one that was found, the smallest first."""
    told = True
    for size in range(1, len(found)):
        new = comb(len(changes), size) - sum(len(some) == size for some in answers)
        if new > most:
            lacking = any(answers.get(rest, True) is None for rest in combinations(found, len(found) - 1))
            return Smallest((found,), "open" if lacking else "1-minimal")
        most -= new
        ahead([some for some in combinations(changes, size) if some not in answers])
        for some in combinations(changes, size):
            holds = ask(some)
            told = told and holds is not None
            if holds:
                return Smallest((some,), "smallest" if told else "open")
    return Smallest((found,), "smallest" if told else "open")


def _first(sets: Sequence[Changes], ask: Ask) -> Changes | None:
    return next((some for some in sets if ask(some)), None)


def _split(changes: Changes, parts: int) -> Iterator[Changes]:
    """Yield the changes in so many parts of nearly equal size."""
    begin = 0
    for i in range(parts):
        end = begin + (len(changes) - begin) // (parts - i)
        yield changes[begin:end]
        begin = end


def _in_order(changes: Changes, some: Collection[str]) -> Changes:
    return tuple(c for c in changes if c in some)


def _without(changes: Changes, part: Changes) -> Changes:
    return tuple(c for c in changes if c not in part)
