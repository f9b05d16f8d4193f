"""Running sums that are held in bfloat16 or float16."""

from collections.abc import Iterator, Sequence
from math import prod

from precaudit.checks.lint.flow import NARROW, Carried, Equation, Graph, as_moved
from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.view import CallView

MANY = 8  # terms
SCANS = ("cumsum", "cumprod", "cumlogsumexp")


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit narrow scans and windows of many terms, and narrow sums that a loop carries."""
    for view in views:
        for e in view.equations:
            if e.result in NARROW and (n := summed_terms(e)) >= MANY:
                yield Hit(view.phase, e.source, e.point, f"{e.primitive} adds up {n:,} terms in {e.result}: {SAYS}")
        for c in view.graph.carried:
            if view.graph.dtypes[c.read] in NARROW and (c.steps is None or c.steps >= MANY):
                for e in carried_additions(view.graph, c):
                    over = "a loop" if c.steps is None else f"{c.steps:,} steps"
                    says = f"A sum that {over} add to is stored in {view.graph.dtypes[c.read]}: {SAYS}"
                    yield Hit(view.phase, e.source, e.point, says)


def summed_terms(e: Equation) -> int:
    """Return how many terms a scan or window adds up; 0 of other equations."""
    if e.primitive in SCANS:
        return int(e.made.invars[0].aval.shape[e.made.params["axis"]])
    window = e.primitive == "reduce_window_sum" or (
        e.primitive == "reduce_window" and e.made.params["jaxpr"].eqns[-1].primitive.name in ("add", "mul")
    )
    return prod(e.made.params["window_dimensions"]) if window else 0


def carried_additions(graph: Graph, c: Carried) -> Iterator[Equation]:
    """Yield the additions that make what a step leaves of what it reads and a term that does not depend on it."""
    for e in graph.made_by(graph.behind(c.left, as_moved, False), "add", "add_any", "sub"):
        for k in (0, 1) if e.primitive != "sub" else (0,):
            from_carry = c.read in graph.behind(e.inputs[k], as_moved, False)
            term = graph.behind(e.inputs[1 - k], lambda x: range(len(x.inputs)), False)
            if from_carry and c.read not in term:
                yield e


SAYS = "it is rounded at every step, and small terms are lost."
RULE = Rule(
    "narrow-scan",
    "warning",
    "jaxpr",
    "Running sums in bfloat16 or float16",
    f"A cumulative sum, a sum over a window or one that a loop carries is stored in bfloat16 or float16: {SAYS}",
    "cast to float32 before and back after; a loop's sum begins as float32",
    "the program's equations",
    check,
)
