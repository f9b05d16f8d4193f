"""A program in FP64 with the values of every device at hand: what shard_map makes on each rank, side by side (JAX).

A value inside shard_map is held as [ranks of each axis of the mesh, …, its own shape], on one device. Collectives are
those of ``jax.vmap`` over named axes. So a value may be looked at, or changed, as no single device can.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from precaudit.interpreters.jaxpr.jax_versions import (
    bodies,
    body_of_call,
    manual_axes,
    open_jaxpr,
    scan_counts,
    source,
    walk,
)
from precaudit.interpreters.jaxpr.primitives import CALLS
from precaudit.interpreters.jaxpr.shadow import Shadow, literal
from precaudit.interpreters.jaxpr.wide import up

MOST_FUNCTIONS = 1 << 12  # compiled functions that are kept
_ALIKE: dict[tuple[Any, ...], Any] = {}  # those of equations without bodies, which any program may have
NOTHING = {"name", "optimization_barrier", "sharding_constraint", "device_put", "reshard", "pvary"}


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh that values are stacked over, outermost first."""

    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many axes lead a value."""
        return len(self.names)

    def at(self, name: str) -> int:
        """Return where an axis is."""
        return self.names.index(name)


Path = tuple[int, ...]  # ids of an equation and of those whose bodies it is in, outermost first
Key = tuple[Path, str, int]  # an equation; or what comes into its body ("in") or leaves it ("out"), by number
Change = Callable[[jex.JaxprEqn, Sequence[Any], list[Any], Axes], list[Any]]


@dataclass(frozen=True)
class Told:
    """An equation, or what crosses its border, with operands and results; ``source``: the user's line."""

    key: Key
    equation: jex.JaxprEqn
    source: str
    inputs: Sequence[Any]
    out: Sequence[Any]
    axes: Axes


@dataclass(frozen=True)
class Made:
    """Compiled functions of equations, and results of an evaluation, by what made them of what.

    ``sources``: the user's lines, by the ids of equations. ``keeps``: whether results are kept now. What is kept holds
    its operands, so that their ids are of nothing else.
    """

    functions: dict[Any, Any]
    sources: dict[int, str] = field(default_factory=dict)
    results: dict[tuple[Any, ...], tuple[Sequence[Any], list[Any]]] = field(default_factory=dict)
    keeps: bool = False

    def once(self, key: Any, inputs: Sequence[Any], make: Callable[[], list[Any]]) -> tuple[list[Any], bool]:
        """Return what is made of some operands, and whether it is new."""
        at = (key, *map(id, inputs))
        if at in self.results:
            return self.results[at][1], False
        out = make()
        if self.keeps:
            self.results[at] = inputs, out
        return out, True


@dataclass(frozen=True)
class Ranks:
    """Evaluates a jaxpr so.

    ``made``: shared by evaluations. ``changes``: what is made of results, by their keys. ``see``: is told of operands
    and results that are new. ``axes``, ``path``, ``source``: those around it.
    """

    made: Made
    changes: Mapping[Key, Change]
    see: Callable[[Told], None] | None = None
    axes: Axes = Axes()
    path: Path = ()
    source: str = ""

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluate an open jaxpr; constants have no ranks, arguments have them."""
        known = [self.spread(x, x) for x in consts]
        return walk(jaxpr, known, args, self.equation, lambda v: self.spread(v, literal(v)))

    def spread(self, of: Any, x: Any) -> Any:
        """Return a value that every rank has; ``of``: what it is known by."""

        def make() -> list[Any]:
            wide = up(jnp.asarray(x))
            return [jnp.broadcast_to(wide, self.axes.sizes + wide.shape)]

        return self.made.once(("spread", self.axes), [of], make)[0][0]

    def equation(self, e: jex.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
        """Evaluate an equation, change its results where that is asked for, and tell of them."""
        name, params, new = e.primitive.name, e.params, True
        if id(e) not in self.made.sources:
            self.made.sources[id(e)] = source(e)
        here = replace(self, path=(*self.path, id(e)), source=self.made.sources[id(e)] or self.source)
        if name in NOTHING:
            out = list(inputs)
        elif name in CALLS:
            body, consts = body_of_call(params, CALLS[name])
            out = here.run(body, consts, inputs)
        elif name == "scan":
            out = here.scan(params, inputs)
        elif name == "shard_map":
            out = here.shards(e, inputs)
        else:
            out, new = self.made.once((id(e), self.axes), inputs, lambda: self.function(e)(self.axes.sizes, *inputs))
        if (change := self.changes.get(key := (here.path, "", 0))) is not None:
            out, new = self.made.once(
                (id(change), self.axes), [*inputs, *out], lambda: change(e, on_host(inputs), on_host(out), self.axes)
            )
        if self.see is not None and new and name not in NOTHING and name not in CALLS:
            self.see(Told(key, e, here.source, inputs, out, self.axes))
        return out

    def crossing(self, e: jex.JaxprEqn, key: Key, x: Any) -> Any:
        """Return what comes into a shard_map or leaves it, changed where that is asked for, and tell of it."""
        change, given = self.changes.get(key), x

        def make() -> list[Any]:
            return [given] if change is None else change(e, on_host([given]), on_host([given]), self.axes)

        (x,), new = self.made.once((*key, id(change)), [given], make)
        if self.see is not None and new:
            self.see(Told(key, e, self.source, [x], [x], self.axes))
        return x

    def function(self, e: jex.JaxprEqn) -> Any:
        """Return an equation as a function of how many ranks there are and the operands of all of them."""
        key = _likeness(e, self.axes)
        functions = self.made.functions if isinstance(key[0], int) else _ALIKE
        if key not in functions:
            if len(functions) >= MOST_FUNCTIONS:
                functions.clear()

            def one(_: Any, *inputs: Any) -> list[Any]:
                return Shadow({}).equation(e, list(inputs))

            each: Callable[..., Any] = one
            for axis, size in zip(reversed(self.axes.names), reversed(self.axes.sizes), strict=True):
                each = jax.vmap(each, axis_name=axis, axis_size=size)
            compiled = jax.jit(each)
            functions[key] = lambda sizes, *inputs: list(compiled(np.zeros(sizes), *inputs))
        return functions[key]

    def scan(self, params: Mapping[str, Any], inputs: Sequence[Any]) -> list[Any]:
        """Run a scan, step by step."""
        jaxpr, consts = open_jaxpr(params["jaxpr"])
        n_consts, n_carry = scan_counts(params)
        shared, carry, stacked = (
            inputs[:n_consts],
            list(inputs[n_consts : n_consts + n_carry]),
            inputs[n_consts + n_carry :],
        )
        lead, each = self.axes.count, list[list[Any]]()
        steps = range(params["length"])

        def step(x: Any, i: int) -> Any:
            return self.made.once(("step", i), [x], lambda: [jnp.take(x, i, axis=lead)])[0][0]

        for i in reversed(steps) if params["reverse"] else steps:
            out = self.run(jaxpr, consts, [*shared, *carry, *(step(x, i) for x in stacked)])
            carry = out[:n_carry]
            each.append(out[n_carry:])
        if params["reverse"]:
            each.reverse()

        def stack(ys: Sequence[Any]) -> Any:
            return self.made.once("stack", ys, lambda: [jnp.stack(ys, axis=lead)])[0][0]

        return [*carry, *map(stack, zip(*each, strict=True))]

    def shards(self, e: jex.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
        """Run a shard_map's body on every rank; what an output's spec does not cut is that of the first."""
        params, names = e.params, manual_axes(e.params)
        new = Axes(names, tuple(params["mesh"].shape[n] for n in names))
        both = Axes(self.axes.names + new.names, self.axes.sizes + new.sizes)
        lead = self.axes.count

        def cut_one(x: Any, spec: Any) -> Any:
            return self.made.once(("cut", str(spec), new), [x], lambda: [cut_to_ranks(x, spec, new, lead)])[0][0]

        cut = [cut_one(x, spec) for x, spec in zip(inputs, params["in_specs"], strict=True)]
        jaxpr, consts = open_jaxpr(params["jaxpr"])
        inside = replace(self, axes=both)
        cut = [inside.crossing(e, (self.path, "in", i), x) for i, x in enumerate(cut)]
        out = [inside.crossing(e, (self.path, "out", i), x) for i, x in enumerate(inside.run(jaxpr, consts, cut))]
        return [joined(x, spec, new, lead) for x, spec in zip(out, params["out_specs"], strict=True)]


def on_host(values: Sequence[Any]) -> list[Any]:
    """Return values as NumPy's, which compiles nothing; keys as they are."""
    return [x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x) for x in values]


def _likeness(e: jex.JaxprEqn, axes: Axes) -> tuple[Any, ...]:
    """Return what equations that are one function have in common; one with bodies is like none but itself: its id."""
    avals = tuple(str(v.aval) for v in (*e.invars, *e.outvars))
    if any(True for value in e.params.values() for _ in bodies(value)):
        return id(e), axes
    return e.primitive.name, repr(sorted(e.params.items(), key=lambda x: x[0])), avals, axes


def cut_to_ranks(x: Any, spec: Any, axes: Axes, lead: int) -> Any:
    """Return an array's shards along new axes, which follow ``lead`` others: [lead…, axes…, …]."""
    shape, kept = x.shape[:lead], x.shape[lead:]
    new, at = list[int](), dict[str, int]()
    for d, size in enumerate(kept):
        named = _axes_of(spec, d)
        for axis in named:
            at[axis] = lead + len(new)
            new.append(axes.sizes[axes.at(axis)])
        new.append(size // int(np.prod([axes.sizes[axes.at(a)] for a in named], dtype=int)))
    x = x.reshape(*shape, *new)
    order = [at[a] for a in axes.names if a in at]
    rest = [i for i in range(lead, x.ndim) if i not in order]
    x = jnp.transpose(x, (*range(lead), *order, *rest))
    for i, (axis, size) in enumerate(zip(axes.names, axes.sizes, strict=True)):
        if axis not in at:
            x = jnp.repeat(jnp.expand_dims(x, lead + i), size, axis=lead + i)
    return x


def joined(x: Any, spec: Any, axes: Axes, lead: int) -> Any:
    """Return an array of its shards, ``cut_to_ranks`` the other way round."""
    named = [_axes_of(spec, d) for d in range(x.ndim - lead - axes.count)]
    used = [axis for its in named for axis in its]
    for i in reversed(range(axes.count)):
        if axes.names[i] not in used:
            x = jnp.take(x, 0, axis=lead + i)
    left = [a for a in axes.names if a in used]
    order, sizes, own = list(range(lead)), list(x.shape[:lead]), lead + len(left)
    for d, its in enumerate(named):
        order += [*(lead + left.index(a) for a in its), own + d]
        sizes.append(x.shape[own + d] * int(np.prod([axes.sizes[axes.at(a)] for a in its], dtype=int)))
    return jnp.transpose(x, order).reshape(sizes)


def _axes_of(spec: Any, dimension: int) -> tuple[str, ...]:
    """Return which axes of a mesh cut a dimension, by a partition's spec."""
    found = spec[dimension] if dimension < len(spec) else None
    return () if found is None else found if isinstance(found, tuple) else (found,)
