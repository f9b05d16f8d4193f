"""Several interpreters of one program in step: what all of them make alike, such as products, is compiled once.

They share calls and scans, so that equal operations lie in one computation, where the compiler merges them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from precaudit.interpreters.jaxpr.jax_versions import open_jaxpr, scan_counts, walk
from precaudit.interpreters.jaxpr.plant import Planted, planting
from precaudit.interpreters.jaxpr.primitives import lifting
from precaudit.interpreters.jaxpr.shadow import literal
from precaudit.interpreters.jaxpr.sites import sites_of
from precaudit.interpreters.jaxpr.wide import up

Interpreter = Callable[[Collection[str]], Planted]
Told = tuple[Any, ...]  # what each interpreter tells of a tap
Keep = Callable[[Any, Told], Told]


def evaluate_together(
    function: Callable[..., Any], interpreters: Sequence[Interpreter], keep: Keep, steps: Sequence[int] | None = None
) -> Callable[..., dict[str, Told]]:
    """Return ``g(values, *args) → {tap: what is kept}``; ``values``, ``steps`` as ``planting``.

    ``keep(value, told)``: what is kept of a tap whose planted value is ``value``, in every step of a scan by itself, so
    that no stack holds more. Of what each interpreter tells, the same values as each alone gives. Raises as
    ``planting`` does.
    """
    return planting(function, lambda names: Together([i(names) for i in interpreters], names, keep), steps=steps)


class Together(Planted):
    """Evaluates a planted shadow by several interpreters; values of variables are tuples, one of each."""

    def __init__(self, runs: Sequence[Planted], names: Collection[str], keep: Keep) -> None:
        super().__init__({}, "read", names)
        self.runs, self.keep = runs, keep

    def evaluate(
        self, jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any], values: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Evaluate an open jaxpr; where some steps alone have values, by each interpreter by itself."""
        if self.steps is None:
            return self.in_step(jaxpr, consts, [self.alike(x) for x in args], values)
        for run in self.runs:
            run.steps = self.steps
        return self.join([run.evaluate(jaxpr, consts, args, values) for run in self.runs], values)

    def alike(self, x: ArrayLike) -> tuple[Any, ...]:
        """Return a value that all interpreters have."""
        return (x,) * len(self.runs)

    def in_step(
        self, jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[tuple[Any, ...]], values: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Evaluate an open jaxpr whose arguments are each interpreter's own."""
        rest, told = list(values), []
        for run in self.runs:
            run.entering(jaxpr)

        def step(equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
            count = len(sites_of(equation, self.names))
            mine, rest[:] = rest[:count], rest[count:]
            own = [[x[i] for x in inputs] for i in range(len(self.runs))]
            if all(v is None for v in mine):
                told.extend(mine)
                made = [run.equation(equation, x) for run, x in zip(self.runs, own, strict=True)]
                return list(zip(*made, strict=True))
            out, errors = self.enter_together(equation, inputs, own, mine)
            told.extend(errors)
            return out

        return walk(jaxpr, [self.alike(c) for c in consts], args, step, lambda v: self.alike(literal(v))), told

    def enter_together(
        self, equation: jex.JaxprEqn, inputs: list[Any], own: list[list[Any]], values: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Evaluate an equation that is a planted tap or has one inside: calls and scans once for all interpreters."""
        name, params = equation.primitive.name, equation.params
        given = any(name in run.lift for run in self.runs)
        if name == "scan" and not given:
            with ExitStack() as stack:
                for run in self.runs:
                    stack.enter_context(run.inside_of(equation))
                return self.run_scan(params, own, values)
        if lifting(name).kind == "call" and not given:
            with ExitStack() as stack:
                bodies = [stack.enter_context(run.body_in_place(equation)) for run in self.runs]
                return self.in_step(*bodies[0], inputs, values)
        return self.join([run.enter(equation, x, values) for run, x in zip(self.runs, own, strict=True)], values)

    def join(self, made: Sequence[tuple[list[Any], list[Any]]], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return outputs as tuples of all interpreters', and what is kept of taps; None of one of which none tells."""
        out = list(zip(*(each for each, _ in made), strict=True))
        told = zip(values, *(t for _, t in made), strict=True)
        return out, [None if all(e is None for e in each) else self.keep(value, tuple(each)) for value, *each in told]

    def run_scan(
        self, params: Mapping[str, Any], own: list[list[Any]], values: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Run a scan for all interpreters; what they all read is sliced once."""
        jaxpr, consts = open_jaxpr(params["jaxpr"])
        n_consts, n_carry = scan_counts(params)
        slices = {id(x): x for each in own for x in each[n_consts + n_carry :]}

        def body(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], Any]:
            cut = dict(zip(slices, xs[0], strict=True))
            args = [
                [*each[:n_consts], *state, *(cut[id(x)] for x in each[n_consts + n_carry :])]
                for each, state in zip(own, carry, strict=True)
            ]
            out, told = self.in_step(jaxpr, consts, list(zip(*args, strict=True)), xs[1])
            made = [[up(x) for x in each] for each in zip(*out, strict=True)]
            return [each[:n_carry] for each in made], ([each[n_carry:] for each in made], told)

        first = [[up(jnp.asarray(x)) for x in each[n_consts : n_consts + n_carry]] for each in own]
        how = {"length": params["length"], "reverse": params["reverse"]}
        carry, (ys, told) = lax.scan(body, first, (list(slices.values()), values), **how)
        return list(zip(*([*c, *y] for c, y in zip(carry, ys, strict=True)), strict=True)), told
