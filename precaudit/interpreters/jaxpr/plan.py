"""Which variables of a program are tapped automatically, and under which names.

Tapped are the results of products, what goes into them that no product made (a norm's, RoPE's, softmax's, a gate's
output), what is written into a cache, small floats that a loop hands on, and the program's float results.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from precaudit.interpreters.jaxpr.jax_versions import bodies, body_of_call, open_jaxpr, scan_counts
from precaudit.interpreters.jaxpr.labels import Label, of_equation
from precaudit.interpreters.jaxpr.primitives import CALLS
from precaudit.interpreters.jaxpr.sites import STATE
from precaudit.interpreters.jaxpr.whole import WholeNumbers

PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
WRITES = {"dynamic_update_slice", "scatter", "scatter-add"}
LAYOUT = {
    "broadcast_in_dim",
    "concatenate",
    "copy",
    "copy_p",
    "expand_dims",
    "gather",
    "name",
    "optimization_barrier",
    "reshape",
    "rev",
    "select_n",
    "sharding_constraint",
    "slice",
    "dynamic_slice",
    "squeeze",
    "stop_gradient",
    "transpose",
}
LOOPS = {"scan", "while"}
CHOICES = {"argmax", "argmin", "sort", "top_k"}
SMALL = 4096  # elements of what while loops hand on, that are recorded of every step
MUCH = 16  # times as many elements the largest point of a scan's step, no cache, has as what is recorded so
CARRIED = "carry"  # the primitive of a tap on a scan's state
MOVES = LAYOUT - {"concatenate", "select_n"}  # of one array of values


@dataclass(frozen=True)
class Tag:
    """An automatic tap: its name, the user's line, the name scopes around it and what made it.

    ``whole``: it holds whole numbers, by what made it. ``by``: of a choice, the format of what is chosen by.
    """

    name: str
    source: str
    scope: str
    primitive: str
    whole: bool = False
    by: str = ""


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
    around: list[Any] = field(default_factory=list)  # equations whose bodies are walked, outermost first
    whole: WholeNumbers = field(default_factory=WholeNumbers)
    own: bool = False  # whether the program's own taps are the only ones but those of states
    tapped: frozenset[Any] = frozenset()  # holds what the program's own taps do

    def __post_init__(self) -> None:
        """What the program's own taps hold is covered."""
        self.covered.update(self.tapped)

    def reserve(self, names: Iterable[str]) -> None:
        """Leave the names of the program's own taps to these."""
        for name in names:
            self.given[name][None] = 0

    def own_tags(self, equations: Mapping[str, Sequence[Any]]) -> dict[str, Tag]:
        """Return what is known of the program's own taps, by their names and equations."""
        whole = self.whole.counts
        return {
            name: Tag(name, of_equation(its[-1]).source, "", "name", any(e.outvars[0] in whole for e in its))
            for name, its in equations.items()
        }

    def label(self, e: jex.JaxprEqn) -> Label:
        """Return an equation's label; of one that a library made in a function that it compiles, the call's.

        What a lambda makes, which names nothing, has the name of the loop or the call that it is handed to.
        """
        found, around = of_equation(e), [of_equation(x) for x in reversed(self.around)]
        found = next((x for x in around if not found.source and x.source), found)
        return next((found._replace(name=x.name) for x in around if x.named and not found.named), found)

    def walk(self, jaxpr: jex.Jaxpr, fixed: Sequence[bool], scope: str = "") -> None:
        """Plan the taps of a jaxpr; ``fixed``: which of its arguments are made of parameters alone."""
        self.fixed.update(jaxpr.constvars)
        self.fixed.update(v for v, still in zip(jaxpr.invars, fixed, strict=True) if still)
        for e in jaxpr.eqns:
            name, params = e.primitive.name, e.params
            here = f"{scope}/{e.source_info.name_stack}".strip("/")
            still = [isinstance(v, jex.Literal) or v in self.fixed for v in e.invars]
            self.around.append(e)
            self.maker.update(dict.fromkeys((v for v in e.outvars), (e, here)))
            if name in PRODUCTS:
                for v in e.invars:
                    self._operand(v, e, here)
            if name in CHOICES:
                self._choice(e, here)
            if name == "scan" and params["length"] == 0:
                pass
            elif name == "scan":
                n_consts, n_carry = scan_counts(params)
                inner = [*still[:n_consts], *[False] * n_carry, *still[n_consts + n_carry :]]
                self._loop(e, open_jaxpr(params["jaxpr"])[0], (n_consts, n_carry), e.invars, inner, here)
            elif name == "while":
                n_cond, n_consts = params["cond_nconsts"], params["body_nconsts"]
                body, last = open_jaxpr(params["body_jaxpr"])[0], n_cond + n_consts
                inner = [*still[n_cond:last], *[False] * (len(body.invars) - n_consts)]
                self._loop(e, body, (n_consts, len(body.outvars)), e.invars[n_cond:last], inner, here)
            elif name == "cond":
                for branch in params["branches"]:
                    self._within(open_jaxpr(branch)[0], e.invars[1:], e.outvars, still[1:], here)
            elif name == "shard_map":
                self._within(open_jaxpr(params["jaxpr"])[0], e.invars, e.outvars, still, here)
            elif name in CALLS and CALLS[name] in params:
                self._within(body_of_call(params, CALLS[name])[0], e.invars, e.outvars, still, here)
            if all(still):
                self.fixed.update(e.outvars)
            elif name in PRODUCTS | WRITES:
                for v in e.outvars:
                    self._tap_result(v, self.label(e), name, here)
            elif not any(True for value in params.values() for _ in bodies(value)):
                for v in e.outvars:
                    if (found := self._count(e.invars)) is not None:
                        self._tap_result(v, *found)
            elif name in MOVES and e.invars[0] in self.covered:
                self.covered.update(e.outvars)
            self.whole.note(e, self.fixed)
            self.around.pop()

    def _loop(
        self,
        e: jex.JaxprEqn,
        body: jex.Jaxpr,
        lengths: tuple[int, int],
        given: Sequence[Any],
        fixed: Sequence[bool],
        scope: str,
    ) -> None:
        """Plan the taps of a loop's body; ``lengths``: constants, carried values; ``given``: as ``_within`` has it."""
        (n_consts, n_carry), states = lengths, self.carried and not self.depth
        if states:
            self._tap_handed(e, body.invars[n_consts : n_consts + n_carry], scope)
        self.depth, known = self.depth + 1, len(self.names)
        self._within(body, given, e.outvars, fixed, scope)
        self.depth -= 1
        if states:
            self._tap_left(e, body.outvars[:n_carry], scope)
        elif not self.own:
            made = list(self.names.items())[known:]
            largest = max((v.aval.size for v, tag in made if tag.primitive not in WRITES), default=0)
            most = SMALL if e.primitive.name == "while" else largest // MUCH
            self._tap_small(body, n_consts, n_carry, most)

    def _tap_handed(self, e: jex.JaxprEqn, carried: Sequence[Any], scope: str) -> None:
        """Tap what each step of a loop is handed."""
        found = self.label(e)
        for v in carried:
            self.tap(v, found._replace(name=f"{found.name}.in"), CARRIED, scope, state=True)

    def _tap_small(self, body: jex.Jaxpr, n_consts: int, n_carry: int, most: int) -> None:
        """Tap floats of at most so many elements that a loop's steps hand on and read, as the results that they are.

        Where they are no points, a step size for one, what the next step makes of them is recomputed from the first
        step on, through all that was recorded since, and errors grow that no rounding made.
        """
        read = {v for e in body.eqns for v in e.invars if not isinstance(v, jex.Literal)}
        handed = zip(body.invars[n_consts : n_consts + n_carry], body.outvars, strict=False)
        for v in (v for before, v in handed if before in read):
            if not isinstance(v, jex.Literal) and v in self.maker and 0 < v.aval.size <= max(1, min(most, SMALL)):
                self._operand(v, *self.maker[v])

    def _tap_left(self, e: jex.JaxprEqn, carried: Sequence[Any], scope: str) -> None:
        """Tap what each step of a loop hands on, and what the last one leaves."""
        found = self.label(e)
        for v in carried:
            if not isinstance(v, jex.Literal) and v in self.maker:
                self.tap(v, found._replace(name=f"{found.name}.out"), self.maker[v][0].primitive.name, scope, True)
        for v in e.outvars[: len(carried)]:
            self.tap(v, found._replace(name=f"{found.name}.end"), CARRIED, scope, state=True)

    def _within(
        self, body: jex.Jaxpr, given: Sequence[Any], made: Sequence[Any], fixed: Sequence[bool], scope: str
    ) -> None:
        """Plan the taps of a body; integers that a product gave are that on both sides of its borders.

        ``given``: what its first arguments are outside; of a while loop none that it carries.
        """
        loop = self.around[-1]
        one, still = loop.primitive.name not in LOOPS, list(range(len(body.invars)))
        if loop.primitive.name == "scan":
            n_consts, n_carry = scan_counts(loop.params)
            steady = self.whole.steady(body, given, n_consts, n_carry)
            still = [i for i in still if i in steady or not n_consts <= i < n_consts + n_carry]
        for i, (inner, outer) in enumerate(zip(body.invars, given, strict=False)):
            if (found := self._count([outer])) is not None:
                self.counted[inner] = found
            if _integers(inner.aval) and inner.aval.shape == outer.aval.shape:  # no slice of it, as a scan's are
                self.handed[inner] = outer
            self.whole.link_body(inner, outer, one, i in still)
        self.walk(body, fixed, scope)
        for inner, outer in zip(body.outvars, made, strict=True):
            if (found := self._count([inner])) is not None:
                self.counted[outer] = found
            self.whole.link_result(outer, inner, one)

    def _choice(self, e: jex.JaxprEqn, scope: str) -> None:
        """Tap the floats by which a sort, a top-k or an argmax chooses, and note the choice as a state of the run."""
        keys, chosen = e.invars[: e.params.get("num_keys", 1)], [v for v in e.outvars if _integers(v.aval)]
        if e.primitive.name == "sort":  # of what lies along it the numbers of places alone
            given = zip(e.invars, e.outvars, strict=True)
            chosen = [v for x, v in given if _integers(v.aval) and self._places(x) and len(keys) == 1]
        chosen = [v for v in chosen if type(v).__name__ != "DropVar"]
        by = [v for v in keys if _floats(v.aval) and not (isinstance(v, jex.Literal) or v in self.fixed)]
        if not by or not chosen:
            return
        found = self.label(e)
        for v in by:
            self._operand(v, e, scope)
        for v in chosen:
            self.names[v] = Tag(
                self._unique_name(f"{STATE}{found.name}", found, e.primitive.name),
                found.source,
                scope,
                e.primitive.name,
                by=by[0].aval.dtype.name,
            )

    def _places(self, v: jex.Var | jex.Literal) -> bool:
        """Whether a variable numbers the places along an axis."""
        while v in self.maker and self.maker[v][0].primitive.name in MOVES:
            v = self.maker[v][0].invars[0]
        return v in self.maker and self.maker[v][0].primitive.name == "iota"

    def counts(self) -> None:
        """Tap whole numbers that a narrow format holds and that are used as something else."""
        for v, e in self.whole.last().items():
            if v not in self.covered:
                self.tap(v, self.label(e), e.primitive.name, str(e.source_info.name_stack))
            if v in self.names:
                self.names[v] = replace(self.names[v], whole=True)

    def _count(self, variables: Sequence[Any]) -> tuple[Label, str, str] | None:
        """Return what gave integers that are among variables, a product; None where none are."""
        known = (self.counted.get(v) for v in variables if not isinstance(v, jex.Literal))
        return next((x for x in known if x is not None), None)

    def _tap_result(self, v: jex.Var | jex.Literal, found: Label, primitive: str, scope: str) -> None:
        """Tap what a product or a write gives; of integers the floats that they become first."""
        if _floats(v.aval):
            self.tap(v, found, primitive, scope)
        elif primitive in PRODUCTS and _integers(v.aval):
            self.counted[v] = (found, primitive, scope)

    def results(self, jaxpr: jex.Jaxpr) -> None:
        """Plan the taps of a program's float results that have none."""
        for v in jaxpr.outvars:
            if not isinstance(v, jex.Literal) and v in self.maker:
                self._operand(v, *self.maker[v])

    def _operand(self, v: jex.Var | jex.Literal, consumer: jex.JaxprEqn, scope: str) -> None:
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
            found = self.label(consumer)
            self.tap(v, found._replace(name=f"{found.name}.in"), "argument", scope)
            return
        e, scope = self.maker[v]
        if self._tapped_inside(e, v):
            self.covered.add(v)
        else:
            self.tap(v, self.label(e), e.primitive.name, scope)

    def _tapped_inside(self, e: jex.JaxprEqn, v: jex.Var | jex.Literal) -> bool:
        """Whether a result of a call or a loop was tapped inside as what it is."""
        name, loops = e.primitive.name, {"scan": "jaxpr", "while": "body_jaxpr", "shard_map": "jaxpr"}
        if name not in loops and (name not in CALLS or CALLS[name] not in e.params):
            return False
        body = open_jaxpr(e.params[loops[name]])[0] if name in loops else body_of_call(e.params, CALLS[name])[0]
        inner = body.outvars[list(e.outvars).index(v)]
        return not isinstance(inner, jex.Literal) and inner in self.covered

    def tap(self, v: jex.Var | jex.Literal, found: Label, primitive: str, scope: str, state: bool = False) -> None:
        """Give a variable a name, unless it has one or holds no floats; ``state``: it is a loop's."""
        known = v in self.names or type(v).__name__ == "DropVar"
        known |= not state and (self.own or v in self.tapped)
        if known or not _floats(v.aval) or v.aval.size == 0:
            return
        base = f"{found.name}.grad" if "transpose(" in scope else found.name
        self.names[v] = Tag(self._unique_name(base, found, primitive), found.source, scope, primitive)
        self.covered.add(v)

    def _unique_name(self, base: str, found: Label, primitive: str) -> str:
        """Return a name that other places do not have."""
        met = self.given[base]
        number = met.setdefault((found.stack, primitive), len(met))
        return f"{base}~{number}" if number else base


def _moves(e: jex.JaxprEqn) -> bool:
    """Whether an equation lays out one array of values, or takes floats as the integers they are."""
    if e.primitive.name == "convert_element_type":
        return _floats(e.invars[0].aval) and _integers(e.outvars[0].aval)
    return e.primitive.name in MOVES


def _integers(aval: object) -> bool:
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.integer))


def _floats(aval: object) -> bool:
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.floating))
