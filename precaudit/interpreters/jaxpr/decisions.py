"""What rounding may decide in a program: a comparison of floats, a rounding to whole numbers, a maximum's place.

Where a value lies at a threshold, FP64 and the program may decide otherwise, and all that follows is another result of
the same formula. What recorded values decide is made of them again, as the program rounds between its taps.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from precaudit.interpreters.jaxpr.emulator import Emulator
from precaudit.interpreters.jaxpr.evaluated import Evaluated
from precaudit.interpreters.jaxpr.jax_versions import bind, body_of_call, open_jaxpr
from precaudit.interpreters.jaxpr.plant import Values, planting
from precaudit.interpreters.jaxpr.primitives import CALLS
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.interpreters.jaxpr.sites import STATE, Site, sites, unique_names
from precaudit.interpreters.jaxpr.tag import Tagged
from precaudit.interpreters.jaxpr.wide import up

DECISION = f"{STATE}decision"  # the name of their taps
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
STEPS = {"floor", "ceil", "round", "sign"}
SELECTS = {
    "select_and_scatter_add": 1,
    "select_and_gather_add": 1,
}  # which operand they only select by, as a max pool's


def decides(equation: jex.JaxprEqn) -> bool:
    """Whether an equation makes of floats what jumps: a truth value, a whole number."""
    name, read = equation.primitive.name, [v.aval.dtype for v in equation.invars if hasattr(v.aval, "dtype")]
    if not any(jnp.issubdtype(dtype, jnp.floating) for dtype in read):
        return False
    if name == "convert_element_type":
        return not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.inexact)
    return name in COMPARISONS or name in STEPS


def tag_decisions(made: Tagged, *args: Any) -> Tagged | None:
    """Return a program with a tap on every decision too, as a state of it; None where it has none.

    ``args``: as its call takes them. Not of those in while loops that hold no points.
    """
    with jax.enable_x64(False):
        jaxpr, shape = jax.make_jaxpr(made.call, return_shape=True)(*args)
        found = list(_deciding(jaxpr.jaxpr))
        if not found:
            return None
        names = {e.outvars[0]: DECISION for e in found if decides(e)}
        selects = {id(e): partial(_select, e) for e in found if e.primitive.name in SELECTS}
        run, structure = Evaluated(names, selects), jax.tree.structure(shape)

        def call(*given: Any) -> Any:
            return jax.tree.unflatten(structure, run.run(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(given)))

        states = [s for s in sites(jax.make_jaxpr(call)(*args).jaxpr) if s.name.startswith(STATE)]
    return replace(made, call=call, states=tuple(states))


def _deciding(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Yield the equations that decide, those in bodies that values can be planted in, too."""
    for e in jaxpr.eqns:
        name, params = e.primitive.name, e.params
        if name in SELECTS or (decides(e) and type(e.outvars[0]).__name__ != "DropVar"):
            yield e
        elif name == "cond":
            for branch in params["branches"]:
                yield from _deciding(open_jaxpr(branch)[0])
        elif name in ("scan", "shard_map"):
            yield from _deciding(open_jaxpr(params["jaxpr"])[0])
        elif name in CALLS and CALLS[name] in params:
            yield from _deciding(body_of_call(params, CALLS[name])[0])


def _select(equation: jex.JaxprEqn, _run: Evaluated, _params: Any, inputs: list[Any]) -> list[Any]:
    """Evaluate an equation that selects, with a tap on what it selects by."""
    at = SELECTS[equation.primitive.name]
    return bind(equation, [checkpoint_name(x, DECISION) if i == at else x for i, x in enumerate(inputs)])


def decisions(made: Tagged, how: Realisation) -> Callable[..., Values]:
    """Return ``g(values, *args) → {state: decision}`` of a program of ``tag_decisions``: what its taps' values decide.

    ``values`` as ``plant`` takes them; ``how``: what is made between taps rounds so. Under ``jax.enable_x64(True)``;
    raises as ``plant`` does.
    """
    named = zip(unique_names(made.states), made.states, strict=True)
    own = {name: s for name, s in named if s.name == DECISION}
    run = planting(made.call, lambda names: Deciding({}, names, how))

    def decide(values: Values, *args: Any) -> Values:
        room = {name: jnp.zeros((*s.stacked, *s.shape), s.dtype) for name, s in own.items()}
        told = run({**values, **room}, *args)
        return {name: told[name] for name in own}

    return decide


class Deciding(Emulator):
    """Evaluates segments of recorded values as they round, and tells what these decide."""

    def enter(self, equation: jex.JaxprEqn, inputs: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
        """Go on with a decision, and tell it."""
        if equation.primitive.name == "name" and equation.params["name"] == DECISION:
            return [inputs[0]], [up(jnp.asarray(inputs[0]))]
        return super().enter(equation, inputs, values)

    def untaken(self, site: Site, value: jax.Array) -> Any:
        """Return what is told of a decision whose branch was not taken: nothing reads it."""
        return up(jnp.zeros_like(value)) if site.name == DECISION else super().untaken(site, value)
