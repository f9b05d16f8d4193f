"""Planted values: a program's FP64 shadow with its taps overwritten, or with something added to them."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from jax import lax

from precaudit.transforms.jax_versions import closed
from precaudit.transforms.shadow import Lift, _Shadow, _up, traced

Values = dict[str, Any]


def plant(
    function: Callable[..., Any], mode: Literal["force", "add"], lift: Mapping[str, Lift] | None = None
) -> Callable[..., tuple[Any, Values]]:
    """Return ``g(values, *args) → (outputs, errors)`` of ``function``'s FP64 shadow, ``values`` planted at its taps.

    ``values`` maps a tap's name to an array: [steps of the scan it is in, …], or the tap's own shape outside scans.
    ``force`` overwrites a tap and gives ``errors[name]`` = planted − computed: what this operation alone added. ``add``
    adds to it, so that a gradient by ``values`` is one by every tap; scan bodies are computed again in the backward
    pass. Under ``jax.enable_x64(True)``. Raises CannotLift as ``shadow`` does.
    """

    def planted(values: Values, *args: Any) -> tuple[Any, Values]:
        jaxpr, structure = traced(function, args)
        run = _Planted(dict(lift or {}), mode, values)
        out = run.run(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(structure, [_up(x) for x in out]), run.errors

    return planted


class _Planted(_Shadow):
    """Evaluates a shadow with planted taps; a tap inside a scan takes its step's slice."""

    def __init__(self, lift: Mapping[str, Lift], mode: str, values: Values) -> None:
        super().__init__(lift)
        self.mode, self.values = mode, values
        self.errors: Values = {}

    def equation(self, equation: Any, inputs: list[Any]) -> list[Any]:
        if equation.primitive.name != "name" or equation.params["name"] not in self.values:
            return super().equation(equation, inputs)
        name, x = equation.params["name"], _up(inputs[0])
        if self.mode == "add":
            return [x + self.values[name]]
        self.errors[name] = self.values[name] - x
        return [self.values[name]]

    def scan(self, params: Any, inputs: list[Any]) -> list[Any]:
        jaxpr, consts = closed(params["jaxpr"])
        inside = {e.params["name"] for e in jaxpr.eqns if e.primitive.name == "name"}
        mine = {k: v for k, v in self.values.items() if k in inside}
        if not mine:
            return super().scan(params, inputs)
        n_consts, n_carry = params["num_consts"], params["num_carry"]
        shared, stacked = inputs[:n_consts], inputs[n_consts + n_carry :]

        def body(carry: Any, xs: Any) -> tuple[list[Any], Any]:
            step = _Planted(self.lift, self.mode, xs[1])
            out = [_up(x) for x in step.run(jaxpr, consts, [*shared, *carry, *xs[0]])]
            return out[:n_carry], (out[n_carry:], step.errors)

        first = [_up(jax.numpy.asarray(x)) for x in inputs[n_consts : n_consts + n_carry]]
        how = {"length": params["length"], "reverse": params["reverse"]}
        again = jax.checkpoint(body) if self.mode == "add" else body
        carry, (ys, errors) = lax.scan(again, first, (stacked, mine), **how)
        self.errors.update(errors)
        return [*carry, *ys]
