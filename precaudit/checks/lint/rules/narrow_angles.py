"""Angles, as of RoPE, whose positions and frequencies are multiplied in few bits."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import numpy as np

from precaudit.checks.lint.flow import FLOATS, NARROW, Equation, Graph, as_moved, is_cast_up
from precaudit.checks.lint.intervals import HELD
from precaudit.checks.lint.rule import Hit, Rule, Severity
from precaudit.checks.lint.view import CallView
from precaudit.checks.lint.whole import Ranges
from precaudit.interpreters.tpu.units import unit_of
from precaudit.schema.digits import digits

AXES = 4  # of positions that a product sums over: time, height, width and one more
ROUNDED = ("convert_element_type", "mul", "div", "add", "sub", "pow", "exp", "exp2", "integer_pow", "dot_general")


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit what rounds a factor or the product of an angle to a narrow format, and products that one pass may make."""
    for view in views:
        met: dict[int, tuple[Equation, str, Severity]] = {}
        for e in view.equations:
            if turns(e):
                behind = view.graph.behind(e.inputs[0], _factors)
                if any(_counts(view, v) or is_of_text(view.graph, v) for v in behind):
                    for found in (*narrow(view, behind), *one_pass_products(view, behind)):
                        met.setdefault(id(found[0]), found)
        for e, says, severity in met.values():
            yield Hit(view.phase, e.source, e.point, says, severity=severity)


def turns(e: Equation) -> bool:
    """Whether it takes a sine or a cosine, of a complex exponential both."""
    return e.primitive in ("sin", "cos") or (e.primitive == "exp" and e.result.startswith("complex"))


def narrow(view: CallView, behind: Iterable[int]) -> Iterator[tuple[Equation, str, Severity]]:
    """Yield what rounds a factor of an angle, or it; whole numbers are ``narrow_integers``'."""
    for e in view.graph.made_by(behind, *ROUNDED):
        if e.result in NARROW and e.outputs[0] not in view.whole and rounds(view.graph, view.whole, e):
            what = "A factor of an angle" if e.primitive == "convert_element_type" else "An angle, or a factor of it,"
            yield e, f"{what} is rounded to {e.result}: {_off(e.result)}.", "error"
    for e in view.graph.made_by(behind, "mul", "dot_general"):
        for k in (0, 1):
            dtypes = [view.graph.dtypes[v] for v in view.graph.behind(e.inputs[k], as_moved) if is_given(view, v)]
            other = view.graph.behind(e.inputs[1 - k], _factors)
            held = [x for x in dtypes if x in NARROW]
            if powers_of_two(view.graph, view.whole, e.inputs[1 - k]):
                continue
            if held and any(_counts(view, v) or is_of_text(view.graph, v) for v in other):
                yield e, f"A factor of an angle is stored in {held[0]}: {_off(held[0])}.", "error"


def rounds(graph: Graph, whole: Ranges, e: Equation) -> bool:
    """Whether an equation with a narrow result rounds: no conversion of a narrower value, no factor that is 2^k."""
    if e.primitive == "convert_element_type":
        return e.dtype() not in NARROW
    return not any(powers_of_two(graph, whole, v) for v in (*e.outputs, *(e.inputs if e.primitive == "mul" else ())))


def powers_of_two(graph: Graph, whole: Ranges, value: int) -> bool:
    """Whether all elements of a value are powers of two, by the program's text."""
    for v in graph.behind(value, as_moved):
        if v in graph.constants:
            x = np.asarray(graph.constants[v])
            return str(x.dtype) in FLOATS and bool((np.frexp(x.astype(np.float64))[0] == 0.5).all())
        e = graph.makers.get(v)
        if e is not None and e.primitive in ("pow", "exp2"):
            base = 2.0 if e.primitive == "exp2" else graph.scalar(e.inputs[0])
            return base is not None and np.frexp(base)[0] == 0.5 and e.inputs[-1] in whole
    return False


def one_pass_products(view: CallView, behind: Iterable[int]) -> Iterator[tuple[Equation, str, Severity]]:
    """Yield float32 matrix products on the way to an angle that the default precision leaves to one pass."""
    for e in view.graph.made_by(behind, "dot_general"):
        wide = e.result == "float32" and any(not is_cast_up(view.graph, e, k) for k in (0, 1))
        if not wide or not _is_default(e.made.params["precision"]):
            continue
        if view.compiled is None:
            severity: Severity = "note" if _terms(e) < 2 else "error" if view.platform == "tpu" else "warning"
            yield e, OUTER if severity == "note" else PASS, severity
        elif any(unit_of(i) == "passes1" and any(x is e for x in view.made_of(i)) for _, i in view.instructions):
            yield e, PASS, "error"


def _is_default(precision: object) -> bool:
    return precision is None or {str(p) for p in np.ravel(np.array(precision, object))} <= {"DEFAULT", "None"}


def _terms(e: Equation) -> int:
    """Return how many terms a product sums."""
    (axes, _), _ = e.made.params["dimension_numbers"]
    return prod(e.made.invars[0].aval.shape[axis] for axis in axes)


def _factors(e: Equation) -> Iterable[int]:
    """Pass through what an angle is made by of positions and frequencies."""
    if e.primitive in ("mul", "div", "add", "sub", "complex") or (e.primitive == "dot_general" and _terms(e) <= AXES):
        return (0, 1)
    return (0,) if e.primitive in ("neg", "rem") else as_moved(e)


def _counts(view: CallView, v: int) -> bool:
    """Whether a value is of whole numbers as positions are: no number of the text, no truth values."""
    return v in view.whole and view.whole[v].most > 1 and view.graph.scalar(v) is None


def is_of_text(graph: Graph, v: int) -> bool:
    """Whether a value is an array that the program's text alone gives, such as a table of frequencies."""
    if prod(graph.shapes[v]) < 2 or graph.single(v):
        return False
    ends = [x for x in graph.behind(v, lambda e: range(len(e.inputs))) if x not in graph.joins]
    return all(x in graph.constants or x in graph.makers for x in ends)


def is_given(view: CallView, v: int) -> bool:
    """Whether a value is an array that the program is given, or a constant of it that holds no whole numbers."""
    graph = view.graph
    if v in graph.makers or v in graph.joins or v in view.whole or prod(graph.shapes[v]) < 2:
        return False
    return v not in graph.constants or not powers_of_two(graph, view.whole, v)


def _off(dtype: str) -> str:
    return f"one of 1,000 is wrong by up to {digits(1000 / HELD[dtype], 2)}"


PASS = (
    "A matrix product makes an angle, at the default precision: on a TPU one bfloat16 pass rounds its frequencies, and "
    "positions above 256"
)
OUTER = (
    f"{PASS}. libtpu 0.0.42.1 makes this one, which sums nothing, by float32 multiplication; no text says that all do."
)
PASS += "."
RULE = Rule(
    "narrow-angles",
    "error",
    "jaxpr",
    "Angles of positions in few bits",
    "An angle is a position times a frequency, computed in bfloat16, in float16 or by one bfloat16 pass of a TPU's "
    "matrix unit. Sine and cosine read its absolute error: in bfloat16 an angle of 300 is wrong by up to a radian.",
    "float32 positions and frequencies, multiplied element by element (positions[..., None] * frequencies), and sine "
    "and cosine of that",
    "the program's equations; jax.lax.Precision (documentation); github.com/huggingface/transformers/pull/29285, "
    "github.com/sgl-project/sglang-jax/issues/1472",
    check,
)
