"""Planted values: a program's FP64 shadow with its taps overwritten, or with something added to them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from precaudit.interpreters.jaxpr.jax_versions import open_jaxpr, scan_counts, walk
from precaudit.interpreters.jaxpr.loops import map_shards
from precaudit.interpreters.jaxpr.shadow import Lift, Shadow, leaves, literal, trace_jaxpr
from precaudit.interpreters.jaxpr.sites import (
    STATE,
    TAKEN,
    Site,
    merge_branches,
    sites,
    sites_of,
    unique_names,
    unknown_tap,
)
from precaudit.interpreters.jaxpr.wide import up, wide_dtype

Values = dict[str, Any]


def plant(
    function: Callable[..., Any], mode: Literal["force", "add"], lift: Mapping[str, Lift] | None = None
) -> Callable[..., tuple[Any, Values]]:
    """Return ``g(values, *args) → (outputs, errors)`` of ``function``'s FP64 shadow, ``values`` planted at its taps.

    ``values`` maps a tap's name, as ``reap`` gives it (``name#1`` of a name met again), to an array: [steps of each
    scan it is in, outermost first, …], or the tap's own shape outside scans. A tap of a cond is planted where its
    branch is taken; ``name@taken`` is not read. ``force`` overwrites a tap and gives ``errors[name]`` = planted −
    computed, FP64 in the shape of ``values``: what this operation alone added, 0 where a branch was not taken and where
    both are one infinity. ``add`` adds to it, so that a gradient by ``values`` is one by every tap, and gives no
    errors; scan bodies are computed again in the backward pass. What a loop decided (taps named ``@…``, of ``tagged``)
    is overwritten in both and has no errors. Under ``jax.enable_x64(True)``.

    Raises CannotLift as ``shadow`` does, ValueError for a name the program lacks or a value of another shape, and
    NotImplementedError for a tap inside a primitive that gives it no value of its own, such as a while loop that is not
    ``bounded``.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import precaudit
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> def f(x):
    ...     return checkpoint_name(x / 3, "third") * 3
    >>> with jax.enable_x64(True):
    ...     out, errors = precaudit.plant(f, "force")({"third": jnp.float32(0.25)}, jnp.float32(1))
    ...     float(out), float(errors["third"])
    (0.75, -0.08333333333333331)
    """
    return planting(function, lambda names: Planted(dict(lift or {}), mode, names), outputs=True)


def planting(
    function: Callable[..., Any],
    interpreter: Callable[[Collection[str]], "Planted"],
    outputs: bool = False,
    steps: Sequence[int] | None = None,
) -> Callable[..., Any]:
    """Return ``g(values, *args)`` that evaluates ``function``'s jaxpr by the interpreter of the taps that have values.

    It gives what the interpreter tells of each tap; with ``outputs`` (outputs, that). ``steps``: those of outermost
    scans that there are values of, ascending; only they are told.
    """

    def evaluate(values: Values, /, *args: Any, **kwargs: Any) -> Any:
        jaxpr, structure = trace_jaxpr(function, args, kwargs)
        found = sites(jaxpr.jaxpr)
        names = {n: s for n, s in zip(unique_names(found), found, strict=True) if s.name in _bases(values, found)}
        run = interpreter(frozenset(s.name for s in names.values()))
        run.steps = None if steps is None else tuple(steps)
        mine = [fitting(n, s, values.get(n), run.steps) for n, s in names.items()]
        out, errors = run.evaluate(jaxpr.jaxpr, jaxpr.consts, leaves(jaxpr, args, kwargs), mine)
        told = {n: e for n, e in zip(names, errors, strict=True) if e is not None}
        return (jax.tree.unflatten(structure, [up(x) for x in out]), told) if outputs else told

    return evaluate


def _bases(values: Values, found: Sequence[Site]) -> set[str]:
    """Return the names, without numbers, of the taps that have values; raises ValueError for one there is not."""
    names = dict(zip(unique_names(found), found, strict=True))
    given = [n for n in values if n.removesuffix(TAKEN) not in names or n in names]
    for name in given:
        if name not in names:
            raise ValueError(unknown_tap(name, names))
    return {names[n].name for n in given}


def fitting(name: str, site: Site, value: ArrayLike | None, steps: Sequence[int] | None = None) -> Any:
    """Return a tap's value, lifted where it is planted: a step of a scan at a time; raises for one of another shape."""
    if value is None:
        return None
    if site.inside:
        raise NotImplementedError(f"tap {name} lies inside {site.inside}, where plant cannot give it its values")
    stacked = site.stacked
    if steps is not None and stacked:
        stacked = (sum(i < stacked[0] for i in steps), *stacked[1:])
    value, shape = jnp.asarray(value), stacked + site.shape
    if value.shape != shape:
        raise ValueError(f"tap {name} has shape {list(shape)}, its value {list(value.shape)}")
    return value if wide_dtype(value.dtype) == wide_dtype(site.dtype) else value.astype(wide_dtype(site.dtype))


@dataclass(frozen=True)
class WantedSteps:
    """The steps of its outermost scan that a tap is asked of: in others only what the scan carries on is made.

    ``name``: the tap's, without a number. ``slots``: for every step where what is told of it goes, ``count`` where it
    is not asked for; a tracer may hold them. ``count``: of steps asked for; what is told is [count + 1, …], the last
    one of no use. Of other taps of the scan nothing is told. Not of scans on shards, or where ``planting`` has some
    steps only.
    """

    name: str
    slots: Any
    count: int


class Planted(Shadow):
    """Evaluates a shadow with planted taps; values and errors are lists in the order of ``sites``, None where none."""

    def __init__(self, lift: Mapping[str, Lift], mode: str, names: Collection[str]) -> None:
        super().__init__(lift)
        self.mode, self.names = mode, names
        self.steps: tuple[int, ...] | None = None  # of outermost scans, those that have values; None: all
        self.here: Any = None  # whether the step that is evaluated has values; None: all have
        self.wanted: WantedSteps | None = None  # of an outermost scan that is not entered yet

    def entering(self, jaxpr: jex.Jaxpr) -> None:
        """Take note of an open jaxpr before it is evaluated."""

    def evaluate(
        self, jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any], values: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Evaluate an open jaxpr; return its outputs and what is told of each tap."""
        rest, errors = list(values), []
        self.entering(jaxpr)

        def step(equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
            count = len(sites_of(equation, self.names))
            mine, rest[:] = rest[:count], rest[count:]
            if all(v is None for v in mine):
                errors.extend(mine)
                return self.equation(equation, inputs)
            with self.inside_of(equation):
                out, made = self.enter(equation, inputs, mine)
            errors.extend(made)
            return out

        return walk(jaxpr, consts, args, step, literal), errors

    def enter(self, equation: jex.JaxprEqn, inputs: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
        """Evaluate an equation that is a planted tap, or that has one inside."""
        name, params = equation.primitive.name, equation.params
        if name in self.lift:
            raise NotImplementedError(f"a planted tap lies inside {name}, which has a given meaning")
        if name == "name" and params["name"].startswith(STATE):
            return [self.chosen(values[0], inputs[0])], [None]
        if name == "name":
            return self.tap(up(jnp.asarray(inputs[0])), up(values[0]))
        if name == "scan":
            return self.planted_scan(params, inputs, values)
        if name == "cond":
            return self.planted_cond(params, inputs, values)
        if name == "shard_map":
            return self.planted_shards(params, inputs, values)
        with self.body_in_place(equation) as body:
            return self.evaluate(*body, inputs, values)

    def tap(self, x: jax.Array, value: jax.Array) -> tuple[list[Any], list[Any]]:
        """Return what the program goes on with, and what is told of a tap."""
        if self.mode == "add":
            return [x + value], [None]
        if self.mode == "read":
            return [self.chosen(value, x)], [x]
        if x.dtype == bool:
            return [value], [value ^ x]
        return [value], [jnp.where(value == x, jnp.zeros_like(x), value - x)]  # equal infinities are no error

    def chosen(self, value: jax.Array, x: jax.Array) -> Any:
        """Return the value of a step that has one, else what was computed."""
        return value if self.here is None else jnp.where(self.here, value, x)

    def untaken(self, site: Site, value: jax.Array) -> Any:
        """Return what is told of a tap or a state whose branch was not taken."""
        return None if site.name.startswith(STATE) else self.none(value)

    def none(self, value: jax.Array) -> Any:
        """Return what is told of a tap whose branch was not taken."""
        return None if value is None or self.mode == "add" else jnp.zeros_like(up(value))

    def planted_scan(
        self, params: Mapping[str, Any], inputs: list[Any], values: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Run a scan; every step takes its slice of the values."""
        if self.steps is not None and self.here is None:
            return self.some_steps(params, inputs, values)
        wanted = self.wanted
        if (
            wanted is not None
            and len(wanted.slots) == params["length"]
            and sites(open_jaxpr(params["jaxpr"])[0], {wanted.name})
        ):
            return self.wanted_steps(params, inputs, values, wanted)
        jaxpr, consts = open_jaxpr(params["jaxpr"])
        n_consts, n_carry = scan_counts(params)
        shared, stacked = inputs[:n_consts], inputs[n_consts + n_carry :]

        def body(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], Any]:
            out, errors = self.evaluate(jaxpr, consts, [*shared, *carry, *xs[0]], xs[1])
            out = [up(x) for x in out]
            return out[:n_carry], (out[n_carry:], errors)

        first = [up(jnp.asarray(x)) for x in inputs[n_consts : n_consts + n_carry]]
        how = {"length": params["length"], "reverse": params["reverse"]}
        again = jax.checkpoint(body) if self.mode == "add" else body
        with self.within():
            carry, (ys, errors) = lax.scan(again, first, (stacked, values), **how)
        return [*carry, *ys], errors

    def wanted_steps(
        self, params: Mapping[str, Any], inputs: list[Any], values: list[Any], wanted: WantedSteps
    ) -> tuple[list[Any], list[Any]]:
        """Run a scan and tell of one tap at the steps that it is asked for; in others it is not made."""
        jaxpr, consts = open_jaxpr(params["jaxpr"])
        n_consts, n_carry = scan_counts(params)
        shared, stacked = inputs[:n_consts], inputs[n_consts + n_carry :]
        asked = [s.name == wanted.name for s in sites(jaxpr, self.names)]

        def step(by: Planted, carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            out, errors = by.evaluate(jaxpr, consts, [*shared, *carry, *xs[0]], xs[1])
            return [up(x) for x in out], [e if a else None for e, a in zip(errors, asked, strict=True)]

        def body(state: Sequence[Any], xs: Sequence[Any]) -> tuple[Any, list[Any]]:
            carry, told = state
            other = copy(self)  # as it is now, so that both draw the same

            def rest() -> tuple[list[Any], list[Any]]:
                out, errors = step(other, carry, xs)
                return out, jax.tree.map(jnp.zeros_like, errors)

            out, errors = lax.cond(xs[2] < wanted.count, lambda: step(self, carry, xs), rest)
            told = jax.tree.map(lambda every, one: lax.dynamic_update_index_in_dim(every, one, xs[2], 0), told, errors)
            return (out[:n_carry], told), out[n_carry:]

        first = [up(jnp.asarray(x)) for x in inputs[n_consts : n_consts + n_carry]]
        xs = (stacked, values, wanted.slots)
        how = {"length": params["length"], "reverse": params["reverse"]}
        with self.within():
            one = jax.eval_shape(lambda *a: step(copy(self), *a)[1], first, jax.tree.map(lambda x: x[0], xs))
            empty = jax.tree.map(lambda x: jnp.zeros((wanted.count + 1, *x.shape), x.dtype), one)
            (carry, told), ys = lax.scan(body, (first, empty), xs, **how)
        return [*carry, *ys], told

    @contextmanager
    def within(self) -> Iterator[None]:
        """Leave what is asked of outermost scans outside of a body."""
        wanted, self.wanted = self.wanted, None
        try:
            yield
        finally:
            self.wanted = wanted

    def some_steps(
        self, params: Mapping[str, Any], inputs: list[Any], values: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Run a scan of which some steps have values, and tell of these alone; ``mode`` is ``read``."""
        jaxpr, consts = open_jaxpr(params["jaxpr"])
        n_consts, n_carry = scan_counts(params)
        shared, stacked = inputs[:n_consts], inputs[n_consts + n_carry :]
        kept = [i for i in self.steps or () if i < params["length"]]
        slots = np.zeros(params["length"], np.int32)
        slots[kept] = np.arange(len(kept))
        has = np.isin(np.arange(params["length"]), kept)

        def body(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], Any]:
            xs, slot, self.here = xs
            mine = [None if v is None else v[slot] for v in values] if kept else [None] * len(values)
            out, errors = self.evaluate(jaxpr, consts, [*shared, *carry, *xs], mine)
            out = [up(x) for x in out]
            return out[:n_carry], (out[n_carry:], errors)

        first = [up(jnp.asarray(x)) for x in inputs[n_consts : n_consts + n_carry]]
        how = {"length": params["length"], "reverse": params["reverse"]}
        carry, (ys, errors) = lax.scan(body, first, (stacked, jnp.asarray(slots), jnp.asarray(has)), **how)
        self.here = None
        return [*carry, *ys], jax.tree.map(lambda x: x[np.asarray(kept, int)], errors)

    def planted_cond(
        self, params: Mapping[str, Any], inputs: list[Any], values: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Run a cond; the taps of a branch that is not taken have no error."""
        branches = [open_jaxpr(b) for b in params["branches"]]
        found, places = merge_branches([sites(b, self.names) for b, _ in branches])
        zeros = [self.untaken(s, v) for s, v in zip(found, values, strict=True)]

        def fill(branch: tuple[Any, Any], at: list[int]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                out, made = self.evaluate(*branch, args, [values[i] for i in at])
                errors = dict(enumerate(zeros)) | dict(zip(at, made, strict=True))
                return [up(x) for x in out], [errors[i] for i in range(len(zeros))]

            return call

        calls = [fill(b, at) for b, at in zip(branches, places, strict=True)]
        out, errors = lax.switch(inputs[0].astype("int32"), calls, *inputs[1:])
        return list(out), errors

    def planted_shards(
        self, params: Mapping[str, Any], inputs: list[Any], values: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Run a body on the shards of a mesh; every shard takes its slice of the values."""
        jaxpr, consts = open_jaxpr(params["jaxpr"])

        def body(args: Sequence[Any], mine: list[Any]) -> tuple[list[Any], list[Any]]:
            out, errors = self.evaluate(jaxpr, consts, args, mine)
            return [up(x) for x in out], errors

        with self.within():
            return map_shards(body, params, inputs, values)
