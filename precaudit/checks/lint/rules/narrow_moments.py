"""Running averages, such as an optimizer's moments, that are kept in bfloat16 or float16."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from precaudit.checks.lint.flow import NARROW, Equation, Graph, as_moved, through_scaling
from precaudit.checks.lint.intervals import HELD
from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.view import CallView
from precaudit.schema.digits import digits

LONGEST = 1 / 8  # what is forgotten in a step: of more, rounding stays below 8 of its units


class Average(NamedTuple):
    """``state`` becomes keep · state + a term, with ``keep`` as its format holds it; None: the program is given it."""

    state: int
    keep: float | None
    term: int


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit the sums that make a running average of the one before, where both are kept in a narrow format."""
    for view in views:
        for e in view.equations:
            for a in averages(view.graph, e):
                if dtype := state_format(view.graph, e, a.state):
                    lost = a.keep is not None and 1 - a.keep < 1 / HELD[dtype]
                    says = f"{_name(view.graph, a.term)} is kept in {dtype}: {_says(a.keep, dtype)}."
                    yield Hit(view.phase, e.source, e.point, says, severity="error" if lost else "warning")
                    break


def averages(graph: Graph, e: Equation) -> Iterator[Average]:
    """Yield how a sum or difference may be a running average: b · m + x, m + c · (x − m) or m − c · (m − x)."""
    for k in (0, 1) if e.primitive == "add" else (0,) if e.primitive == "sub" else ():
        first, term = e.inputs[k], e.inputs[1 - k]
        weights = list(_weights(graph, term))
        for m, b, number in _weights(graph, first):
            small = [c for _, c, _ in weights if c is not None and 0 < c <= LONGEST]
            if b is not None and (1 - LONGEST <= b < 1 or (b == 1 and small)):
                yield Average(m, b, term)
            elif b is None and any(_is_rest(graph, w, number) for _, _, w in weights):
                yield Average(m, None, term)
        for difference, c, _ in weights:
            if c is not None and 0 < c <= LONGEST:
                for d in graph.made_by(graph.behind(difference, as_moved), "sub"):
                    if any(_source(graph, v) & _source(graph, first) for v in d.inputs):
                        yield Average(first, 1 - c, difference)


def _weights(graph: Graph, value: int) -> Iterator[tuple[int, float | None, int]]:
    """Yield (what is multiplied, the number, the value that holds it) of the product that a value is, moved or not."""
    for e in graph.made_by(graph.behind(value, as_moved, False), "mul"):
        for k in (0, 1):
            if graph.single(e.inputs[1 - k]):
                yield e.inputs[k], graph.scalar(e.inputs[1 - k]), e.inputs[1 - k]


def _is_rest(graph: Graph, weight: int, number: int) -> bool:
    """Whether a weight is 1 less a number."""
    return any(
        graph.scalar(e.inputs[0]) == 1 and _source(graph, e.inputs[1]) & _source(graph, number)
        for e in graph.made_by(graph.behind(weight, as_moved), "sub")
    )


def _source(graph: Graph, value: int) -> set[int]:
    """Return the values that it is, moved and converted, literals of the text aside."""
    return {v for v in graph.behind(value, as_moved, False) if graph.scalar(v) is None}


def state_format(graph: Graph, e: Equation, state: int) -> str:
    """Return the narrow format that a state and what is made of it are both held in: by a loop, or the caller."""
    behind = graph.behind(state, as_moved)
    ahead = graph.ahead(e.outputs[0], _through_addition)
    for c in graph.carried:
        if c.read in behind and c.left in ahead and graph.dtypes[c.read] in NARROW:
            return graph.dtypes[c.read]
    given = {(graph.dtypes[v], graph.shapes[v]) for v in behind if _is_given(graph, v)}
    left = {(graph.dtypes[v], graph.shapes[v]) for v in graph.results if v in ahead}
    return next((dtype for dtype, _ in given & left if dtype in NARROW), "")


def _through_addition(e: Equation) -> Iterable[int]:
    return (0, 1) if e.primitive in ("add", "sub") else as_moved(e)


def _is_given(graph: Graph, v: int) -> bool:
    return v not in graph.makers and v not in graph.joins and v not in graph.constants


def _name(graph: Graph, term: int) -> str:
    """Return what an average is of: squares make it a second moment."""
    made = graph.made_by(graph.behind(term, lambda e: through_scaling(graph, e)), "square", "integer_pow", "mul")
    squares = any(
        s.primitive == "square" or s.made.params.get("y") == 2 or (s.primitive == "mul" and len(set(s.inputs)) == 1)
        for s in made
    )
    return "A running average of squares (a second moment)" if squares else "A running average"


def _says(keep: float | None, dtype: str) -> str:
    """Return what rounding does to it: errors of the steps before fade as it does (a geometric sum of u each)."""
    u = 1 / HELD[dtype]
    if keep is None:
        return "every step rounds it; how much it forgets in a step is given when it runs"
    if 1 - keep < u:
        return (
            f"what it forgets in a step, {digits(1 - keep, 2)} of itself, is less than the unit roundoff, "
            f"{digits(u, 2)}, and is rounded away: it hardly ever falls"
        )
    return f"every step rounds it, and it is wrong by up to {digits(u / (1 - keep), 2)} of itself"


RULE = Rule(
    "narrow-moments",
    "warning",
    "jaxpr",
    "Running averages kept in bfloat16 or float16",
    "A running average, such as an optimizer's first or second moment, is kept in bfloat16 or float16: what changes it "
    "by less than half an ulp is lost, and with a decay near 1 it hardly ever falls.",
    "keep it in float32 (optax: mu_dtype=float32, and float32 parameters, whose format the second moment has)",
    "the program's equations; N. J. Higham, Accuracy and Stability of Numerical Algorithms (2002), 2.2",
    check,
)
