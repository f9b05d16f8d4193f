"""Exponentials of logits of which the largest was not taken off: they overflow."""

from collections.abc import Iterable, Iterator, Sequence

from precaudit.checks.lint.flow import Equation, Graph, through_scaling
from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.rules.rounded_scores import EXPONENTIALS, exponential_of
from precaudit.checks.lint.view import CallView

LARGEST = {"float16": "11", "bfloat16": "88", "float32": "88", "float64": "709"}  # whose exponential is finite


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit where a product's results are exponentiated as they are, for a softmax or the log of their sum."""
    for view in views:
        for e in view.equations:
            if e.primitive in EXPONENTIALS and _reads_a_product(view.graph, e) and exponential_of(view.graph, e):
                says = f"exp of logits in {e.result} is infinite above {LARGEST.get(e.result, 'some x')}: {SAYS}"
                yield Hit(view.phase, e.source, e.point, says)


def _reads_a_product(graph: Graph, exponential: Equation) -> bool:
    """Whether logits come there without a difference, a bound or a function between: from a product, scaled, biased."""

    def passes(e: Equation) -> Iterable[int]:
        return (0, 1) if e.primitive == "add" else through_scaling(graph, e)

    behind = graph.behind(exponential.inputs[0], passes, through_loops=False)
    return next(graph.made_by(behind, "dot_general"), None) is not None


SAYS = "a sum of such terms is infinite, and a softmax of them NaN."
RULE = Rule(
    "unshifted-exp",
    "warning",
    "jaxpr",
    "Exponentials of logits without their largest subtracted",
    f"A logit above 88 (11 in float16) has an infinite exponential: {SAYS}",
    "jax.nn.logsumexp(x), jax.nn.softmax(x), or jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))",
    "Blanchard, Higham & Higham 2021, Accurately computing the log-sum-exp and softmax functions",
    check,
)
