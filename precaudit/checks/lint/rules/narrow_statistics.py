"""Statistics of a norm that are rounded before their root."""

from collections.abc import Iterable, Iterator, Sequence

from precaudit.checks.lint.flow import NARROW, Equation, Graph, as_moved, through_scaling
from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.view import CallView


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit where a sum of squares is narrow, or made narrow, on its way to a root."""
    for view in views:
        met: dict[int, Equation] = {}
        for e in view.equations:
            if root(view.graph, e):
                met.update((id(found), found) for found in root_roundings(view.graph, e))
        for e in met.values():
            says = f"The mean of squares is rounded to {e.result} before its root: {SAYS}"
            yield Hit(view.phase, e.source, e.point, says)


def root_roundings(graph: Graph, of: Equation) -> Iterator[Equation]:
    """Yield the sums of squares and conversions that round what a root reads."""

    def passes(e: Equation) -> Iterable[int]:
        if e.primitive in ("add", "sub", "max"):
            return (0, 1)
        return (0,) if e.primitive in ("psum", "abs") else through_scaling(graph, e)

    behind = graph.behind(of.inputs[0], passes)
    for total in graph.made_by(behind, "reduce_sum", "dot_general"):
        if not of_squares(graph, total):
            continue
        if total.result in NARROW:
            yield total
        for v in graph.ahead(total.outputs[0], passes):
            if v in behind and (e := graph.makers.get(v)) is not None and e.rounds:
                yield e


def root(graph: Graph, e: Equation) -> bool:
    """Whether it takes a square root."""
    if e.primitive == "pow":
        return graph.scalar(e.inputs[1]) in (0.5, -0.5)
    return e.primitive in ("rsqrt", "sqrt")


def of_squares(graph: Graph, e: Equation) -> bool:
    """Whether a sum is one of squares."""
    if e.primitive == "dot_general":
        return bool(graph.behind(e.inputs[0], as_moved).keys() & graph.behind(e.inputs[1], as_moved).keys())
    squares = graph.made_by(
        graph.behind(e.inputs[0], lambda e: through_scaling(graph, e)), "square", "integer_pow", "mul"
    )
    return any(
        s.primitive == "square" or s.made.params.get("y") == 2 or (s.primitive == "mul" and len(set(s.inputs)) == 1)
        for s in squares
    )


SAYS = "every element of the row is wrong by the same factor."
RULE = Rule(
    "narrow-statistics",
    "warning",
    "jaxpr",
    "Norm statistics rounded before their root",
    f"A mean of squares or a variance is stored in bfloat16 or float16 before its root: {SAYS}",
    "cast the row to float32 before it is squared, and the normalised row back",
    "the program's equations",
    check,
)
