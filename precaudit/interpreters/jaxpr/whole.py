"""Which values of a program are whole numbers by what makes them: sums and products of integers, literals and counts.

Positions, counts and indices that a format of 16 bits or less holds are whole numbers that it may not have.
"""

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from math import inf, prod
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from precaudit.interpreters.jaxpr.jax_versions import body_of_call, open_jaxpr, scan_counts
from precaudit.interpreters.jaxpr.primitives import CALLS
from precaudit.interpreters.jaxpr.products import GROUPED, PRODUCTS
from precaudit.interpreters.jaxpr.sums import float_bits
from precaudit.numbers.arrays import widen

# Of whole numbers they make whole numbers.
MOVES = {
    "broadcast_in_dim",
    "clamp",
    "concatenate",
    "copy",
    "copy_p",
    "cummax",
    "cummin",
    "dynamic_slice",
    "dynamic_update_slice",
    "expand_dims",
    "gather",
    "max",
    "min",
    "name",
    "optimization_barrier",
    "pad",
    "reduce_max",
    "reduce_min",
    "reshape",
    "rev",
    "select_n",
    "slice",
    "squeeze",
    "stop_gradient",
    "transpose",
}
COUNTS = {"add", "cumsum", "mul", "reduce_sum", "sub"}  # what is larger than all that they are made of
MAKES = MOVES | COUNTS | {"abs", "ceil", "convert_element_type", "floor", "iota", "neg", "rem", "round", "sign"}

FIRST = 1024  # elements of an input that are looked at before all of them are


@dataclass
class WholeNumbers:
    """Variables that are whole numbers; ``counts``: those in a narrow format, as their makers hold them, in order.

    ``passed``: those of which other whole numbers in floats are made: what these hold says more. ``free``: variables
    that are made of literals alone; ``constant``: of one literal, moved or converted. ``most``: how large they may be,
    where that is known.
    """

    known: set[Any] = field(default_factory=set)
    free: set[Any] = field(default_factory=set)
    constant: set[Any] = field(default_factory=set)
    counts: dict[Any, Any] = field(default_factory=dict)
    passed: set[Any] = field(default_factory=set)
    most: dict[Any, float] = field(default_factory=dict)
    measured: set[Any] = field(default_factory=set)

    def given(self, v: jex.Var, x: Any) -> None:
        """Take note of an input of floats and its value, if these are whole numbers: positions, a mask, ones to count.

        Of zeros, such as an empty cache, nothing is said. What is larger than 1 may grow from call to call.
        """
        if not _floating(v.aval) or not v.aval.size or not _has_values(x):
            return
        values = np.asarray(x).reshape(-1)
        if all(np.array_equal(np.rint(y), y) for y in map(widen, (values[:FIRST], values))) and (
            x.size == 1 or values.any()
        ):
            self.known.add(v)
            if x.size > 1 and np.abs(widen(values)).max() <= 1:
                self.most[v] = 1.0

    def of(self, v: jex.Var | jex.Literal) -> bool:
        """Whether a variable or literal is a whole number."""
        if isinstance(v, jex.Literal):
            return not _is_number(v.aval) or bool(np.all(np.rint(held := np.asarray(v.val, np.float64)) == held))
        return v in self.known or (_integral(v.aval) and v not in self.measured)

    def note(self, e: jex.JaxprEqn, fixed: Collection[Any]) -> None:
        """Take note of an equation; ``fixed``: variables made of parameters or literals alone."""
        name, floats = e.primitive.name, [v for v in e.outvars if _floating(v.aval)]
        if _of_quantised(e) or any(not isinstance(v, jex.Literal) and v in self.measured for v in e.invars):
            self.measured.update(e.outvars)
        if name in MAKES:
            self.most.update(dict.fromkeys(e.outvars, self._most_of(e)))
        if all(isinstance(v, jex.Literal) or v in self.free for v in e.invars):
            self.free.update(e.outvars)
        if e.invars and name not in COUNTS and all(isinstance(v, jex.Literal) or v in self.constant for v in e.invars):
            self.constant.update(e.outvars)
        if not floats or name not in MAKES or not all(self.of(v) for v in e.invars):
            return
        self.known.update(floats)
        if any(float_bits(v.aval.dtype) <= 16 for v in floats):
            self.passed.update(v for v in e.invars if not isinstance(v, jex.Literal))
        counts = name in COUNTS or name == "convert_element_type"
        moved = any(v in self.counts for v in e.invars if not isinstance(v, jex.Literal))
        for v in floats:
            if (
                v not in self.constant
                and float_bits(v.aval.dtype) <= 16
                and ((counts and self.most[v] > 2.0 ** (ml_dtypes.finfo(v.aval.dtype).nmant + 1)) or moved)
                and (v not in fixed or v in self.free)
            ):
                self.counts[v] = e

    def _most_of(self, e: jex.JaxprEqn) -> float:
        """Return how large what an equation makes of whole numbers may be."""
        each, name = [self.size(v) for v in e.invars], e.primitive.name
        if name == "iota":
            return float(e.params["shape"][e.params["dimension"]] - 1)
        if name in ("add", "sub"):
            return sum(each)
        if name == "mul":
            return prod(each) if all(each) else 0.0
        if name in ("cumsum", "reduce_sum"):
            axes = e.params["axes"] if name == "reduce_sum" else (e.params["axis"],)
            return each[0] * prod(e.invars[0].aval.shape[i] for i in axes)
        return max(each)

    def size(self, v: jex.Var | jex.Literal) -> float:
        """Return how large a variable or literal may be; infinity where nothing is known."""
        if isinstance(v, jex.Literal):
            return float(np.abs(np.asarray(v.val)).max(initial=0)) if _is_number(v.aval) else 0.0
        if _integral(v.aval) and v not in self.most:
            return 1.0 if v.aval.dtype == bool else _most_held(v.aval.dtype)
        return self.most.get(v, inf)

    def link_body(self, inner: object, outer: object, one: bool = True, whole: bool = True) -> None:
        """Take note that a variable of a body is one outside of it, or slices of it; ``one``: in every step, too.

        ``whole``: it is a whole number in every step if it is one outside.
        """
        if one:
            self.most[inner] = self.size(outer)
        if whole and self.of(outer):
            self.known.add(inner)
        if not isinstance(outer, jex.Literal) and outer in self.measured:
            self.measured.add(inner)
        if isinstance(outer, jex.Literal) or outer in self.free:
            self.free.add(inner)
        if isinstance(outer, jex.Literal) or outer in self.constant:
            self.constant.add(inner)

    def steady(self, body: jex.Jaxpr, given: Sequence[Any], n_consts: int, n_carry: int) -> set[int]:
        """Return which values that a scan carries are whole numbers in every step; ``given``: its operands.

        A value that begins as one and that a step makes no whole number of is none: a sum that begins at 0.
        """
        carried = {i for i in range(n_consts, n_consts + n_carry) if self.of(given[i])}
        while True:
            trial = WholeNumbers(**{f.name: copy(getattr(self, f.name)) for f in fields(self)})
            for i, (inner, outer) in enumerate(zip(body.invars, given, strict=True)):
                if i in carried or not n_consts <= i < n_consts + n_carry:
                    trial.link_body(inner, outer, one=False)
            trial.walk(body)
            stays = {i for i in carried if trial.of(body.outvars[i - n_consts])}
            if stays == carried:
                return carried
            carried = stays

    def walk(self, jaxpr: jex.Jaxpr) -> None:
        """Take note of all equations of a jaxpr, and of those in its calls, branches and scans."""
        for e in jaxpr.eqns:
            name, params = e.primitive.name, e.params
            if name == "scan":
                (body, _), (n_consts, n_carry) = open_jaxpr(params["jaxpr"]), scan_counts(params)
                steady = self.steady(body, e.invars, n_consts, n_carry)
                carried = range(n_consts, n_consts + n_carry)
                inside = [(body, [v if i in steady or i not in carried else None for i, v in enumerate(e.invars)])]
            elif name == "cond":
                inside = [(open_jaxpr(b)[0], e.invars[1:]) for b in params["branches"]]
            else:
                called = name in CALLS and CALLS[name] in params
                inside = [(body_of_call(params, CALLS[name])[0], e.invars)] if called else []
            for body, given in inside:
                for inner, outer in zip(body.invars, given, strict=False):
                    if outer is not None:
                        self.link_body(inner, outer, name != "scan")
                self.walk(body)
            if inside:
                results = zip(e.outvars, *(body.outvars for body, _ in inside), strict=True)
                self.known.update(out for out, *each in results if all(map(self.of, each)))
            self.note(e, ())

    def link_result(self, outer: object, inner: object, one: bool = True) -> None:
        """Take note that a result of a call is what its body gives; ``one``: in every step."""
        self.link_body(outer, inner, one)
        if not isinstance(inner, jex.Literal) and inner in self.counts:
            self.passed.add(inner)
            self.counts[outer] = self.counts[inner]

    def last(self) -> dict[Any, Any]:
        """Return {variable: equation} of the narrow whole numbers that no other narrow ones are made of."""
        return {v: e for v, e in self.counts.items() if v not in self.passed}


def _of_quantised(e: jex.JaxprEqn) -> bool:
    """Whether an equation is a product of integers of 8 bits or less, by which values that are quantised are held."""
    formats = [v.aval.dtype for v in e.invars[:2]] if e.primitive.name in (*PRODUCTS, GROUPED) else [np.dtype(bool)]
    return all(jnp.issubdtype(x, jnp.integer) and jnp.iinfo(x).bits <= 8 for x in formats)


def _has_values(x: object) -> bool:
    """Whether an input is an array here, with values, and no tracer."""
    if isinstance(x, jax.Array):
        return not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
    return isinstance(x, np.ndarray | np.generic)


def _is_number(aval: object) -> bool:
    """Whether a literal holds numbers or truth values: a tangent of integers (float0) holds none."""
    return getattr(aval, "dtype", None) != jax.dtypes.float0


def _integral(aval: object) -> bool:
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.integer) or aval.dtype == bool)


def _most_held(dtype: DTypeLike) -> float:
    """Return how large an integer may be; of more than 8 bits that is not known."""
    held = jnp.iinfo(dtype)
    return float(max(held.max, -held.min)) if held.bits <= 8 else inf


def _floating(aval: object) -> bool:
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.floating))
