"""Scores and logits that are rounded before a softmax, or before the log of a sum of exponentials."""

from collections.abc import Iterable, Iterator, Sequence

from precaudit.checks.lint.flow import NARROW, Equation, Graph, Passes, as_moved, through_scaling
from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.view import CallView

LOGARITHMS = ("log", "log1p", "log2")
EXPONENTIALS = ("exp", "exp2")
SUMS = ("psum", "psum_invariant")  # over shards of a vocabulary


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit where a product's result is rounded on its way to the exponentials of a softmax, or of a log of their sum."""
    for view in views:
        met: dict[int, tuple[Equation, bool]] = {}
        for e in view.equations:
            if e.primitive in EXPONENTIALS and (found := exponential_of(view.graph, e)):
                for r in roundings(view.graph, e):
                    met[id(r)] = r, "softmax" in found or met.get(id(r), (r, False))[1]
        for e, softmax in met.values():
            yield Hit(view.phase, e.source, e.point, SCORES.format(e.result) if softmax else LOGITS.format(e.result))


def roundings(graph: Graph, exponential: Equation) -> Iterator[Equation]:
    """Yield the products and conversions that round what an exponential reads."""

    def passes(e: Equation) -> Iterable[int]:
        if e.primitive in ("sub", "tanh", "neg"):
            return (0,)
        return (0, 1) if e.primitive in ("add", "max", "min") else through_scaling(graph, e)

    behind = graph.behind(exponential.inputs[0], passes)
    for product in graph.made_by(behind, "dot_general"):
        if product.result in NARROW:
            yield product
        for v in graph.ahead(product.outputs[0], passes):
            if v in behind and (e := graph.makers.get(v)) is not None and e.rounds:
                yield e


def exponential_of(graph: Graph, e: Equation) -> set[str]:
    """Return what an exponential is a part of: ``softmax``, ``logarithm`` of a sum of exponentials, both or neither."""
    terms = graph.ahead(e.outputs[0], _terms)
    sums = further(graph, terms, "reduce_sum", _terms)
    found = {"softmax"} if sums and _is_softmax(graph, terms, sums) else set()
    logged = any(user.primitive in LOGARITHMS for v in sums for user in graph.users.get(v, ()))
    return found | ({"logarithm"} if logged or _less_a_logarithm(graph, e) else set())


def _terms(e: Equation) -> Iterable[int]:
    if e.primitive in (*SUMS, "abs"):
        return (0,)
    return (0, 1) if e.primitive in ("mul", "add") else as_moved(e)


def _is_softmax(graph: Graph, terms: Iterable[int], sums: Iterable[int]) -> bool:
    """Whether an exponential, or a product with it, is divided by its sum."""
    parts = {*terms, *further(graph, terms, "dot_general", _terms)}
    inverses: set[int] = set()
    for v in sums:
        for user in graph.users.get(v, ()):
            if user.primitive == "div" and user.inputs[1] == v:
                if user.inputs[0] in parts:
                    return True
                inverses.update(graph.ahead(user.outputs[0], as_moved))
            elif user.primitive == "integer_pow" and user.made.params["y"] == -1:
                inverses.update(graph.ahead(user.outputs[0], as_moved))
    return any(
        user.primitive == "mul" and set(user.inputs) & parts - {v} for v in inverses for user in graph.users.get(v, ())
    )


def _less_a_logarithm(graph: Graph, e: Equation) -> bool:
    """Whether a log of a sum is taken from what an exponential reads: a softmax, as backward passes make it again."""

    def passes(x: Equation) -> Iterable[int]:
        return (0, 1) if x.primitive in ("add", "sub") else as_moved(x)

    for taken in graph.made_by(graph.behind(e.inputs[0], as_moved), "sub"):
        for log in graph.made_by(graph.behind(taken.inputs[1], passes), *LOGARITHMS):
            if next(graph.made_by(graph.behind(log.inputs[0], _terms), "reduce_sum"), None) is not None:
                return True
    return False


def further(graph: Graph, values: Iterable[int], primitive: str, passes: Passes) -> set[int]:
    """Return what is made of the results of a primitive that reads one of the values."""
    found: set[int] = set()
    for v in values:
        for user in graph.users.get(v, ()):
            if user.primitive == primitive:
                found.update(graph.ahead(user.outputs[0], passes))
    return found


SAYS = "a probability's relative error is the score's absolute one, up to half an ulp of the score."
SCORES = f"Scores are rounded to {{}} before their softmax: {SAYS}"
LOGITS = (
    "Logits are rounded to {} before the log of the sum of their exponentials: a log-probability is wrong by as much "
    "as a logit, up to half an ulp of it."
)
RULE = Rule(
    "rounded-scores",
    "warning",
    "jaxpr",
    "Scores or logits rounded before softmax",
    "Scores or logits are rounded to bfloat16 or float16 before their softmax, log_softmax, logsumexp or "
    f"cross-entropy: {SAYS}",
    "preferred_element_type=float32 on the product, and no conversion before the softmax or the loss; of a model here: "
    "--set scores=float32",
    "the program's equations",
    check,
)
