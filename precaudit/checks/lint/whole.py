"""Which values of a program are whole numbers, and between which two they lie: intervals, followed through its text.

Intervals: R. E. Moore, Interval Analysis (1966), with what loops carry taken as growing alike in every step.
"""

from collections.abc import Mapping
from typing import NamedTuple

from precaudit.checks.lint.flow import Carried, Equation, Graph
from precaudit.checks.lint.intervals import ANY, WholeRange, default, either, of_constant, product_range, result_range

PASSES = 16
TIMES = 3  # that what a loop carries may be found to grow by more

Ranges = Mapping[int, WholeRange]


class Grown(NamedTuple):
    """What all steps of a loop read, how far below and above one leaves it, and how often that was found anew."""

    read: WholeRange | None
    down: float = ANY
    up: float = ANY
    times: int = 0


def whole_numbers(graph: Graph) -> Ranges:
    """Return {value: range} of the values that are whole numbers, by the program's text."""
    read: dict[int, Grown] = {}
    for _ in range(PASSES):
        found = _once(graph, read)
        grown = {c.read: wider for c in graph.carried if (wider := _grown(graph, found, c, read.get(c.read)))}
        if not grown:
            return found
        read |= grown
    return _once(graph, read | {c.read: Grown(None) for c in graph.carried})


def _once(graph: Graph, read: Mapping[int, Grown]) -> dict[int, WholeRange]:
    """Return the ranges where loops carry what ``read`` says, or what they are first given."""
    lefts = {c.read: c.left for c in graph.carried}
    found: dict[int, WholeRange | None] = {v: of_constant(x) for v, x in graph.constants.items()}

    def of(v: int) -> WholeRange | None:
        if v not in found:
            found[v] = default(graph.dtypes[v])  # where a value is made of itself, or of what is made later
            sources = [s for s in graph.joins.get(v, ()) if s != lefts.get(v)]
            if v in read:
                found[v] = read[v].read
            elif sources and all(s in found or s not in graph.makers for s in sources):
                found[v] = either([of(s) for s in sources])
        return found[v]

    for e in graph.equations:
        if e.outputs and graph.makers.get(e.outputs[0]) is e:
            given = [of(v) for v in e.inputs]
            found |= {v: _modulo(graph, found, e) or result_range(e, given, k) for k, v in enumerate(e.outputs)}
    known = ((v, of(v)) for v in range(len(graph.shapes)))
    return {v: r for v, r in known if r is not None}


def _modulo(graph: Graph, found: Mapping[int, WholeRange | None], e: Equation) -> WholeRange | None:
    """Return the range of ``a % n`` with a positive n, which jnp makes as a choice of a remainder and that plus n."""
    if e.primitive != "select_n" or len(e.inputs) != 3:
        return None
    rest, plus = (graph.makers.get(v) for v in e.inputs[1:])
    if rest is None or plus is None or (rest.primitive, plus.primitive) != ("rem", "add"):
        return None
    n = found.get(rest.inputs[1])
    if n is None or n.low < 1 or set(plus.inputs) != {e.inputs[1], rest.inputs[1]}:
        return None
    return WholeRange(0, n.high - 1)


def _grown(graph: Graph, found: Ranges, c: Carried, before: Grown | None) -> Grown | None:
    """Return what all steps of a loop read, where that is not what was taken: growing by as much in each step.

    What grows by more each time it is looked at may be any number.
    """
    read, left = found.get(c.read), found.get(c.left)
    first = either([found.get(s) for s in graph.joins[c.read] if s != c.left])
    if read is None or first is None or left is None:
        return None if read is None else Grown(None)
    down = read.low - left.low if left.low < read.low else 0.0
    up = left.high - read.high if left.high > read.high else 0.0
    known = before or Grown(read, 0.0, 0.0)
    often = known.times + (down > known.down or up > known.up)
    down, up = max(down, known.down), max(up, known.up)
    steps = ANY if c.steps is None or often > TIMES else c.steps - 1
    low, high = (
        min(read.low, first.low - product_range(steps, down)),
        max(read.high, first.high + product_range(steps, up)),
    )
    if up and (limit := _limit(graph, found, c)) < high:
        high, up = max(limit, first.high), ANY
    wide = WholeRange(low, high, min(first.step, left.step))
    return None if wide.within(read) else Grown(wide, down, up, often)


def _limit(graph: Graph, found: Ranges, c: Carried) -> float:
    """Return the largest number that a loop's condition lets a step read."""
    todo, most = [] if c.condition is None else [c.condition], ANY
    while todo:
        e = graph.makers.get(todo.pop())
        if e is not None and e.primitive == "and":
            todo.extend(e.inputs)
        elif e is not None and e.primitive in ("lt", "le") and e.inputs[0] == c.read and e.inputs[1] in found:
            most = min(most, found[e.inputs[1]].high - (e.primitive == "lt"))
    return most
