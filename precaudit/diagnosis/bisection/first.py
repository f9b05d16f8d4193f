"""The first of a row of states that is bad: binary search, past states that cannot be told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FirstBad:
    """``good`` and ``bad``: the states nearest to each other that were told; ``between``: those that could not be."""

    good: int
    bad: int
    between: tuple[int, ...] = ()


def first_bad(
    count: int, ask: Callable[[int], bool | None], ahead: Callable[[Sequence[int]], None] | None = None
) -> FirstBad:
    """Return where states 0 to ``count`` − 1 turn bad; the first is good, the last one bad.

    ``ask(i)`` says whether a state is bad, None where that cannot be told: then its neighbours are asked. Where states
    turn several times it is one of these turns. ``ahead``: is told the states that may be asked for next.
    """
    good, bad = 0, count - 1
    untold: set[int] = set()
    while rest := [i for i in range(good + 1, bad) if i not in untold]:
        middle = (good + bad) / 2
        i = min(rest, key=lambda x: abs(x - middle))
        if ahead is not None:
            ahead([i, *({(good + i) // 2, (i + bad) // 2} - {good, i, bad})])
        is_bad = ask(i)
        if is_bad is None:
            untold.add(i)
        elif is_bad:
            bad = i
        else:
            good = i
    return FirstBad(good, bad, tuple(range(good + 1, bad)))
