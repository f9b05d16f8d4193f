"""Exponentials and logarithms whose results are bfloat16 or float16."""

from collections.abc import Iterable, Iterator, Sequence

from precaudit.checks.lint.flow import NARROW, Equation, Graph, as_moved, through_scaling
from precaudit.checks.lint.rule import Hit, Rule, Severity
from precaudit.checks.lint.view import CallView

LOGARITHMS = ("log", "log1p", "log2")
EXPONENTIALS = ("exp", "exp2", "logistic")
SUMMED = ("add", "add_any", "mul", "div", "max", "psum")


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit narrow exponentials and logarithms; those of a log of a sum of exponentials, and what is made of it."""
    for view in views:
        in_loss = losses(view.graph)
        for e in view.equations:
            if e.primitive in (*EXPONENTIALS, *LOGARITHMS) and e.result in NARROW:
                severity: Severity = "error" if id(e) in in_loss else "warning"
                what = ", part of a log of a sum of exponentials," if severity == "error" else ""
                says = f"The result of {e.primitive}{what} is {e.result}: {BITS[e.result]} significant bits."
                yield Hit(view.phase, e.source, e.point, says, severity=severity)
            elif e.rounds and id(e) in in_loss:
                says = f"Log-probabilities are rounded to {e.result}: at −10 they are wrong by up to {STEP[e.result]}."
                yield Hit(view.phase, e.source, e.point, says, severity="error")


def losses(graph: Graph) -> set[int]:
    """Return the ids of the equations that make logs of sums of exponentials, and of those that round them."""
    found = set()
    for log in graph.equations:
        if log.primitive not in LOGARITHMS:
            continue
        behind = graph.behind(log.inputs[0], _through_sum)
        exponentials = list(graph.made_by(behind, *EXPONENTIALS[:2]))
        if not exponentials or next(graph.made_by(behind, "reduce_sum"), None) is None:
            continue
        found |= {id(log), *map(id, exponentials)}
        ahead = graph.ahead(log.outputs[0], lambda e: _as_log(graph, e))
        found |= {id(e) for e in graph.made_by(ahead, "convert_element_type")}
    return found


def _through_sum(e: Equation) -> Iterable[int]:
    """Pass through what an exponential meets on its way into the log of a sum."""
    if e.primitive in SUMMED:
        return range(len(e.inputs))
    return (0,) if e.primitive in ("reduce_sum", "abs") else as_moved(e)


def _as_log(graph: Graph, e: Equation) -> Iterable[int]:
    """Pass through what leaves a logarithm one."""
    if e.primitive in ("add", "sub"):
        return (0, 1)
    return (0,) if e.primitive == "neg" else through_scaling(graph, e)


BITS = {"bfloat16": 8, "float16": 11}
STEP = {"bfloat16": "0.03", "float16": "0.004"}  # half an ulp of ten
RULE = Rule(
    "narrow-exp",
    "warning",
    "jaxpr",
    "Exponentials or logarithms in bfloat16 or float16",
    "The result of an exponential or a logarithm is rounded to 8 or 11 significant bits; of a log of a sum of "
    "exponentials that is an error of the loss itself.",
    "cast the input to float32 before, and back after the loss or the sum",
    "the program's equations",
    check,
)
