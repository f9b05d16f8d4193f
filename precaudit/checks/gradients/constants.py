"""A constant of a kernel's that stands for another of its reference's: the formula with that one exchanged is tried."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from precaudit.checks.gradients.formula import Formula
from precaudit.interpreters.jaxpr.jax_versions import source, walk_equations, with_bodies
from precaudit.numbers.arrays import Array
from precaudit.schema.metrics.sizes import norm, ratio

LEFT = 0.1  # of the error: what may be left once the constant is exchanged
TRIED = 8  # exchanges; each is compiled


class Constant(NamedTuple):
    """A number that a line multiplies by, adds or compares with."""

    value: float
    line: str


class Exchanged(NamedTuple):
    """``mine`` stands where the reference has ``its``; ``left``: of the error, relative to the exact array's norm."""

    mine: Constant
    its: Constant
    left: float


def find_exchange(
    mine: Formula, its: Formula, cotangents: jax.Array, inputs: Sequence[Any], leaf: int, run: Array, exact: Array
) -> Exchanged | None:
    """Return the exchange of one constant in a formula that explains best what a function gives; None where none does.

    ``mine``: of the function that gave ``run``, read for its constants alone; ``its``: the formula of ``exact``. A
    constant that is left out is 0.
    """
    error, found = _off(run, exact), []
    for a, b in list(_pairs(mine, its))[:TRIED]:
        made = Formula(jex.ClosedJaxpr(_with(its.jaxpr.jaxpr, b.value, a.value), its.jaxpr.consts))
        left = _off(run, made.exact(cotangents, inputs)[leaf])
        if left <= LEFT * error:
            found.append(Exchanged(a, b, left))
    return min(found, key=lambda x: x.left, default=None)


def _pairs(mine: Formula, its: Formula) -> Iterator[tuple[Constant, Constant]]:
    """Yield (a constant of the function's alone, one of the reference's alone), nearest in size first."""
    ours, theirs = _constants(mine), _constants(its)
    ours_alone = [c for c in ours.values() if not any(_same(c.value, t) for t in theirs)]
    theirs_alone = [c for c in theirs.values() if not any(_same(o, c.value) for o in ours)]
    every = [(a, b) for b in theirs_alone for a in [*ours_alone, Constant(0.0, "")]]
    return iter(sorted(every, key=lambda p: abs(np.log(abs(p[0].value / p[1].value))) if p[0].value else np.inf))


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


def _with(jaxpr: jex.Jaxpr, old: float, new: float) -> Any:
    """Return an open jaxpr with every literal of one value as another."""

    def other(v: jex.Var | jex.Literal) -> Any:
        return jex.Literal(np.asarray(new, v.aval.dtype), v.aval) if _number(v) and float(v.val) == old else v

    made = []
    for e in jaxpr.eqns:
        params = {n: with_bodies(x, lambda body: _with(body, old, new)) for n, x in e.params.items()}
        made.append(e.replace(invars=[other(v) for v in e.invars], params=params))
    return jaxpr.replace(eqns=made)


def _off(run: Array, exact: Array) -> float:
    """Return how far an array is off, relative; infinite where one is not finite and the other is."""
    finite = np.isfinite(run)
    if not np.array_equal(finite, np.isfinite(exact)):
        return np.inf
    return ratio(norm(run[finite] - exact[finite]), norm(exact[finite]))
