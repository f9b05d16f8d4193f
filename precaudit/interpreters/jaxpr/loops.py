"""Loops and branches of a jaxpr evaluated by an interpreter that holds values in another form.

``run(jaxpr, consts, arguments)`` evaluates an open jaxpr; ``hold(value)`` is the form of what a loop carries and a
branch returns (FP64, bits), so that it is the same at every step and in every branch. What a scan stacks or closes over
is handed in as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from precaudit.interpreters.jaxpr.jax_versions import manual_axes, open_jaxpr, scan_counts
from precaudit.interpreters.jaxpr.rules import select_batched

Run = Callable[[Any, Sequence[Any], Sequence[Any]], list[Any]]
Hold = Callable[[Any], Any]


def scan(run: Run, hold: Hold, params: Mapping[str, Any], inputs: Sequence[Any]) -> list[Any]:
    """Run a scan."""
    jaxpr, consts = open_jaxpr(params["jaxpr"])
    n_consts, n_carry = scan_counts(params)
    shared, stacked = inputs[:n_consts], list(inputs[n_consts + n_carry :])

    def body(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        out = [hold(x) for x in run(jaxpr, consts, [*shared, *carry, *xs])]
        return out[:n_carry], out[n_carry:]

    first = [hold(x) for x in inputs[n_consts : n_consts + n_carry]]
    how = {"length": params["length"], "reverse": params["reverse"], "unroll": params["unroll"]}
    carry, ys = lax.scan(body, first, stacked, **how)
    return [*carry, *ys]


def while_loop(run: Run, hold: Hold, params: Mapping[str, Any], inputs: Sequence[Any]) -> list[Any]:
    """Run a loop; under vmap the condition is batched, and elements that have ended stay as they are."""
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond, body = open_jaxpr(params["cond_jaxpr"]), open_jaxpr(params["body_jaxpr"])
    for_cond, for_body, first = inputs[:n_cond], inputs[n_cond : n_cond + n_body], inputs[n_cond + n_body :]

    def goes_on(state: list[Any]) -> Any:
        return run(*cond, [*for_cond, *state])[0]

    def step(state: list[Any]) -> list[Any]:
        new = [hold(x) for x in run(*body, [*for_body, *state])]
        if not cond[0].outvars[0].aval.shape:
            return new
        going = goes_on(state)
        kept: list[Any] = jax.tree.map(lambda a, b: select_batched(going, a, b), new, state)
        return kept

    return list(lax.while_loop(lambda state: jnp.any(goes_on(state)), step, [hold(x) for x in first]))


def cond(run: Run, hold: Hold, params: Mapping[str, Any], inputs: Sequence[Any]) -> list[Any]:
    """Run the branch that an index chooses."""
    branches = [lambda *a, b=b: [hold(x) for x in run(*open_jaxpr(b), a)] for b in params["branches"]]
    return list(lax.switch(jnp.asarray(inputs[0]).astype(np.int32), branches, *inputs[1:]))


def shard_map(
    run: Run, hold: Hold, params: Mapping[str, Any], inputs: Sequence[Any], checked: bool = False
) -> list[Any]:
    """Run a body on the shards of a mesh; ``checked``: what differs between these is declared in it."""
    jaxpr, consts = open_jaxpr(params["jaxpr"])
    return map_shards(lambda args, _: ([hold(x) for x in run(jaxpr, consts, args)], []), params, inputs, [], checked)[0]


def map_shards(
    body: Callable[[Sequence[Any], list[Any]], tuple[list[Any], Any]],
    params: Mapping[str, Any],
    inputs: Sequence[Any],
    values: list[Any],
    checked: bool = False,
) -> tuple[list[Any], Any]:
    """Return ``body(inputs, values) → (outputs, told)`` on the shards of a shard_map equation's mesh.

    Values and what is told are [shards, …], in the order of the mesh's axes: each shard has its own.
    """
    axes = manual_axes(params)

    def each(args: Sequence[Any], mine: list[Any]) -> tuple[list[Any], Any]:
        out, told = body(args, jax.tree.map(lambda x: x[0], mine))
        return out, jax.tree.map(lambda x: x[None], told)

    function = jax.shard_map(
        each,
        mesh=params["mesh"],
        in_specs=(list(params["in_specs"]), PartitionSpec(axes)),
        out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
        axis_names=set(axes),
        check_vma=checked,
    )
    return function(list(inputs), values)


LOOPS = {"scan": scan, "while": while_loop, "cond": cond}
