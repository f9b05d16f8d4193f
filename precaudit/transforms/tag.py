"""Automatic taps: a JAX program evaluated with ``checkpoint_name`` where its numbers are made, with no edit of it.

Tapped are the results of products, what goes into them that no product made (a norm's, RoPE's, softmax's, a gate's
output), what is written into a cache, and the program's float results. ``reap``, ``plant``, ``shadow`` and ``emulated``
take the tagged program as any other.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from precaudit.errors import UserError, nearest
from precaudit.transforms.jax_versions import bind, bodies, called, closed, scanned
from precaudit.transforms.labels import Label, of_equation
from precaudit.transforms.loops import LOOPS
from precaudit.transforms.primitives import CALLS
from precaudit.transforms.sites import Site, sites

PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
WRITES = {"dynamic_update_slice", "scatter", "scatter-add"}
LAYOUT = {
    "broadcast_in_dim", "concatenate", "copy", "copy_p", "expand_dims", "gather", "optimization_barrier", "reshape",
    "rev", "select_n", "sharding_constraint", "slice", "dynamic_slice", "squeeze", "stop_gradient", "transpose",
}  # fmt: skip
CARRIED = "carry"  # the primitive of a tap on a scan's state
MOVES = LAYOUT - {"concatenate", "select_n"}  # of one array of values


@dataclass(frozen=True)
class Tag:
    """An automatic tap: its name, the user's line, the name scopes around it and what made it."""

    name: str
    source: str
    scope: str
    primitive: str


@dataclass
class Plan:
    """Which variables of a jaxpr and of the bodies in it are tapped; ``fixed``: those made of parameters alone."""

    names: dict[Any, Tag] = field(default_factory=dict)
    fixed: set[Any] = field(default_factory=set)
    covered: set[Any] = field(default_factory=set)  # tapped, or a layout of what is
    maker: dict[Any, Any] = field(default_factory=dict)
    scopes: dict[int, str] = field(default_factory=dict)
    counted: dict[Any, tuple[Label, str, str]] = field(default_factory=dict)  # integers that a product gave
    handed: dict[Any, Any] = field(default_factory=dict)  # integers in a body, and what they are outside
    given: dict[str, dict[Any, int]] = field(default_factory=lambda: defaultdict(dict))
    carried: bool = False  # whether the states of outermost scans are tapped
    depth: int = 0  # scans around
    own: bool = False  # whether the program has taps of its own: no others than those of states

    def walk(self, jaxpr: Any, fixed: Sequence[bool], scope: str = "") -> None:
        """Plan the taps of a jaxpr; ``fixed``: which of its arguments are made of parameters alone."""
        self.fixed.update(jaxpr.constvars)
        self.fixed.update(v for v, still in zip(jaxpr.invars, fixed, strict=True) if still)
        for e in jaxpr.eqns:
            name, params = e.primitive.name, e.params
            here = f"{scope}/{e.source_info.name_stack}".strip("/")
            still = [isinstance(v, jex.Literal) or v in self.fixed for v in e.invars]
            self.maker.update(dict.fromkeys((v for v in e.outvars), (e, here)))
            if name in PRODUCTS:
                for v in e.invars:
                    self._operand(v, e, here)
            if name == "scan":
                n_consts, n_carry = scanned(params)
                inner = [*still[:n_consts], *[False] * n_carry, *still[n_consts + n_carry :]]
                states = self.carried and not self.depth
                if states:
                    self._handed(e, n_consts, n_carry, here)
                self.depth += 1
                self._within(closed(params["jaxpr"])[0], e.invars, e.outvars, inner, here)
                self.depth -= 1
                if states:
                    self._left(e, n_carry, here)
            elif name == "cond":
                for branch in params["branches"]:
                    self._within(closed(branch)[0], e.invars[1:], e.outvars, still[1:], here)
            elif name in CALLS and CALLS[name] in params:
                self._within(called(params, CALLS[name])[0], e.invars, e.outvars, still, here)
            if all(still):
                self.fixed.update(e.outvars)
            elif name in PRODUCTS | WRITES:
                for v in e.outvars:
                    self._made(v, of_equation(e), name, here)
            elif not any(True for value in params.values() for _ in bodies(value)):
                for v in e.outvars:
                    if (found := self._count(e.invars)) is not None:
                        self._made(v, *found)
            elif name in MOVES and e.invars[0] in self.covered:
                self.covered.update(e.outvars)

    def _handed(self, e: Any, n_consts: int, n_carry: int, scope: str) -> None:
        """Tap what each step of a scan is handed."""
        found = of_equation(e)
        for v in closed(e.params["jaxpr"])[0].invars[n_consts : n_consts + n_carry]:
            self.tap(v, found._replace(name=f"{found.name}.in"), CARRIED, scope, state=True)

    def _left(self, e: Any, n_carry: int, scope: str) -> None:
        """Tap what each step of a scan hands on, and what the last one leaves."""
        found = of_equation(e)
        for v in closed(e.params["jaxpr"])[0].outvars[:n_carry]:
            if not isinstance(v, jex.Literal) and v in self.maker:
                self.tap(v, found._replace(name=f"{found.name}.out"), self.maker[v][0].primitive.name, scope, True)
        for v in e.outvars[:n_carry]:
            self.tap(v, found._replace(name=f"{found.name}.end"), CARRIED, scope, state=True)

    def _within(self, body: Any, given: Sequence[Any], made: Sequence[Any], fixed: Sequence[bool], scope: str) -> None:
        """Plan the taps of a body; integers that a product gave are that on both sides of its borders."""
        for inner, outer in zip(body.invars, given, strict=True):
            if (found := self._count([outer])) is not None:
                self.counted[inner] = found
            if _integers(inner.aval) and inner.aval.shape == outer.aval.shape:  # no slice of it, as a scan's are
                self.handed[inner] = outer
        self.walk(body, fixed, scope)
        for inner, outer in zip(body.outvars, made, strict=True):
            if (found := self._count([inner])) is not None:
                self.counted[outer] = found

    def _count(self, variables: Sequence[Any]) -> tuple[Label, str, str] | None:
        """Return what gave integers that are among variables, a product; None where none are."""
        known = (self.counted.get(v) for v in variables if not isinstance(v, jex.Literal))
        return next((x for x in known if x is not None), None)

    def _made(self, v: Any, found: Label, primitive: str, scope: str) -> None:
        """Tap what a product or a write gives; of integers the floats that they become first."""
        if _floats(v.aval):
            self.tap(v, found, primitive, scope)
        elif primitive in PRODUCTS and _integers(v.aval):
            self.counted[v] = (found, primitive, scope)

    def results(self, jaxpr: Any) -> None:
        """Plan the taps of a program's float results that have none."""
        for v in jaxpr.outvars:
            if not isinstance(v, jex.Literal) and v in self.maker:
                self._operand(v, *self.maker[v])

    def _operand(self, v: Any, consumer: Any, scope: str) -> None:
        """Tap what an operand was made as, before it was laid out for the product."""
        if isinstance(v, jex.Literal) or v in self.fixed:
            return
        while v not in self.covered and (v in self.handed or (v in self.maker and _moves(self.maker[v][0]))):
            v = self.handed[v] if v in self.handed else self.maker[v][0].invars[0]
            if isinstance(v, jex.Literal):
                return
        if v in self.covered or v in self.fixed:
            return
        if v not in self.maker:
            found = of_equation(consumer)
            self.tap(v, found._replace(name=f"{found.name}.in"), "argument", scope)
            return
        e, scope = self.maker[v]
        if self._tapped_inside(e, v):
            self.covered.add(v)
        else:
            self.tap(v, of_equation(e), e.primitive.name, scope)

    def _tapped_inside(self, e: Any, v: Any) -> bool:
        """Whether a result of a call or a scan was tapped inside as what it is."""
        name = e.primitive.name
        if name != "scan" and (name not in CALLS or CALLS[name] not in e.params):
            return False
        body = closed(e.params["jaxpr"])[0] if name == "scan" else called(e.params, CALLS[name])[0]
        inner = body.outvars[list(e.outvars).index(v)]
        return not isinstance(inner, jex.Literal) and inner in self.covered

    def tap(self, v: Any, found: Label, primitive: str, scope: str, state: bool = False) -> None:
        """Give a variable a name, unless it has one or holds no floats; ``state``: it is a loop's."""
        if v in self.names or type(v).__name__ == "DropVar" or not _floats(v.aval) or (self.own and not state):
            return
        base = f"{found.name}.grad" if "transpose(" in scope else found.name
        met = self.given[base]
        number = met.setdefault((found.stack, primitive), len(met))
        name = f"{base}~{number}" if number else base
        self.names[v] = Tag(name, found.source, scope, primitive)
        self.covered.add(v)


def _moves(e: Any) -> bool:
    """Whether an equation lays out one array of values, or takes floats as the integers they are."""
    if e.primitive.name == "convert_element_type":
        return _floats(e.invars[0].aval) and _integers(e.outvars[0].aval)
    return e.primitive.name in MOVES


def _integers(aval: Any) -> bool:
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.integer))


def _floats(aval: Any) -> bool:
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.floating))


@dataclass(frozen=True)
class _Tagged:
    """Evaluates a jaxpr as it is, with the planned taps."""

    names: dict[Any, Tag]

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values: dict[Any, Any] = {}

        def put(variables: Sequence[Any], given: Sequence[Any]) -> None:
            for v, x in zip(variables, given, strict=True):
                tag = self.names.get(v)
                values[v] = x if tag is None else checkpoint_name(x, tag.name)

        def read(v: Any) -> Any:
            return v.val if isinstance(v, jex.Literal) else values[v]

        put(jaxpr.constvars, consts)
        put(jaxpr.invars, args)
        for e in jaxpr.eqns:
            put(e.outvars, self.equation(e, [read(v) for v in e.invars]))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, e: Any, inputs: list[Any]) -> list[Any]:
        name, params = e.primitive.name, e.params
        if not self.within(e):
            return bind(e, inputs)
        if name in ("scan", "cond"):
            return LOOPS[name](self.run, jnp.asarray, params, inputs)
        if name == "remat2":
            jaxpr, consts = closed(params["jaxpr"])
            how = {"prevent_cse": params["prevent_cse"], "policy": params["policy"]}
            return list(jax.checkpoint(lambda *a: self.run(jaxpr, consts, a), **how)(*inputs))
        return self.run(*called(params, CALLS[name]), inputs)

    def within(self, e: Any) -> bool:
        """Whether a tap lies in a body of an equation."""
        return any(self.tapped(body) for value in e.params.values() for body in bodies(value))

    def tapped(self, jaxpr: Any) -> bool:
        """Whether a tap lies in a jaxpr."""
        if any(v in self.names for v in (*jaxpr.constvars, *jaxpr.invars)):
            return True
        return any(any(v in self.names for v in e.outvars) or self.within(e) for e in jaxpr.eqns)


@dataclass(frozen=True)
class Tagged:
    """A program with taps: ``call(params, *inputs)``, the taps as ``sites`` has them, and what is known of each name.

    ``automatic``: whether the taps are ours; where the program has taps of its own, they are its points. ``jaxpr``: of
    the program as it is, whose outputs ``structure`` puts together.
    """

    call: Callable[..., Any]
    sites: tuple[Site, ...]
    tags: dict[str, Tag]
    automatic: bool
    jaxpr: Any
    structure: Any


def _renamed(names: dict[Any, Tag], renamed: Mapping[str, str], own: bool) -> dict[Any, Tag]:
    """Return the taps under other names; raises UserError."""
    if own:
        raise UserError("points are renamed where they are automatic; this program names its own with checkpoint_name")
    known = dict.fromkeys(tag.name for tag in names.values())
    other: dict[str, str] = {}
    for new, old in renamed.items():
        if old not in known:
            raise UserError(
                f"points: {new} = {old!r}: no point has that name{nearest(old, known)} (occurrences go along)"
            )
        if old in other:
            raise UserError(f"points: {old!r} is given two names, {other[old]!r} and {new!r}")
        other[old] = new
    for new, old in renamed.items():
        if new in known and new not in other:
            raise UserError(f"points: {new} = {old!r}: the program has another point of that name; rename that, too")
    return {v: replace(tag, name=other.get(tag.name, tag.name)) for v, tag in names.items()}


def tagged(
    function: Callable[..., Any], params: Any, *inputs: Any, renamed: Mapping[str, str] | None = None,
    carried: bool = False,
) -> Tagged:  # fmt: skip
    """Return ``function(params, *inputs)`` with taps: its own where it has any, else automatic ones.

    Parameters are arguments that are recorded nowhere: what is made of them alone is no point. ``renamed``: other names
    of automatic taps, by the new one; ``carried``: tap the states of outermost scans, too. Raises UserError for a name
    that none has, or that is taken.
    """
    jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(params, *inputs)
    structure = jax.tree.structure(shape)
    own = sites(jaxpr.jaxpr)
    plan = Plan(carried=carried, own=bool(own))
    if not own or carried:
        weights = len(jax.tree.leaves(params))
        plan.covered.update(jaxpr.jaxpr.invars)
        plan.walk(jaxpr.jaxpr, [i < weights for i in range(len(jaxpr.jaxpr.invars))])
    if not own:
        plan.results(jaxpr.jaxpr)
    if renamed:
        plan.names = _renamed(plan.names, renamed, bool(own))
    run = _Tagged(plan.names)

    def call(*args: Any) -> Any:
        out = run.run(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(structure, out)

    if own and not carried:
        call = function
    known = {s.name: Tag(s.name, "", "", "name") for s in own} | {tag.name: tag for tag in plan.names.values()}
    found = sites(jax.make_jaxpr(call)(params, *inputs).jaxpr)
    used = Counter(s.name for s in found)
    return Tagged(call, found, {n: t for n, t in known.items() if n in used}, not own, jaxpr, structure)
