"""Constants that mean something else in the format they are held in."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from precaudit.checks.lint.flow import FLOATS, NARROW, Equation, Graph, Passes, as_moved
from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.view import CallView
from precaudit.schema.digits import digits

ROOTS = ("rsqrt", "sqrt", "log", "pow")
EIGHT = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz")
LARGEST = 1 << 20  # elements of a constant that are looked at


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit constants that overflow, vanish or become 1, epsilons that are 0 or subnormal, masks that add up to −∞."""
    rules = (overflown, infinite, masked_twice, rounded_away, vanishing)
    for view in views:
        for e in view.equations:
            says = next((found for rule in rules if (found := rule(view.graph, e))), None)
            if says:
                yield Hit(view.phase, e.source, e.point, *says)


def overflown(graph: Graph, e: Equation) -> tuple[Any, ...]:
    """Say that a conversion makes a finite constant, or what a mask's factor makes of its ones, infinite."""
    if e.primitive != "convert_element_type" or e.result not in (*NARROW, *EIGHT) or e.dtype() not in FLOATS:
        return ()
    for v in graph.behind(e.inputs[0], as_moved):
        given = np.asarray(graph.constants.get(v, 0.0))
        if str(given.dtype) not in FLOATS or not 0 < given.size <= LARGEST:
            continue
        if (lost := _unrepresentable(given, e.result)).size:
            return (_infinite(float(lost[0]), e.result),)
    for times in graph.made_by(graph.behind(e.inputs[0], as_moved), "mul"):
        factors = [x for k in (0, 1) if (x := graph.scalar(times.inputs[k])) is not None]
        if (lost := _unrepresentable(np.array(factors), e.result)).size and lost[0] < 0:
            return (_infinite(float(lost[0]), e.result),)
    return ()


def _unrepresentable(given: Any, dtype: str) -> Any:
    """Return the finite values that a format does not hold."""
    with np.errstate(all="ignore"):
        return given[np.isfinite(given) & ~np.isfinite(given.astype(ml_dtypes.finfo(dtype).dtype))]


def _infinite(number: float, dtype: str) -> str:
    masks = ": a row that is masked throughout becomes NaN" if number < 0 else ""
    with np.errstate(over="ignore"):
        held = "NaN" if np.isnan(np.float64(number).astype(ml_dtypes.finfo(dtype).dtype)) else "infinite"
    return f"{digits(number, 6)} is {held} in {dtype}{masks}."


def infinite(graph: Graph, e: Equation) -> tuple[Any, ...]:
    """Say that a factor is infinite."""
    if e.primitive != "mul" or e.result not in NARROW:
        return ()
    if any(abs(x) == np.inf for k in (0, 1) if (x := graph.scalar(e.inputs[k])) is not None):
        return (f"A factor is infinite in {e.result}, and 0 · ∞ is NaN.", "", "error")
    return ()


def masked_twice(graph: Graph, e: Equation) -> tuple[Any, ...]:
    """Say that two masks add up to −∞, or in float16 a mask at its lowest number and what it is added to."""
    if e.primitive != "add" or e.result not in NARROW:
        return ()
    most = float(ml_dtypes.finfo(e.result).max)
    lowest = [_lowest(graph, v, _through_addition) for v in e.inputs]
    if sum(lowest) < -most and max(lowest) < 0:
        return (f"Masks of {digits(lowest[0], 6)} and {digits(lowest[1], 6)} add up to −∞ in {e.result}: {MASKED}.",)
    if e.result == "float16" and min(_lowest(graph, v, as_moved) for v in e.inputs) == -most:
        return (f"A mask of {digits(-most, 6)} and a score below −16 add up to −∞ in float16: {MASKED}.",)
    return ()


def _through_addition(e: Equation) -> Iterable[int]:
    return (0, 1) if e.primitive == "add" else as_moved(e)


def _lowest(graph: Graph, value: int, passes: Passes) -> float:
    """Return the lowest finite constant that a value may be made of; 0 where there is none below."""
    found = [0.0]
    for v in graph.behind(value, passes):
        given = np.asarray(graph.constants.get(v, 0.0))
        if str(given.dtype) in FLOATS and 0 < given.size <= LARGEST:
            wide = given.astype(np.float64)
            found.append(float(np.min(wide, where=np.isfinite(wide), initial=0.0)))
    return min(found)


def rounded_away(graph: Graph, e: Equation) -> tuple[Any, ...]:
    """Say that a number becomes 0 or 1 where it is converted, or that 1 swallows what is added to it."""
    if e.result not in FLOATS:
        return ()
    given = [graph.scalar(v) for v in e.inputs]
    held = _value(e, given)
    if held is None:
        return ()
    if e.primitive == "convert_element_type" and e.dtype() in FLOATS:
        if given[0] != held and held in (0, 1):
            return (f"{digits(given[0], 12)} is {digits(held, 6)} in {e.result}.",)
    elif e.primitive in ("add", "sub") and abs(held) == 1 and all(given) and held in (given[0], given[1]):
        small = given[1] if held == given[0] else given[0]
        return (f"1 and {digits(small, 2)} add up to 1 in {e.result}.",)
    return ()


def _value(e: Equation, given: Sequence[float | None]) -> float | None:
    """Return the number that a conversion, sum or difference of numbers is in its format; None of other equations."""
    a, b = (*given, 0.0)[:2] if given else (None, None)
    if a is None or b is None or e.primitive not in ("convert_element_type", "add", "sub"):
        return None
    with np.errstate(all="ignore"):
        made = np.asarray(a - b if e.primitive == "sub" else a + b)
        return float(made.astype(ml_dtypes.finfo(e.result).dtype).astype(np.float64))


def vanishing(graph: Graph, e: Equation) -> tuple[Any, ...]:
    """Say that what is added, or stands in for less, before a root, a logarithm or a division is 0 or subnormal."""
    if e.primitive not in ("add", "sub", "max", "select_n") or e.result not in FLOATS:
        return ()
    for k in range(e.primitive == "select_n", len(e.inputs)):
        number = graph.scalar(e.inputs[k])
        if number is None or all(graph.scalar(v) is not None for v in e.inputs if v != e.inputs[k]):
            continue
        smallest = float(ml_dtypes.finfo(e.result).smallest_normal)
        zero = number == 0 and e.result == "float16" and _is_literal(graph, e.inputs[k])
        if (zero or 0 < abs(number) < smallest) and _guards(graph, e, zero and e.primitive not in ("add", "sub")):
            how = "0" if zero else f"{digits(number, 2)}, subnormal"
            return (f"The epsilon {HOW[e.primitive]} is {how} in {e.result}: {'it guards nothing' if zero else FEW}.",)
    return ()


def _is_literal(graph: Graph, value: int) -> bool:
    """Whether a number is as the text gives it: what a conversion makes 0 is said where it is converted."""
    behind = graph.behind(value, as_moved)
    return not any(x.dtype() in FLOATS for x in graph.made_by(behind, "convert_element_type"))


def _guards(graph: Graph, e: Equation, clamped: bool) -> bool:
    """Whether a root, a logarithm or a division reads the sum; of what is ``clamped`` at 0 a square root may."""
    roots = [name for name in ROOTS if not clamped or name not in ("sqrt", "pow")]
    return any(
        (user.primitive in roots and user.inputs[0] == v) or (user.primitive == "div" and user.inputs[1] == v)
        for v in graph.ahead(e.outputs[0], _in_format(e.result))
        for user in graph.users.get(v, ())
    )


def _in_format(dtype: str) -> Any:
    def passes(e: Equation) -> Iterable[int]:
        return as_moved(e) if e.result == dtype or e.rounds or e.dtype() == dtype else ()

    return passes


MASKED = "a row that is masked throughout becomes NaN"
HOW = {"add": "added here", "sub": "taken here", "max": "that is the least here", "select_n": "chosen here"}
FEW = "few of its bits remain, and where subnormals are flushed it is 0"
RULE = Rule(
    "lost-constant",
    "warning",
    "jaxpr",
    "A constant that its format does not hold",
    "A constant of the program is infinite, 0, 1 or subnormal in the format it is stored in: a mask, a factor or an "
    "epsilon that does not do what it says.",
    "jnp.finfo(x.dtype).min for one mask (half of it for two), an epsilon of at least jnp.finfo(x.dtype).tiny, or "
    "float32 there",
    "the program's equations; IEEE 754",
    check,
)
