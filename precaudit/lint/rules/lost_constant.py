"""Constants that mean something else in the format they are held in."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from precaudit.lint.flow import FLOATS, NARROW, Equation, Graph, as_moved
from precaudit.lint.rule import Hit, Rule
from precaudit.lint.view import View

ROOTS = ("rsqrt", "sqrt", "log", "pow")
LARGEST = 1 << 20  # elements of a constant that are looked at


def check(views: Sequence[View]) -> Iterator[Hit]:
    """Hit finite constants that become infinite, factors that are, and epsilons that are 0 or subnormal."""
    for view in views:
        for e in view.equations:
            says = overflown(view.graph, e) or infinite(view.graph, e) or vanished(view.graph, e)
            if says:
                yield Hit(view.phase, e.source, e.point, *says)


def overflown(graph: Graph, e: Equation) -> tuple[Any, ...]:
    """Say that a conversion makes a finite constant infinite."""
    if e.primitive != "convert_element_type" or e.result not in NARROW or e.dtype() not in FLOATS:
        return ()
    for v in graph.behind(e.inputs[0], as_moved):
        given = np.asarray(graph.constants.get(v, 0.0))
        if str(given.dtype) not in FLOATS or not 0 < given.size <= LARGEST:
            continue
        with np.errstate(all="ignore"):
            lost = given[np.isfinite(given) & np.isinf(given.astype(e.result))]
        if lost.size:
            masks = ": a row that is masked throughout becomes NaN" if lost[0] < 0 else ""
            return (f"{float(lost[0]):g} is infinite in {e.result}{masks}.",)
    return ()


def infinite(graph: Graph, e: Equation) -> tuple[Any, ...]:
    """Say that a factor is infinite."""
    if e.primitive != "mul" or e.result not in NARROW:
        return ()
    if any(abs(x) == np.inf for k in (0, 1) if (x := graph.scalar(e.inputs[k])) is not None):
        return (f"A factor is infinite in {e.result}, and 0 · ∞ is NaN.", "", "error")
    return ()


def vanished(graph: Graph, e: Equation) -> tuple[Any, ...]:
    """Say that what is added before a root, a logarithm or a division is 0 or subnormal."""
    if e.primitive not in ("add", "max") or e.result not in FLOATS:
        return ()
    for k in (0, 1):
        number = graph.scalar(e.inputs[k])
        if number is None or graph.scalar(e.inputs[1 - k]) is not None:
            continue
        smallest = float(ml_dtypes.finfo(e.result).smallest_normal)
        zero = number == 0 and e.primitive == "add" and e.result == "float16"
        if (zero or 0 < number < smallest) and _guards(graph, e):
            how = "0" if zero else f"{number:.2g}, subnormal"
            return (f"The epsilon added here is {how} in {e.result}: {'it guards nothing' if zero else FEW}.",)
    return ()


def _guards(graph: Graph, e: Equation) -> bool:
    """Whether a root, a logarithm or a division reads the sum."""
    return any(
        (user.primitive in ROOTS and user.inputs[0] == v) or (user.primitive == "div" and user.inputs[1] == v)
        for v in graph.ahead(e.outputs[0], _in_format(e.result))
        for user in graph.users.get(v, ())
    )


def _in_format(dtype: str) -> Any:
    def passes(e: Equation) -> Iterable[int]:
        return as_moved(e) if e.result == dtype or e.rounds or e.dtype() == dtype else ()

    return passes


FEW = "few of its bits are left, and where subnormals are flushed it is 0"
RULE = Rule(
    "lost-constant",
    "warning",
    "jaxpr",
    "A constant that its format does not hold",
    "A constant of the program is infinite, 0 or subnormal in the format it is held in: a mask, a factor or an epsilon "
    "that does not do what it says.",
    "jnp.finfo(x.dtype).min for masks, an epsilon of at least jnp.finfo(x.dtype).tiny, or float32 there",
    "the program's equations; IEEE 754",
    check,
)
