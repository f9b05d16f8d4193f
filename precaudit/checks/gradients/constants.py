"""Constants of a kernel that may stand for others of its reference, and a formula with one exchanged."""

from typing import Any, NamedTuple

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from precaudit.checks.gradients.formula import Formula
from precaudit.interpreters.jaxpr.jax_versions import source, walk_equations, with_bodies

TRIED = 8  # exchanges; each is compiled


class Constant(NamedTuple):
    """A number that a line multiplies by, adds or compares with."""

    value: float
    line: str


def constant_pairs(mine: Formula, its: Formula) -> list[tuple[Constant, Constant]]:
    """Return (a constant of the function's alone, one of the reference's), those of the reference's alone first.

    ``mine``: of the function that was run, read for its constants alone. A constant that is left out is 0.
    """
    ours, theirs = _constants(mine), _constants(its)
    ours_alone = [c for c in ours.values() if not any(_same(c.value, t) for t in theirs)]
    theirs_alone = [c for c in theirs.values() if not any(_same(o, c.value) for o in ours)]
    shared = [c for c in theirs.values() if c not in theirs_alone]
    first = [(a, b) for b in theirs_alone for a in [*ours_alone, Constant(0.0, "")]]
    both_passes = [(a, b) for b in shared for a in ours_alone]  # right in one pass, and another in the other one
    return [*sorted(first, key=_apart), *sorted(both_passes, key=_apart)][:TRIED]


def _apart(pair: tuple[Constant, Constant]) -> float:
    """Return how far two constants are from each other in size."""
    mine, its = pair
    return float(abs(np.log(abs(mine.value / its.value)))) if mine.value else np.inf


def _constants(formula: Formula) -> dict[float, Constant]:
    """Return the float literals of a function, Pallas kernels' inside included, and their first lines."""
    found: dict[float, Constant] = {}
    for e in walk_equations(formula.jaxpr.jaxpr):
        for v in e.invars:
            if _number(v) and v.val and np.isfinite(float(v.val)):
                found.setdefault(float(v.val), Constant(float(v.val), source(e)))
    return found


def _number(v: jex.Var | jex.Literal) -> bool:
    return isinstance(v, jex.Literal) and np.ndim(v.val) == 0 and jnp.issubdtype(v.aval.dtype, jnp.floating)


def _same(a: float, b: float) -> bool:
    """Whether two numbers are one once both are rounded to bfloat16's 8 bits."""
    return bool(np.isclose(a, b, rtol=2.0**-8, atol=0.0))


def with_constant(jaxpr: jex.Jaxpr, old: float, new: float) -> Any:
    """Return an open jaxpr with every literal of one value as another."""

    def other(v: jex.Var | jex.Literal) -> Any:
        return jex.Literal(np.asarray(new, v.aval.dtype), v.aval) if _number(v) and float(v.val) == old else v

    made = []
    for e in jaxpr.eqns:
        params = {n: with_bodies(x, lambda body: with_constant(body, old, new)) for n, x in e.params.items()}
        made.append(e.replace(invars=[other(v) for v in e.invars], params=params))
    return jaxpr.replace(eqns=made)
