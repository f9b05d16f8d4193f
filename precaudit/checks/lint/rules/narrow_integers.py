"""Positions, counts and indices in bfloat16 or float16 that the format does not hold exactly."""

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from precaudit.checks.lint.flow import NARROW, Equation, Graph, as_moved
from precaudit.checks.lint.intervals import HELD, WholeRange
from precaudit.checks.lint.rule import Hit, Rule, Severity
from precaudit.checks.lint.rules.narrow_angles import turns
from precaudit.checks.lint.rules.rounded_scores import EXPONENTIALS, exponential_of
from precaudit.checks.lint.view import CallView
from precaudit.checks.lint.whole import Ranges

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
KEEPS = (
    "add",
    "sub",
    "mul",
    "max",
    "min",
    "rem",
    "neg",
    "abs",
    "floor",
    "ceil",
    "round",
    "reduce_max",
    "reduce_min",
    "reduce_sum",
    "cumsum",
    "cummax",
    "clamp",
    "dynamic_update_slice",
)
INDICES = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2, "scatter": 1, "scatter-add": 1}  # from here on


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit what makes whole numbers that its narrow format does not hold, where they place, compare or turn."""
    for view in views:
        found: dict[tuple[str, str], list[Hit]] = {}
        for value, dtype, made, e in origins(view.graph, view.whole):
            r = view.whole[value]
            if not _is_mask(view.graph, value) and (used := uses(view.graph, view.whole, value, r, dtype)):
                size = "of any size" if r.most == inf else f"up to {r.most:,.0f}"
                says = f"{made} integers {size} in {dtype}, which holds them only up to {HELD[dtype]:,.0f}: {used}."
                severity: Severity = "warning" if r.most == inf else "error"
                found.setdefault((e.source, e.point), []).append(
                    Hit(view.phase, e.source, e.point, says, severity=severity)
                )
        for hits in found.values():
            sure = [h for h in hits if h.severity == "error"]
            yield from sure or hits


def origins(graph: Graph, whole: Ranges) -> Iterator[tuple[int, str, str, Equation]]:
    """Yield (value, format, what made it, equation) where narrow whole numbers are first larger than is held.

    Of a constant of the program: the equation that reads it first.
    """

    def is_lost(v: int) -> bool:
        return graph.dtypes[v] in NARROW and v in whole and whole[v].exceeds(graph.dtypes[v])

    given = {c.read: s for c in graph.carried for s in graph.joins.get(c.read, ()) if s != c.left}

    def first(v: int) -> int:
        while v in given:
            v = given[v]
        return v

    for v in graph.constants:
        if is_lost(v) and graph.scalar(v) is None and (readers := graph.users.get(v)):
            yield v, graph.dtypes[v], "A constant has", readers[0]
    for e in graph.equations:
        made = e.outputs[0] if e.outputs else None
        if made is None or graph.makers.get(made) is not e or graph.scalar(made) is not None:
            continue
        if is_lost(made) and not any(is_lost(v) and is_lost(first(v)) for v in e.inputs):
            how = "A conversion makes" if e.primitive == "convert_element_type" else f"{e.primitive} makes"
            yield made, e.result, how, e


def _is_mask(graph: Graph, value: int) -> bool:
    """Whether it is a choice among numbers of the program's text, such as 0 and −10⁹: a mask, and no count."""
    ends = [v for v in graph.behind(value, as_moved) if v not in graph.joins and not _moves(graph, v)]
    return all(graph.scalar(v) is not None for v in ends)


def _moves(graph: Graph, value: int) -> bool:
    e = graph.makers.get(value)
    return e is not None and bool(tuple(as_moved(e)))


def uses(graph: Graph, whole: Ranges, value: int, r: WholeRange, dtype: str) -> str:
    """Return what whole numbers are for, of what a number that is off makes another: in words, "" for nothing."""
    numbers = graph.ahead(value, lambda e: _through_multiples(e) if e.outputs and e.outputs[0] in whole else ())
    found = {
        "they are compared": any(is_compared(graph, whole, v, dtype) for v in numbers),
        "they are indices": any(indexes(graph, v, dtype) for v in numbers),
    }
    ends = graph.ahead(
        value, lambda e: (*_through_multiples(e), *((0, 1) if e.primitive in ("div", "dot_general") else ()))
    )
    readers = [e for v in ends for e in graph.users.get(v, ())]
    found["they are positions of an angle"] = any(turns(e) for e in readers)
    counts = r.most < inf and any(e.primitive in EXPONENTIALS for e in readers)
    found["they are distances in a softmax"] = counts and any(
        "softmax" in exponential_of(graph, e) for e in readers if e.primitive in EXPONENTIALS
    )
    return " and ".join(says for says, is_so in found.items() if is_so)


def is_compared(graph: Graph, whole: Ranges, value: int, dtype: str) -> bool:
    """Whether it is compared with what may be as large: with less, rounding turns no comparison."""
    for e in graph.users.get(value, ()):
        if e.primitive in COMPARISONS and e.inputs[0] != e.inputs[1]:
            other = whole.get(e.inputs[e.inputs[0] == value])
            if other is None or other.most >= HELD[dtype]:
                return True
    return False


def indexes(graph: Graph, value: int, dtype: str) -> bool:
    """Whether it is an index into more elements than its format counts."""
    return any(
        value in e.inputs[INDICES[e.primitive] :] and max(graph.shapes[e.inputs[0]], default=0) > HELD[dtype]
        for e in graph.users.get(value, ())
        if e.primitive in INDICES
    )


def _through_multiples(e: Equation) -> Iterable[int]:
    """Pass through what leaves whole numbers whole numbers, or makes multiples of them."""
    if e.primitive in COMPARISONS or e.result == "bool":
        return ()
    return range(len(e.inputs)) if e.primitive in KEEPS else as_moved(e)


RULE = Rule(
    "narrow-integers",
    "error",
    "jaxpr",
    "Positions or counts that their format does not hold",
    "Positions, counts or indices are stored in bfloat16 or float16, which hold every integer only up to 256 or 2,048: "
    "larger ones are rounded to others.",
    "int32 for positions, counts and indices, and float32 where an angle is computed from them",
    "the program's equations; IEEE 754: a significand of p bits holds each integer up to 2^p",
    check,
)
