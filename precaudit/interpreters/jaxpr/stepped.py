"""One step of a scan as a program of its own, handed what the step before it left: recorded values say what that was.

Where every value that a scan carries on is made of taps of the same step, the segments of a step are made of its own
taps and of some of the step's before. Made step by step, they take the memory of one step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from precaudit.interpreters.jaxpr.jax_versions import (
    bind,
    bodies,
    body_of_call,
    open_jaxpr,
    scan_counts,
    source_context,
    walk,
)
from precaudit.interpreters.jaxpr.primitives import CALLS
from precaudit.interpreters.jaxpr.reads import reads_of_arguments
from precaudit.interpreters.jaxpr.shadow import trace_jaxpr
from precaudit.interpreters.jaxpr.sites import STATE, Site, sites, sites_of, unique_names

BEFORE = "<"  # begins the names of taps of the step before


@dataclass(frozen=True)
class ScanStep:
    """A scan's step: ``call(index, *args)``, where the whole is ``call(*args)``, and its taps.

    ``names``: of the scan's taps, as in the whole, and where they are; ``outside``: of those that are made before it.
    ``length``, ``reverse``: of the scan.
    """

    call: Callable[..., Any]
    sites: tuple[Site, ...]
    outside: tuple[str, ...]
    length: int
    reverse: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the scan's taps."""
        return tuple(s.name for s in self.sites)

    def has_all_taps(self, taps: Mapping[str, Any]) -> bool:
        """Whether every tap of the scan is there, as it is: they say what each step was handed."""
        known = [(s, taps.get(s.name)) for s in self.sites]
        return all(x is not None and x.shape == (*s.stacked, *s.shape) and x.dtype == s.dtype for s, x in known)

    def values(self, taps: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return the values of a step's taps, those of the step before as ``<name``, out of the whole's taps."""
        before = min(index + 1, self.length - 1) if self.reverse else max(index - 1, 0)
        handed = {BEFORE + name: taps[name][before] for name in self.names}
        return (
            {n: taps[n] for n in self.outside if n in taps} | handed | {name: taps[name][index] for name in self.names}
        )


def scan_steps(function: Callable[..., Any], args: Sequence[Any]) -> list[ScanStep]:
    """Return a program's scans whose steps can be made one by one, as steps.

    Not those with loops, shards or taps of one name inside, or that carry what no tap of the step made, or that begin
    with what another scan with taps left.
    """
    jaxpr = trace_jaxpr(function, args, {})[0]
    found = sites(jaxpr.jaxpr)
    names = unique_names(found)
    return [
        _step(jaxpr, equation, found[at : at + count], names[:at])
        for equation, at, count in _scans(jaxpr.jaxpr, 0)
        if names[at : at + count] == [s.name for s in found[at : at + count]]
        and all(_plain(s, equation.params["length"]) for s in found[at : at + count])
        and all(_outside(s) for s in found[:at])
        and _handed_by_taps(equation)
    ]


def _plain(s: Site, length: int) -> bool:
    return s.stacked == (length,) and not (s.inside or s.sharded or s.name.startswith(STATE))


def _outside(s: Site) -> bool:
    return not (s.stacked or s.inside or s.name.startswith(STATE))


def _scans(jaxpr: jex.Jaxpr, at: int) -> Iterator[tuple[Any, int, int]]:
    """Yield the scans with taps that calls alone are around, the number of taps before each, and of those in it."""
    for e in jaxpr.eqns:
        count = len(sites_of(e))
        if e.primitive.name == "scan" and count:
            yield e, at, count
        elif e.primitive.name in CALLS and count:
            yield from _scans(body_of_call(e.params, CALLS[e.primitive.name])[0], at)
        at += count


def _handed_by_taps(equation: jex.JaxprEqn) -> bool:
    """Whether all that a scan carries on is made of taps of the same step, and these of no state."""
    body, (n_consts, n_carry) = open_jaxpr(equation.params["jaxpr"])[0], scan_counts(equation.params)
    state = frozenset({BEFORE})
    given = [state if n_consts <= i < n_consts + n_carry else frozenset() for i in range(len(body.invars))]
    found, outputs = reads_of_arguments(body, given)
    read = frozenset[str]().union(*outputs[:n_carry])
    return BEFORE not in read.union(*(found.get(name, ()) for name in read))


def _step(jaxpr: jex.ClosedJaxpr, scan: jex.JaxprEqn, own: Sequence[Site], outside: Sequence[str]) -> ScanStep:
    params = scan.params
    length, reverse = params["length"], params["reverse"]
    body, consts = open_jaxpr(params["jaxpr"])
    n_consts, n_carry = scan_counts(params)
    earlier = _previous_taps(body)

    def call(index: jax.Array, *args: Any) -> Any:
        def step(inputs: Sequence[Any]) -> list[Any]:
            shared, stacked = inputs[:n_consts], inputs[n_consts + n_carry :]
            first = inputs[n_consts : n_consts + n_carry]

            def at(i: jax.Array) -> list[Any]:
                return [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in stacked]

            def carry_of_step(*xs: Any) -> list[Any]:
                return walk(earlier, consts, xs, bind)[:n_carry]

            start, before = (length - 1, index + 1) if reverse else (0, index - 1)
            previous = jax.jit(carry_of_step)(*shared, *first, *at(jnp.clip(before, 0, length - 1)))
            state = [jnp.where(index == start, a, b) for a, b in zip(first, previous, strict=True)]
            return list(jax.jit(lambda *xs: walk(body, consts, xs, bind))(*shared, *state, *at(index)))

        return _until(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(args), scan, step)

    return ScanStep(call, tuple(own), tuple(outside), length, reverse)


def _until(
    jaxpr: jex.Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    target: jex.JaxprEqn,
    meaning: Callable[[list[Any]], list[Any]],
) -> list[Any]:
    """Return what is made of an equation's inputs, evaluating what comes before it."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for e in jaxpr.eqns:
        inputs = [v.val if hasattr(v, "val") else values[v] for v in e.invars]
        with source_context(e):
            if e is target:
                return meaning(inputs)
            if e.primitive.name in CALLS and _holds(e, target):
                return _until(*body_of_call(e.params, CALLS[e.primitive.name]), inputs, target, meaning)
            values.update(zip(e.outvars, bind(e, inputs), strict=True))
    raise ValueError("the equation is not in the jaxpr")


def _holds(equation: jex.JaxprEqn, target: jex.JaxprEqn) -> bool:
    body = body_of_call(equation.params, CALLS[equation.primitive.name])[0]
    return any(e is target or (e.primitive.name in CALLS and _holds(e, target)) for e in body.eqns)


def _previous_taps(jaxpr: jex.Jaxpr) -> Any:
    """Return an open jaxpr whose taps are those of the step before."""
    return jaxpr.replace(eqns=[_of_before(e) for e in jaxpr.eqns])


def _of_before(e: jex.JaxprEqn) -> Any:
    if e.primitive.name == "name":
        return e.replace(params={**e.params, "name": BEFORE + e.params["name"]})
    if not any(True for value in e.params.values() for _ in bodies(value)):
        return e
    return e.replace(params={key: _bodies_of_before(value) for key, value in e.params.items()})


def _bodies_of_before(value: Any) -> Any:
    if not any(True for _ in bodies(value)):
        return value
    if isinstance(value, tuple | list):
        return type(value)(_bodies_of_before(x) for x in value)
    return value.replace(jaxpr=_previous_taps(value.jaxpr)) if hasattr(value, "jaxpr") else _previous_taps(value)
