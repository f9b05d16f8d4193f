"""A one beside a small value: in a logarithm of their sum or difference, or taken from an exponential."""

from collections.abc import Iterator, Sequence

import numpy as np

from precaudit.checks.lint.flow import Equation, Graph, as_moved
from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.view import CallView

LOST = {"bfloat16": "0.004", "float16": "0.0005", "float32": "6e-8", "float64": "1e-16"}  # half an ulp of one
COUNTS = ("int", "uint", "bool")  # formats whose values are whole: 1 + n is exact


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit log(1 + x), log(1 - x) and exp(x) - 1, of an x that is no whole number."""
    for view in views:
        for e in view.equations:
            if e.primitive == "log" and (one := _beside_one(view.graph, e)) is not None:
                yield Hit(view.phase, e.source, e.point, _log_says(view.graph, *one))
            elif e.primitive in ("sub", "add") and _exponential_less_one(view.graph, e):
                says = f"exp(x) − 1 in {e.result} is 0 for |x| below {LOST.get(e.result, 'an ulp')}: write expm1(x)."
                yield Hit(view.phase, e.source, e.point, says)


def _beside_one(graph: Graph, log: Equation) -> tuple[Equation, int] | None:
    """Return the sum or difference of 1 and a value that a logarithm is of, and which of its inputs the value is."""
    for e in graph.made_by(graph.behind(log.inputs[0], as_moved, through_loops=False), "add", "sub"):
        for k in (0, 1):
            one = graph.scalar(e.inputs[1 - k])
            if (one == 1.0 and (e.primitive == "add" or k == 1)) and not _is_whole(graph, e.inputs[k]):
                return e, k
    return None


def _is_whole(graph: Graph, value: int) -> bool:
    """Whether a value was converted from integers."""
    return any(graph.dtypes[v].startswith(COUNTS) for v in graph.behind(value, as_moved))


def _log_says(graph: Graph, e: Equation, k: int) -> str:
    held, sign = LOST.get(e.result, "an ulp"), "+" if e.primitive == "add" else "−"
    behind = graph.behind(e.inputs[k], as_moved)
    if sign == "−" and next(graph.made_by(behind, "logistic"), None) is not None:
        most = f"{-np.log(float(held)):.0f}" if held[0].isdigit() else "some x"
        return f"log(1 − sigmoid(x)) in {e.result} is −∞ from about x = {most} on: write log_sigmoid(−x)."
    if sign == "+" and next(graph.made_by(behind, "exp"), None) is not None:
        return (
            f"log(1 + exp(x)) in {e.result} is 0 where exp(x) is below {held}, and infinite for large x: softplus(x)."
        )
    return f"log(1 {sign} x) in {e.result} is 0 for x below {held}: write log1p({'' if sign == '+' else '−'}x)."


def _exponential_less_one(graph: Graph, e: Equation) -> bool:
    for k in (0, 1):
        one = graph.scalar(e.inputs[1 - k])
        if one == (1.0 if e.primitive == "sub" else -1.0) and (e.primitive == "add" or k == 0):
            behind = graph.behind(e.inputs[k], as_moved, through_loops=False)
            return next(graph.made_by(behind, "exp", "exp2"), None) is not None
    return False


RULE = Rule(
    "cancelled-one",
    "warning",
    "jaxpr",
    "A one that swallows a small value beside it",
    "1 + x keeps only those digits of a small x that are above half an ulp of one, and so does exp(x) − 1: digits of "
    "x are lost before the logarithm or after the exponential.",
    "jnp.log1p(x), jnp.expm1(x), jax.nn.softplus(x), or jax.nn.log_sigmoid(−x) for log(1 − sigmoid(x))",
    "Higham 2002, Accuracy and Stability of Numerical Algorithms, §1.14.1",
    check,
)
