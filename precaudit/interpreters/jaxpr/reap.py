"""Collect tapped values from inside a JAX program: ``reap(f)(*args)`` returns f's output and every tap's value.

A tap is ``jax.ad_checkpoint.checkpoint_name(x, name)``, an identity. The program is traced to its jaxpr, and the jaxpr
is rewritten so that the selected values become outputs; what is not selected stays as it was and costs nothing.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding

from precaudit.interpreters.jaxpr.jax_versions import (
    bind,
    body_of_call,
    manual_axes,
    open_jaxpr,
    scan_counts,
    typed_as,
    varying,
    walk,
    with_leading_axis,
)
from precaudit.interpreters.jaxpr.loops import map_shards
from precaudit.interpreters.jaxpr.primitives import CALLS
from precaudit.interpreters.jaxpr.rules import select_batched
from precaudit.interpreters.jaxpr.sites import TAKEN, merge_branches, sites, sites_of, unique_names, unknown_tap

Taps = dict[str, Any]
Transform = Callable[[str, jax.Array], Any]  # what is kept of a tap's value: an array, or a tree of some


class Tap(NamedTuple):
    """A tap's value and whether it was computed at all (None: always)."""

    value: Any
    taken: Any = None


def reap(
    function: Callable[..., Any],
    select: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    transform: Transform | None = None,
    missing: Literal["error", "ignore"] = "error",
) -> Callable[..., tuple[Any, Taps]]:
    """Return a function that calls ``function``, with its arguments and keywords, and also returns its taps by name.

    ``select`` names the taps wanted (None: all). A tap inside a scan gives [length, …], inside nested scans [outer,
    inner, …]. ``layers`` keeps only those steps of the scan met first from outside, in ascending order, without ever
    holding the others; scans inside a kept step give all their steps. A name met twice gets ``#1``, ``#2`` in program
    order. ``transform(name, value)`` is applied to a value where it is made, before it is stacked; it gives arrays, in
    any tree.

    A tap inside a while loop gives its last iteration, in its condition the evaluation that ended it (of a vmapped
    loop: the last iteration of any element; ``vmap(reap(f))`` gives each its own). Inside a cond it gives the branch
    taken: branches that tap a name in the same shape and format share it, others get a number in the order of the
    jaxpr (of ``lax.cond``, the false branch first). ``name@taken``, bool, with an axis for every scan between, is
    False where the branch was not taken or the loop's body never ran, and the value is zeros there.

    Inside shard_map the shards are stacked on a new leading axis, in the order of the mesh's axes. Inner jits keep
    their shardings; they donate nothing (a tap may need the buffer) and keep no layouts. Derivative rules around a
    selected tap are dropped: use ``reap(grad(f))``.

    Raises ValueError where ``select`` names no tap of the program (``missing="ignore"``: it has none) or a layer is
    negative, and NotImplementedError for a selected tap inside a primitive whose body cannot be entered.

    >>> import jax.numpy as jnp
    >>> import precaudit
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> def f(x):
    ...     return jnp.sum(checkpoint_name(x * 2, "doubled"))
    >>> out, taps = precaudit.reap(f)(jnp.arange(3))
    >>> int(out), taps["doubled"].tolist()
    (6, [0, 2, 4])
    """
    if layers is not None and any(i < 0 for i in layers):
        raise ValueError(f"layers {sorted(layers)}: they count from 0")
    names = None if select is None else frozenset(select)
    reaper = _Reaper(names, None if layers is None else tuple(sorted(set(layers))), transform or (lambda _name, x: x))

    def collecting(*args: Any, **kwargs: Any) -> tuple[Any, Taps]:
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
        known = {s.name for s in sites(jaxpr.jaxpr)}
        if missing == "error" and names and (unknown := min(names - known, default=None)) is not None:
            raise ValueError(unknown_tap(unknown, known))
        out, taps = reaper.run(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(shape), out), _by_name(
            unique_names(sites(jaxpr.jaxpr, names)), taps
        )

    return collecting


def _by_name(names: Iterable[str], taps: Iterable[Tap]) -> Taps:
    found: Taps = {}
    for name, tap in zip(names, taps, strict=True):
        found[name] = tap.value
        if tap.taken is not None:
            found[name + TAKEN] = tap.taken
    return found


@dataclass(frozen=True)
class _Reaper:
    """Evaluates jaxprs, returning (outputs, taps in the order of ``sites``)."""

    names: frozenset[str] | None
    layers: tuple[int, ...] | None
    transform: Transform
    shards: tuple[str, ...] = ()  # the axes of the shard_map around, which every tap is made to vary over

    def run(self, jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], list[Tap]]:
        taps: list[Tap] = []

        def step(equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
            if not sites_of(equation, self.names):
                return bind(equation, inputs)
            if equation.primitive.name == "name":
                kept = self.transform(equation.params["name"], inputs[0])
                taps.append(Tap(jax.tree.map(self.each, kept)))
                return inputs
            out, inner = self.enter(equation, inputs)
            taps.extend(inner)
            return out

        return walk(jaxpr, consts, args, step), taps

    def each(self, x: jax.Array) -> Any:
        """Return a value as one of each shard."""
        return varying(x, self.shards) if self.shards else x

    def zeros(self, shapes: Any) -> Any:
        """Return zeros (False of ``taken``) of shapes."""
        return jax.tree.map(lambda s: self.each(typed_as(jnp.zeros(s.shape, s.dtype), s)), shapes)

    def full(self, tap: Tap | None, shapes: Tap) -> Tap:
        """Return a branch's tap, zeros and not taken where the branch lacks it."""
        if tap is None:
            return self.zeros(shapes)
        taken = jnp.asarray(True) if tap.taken is None else tap.taken
        axes = tuple(range(taken.ndim, len(shapes.taken.shape)))
        taken = jnp.broadcast_to(jnp.expand_dims(taken, axes), shapes.taken.shape)
        value = jax.tree.map(typed_as, tap.value, shapes.value)
        return Tap(value, self.each(typed_as(taken, shapes.taken)))

    def enter(self, equation: jex.JaxprEqn, inputs: list[Any]) -> tuple[list[Any], list[Tap]]:
        """Evaluate an equation whose body holds a wanted tap."""
        name, params = equation.primitive.name, equation.params
        rules = {
            "scan": self.scan,
            "while": self.while_loop,
            "cond": self.cond,
            "shard_map": self.shard_map,
            "jit": self.jit,
            "remat2": self.remat,
        }
        if name in rules:
            return rules[name](params, inputs)
        if name in CALLS:
            return self.run(*body_of_call(params, CALLS[name]), inputs)
        raise NotImplementedError(f"a selected tap lies inside {name}, which reap cannot enter")

    def jit(self, params: Mapping[str, Any], inputs: list[Any]) -> tuple[list[Any], list[Tap]]:
        jaxpr, consts = open_jaxpr(params["jaxpr"])

        def body(*args: Any) -> tuple[list[Any], list[Tap]]:
            return self.run(jaxpr, consts, args)

        body.__name__ = params["name"]
        compiled = jax.jit(
            body,
            in_shardings=tuple(map(_sharding, params["in_shardings"])),
            out_shardings=(list(map(_sharding, params["out_shardings"])), None),
            keep_unused=params["keep_unused"],
            inline=params["inline"],
        )
        return compiled(*inputs)

    def remat(self, params: Mapping[str, Any], inputs: list[Any]) -> tuple[list[Any], list[Tap]]:
        jaxpr, consts = open_jaxpr(params["jaxpr"])
        how = {"prevent_cse": params["prevent_cse"], "policy": params["policy"]}
        return jax.checkpoint(lambda *a: self.run(jaxpr, consts, a), **how)(*inputs)

    def scan(self, params: Mapping[str, Any], inputs: list[Any]) -> tuple[list[Any], list[Tap]]:
        jaxpr, consts = open_jaxpr(params["jaxpr"])
        (n_consts, n_carry), length = scan_counts(params), params["length"]
        shared, first, stacked = inputs[:n_consts], inputs[n_consts : n_consts + n_carry], inputs[n_consts + n_carry :]
        how = {"length": length, "reverse": params["reverse"], "unroll": params["unroll"]}
        within = replace(self, layers=None)

        def body(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any], list[Tap]]:
            out, taps = within.run(jaxpr, consts, [*shared, *carry, *xs])
            return out[:n_carry], out[n_carry:], taps

        if self.layers is None:

            def every(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[Any, Any]:
                carry, ys, taps = body(carry, xs)
                return carry, (ys, taps)

            carry, (ys, taps) = lax.scan(every, first, stacked, **how)
            return [*carry, *ys], taps

        # Unselected steps write to one slot past the end: no branch, and memory for the selected steps only.
        kept = [i for i in self.layers if i < length]
        slots = np.full(length, len(kept), np.int32)
        slots[kept] = np.arange(len(kept))
        xs_one = [with_leading_axis(x, None) for x in stacked]
        shapes = jax.eval_shape(lambda c, x: body(c, x)[2], first, xs_one)
        buffers = self.zeros(jax.tree.map(lambda s: with_leading_axis(s, len(kept) + 1), shapes))

        def some(state: Sequence[Any], xs: Sequence[Any]) -> tuple[Any, Any]:
            (carry, held), (slot, inner) = state, xs
            carry, ys, taps = body(carry, inner)
            held = jax.tree.map(lambda all_, x: lax.dynamic_update_index_in_dim(all_, x, slot, 0), held, taps)
            return (carry, held), ys

        (carry, buffers), ys = lax.scan(some, (first, buffers), (jnp.asarray(slots), stacked), **how)
        return [*carry, *ys], jax.tree.map(lambda x: x[:-1], buffers)

    def while_loop(self, params: Mapping[str, Any], inputs: list[Any]) -> tuple[list[Any], list[Tap]]:
        """Run a loop, its condition evaluated where the state is made, so that its taps are those that decided."""
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        cond, body = open_jaxpr(params["cond_jaxpr"]), open_jaxpr(params["body_jaxpr"])
        for_cond, for_body, first = inputs[:n_cond], inputs[n_cond : n_cond + n_body], inputs[n_cond + n_body :]
        batched = cond[0].outvars[0].aval.shape != ()

        def test(values: list[Any]) -> tuple[Any, list[Tap]]:
            out, taps = self.run(*cond, [*for_cond, *values])
            return out[0], taps

        def body_step(values: list[Any]) -> tuple[list[Any], list[Tap]]:
            out, taps = self.run(*body, [*for_body, *values])
            return out, [t if t.taken is not None else Tap(t.value, self.each(jnp.asarray(True))) for t in taps]

        def step(state: Sequence[Any]) -> Any:
            values, _, going, _ = state
            new, taps = body_step(values)
            if batched:
                new = [select_batched(going, a, b) for a, b in zip(new, values, strict=True)]
            return new, taps, *test(new)

        values, taps, _, last = lax.while_loop(
            lambda state: jnp.any(state[2]),
            step,
            (first, self.zeros(jax.eval_shape(body_step, first)[1]), *test(first)),
        )
        return values, [*last, *taps]

    def cond(self, params: Mapping[str, Any], inputs: list[Any]) -> tuple[list[Any], list[Tap]]:
        index, args = inputs[0], inputs[1:]
        branches = [open_jaxpr(b) for b in params["branches"]]
        found, places = merge_branches([sites(b, self.names) for b, _ in branches])
        calls = [lambda *a, b=b: self.run(b[0], b[1], a) for b in branches]
        shapes: dict[int, Tap] = {}
        for call, at in zip(calls, places, strict=True):
            for i, tap in zip(at, jax.eval_shape(call, *args)[1], strict=True):
                shapes[i] = _wider(tap, shapes.get(i))

        def fill(call: Callable[..., Any], at: list[int]) -> Callable[..., Any]:
            def branch(*a: Any) -> Any:
                out, taps = call(*a)
                mine = dict(zip(at, taps, strict=True))
                return out, [self.full(mine.get(i), shapes[i]) for i in range(len(found))]

            return branch

        made = [fill(call, at) for call, at in zip(calls, places, strict=True)]
        return lax.switch(index.astype(np.int32), made, *args)

    def shard_map(self, params: Mapping[str, Any], inputs: list[Any]) -> tuple[list[Any], list[Tap]]:
        jaxpr, consts = open_jaxpr(params["jaxpr"])
        axes = manual_axes(params)
        within = replace(self, shards=(*self.shards, *axes)) if params["check_vma"] else self

        def body(args: Sequence[Any], _: list[Any]) -> tuple[list[Any], list[Tap]]:
            return within.run(jaxpr, consts, args)

        return map_shards(body, params, inputs, [], params["check_vma"])


def _sharding(given: object) -> Sharding | None:
    """Return a sharding, None where none was given (JAX has a mark of its own for that)."""
    return given if isinstance(given, Sharding) else None


def _wider(tap: Tap, other: Tap | None) -> Tap:
    """Return the shapes of a tap of two branches: ``taken`` has the axes of the branch that needs more."""
    marks = [jax.ShapeDtypeStruct((), bool), *(t.taken for t in (tap, other) if t is not None and t.taken is not None)]
    return Tap(tap.value, max(marks, key=lambda s: len(s.shape)))
