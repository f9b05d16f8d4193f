"""Collect tapped values from inside a JAX program: ``reap(f)(*args)`` returns f's output and every tap's value.

A tap is ``jax.ad_checkpoint.checkpoint_name(x, name)``, an identity. The program is traced to its jaxpr, and the jaxpr
is rewritten so that the selected values become outputs; what is not selected stays as it was and costs nothing.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import name_p
from jax.sharding import PartitionSpec

from precaudit.transforms.jax_versions import BODY_KEYS, CALLS, REMATS, bind, bodies, closed, evaluate, manual_axes

Taps = dict[str, Any]
Transform = Callable[[str, jax.Array], jax.Array]


def reap(
    function: Callable[..., Any],
    select: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    transform: Transform | None = None,
) -> Callable[..., tuple[Any, Taps]]:
    """Return a function that calls ``function`` and also returns its taps by name.

    ``select`` names the taps wanted (None: all). A tap inside a scan gives [length, …]; ``layers`` keeps only those
    steps, in ascending order, without ever holding the others. A tap inside a while loop gives its last iteration;
    inside a cond, zeros where its branch was not taken, with ``name@taken``. A name met twice gets ``#1``, ``#2``.
    Inside shard_map the shards are stacked on a new leading axis. ``transform`` is applied to a value where it is
    made, before it is stacked. Derivative rules around a selected tap are dropped: use ``reap(grad(f))``.

    Raises NotImplementedError for a selected tap inside a primitive whose body cannot be entered.
    """
    reaper = _Reaper(select, None if layers is None else sorted(set(layers)), transform or (lambda name, x: x))

    def collecting(*args: Any) -> tuple[Any, Taps]:
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        out, taps = reaper.run(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out), taps

    return collecting


def _put(taps: Taps, name: str, value: Any) -> None:
    free, i = name, 0
    while free in taps:
        i += 1
        free = f"{name}#{i}"
    taps[free] = value


class _Reaper:
    """Evaluates jaxprs, returning (outputs, taps)."""

    def __init__(self, select: Collection[str] | None, layers: list[int] | None, transform: Transform) -> None:
        self.select = None if select is None else frozenset(select)
        self.layers = layers
        self.transform = transform

    def wants(self, equation: Any) -> bool:
        return equation.primitive is name_p and (self.select is None or equation.params["name"] in self.select)

    def contains(self, jaxpr: Any) -> bool:
        """Whether a wanted tap is anywhere inside."""
        return any(
            self.wants(e) or any(self.contains(b) for v in e.params.values() for b in bodies(v)) for e in jaxpr.eqns
        )

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], Taps]:
        values: dict[Any, Any] = {}
        taps: Taps = {}

        def read(variable: Any) -> Any:
            return variable.val if isinstance(variable, jex.Literal) else values[variable]

        values.update(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))
        for equation in jaxpr.eqns:
            inputs = [read(v) for v in equation.invars]
            if self.wants(equation):
                name = equation.params["name"]
                _put(taps, name, self.transform(name, inputs[0]))
                out = inputs
            elif any(self.contains(b) for v in equation.params.values() for b in bodies(v)):
                out, inner = self.enter(equation, inputs)
                for name, value in inner.items():
                    _put(taps, name, value)
            else:
                out = bind(equation, inputs)
            values.update(zip(equation.outvars, out, strict=True))
        return [read(v) for v in jaxpr.outvars], taps

    def enter(self, equation: Any, inputs: list[Any]) -> tuple[list[Any], Taps]:
        """Evaluate an equation whose body holds a wanted tap."""
        name, params = equation.primitive.name, equation.params
        if name in CALLS:
            jaxpr, consts = closed(params["jaxpr"])
            return jax.jit(lambda *a: self.run(jaxpr, consts, a), inline=params.get("inline", False))(*inputs)
        if name in REMATS:
            jaxpr, consts = closed(params["jaxpr"])
            body = jax.checkpoint(
                lambda *a: self.run(jaxpr, consts, a), prevent_cse=params["prevent_cse"], policy=params["policy"]
            )
            return body(*inputs)
        rule = {"scan": self.scan, "while": self.while_loop, "cond": self.cond, "shard_map": self.shard_map}.get(name)
        if rule is not None:
            return rule(params, inputs)
        for key in BODY_KEYS:
            if key in params and any(True for _ in bodies(params[key])):
                return self.run(*closed(params[key]), inputs)
        raise NotImplementedError(f"a selected tap lies inside {name}, which reap cannot enter")

    def scan(self, params: Any, inputs: list[Any]) -> tuple[list[Any], Taps]:
        jaxpr, consts = closed(params["jaxpr"])
        n_consts, n_carry, length = params["num_consts"], params["num_carry"], params["length"]
        shared, first, stacked = inputs[:n_consts], inputs[n_consts : n_consts + n_carry], inputs[n_consts + n_carry :]
        how = {"length": length, "reverse": params["reverse"], "unroll": params["unroll"]}

        def body(carry: Any, xs: Any) -> tuple[list[Any], list[Any], Taps]:
            out, taps = self.run(jaxpr, consts, [*shared, *carry, *xs])
            return out[:n_carry], out[n_carry:], taps

        if self.layers is None:

            def every(carry: Any, xs: Any) -> tuple[Any, Any]:
                carry, ys, taps = body(carry, xs)
                return carry, (ys, taps)

            carry, (ys, taps) = lax.scan(every, first, stacked, **how)
            return [*carry, *ys], taps

        # Unselected steps write to one slot past the end: no branch, and memory for the selected steps only.
        kept = [i for i in self.layers if i < length]
        slots = np.full(length, len(kept), np.int32)
        slots[kept] = np.arange(len(kept))
        xs_one = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in stacked]
        shapes = jax.eval_shape(lambda c, x: body(c, x)[2], first, xs_one)
        buffers = {k: jnp.zeros((len(kept) + 1, *s.shape), s.dtype) for k, s in shapes.items()}

        def some(state: Any, xs: Any) -> tuple[Any, Any]:
            (carry, kept_taps), (slot, inner) = state, xs
            carry, ys, taps = body(carry, inner)
            kept_taps = {k: lax.dynamic_update_index_in_dim(kept_taps[k], taps[k], slot, 0) for k in kept_taps}
            return (carry, kept_taps), ys

        (carry, buffers), ys = lax.scan(some, (first, buffers), (jnp.asarray(slots), stacked), **how)
        return [*carry, *ys], {k: v[:-1] for k, v in buffers.items()}

    def while_loop(self, params: Any, inputs: list[Any]) -> tuple[list[Any], Taps]:
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        cond_jaxpr, cond_consts = closed(params["cond_jaxpr"])
        body_jaxpr, body_consts = closed(params["body_jaxpr"])
        for_cond, for_body, first = inputs[:n_cond], inputs[n_cond : n_cond + n_body], inputs[n_cond + n_body :]

        def body(state: Any) -> tuple[list[Any], Taps]:
            return self.run(body_jaxpr, body_consts, [*for_body, *state[0]])

        zeros = self.zeros(lambda *a: self.run(body_jaxpr, body_consts, [*for_body, *a]), *first)
        return lax.while_loop(
            lambda state: evaluate(cond_jaxpr, cond_consts, [*for_cond, *state[0]])[0], body, (first, zeros)
        )

    def zeros(self, function: Callable[..., tuple[Any, Taps]], *args: Any) -> Taps:
        return {k: jnp.zeros(s.shape, s.dtype) for k, s in jax.eval_shape(function, *args)[1].items()}

    def cond(self, params: Any, inputs: list[Any]) -> tuple[list[Any], Taps]:
        index, args = inputs[0], inputs[1:]
        branches = [lambda *a, b=b: self.run(*closed(b), a) for b in params["branches"]]
        every: Taps = {}
        for branch in branches:
            every.update(self.zeros(branch, *args))

        def filled(branch: Callable[..., tuple[Any, Taps]]) -> Callable[..., Any]:
            def call(*a: Any) -> Any:
                out, taps = branch(*a)
                taken = {f"{k}@taken": jnp.asarray(k in taps) for k in every}
                return out, {k: taps.get(k, every[k]) for k in every} | taken

            return call

        return lax.switch(index.astype(np.int32), [filled(b) for b in branches], *args)

    def shard_map(self, params: Any, inputs: list[Any]) -> tuple[list[Any], Taps]:
        jaxpr, consts = closed(params["jaxpr"])
        axes = manual_axes(params)

        def body(*args: Any) -> tuple[list[Any], Taps]:
            out, taps = self.run(jaxpr, consts, args)
            return out, {k: v[None] for k, v in taps.items()}

        mapped = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
            axis_names=set(axes),
            check_vma=params["check_vma"],
        )
        return mapped(*inputs)
