"""What a program's sorts, top-ks and argmaxes chose, beside what they choose of the values that were recorded.

A choice is recorded as a state of the run: FP64 and every emulation go on with it. It is right where what it takes is
as large as what it should take, but for the rounding of both.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from precaudit.interpreters.jaxpr.plant import Planted, Values, planting
from precaudit.interpreters.jaxpr.sites import STATE, Site

FIRST = {"argmax", "argmin", "sort", "top_k"}  # they choose by their first operand
TINY = float(np.finfo(np.float64).tiny)


def choices(
    function: Callable[..., Any], mine: Collection[str], steps: Sequence[int] | None = None
) -> Callable[..., Values]:
    """Return ``g(values, *args) → {state: distance}`` of the states of a program with taps that are choices, ``mine``.

    Distance, FP64 in the shape of the choice: |x[own] − x[recorded]| / max of both sizes, x what is chosen by; 0 where
    both are NaN, and NaN where it is not known what is chosen by. ``values``, ``steps``: as ``planting``. Under
    ``jax.enable_x64(True)``; raises as ``plant`` does.
    """
    return planting(function, lambda names: Chosen(names, mine), steps=steps)


class Chosen(Planted):
    """Evaluates a planted shadow and holds what was chosen to what the planted values choose."""

    def __init__(self, names: Collection[str], mine: Collection[str]) -> None:
        super().__init__({}, "read", names)
        self.mine = mine
        self.made: dict[
            int, tuple[Any, Any, int]
        ] = {}  # choices, by their ids, with what they are chosen by, and where

    def operation(self, equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluate one operation; take note of what a choice chooses by."""
        out = super().operation(equation, inputs)
        name, params = equation.primitive.name, equation.params
        if name in FIRST:
            axis = params["axes"][0] if "axes" in params else params.get("dimension", params.get("axis", -1))
            self.made |= {id(y): (y, inputs[0], axis) for y in out if jnp.issubdtype(y.dtype, jnp.integer)}
        return out

    def enter(self, equation: jex.JaxprEqn, inputs: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
        """Go on with a recorded choice, and tell how far it is from that of the planted values."""
        if equation.primitive.name != "name" or not equation.params["name"].startswith(STATE):
            return super().enter(equation, inputs, values)
        out, _ = super().enter(equation, inputs, values)
        if equation.params["name"] not in self.mine:
            return out, [None]
        known = self.made.get(id(inputs[0]))
        unknown = jnp.full(jnp.shape(values[0]), np.nan)
        return out, [unknown if known is None else _distance(known[1], known[0], values[0], known[2])]

    def untaken(self, site: Site, value: jax.Array) -> Any:
        """Return what is told of a choice whose branch was not taken: it is right."""
        return jnp.zeros(jnp.shape(value)) if site.name in self.mine else None

    def tap(self, x: jax.Array, value: jax.Array) -> tuple[list[Any], list[Any]]:
        """Go on with the planted value."""
        return [self.chosen(value, x)], [None]


def _distance(x: jax.Array, own: jax.Array, recorded: jax.Array, axis: int) -> Any:
    """Return the relative distance of the elements along an axis that two choices take."""
    if own.ndim < x.ndim:  # of one element: an argmax
        own, recorded = (jnp.expand_dims(i, axis) for i in (own, recorded))
        return jnp.squeeze(_distance(x, own, recorded, axis), axis)
    a, b = (jnp.take_along_axis(x, i.astype("int32"), axis, mode="fill", fill_value=np.nan) for i in (own, recorded))
    size = jnp.maximum(jnp.maximum(jnp.abs(a), jnp.abs(b)), TINY)
    same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    apart = jnp.where(same, 0.0, jnp.abs(a - b) / size)
    return jnp.where(jnp.isnan(apart), np.inf, apart)
