"""Choices of a function (top-k, argmax, sort) as it runs, and the same function in FP64 that goes on with them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from precaudit.interpreters.jaxpr.choices import FIRST
from precaudit.interpreters.jaxpr.emulator import Emulator
from precaudit.interpreters.jaxpr.jax_versions import bind, body_of_call, source, walk, walk_equations
from precaudit.interpreters.jaxpr.loops import LOOPS
from precaudit.interpreters.jaxpr.primitives import lifting
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.interpreters.jaxpr.subnormals import device_flushes
from precaudit.numbers.arrays import Array

WHOLE = {"shard_map"} | set(LOOPS)  # what is chosen inside is not looked at


def chooses(jaxpr: jex.Jaxpr) -> bool:
    """Whether an open jaxpr, or a body in it, chooses by floats."""
    return any(map(_indices, walk_equations(jaxpr)))


def record_choices(jaxpr: jex.ClosedJaxpr, leaves: Sequence[Any], options: dict[str, Any] | None) -> list[Array]:
    """Return what a closed jaxpr chooses as it runs, in its order; ``options``: the compiler's."""

    def run(*given: Any) -> list[Any]:
        found: list[Any] = []

        def step(equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
            how = lifting(equation.primitive.name)
            if how.kind == "call":
                return walk(*body_of_call(equation.params, how.body), inputs, step)
            out = bind(equation, inputs)
            found.extend(out[i] for i in _indices(equation))
            return out

        walk(jaxpr.jaxpr, jaxpr.consts, given, step)
        return found

    return [np.asarray(x) for x in jax.jit(run, compiler_options=options)(*leaves)]


class Choosing(Emulator):
    """Rounds what the equations of one line give, all else in FP64; goes on with choices that are given.

    ``line``: None for none. ``held``: choices in the program's order, None for its own; ``made``: (line, operation,
    its own choice) of each.
    """

    def __init__(self, line: str | None, held: Sequence[Any] | None = None) -> None:
        super().__init__({}, (), Realisation(flush=device_flushes()))
        self.line, self.given = line, None if held is None else list(held)
        self.made: list[tuple[str, str, Any]] = []
        self.inside = 0

    def equation(self, equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluate an equation."""
        whole = equation.primitive.name in WHOLE
        self.inside += whole
        out = super().equation(equation, inputs)
        self.inside -= whole
        return out

    def operation(self, equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluate one operation, in FP64 unless the line made it; of a choice, what is taken by the one given."""
        rounds = source(equation) == self.line
        out = super().operation(equation, inputs) if rounds else super(Emulator, self).operation(equation, inputs)
        if self.inside:
            return out
        for i in _indices(equation):
            mine = out[i]
            self.made.append((source(equation), equation.primitive.name, mine))
            if self.given is None:
                continue
            other = self.given[len(self.made) - 1]
            if equation.primitive.name == "top_k":
                out = [jnp.take_along_axis(inputs[0], other, equation.params.get("axis", -1)), other]
            elif mine.ndim < inputs[0].ndim:
                out = [other]
            else:  # both are orders of the same elements: where each of the other's stands in this one's
                axis = equation.params["dimension"]
                at = jnp.take_along_axis(jnp.argsort(mine, axis), other, axis)
                out = [jnp.take_along_axis(x, at, axis) for x in out]
        return out


def _indices(equation: jex.JaxprEqn) -> list[int]:
    """Return which results of an equation are what it chose by floats: one of whole numbers, in a sort the last."""
    name = equation.primitive.name
    if name not in FIRST or not jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating):
        return []
    return [i for i, v in enumerate(equation.outvars) if jnp.issubdtype(v.aval.dtype, jnp.integer)][-1:]
