"""A variance that is the mean of squares less the square of the mean."""

from collections.abc import Iterable, Iterator, Sequence

from precaudit.checks.lint.flow import Equation, Graph, as_moved, through_scaling
from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.rules.narrow_statistics import of_squares
from precaudit.checks.lint.view import CallView

AVERAGES = ("psum", "psum_invariant", "pmean")  # over shards of what is averaged


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit E[x²] − E[x]² of one x."""
    for view in views:
        for e in view.equations:
            if e.primitive == "sub" and _is_variance(view.graph, e):
                yield Hit(view.phase, e.source, e.point)


def _is_variance(graph: Graph, e: Equation) -> bool:
    sums = [s for s in graph.made_by(_behind(graph, e.inputs[0]), "reduce_sum") if of_squares(graph, s)]
    if not sums:
        return False
    of = {v for s in sums for v in _squared(graph, s)}
    for square in graph.made_by(_behind(graph, e.inputs[1]), "square", "integer_pow", "mul"):
        if not _squares(square):
            continue
        for mean in graph.made_by(_behind(graph, square.inputs[0]), "reduce_sum"):
            if of & graph.behind(mean.inputs[0], as_moved).keys():
                return True
    return False


def _behind(graph: Graph, value: int) -> dict[int, None]:
    def passes(e: Equation) -> Iterable[int]:
        return (0,) if e.primitive in AVERAGES else through_scaling(graph, e)

    return graph.behind(value, passes, through_loops=False)


def _squared(graph: Graph, total: Equation) -> Iterator[int]:
    """Yield the values whose squares a sum adds up."""
    for square in graph.made_by(_behind(graph, total.inputs[0]), "square", "integer_pow", "mul"):
        if _squares(square):
            yield from graph.behind(square.inputs[0], as_moved)


def _squares(e: Equation) -> bool:
    return e.primitive == "square" or e.made.params.get("y") == 2 or (e.primitive == "mul" and len(set(e.inputs)) == 1)


RULE = Rule(
    "fast-variance",
    "warning",
    "jaxpr",
    "A variance as the mean of squares less the square of the mean",
    "E[x²] − E[x]² cancels where the mean is large: one of 4,096 standard deviations keeps no digit in "
    "float32 (2⁻²⁴ · 4,096² = 1), and the result may be negative.",
    "jnp.var(x), or jnp.mean(jnp.square(x - jnp.mean(x))); in Flax use_fast_variance=False",
    "Chan, Golub & LeVeque 1983, Algorithms for computing the sample variance: analysis and recommendations",
    check,
)
