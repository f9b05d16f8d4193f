"""Which values of a program are whole numbers by what makes them: sums and products of integers, literals and counts.

Positions, counts and indices that a format of 16 bits or less holds are whole numbers that it may not have.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from precaudit.interpreters.jaxpr.sums import float_bits

# Of whole numbers they make whole numbers.
MOVES = {
    "broadcast_in_dim", "clamp", "concatenate", "copy", "copy_p", "cummax", "cummin", "dynamic_slice",
    "dynamic_update_slice", "expand_dims", "gather", "max", "min", "name", "optimization_barrier", "pad", "reduce_max",
    "reduce_min", "reshape", "rev", "select_n", "slice", "squeeze", "stop_gradient", "transpose",
}  # fmt: skip
COUNTS = {"add", "cumsum", "mul", "reduce_sum", "sub"}  # what is larger than all that they are made of
MAKES = MOVES | COUNTS | {"abs", "ceil", "convert_element_type", "floor", "iota", "neg", "rem", "round", "sign"}


@dataclass
class Whole:
    """Variables that are whole numbers; ``counts``: those in a narrow format, as their makers hold them, in order.

    ``passed``: those of which other whole numbers in floats are made: what these hold says more. ``free``: variables
    that are made of literals alone; ``constant``: of one literal, moved or converted.
    """

    known: set[Any] = field(default_factory=set)
    free: set[Any] = field(default_factory=set)
    constant: set[Any] = field(default_factory=set)
    counts: dict[Any, Any] = field(default_factory=dict)
    passed: set[Any] = field(default_factory=set)

    def of(self, v: Any) -> bool:
        """Whether a variable or literal is a whole number."""
        if isinstance(v, jex.Literal):
            return bool(np.all(np.asarray(v.val, np.float64) == np.rint(np.asarray(v.val, np.float64))))
        return v in self.known or _integral(v.aval)

    def note(self, e: Any, fixed: Collection[Any]) -> None:
        """Take note of an equation; ``fixed``: variables made of parameters or literals alone."""
        name, floats = e.primitive.name, [v for v in e.outvars if _floating(v.aval)]
        if all(isinstance(v, jex.Literal) or v in self.free for v in e.invars):
            self.free.update(e.outvars)
        if e.invars and name not in COUNTS and all(isinstance(v, jex.Literal) or v in self.constant for v in e.invars):
            self.constant.update(e.outvars)
        if not floats or name not in MAKES or not all(self.of(v) for v in e.invars):
            return
        self.known.update(floats)
        if any(float_bits(v.aval.dtype) <= 16 for v in floats):
            self.passed.update(v for v in e.invars if not isinstance(v, jex.Literal))
        counts = name in COUNTS or (name == "convert_element_type" and _wide_integer(e.invars[0].aval))
        moved = any(v in self.counts for v in e.invars if not isinstance(v, jex.Literal))
        for v in floats:
            if (
                v not in self.constant
                and float_bits(v.aval.dtype) <= 16
                and (counts or moved)
                and (v not in fixed or v in self.free)
            ):
                self.counts[v] = e

    def handed(self, inner: Any, outer: Any) -> None:
        """Take note that a variable of a body is one outside of it, or slices of it."""
        if self.of(outer):
            self.known.add(inner)
        if isinstance(outer, jex.Literal) or outer in self.free:
            self.free.add(inner)
        if isinstance(outer, jex.Literal) or outer in self.constant:
            self.constant.add(inner)

    def returned(self, outer: Any, inner: Any) -> None:
        """Take note that a result of a call is what its body gives."""
        self.handed(outer, inner)
        if not isinstance(inner, jex.Literal) and inner in self.counts:
            self.passed.add(inner)
            self.counts[outer] = self.counts[inner]

    def last(self) -> dict[Any, Any]:
        """Return {variable: equation} of the narrow whole numbers that no other narrow ones are made of."""
        return {v: e for v, e in self.counts.items() if v not in self.passed}


def _integral(aval: Any) -> bool:
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.integer) or aval.dtype == bool)


def _wide_integer(aval: Any) -> bool:
    """Whether an integer may be one that 16 bits of a float do not hold; of 8 bits they hold all."""
    return _integral(aval) and aval.dtype != bool and bool(jnp.iinfo(aval.dtype).bits > 8)


def _floating(aval: Any) -> bool:
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.floating))
