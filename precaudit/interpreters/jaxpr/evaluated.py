"""Evaluation of a jaxpr as it is, but for what is asked for: taps on some variables, some while loops run otherwise."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Sharding

from precaudit.interpreters.jaxpr.jax_versions import bind, bodies, body_of_call, open_jaxpr, source_context
from precaudit.interpreters.jaxpr.loops import LOOPS, shard_map
from precaudit.interpreters.jaxpr.primitives import CALLS

Meaning = Callable[["Evaluated", Any, list[Any]], list[Any]]  # of a loop: (interpreter, parameters, inputs) → outputs


@dataclass(frozen=True)
class Evaluated:
    """Evaluates jaxprs.

    ``names``: the name of the tap on a variable; ``loops``: what is made of a while loop, by the id of its equation;
    ``labels``: a scope's name for an equation, by its id. ``own``: those of the program's own
    taps that are kept, by their names (None: all).
    """

    names: Mapping[Any, str] = field(default_factory=dict)
    loops: Mapping[int, Meaning] = field(default_factory=dict)
    labels: Mapping[int, str] = field(default_factory=dict)
    own: Collection[str] | None = None

    def run(self, jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluate an open jaxpr."""
        values: dict[Any, Any] = {}

        def bind(variables: Sequence[Any], given: Sequence[Any]) -> None:
            for v, x in zip(variables, given, strict=True):
                name = self.names.get(v)
                values[v] = x if name is None else checkpoint_name(x, name)

        def value_of(v: jex.Var | jex.Literal) -> Any:
            return v.val if isinstance(v, jex.Literal) else values[v]

        bind(jaxpr.constvars, consts)
        bind(jaxpr.invars, args)
        for e in jaxpr.eqns:
            with source_context(e):
                bind(e.outvars, self.equation(e, [value_of(v) for v in e.invars]))
        return [value_of(v) for v in jaxpr.outvars]

    def equation(self, e: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluate an equation."""
        name, params = e.primitive.name, e.params
        if id(e) in self.loops:
            return self.loops[id(e)](self, params, inputs)
        if self.drops(e):
            return inputs
        if id(e) in self.labels:
            with jax.named_scope(self.labels[id(e)]):
                return bind(e, inputs)
        if not self.within(e):
            return bind(e, inputs)
        if name in LOOPS:
            return LOOPS[name](self.run, jnp.asarray, params, inputs)
        if name == "shard_map":
            return shard_map(self.run, jnp.asarray, params, inputs, params["check_vma"])
        if name == "remat2":
            jaxpr, consts = open_jaxpr(params["jaxpr"])
            how = {"prevent_cse": params["prevent_cse"], "policy": params["policy"]}
            return list(jax.checkpoint(lambda *a: self.run(jaxpr, consts, a), **how)(*inputs))
        if name not in CALLS:
            return bind(e, inputs)
        out = self.run(*body_of_call(params, CALLS[name]), placed(inputs, params.get("in_shardings")))
        return placed(out, params.get("out_shardings"))

    def drops(self, e: jex.JaxprEqn) -> bool:
        """Whether an equation is a tap of the program's own that is not kept."""
        return e.primitive.name == "name" and self.own is not None and e.params["name"] not in self.own

    def within(self, e: jex.JaxprEqn) -> bool:
        """Whether anything that is asked for lies in a body of an equation."""
        return any(self.touches(body) for value in e.params.values() for body in bodies(value))

    def touches(self, jaxpr: jex.Jaxpr) -> bool:
        """Whether anything that is asked for lies in a jaxpr."""
        if any(v in self.names for v in (*jaxpr.constvars, *jaxpr.invars)):
            return True
        return any(
            any(v in self.names for v in e.outvars) or id(e) in self.loops or self.drops(e) or self.within(e)
            for e in jaxpr.eqns
        )


def placed(values: Sequence[Any], where: Sequence[Any] | None) -> list[Any]:
    """Return values where an inner jit says they lie; those of which it says nothing as they are."""
    given = [None] * len(values) if where is None else where
    return [
        lax.with_sharding_constraint(x, how) if isinstance(how, Sharding) else x
        for x, how in zip(values, given, strict=True)
    ]
