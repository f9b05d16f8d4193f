"""Scores that are rounded before a softmax."""

from collections.abc import Iterable, Iterator, Sequence

from precaudit.lint.flow import NARROW, Equation, Graph, Passes, as_moved, scaled
from precaudit.lint.rule import Hit, Rule
from precaudit.lint.view import View


def check(views: Sequence[View]) -> Iterator[Hit]:
    """Hit where a product's result is rounded on its way to the exponential of a softmax."""
    for view in views:
        met: dict[int, Equation] = {}
        for e in view.equations:
            if e.primitive in ("exp", "exp2") and normalised(view.graph, e):
                met.update((id(found), found) for found in roundings(view.graph, e))
        for e in met.values():
            yield Hit(view.phase, e.source, e.point, f"Scores are rounded to {e.result} before their softmax: {SAYS}")


def roundings(graph: Graph, exponential: Equation) -> Iterator[Equation]:
    """Yield the products and conversions that round what an exponential reads."""

    def passes(e: Equation) -> Iterable[int]:
        if e.primitive in ("sub", "tanh", "neg"):
            return (0,)
        return (0, 1) if e.primitive in ("add", "max", "min") else scaled(graph, e)

    behind = graph.behind(exponential.inputs[0], passes)
    for product in graph.made_by(behind, "dot_general"):
        if product.result in NARROW:
            yield product
        for v in graph.ahead(product.outputs[0], passes):
            if v in behind and (e := graph.makers.get(v)) is not None and e.rounds:
                yield e


def normalised(graph: Graph, e: Equation) -> bool:
    """Whether an exponential, or a product with it, is divided by its sum."""

    def passes(e: Equation) -> Iterable[int]:
        return (0, 1) if e.primitive in ("mul", "add") else as_moved(e)

    terms = graph.ahead(e.outputs[0], passes)
    sums = _further(graph, terms, "reduce_sum", passes)
    if not sums:
        return False
    parts = terms.keys() | _further(graph, terms, "dot_general", passes)
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


def _further(graph: Graph, values: Iterable[int], primitive: str, passes: Passes) -> set[int]:
    """Return what is made of the results of a primitive that reads one of the values."""
    found: set[int] = set()
    for v in values:
        for user in graph.users.get(v, ()):
            if user.primitive == primitive:
                found.update(graph.ahead(user.outputs[0], passes))
    return found


SAYS = "a probability's relative error is the score's absolute one, up to half an ulp of the score."
RULE = Rule(
    "rounded-scores",
    "warning",
    "jaxpr",
    "Scores rounded before softmax",
    f"Scores are rounded to bfloat16 or float16 before their softmax: {SAYS}",
    "preferred_element_type=float32 on the product, and no conversion before the softmax; of a model here: "
    "--set scores=float32",
    "the program's equations",
    check,
)
