"""A program's own taps (``checkpoint_name``), and which other variables hold the very values that they tap."""

from typing import Any, NamedTuple

import jax.extend.core as jex
import jax.numpy as jnp

from precaudit.interpreters.jaxpr.jax_versions import bodies, body_of_call
from precaudit.interpreters.jaxpr.primitives import CALLS

# Of one array of values all of them, in another layout.
SAME = {
    "copy",
    "copy_p",
    "expand_dims",
    "name",
    "optimization_barrier",
    "reshape",
    "squeeze",
    "stop_gradient",
    "transpose",
}


class Own(NamedTuple):
    """A program's own taps of floats: their equations by name, and the variables that hold what they tap."""

    equations: dict[str, list[Any]]
    values: frozenset[Any]


def own_taps(jaxpr: jex.Jaxpr) -> Own:
    """Return the taps of floats of an open jaxpr.

    A body that is called several times holds their values where every call does.
    """
    order: list[Any] = []
    calls: dict[int, list[Any]] = {}
    _append_bodies(jaxpr, order, calls, set())
    equations: dict[str, list[Any]] = {}
    values: set[Any] = set()
    for body in reversed(order):  # each after those that call it
        for i, v in enumerate(body.outvars):
            its = calls.get(id(body), [None])
            if not isinstance(v, jex.Literal) and all(e is not None and e.outvars[i] in values for e in its):
                values.add(v)
        for e in reversed(body.eqns):
            name = e.primitive.name
            tapped = name == "name" and jnp.issubdtype(e.outvars[0].aval.dtype, jnp.floating)
            if tapped:
                equations.setdefault(e.params["name"], []).append(e)
            read = type(e.outvars[0]).__name__ != "DropVar" if e.outvars else False
            if read and (tapped or (name in SAME and e.outvars[0] in values)):
                values.update(v for v in (e.invars[0], e.outvars[0]) if not isinstance(v, jex.Literal))
    return Own(equations, frozenset(values))


def _append_bodies(jaxpr: jex.Jaxpr, order: list[Any], calls: dict[int, list[Any]], met: set[int]) -> None:
    """Append a jaxpr after all bodies in it, each once; note what calls a body, None for what does not only call it."""
    if id(jaxpr) in met:
        return
    met.add(id(jaxpr))
    for e in jaxpr.eqns:
        key = CALLS.get(e.primitive.name, "")
        mine = body_of_call(e.params, key)[0] if key in e.params or (key and "call_jaxpr" in e.params) else None
        for body in (x for value in e.params.values() for x in bodies(value)):
            calls.setdefault(id(body), []).append(e if body is mine else None)
            _append_bodies(body, order, calls, met)
    order.append(jaxpr)
