"""Where a function leaves its formats' range: the first line that gives NaN or infinities where FP64 has none."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from precaudit.checks.gradients.case import KERNEL, STRICT, ArrayFinding, GradientCase
from precaudit.checks.gradients.formula import Formula
from precaudit.interpreters.jaxpr.effort import least_effort
from precaudit.interpreters.jaxpr.jax_versions import bind, body_of_call, source, walk
from precaudit.interpreters.jaxpr.primitives import lifting
from precaudit.interpreters.jaxpr.shadow import CannotLift, Shadow
from precaudit.interpreters.jaxpr.strict import STRICTLY

LOST = 0.5  # relative L2 error: half of an array or more is not in what was stored


def range_lost(c: GradientCase, f: ArrayFinding) -> tuple[str, str] | None:
    """Return (line, operation) where a side leaves its format's range and stores finite values that hold little.

    So √(mean x²) of 1e25 is infinite in float32, and 1 / ∞ is 0. None where the array holds what FP64 does.
    """
    if f.distance is None or not f.distance.same_places or not f.distance.normwise >= LOST:
        return None
    own = c.own[KERNEL if f.side == STRICT else f.side]
    try:
        return first_infinite(own, own.leaves(c.cotangents, c.inputs))
    except CannotLift:
        return None


def first_infinite(formula: Formula, leaves: Sequence[Any]) -> tuple[str, str] | None:
    """Return (line, operation) of the first values that are not finite where FP64's are; None where there are none.

    Loops are one operation. Raises CannotLift for what has no FP64 meaning.
    """
    own, exact, lines = _counters(formula)
    ours = own(list(leaves))
    with jax.enable_x64(True):
        true = exact(list(leaves))
    return next((at for key, at in lines.items() if int(ours[key]) > int(true.get(key, 0))), None)


def _counters(formula: Formula) -> tuple[Any, Any, dict[int, tuple[str, str]]]:
    """Return what counts a formula's values that are not finite, as it runs and in FP64: compiled once."""
    if first_infinite not in formula.remade:
        lines: dict[int, tuple[str, str]] = {}
        options = STRICTLY if formula.strict else None
        own = jax.jit(lambda given: _own_counts(formula.jaxpr, given, lines), compiler_options=options)
        exact = jax.jit(lambda given: _exact_counts(formula.jaxpr, given), compiler_options=least_effort())
        formula.remade[first_infinite] = own, exact, lines
    found: tuple[Any, Any, dict[int, tuple[str, str]]] = formula.remade[first_infinite]
    return found


def _count(out: Sequence[Any]) -> Any:
    found = [jnp.sum(~jnp.isfinite(x)) for x in out if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    return sum(found) if found else jnp.zeros((), jnp.int32)


def _own_counts(jaxpr: jex.ClosedJaxpr, given: Sequence[Any], lines: dict[int, tuple[str, str]]) -> dict[int, Any]:
    counts: dict[int, Any] = {}

    def step(equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        how = lifting(equation.primitive.name)
        if how.kind == "call":
            return walk(*body_of_call(equation.params, how.body), inputs, step)
        out = bind(equation, inputs)
        counts[id(equation)] = _count(out)
        lines[id(equation)] = source(equation), equation.primitive.name
        return out

    walk(jaxpr.jaxpr, jaxpr.consts, given, step)
    return counts


def _exact_counts(jaxpr: jex.ClosedJaxpr, given: Sequence[Any]) -> dict[int, Any]:
    one = _Counting()
    one.run(jaxpr.jaxpr, jaxpr.consts, given)
    return one.counts


class _Counting(Shadow):
    """Evaluates in FP64 and counts, for each equation outside loops, the values that are not finite."""

    def __init__(self) -> None:
        super().__init__({})
        self.counts: dict[int, Any] = {}
        self.inside = 0

    def equation(self, equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluate an equation and count."""
        call = lifting(equation.primitive.name).kind == "call"
        self.inside += not call
        out = super().equation(equation, inputs)
        self.inside -= not call
        if not call and not self.inside:
            self.counts[id(equation)] = _count(out)
        return out
