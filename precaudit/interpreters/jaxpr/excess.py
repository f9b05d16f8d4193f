"""Excess precision: which reads of a result of 16 bits see it as it was before it was rounded, as compilers allow.

XLA computes results of 16 bits in float32 and removes conversions that follow one another, so that one reader of a
result may see it rounded and another not (docs/numerics.md, fact 2).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax.extend.core as jex

from precaudit.interpreters.jaxpr.sums import float_bits

# Functions that JAX lowers in float32: what they read is converted, so that a compiler may not have rounded it
IN_SINGLE = ("erfc", "erf_inv", "lgamma", "digamma", "sinh", "cosh", "bessel_i0e", "bessel_i1e")
STATISTICS = ("square", "integer_pow", "mul", "reduce_sum")  # where one value is all that they read
# Results that are values of operands: of an unrounded operand they are unrounded, too
MOVES = (
    *("broadcast_in_dim", "clamp", "concatenate", "dynamic_slice", "expand_dims", "gather", "max", "min", "neg", "pad"),
    *("reshape", "rev", "select_n", "slice", "squeeze", "stop_gradient", "transpose"),
    *("copy", "copy_p", "optimization_barrier", "sharding_constraint", "split"),
)
Unrounded = Literal["none", "converted", "computed", "statistics", "unshared", "all", "single"]
Condition = Callable[[jex.JaxprEqn], bool]


def never(_: jex.JaxprEqn) -> bool:
    """No equation."""
    return False


@dataclass(frozen=True)
class Excess:
    """Which reads see excess precision.

    ``reads``: whether an equation reads its operand ``i`` unrounded; a tracer may say so. ``hands_on``: whether an
    equation's result is known unrounded where an operand is. ``rounds``: whether an equation's result is rounded for
    all that read it.
    """

    reads: Callable[[jex.JaxprEqn, int], Any]
    hands_on: Condition = never
    rounds: Condition = never


def widens(equation: jex.JaxprEqn) -> bool:
    """Whether an equation converts floats of 16 bits to a wider format, as a function that is computed in one does."""
    if equation.primitive.name in IN_SINGLE:
        return float_bits(equation.invars[0].aval.dtype) == 16
    if equation.primitive.name != "convert_element_type":
        return False
    return float_bits(equation.outvars[0].aval.dtype) > float_bits(equation.invars[0].aval.dtype) == 16


def narrows(equation: jex.JaxprEqn) -> bool:
    """Whether an equation converts wider floats to a format of 16 bits."""
    if equation.primitive.name != "convert_element_type":
        return False
    return float_bits(equation.invars[0].aval.dtype) > float_bits(equation.outvars[0].aval.dtype) == 16


def moves(equation: jex.JaxprEqn) -> bool:
    """Whether an equation's result has values of its operands, in a format that has them all."""
    return equation.primitive.name in MOVES or (equation.primitive.name == "convert_element_type" and widens(equation))


def _transposes(equation: jex.JaxprEqn) -> bool:
    return equation.primitive.name == "transpose"


def _statistic(equation: jex.JaxprEqn, _: int) -> bool:
    return equation.primitive.name in STATISTICS and len({*equation.invars}) == 1


NOWHERE = Excess(lambda _equation, _operand: False)
CONVERTED = Excess(lambda equation, _operand: widens(equation), _transposes)
EXCESS: Mapping[Unrounded, Excess] = {
    "none": NOWHERE,
    "converted": CONVERTED,
    "computed": Excess(CONVERTED.reads, _transposes, narrows),
    "statistics": Excess(_statistic, lambda equation: equation.primitive.name not in IN_SINGLE and widens(equation)),
    "unshared": NOWHERE,
    "all": NOWHERE,
    "single": NOWHERE,
}
