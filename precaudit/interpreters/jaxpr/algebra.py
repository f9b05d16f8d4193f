"""What XLA's algebra makes of elementwise operations: A / √B is A · rsqrt(B), (A / B) / C is A / (B · C), and the like.

Each step is rounded, so that the result differs from that of the operations as they are written, in float16 by units of
its last place (XLA, ``algebraic_simplifier.cc``; as XLA:CPU computes float16, bit for bit:
tests/interpreters/jaxpr/test_algebra.py). In bfloat16 conversions stand between operations, and nothing is rewritten.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.interpreters.jaxpr.jax_versions import count_readers
from precaudit.interpreters.jaxpr.rounding import round_once

NATIVE = (np.float16, np.float32)  # formats that no conversion stands beside
MOVES = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims")
FOLDED = (*MOVES, "convert_element_type", "mul", "div", "add", "sub", "neg", "sqrt", "rsqrt")  # of constants: constants
SUMS = ("add", "sub", "add_any")
Once = Callable[[Any], Any]  # rounds to the format of a result
Again = Callable[[Any], Any]  # moves another array as an equation moves its operand


class Source(NamedTuple):
    """What made a value: an operation and its operands, in FP64; ``scaled`` and ``shifted`` end with a constant.

    ``over`` is a quotient that begins with one, ``mirrored`` a difference. ``names``: the variables that hold it,
    some of them moved.
    """

    name: str
    inputs: tuple[Any, ...]
    names: tuple[Any, ...] = ()


# 1 / what each makes, of its operands
INVERSES: Mapping[str, Callable[..., Any]] = {
    "exp": lambda x: jnp.exp(-x),
    "sqrt": lax.rsqrt,
    "rsqrt": jnp.sqrt,
    "pow": lambda x, y: jnp.power(x, -y),
    "div": lambda x, y: y / x,
    "over": lambda x, y: y / x,
}
QUOTIENTS = ("div", "over")
ROOTS = ("sqrt", "rsqrt")  # which are rewritten where one operation reads them


class Algebra:
    """The sources of a jaxpr's values, and what becomes of the operations that read them."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.readers: Counter[Any] = Counter()  # how many operations read a variable; what is given out is read
        self.sources: dict[Any, Source] = {}
        self.spread: set[Any] = set()  # variables that repeat the elements of a smaller array
        self.constants: set[Any] = set()  # variables that are one number, known when the program is compiled

    def entering(self, jaxpr: jex.Jaxpr) -> None:
        """Note what reads each variable of an open jaxpr."""
        self.readers |= count_readers(jaxpr) + Counter({v for v in jaxpr.outvars if not hasattr(v, "val")})

    def of(self, variable: jex.Var | jex.Literal) -> Source | None:
        """Return what made a variable, where that is known."""
        return None if hasattr(variable, "val") else self.sources.get(variable)

    def hand_over(self, given: Sequence[jex.Var | jex.Literal], taken: Sequence[jex.Var]) -> None:
        """Take note that variables (``taken``) are others, or literals (``given``), by another name."""
        known = [(self.of(v), self.constant(v), not hasattr(v, "val") and v in self.spread) for v in given]
        for v, (source, constant, spread) in zip(taken, known, strict=True):
            self.sources.pop(v, None)
            self.sources |= {} if source is None else {v: source._replace(names=(*source.names, v))}
            for names, mine in ((self.constants, constant), (self.spread, spread)):
                (names.add if mine else names.discard)(v)

    def constant(self, variable: jex.Var | jex.Literal) -> bool:
        """Whether a variable is a number of the program's."""
        return hasattr(variable, "val") or variable in self.constants

    def inverted(self, source: Source | None) -> bool:
        """Whether what divides by it multiplies by its inverse: not by a root that several operations read."""
        if source is None or source.name not in INVERSES or source.name in QUOTIENTS:
            return False
        return source.name not in ROOTS or all(self.readers[v] < 2 for v in source.names)

    def smaller(self, variable: jex.Var | jex.Literal, out: Any) -> bool:
        """Whether a variable has fewer elements than a result (``out``: its type), or repeats those of one that has."""
        return variable.aval.size < out.size or variable in self.spread

    def note(self, equation: jex.JaxprEqn, inputs: Sequence[Any], again: Again) -> None:
        """Take note of what makes an equation's result."""
        if not equation.outvars:
            return
        out, name = equation.outvars[0], equation.primitive.name
        self.sources.pop(out, None)
        if name == "broadcast_in_dim":
            self.spread.add(out)
        self.constants.discard(out)
        if name in FOLDED and all(map(self.constant, equation.invars)):
            self.constants.add(out)
        if name in MOVES and (source := self.of(equation.invars[0])) is not None:
            shape = np.shape(inputs[0])
            if all(np.shape(x) in ((), shape) for x in source.inputs):
                moved = (again(x) if np.shape(x) == shape else x for x in source.inputs)
                self.sources[out] = Source(source.name, tuple(moved), (*source.names, out))
        elif getattr(out.aval, "dtype", None) in NATIVE and (found := self._source(equation, inputs)) is not None:
            self.sources[out] = found._replace(names=(out,))

    def _source(self, equation: jex.JaxprEqn, inputs: Sequence[Any]) -> Source | None:
        name, constant = equation.primitive.name, [self.constant(v) for v in equation.invars]
        if name == "div":
            if constant[1]:
                inverse = round_once(1 / inputs[1], equation.outvars[0].aval.dtype)
                return Source("scaled", (inputs[0], inverse))
            above, below = (self.of(v) for v in equation.invars)
            if self.by_inverse(equation) or self.inverted(below):
                return Source("mul", tuple(inputs))
            others = any(x is not None and x.name in QUOTIENTS for x in (above, below))
            return None if others else Source("over" if constant[0] else "div", tuple(inputs))
        if name in ("mul", "add", "sub") and any(constant):
            if name == "sub":
                return (
                    Source("shifted", (inputs[0], -inputs[1]))
                    if constant[1]
                    else Source("mirrored", (inputs[1], inputs[0]))
                )
            rest, fixed = inputs if constant[1] else (inputs[1], inputs[0])
            return Source("scaled" if name == "mul" else "shifted", (rest, fixed))
        if name == "pow":  # XLA converts an exponent that is a whole number to the base's format first
            return Source(name, (inputs[0], jnp.asarray(inputs[1], jnp.result_type(inputs[0]))))
        return Source(name, tuple(inputs)) if name in INVERSES or name == "mul" else None

    def by_inverse(self, equation: jex.JaxprEqn) -> bool:
        """Whether XLA multiplies by an inverse, rounded: of what is smaller than the quotient; of bfloat16 on a GPU."""
        out, divisor = equation.outvars[0].aval, equation.invars[1]
        if out.dtype not in NATIVE and not (out.dtype == jnp.bfloat16 and self.unit == "gpu"):
            return False
        return self.constant(divisor) or self.smaller(divisor, out)

    def made(self, equation: jex.JaxprEqn, inputs: Sequence[Any], once: Once) -> Any | None:
        """Return an operation's result before it is rounded, None where it is made as it is written."""
        name, out = equation.primitive.name, equation.outvars[0].aval if equation.outvars else None
        native = getattr(out, "dtype", None) in NATIVE
        if name == "div" and (native or self.by_inverse(equation)):
            return self._quotient(equation, inputs, once)
        if name == "expm1" and native:
            return _exponential_minus_one(inputs[0], once)
        of = [self.of(v) for v in equation.invars] if native else []
        if name == "pow" and native and hasattr(equation.invars[1], "val") and equation.invars[1].val == 3:
            return once(inputs[0] * inputs[0]) * inputs[0]
        if name == "exp2" and native:
            return jnp.exp(once(_scaled_by(inputs[0], of[0], jnp.log(2.0), once)))
        if not any(of):
            return None
        if name in ("mul", "square", "integer_pow"):
            return self._product(equation, inputs, [*of, *of][:2], once)
        first = of[0]
        if name == "log" and first is not None:
            return _logarithm(first, once)
        if name == "pow" and first is not None and first.name == "exp":
            return jnp.exp(once(first.inputs[0] * inputs[1]))
        if name in ("add", "sub"):
            return _shift(equation, inputs, of, once)
        return None

    def _product(
        self, equation: jex.JaxprEqn, inputs: Sequence[Any], of: Sequence[Source | None], once: Once
    ) -> Any | None:
        """Return exp(A) · exp(B) as exp(A + B), a constant after another as one with it, or with a smaller factor."""
        if equation.primitive.name == "integer_pow" and equation.params["y"] != 2:
            return None
        exponents = [source.inputs[0] for source in of if source is not None and source.name == "exp"]
        if len(exponents) == 2 and np.shape(exponents[0]) == np.shape(exponents[1]):
            return jnp.exp(once(exponents[0] + exponents[1]))
        if equation.primitive.name != "mul":
            return None
        for source, i in zip(of, (1, 0), strict=True):
            v, x = equation.invars[i], inputs[i]
            if source is None or source.name != "scaled":
                continue
            if self.constant(v):
                return source.inputs[0] * once(source.inputs[1] * x)
            if self.smaller(v, equation.outvars[0].aval):
                return source.inputs[0] * once(_times(source.inputs[1], x, self.of(v), once))
        return None

    def _quotient(self, equation: jex.JaxprEqn, inputs: Sequence[Any], once: Once) -> Any | None:
        x, y = inputs
        above, below = (self.of(v) for v in equation.invars)
        small = self.by_inverse(equation)
        if self.constant(equation.invars[1]):
            return _scaled_by(x, above, 1 / y, once)
        if below is not None and (self.inverted(below) or (small and below.name in QUOTIENTS)):
            if below.name == "exp" and above is not None and above.name == "exp" and not small:
                return jnp.exp(once(above.inputs[0] - below.inputs[0]))
            return _scaled_by(x, above if small else None, _inverse(below, once), once)
        if small:
            return _scaled_by(x, above, 1 / y, once)
        if below is not None and below.name in QUOTIENTS:
            p, q = below.inputs
            if above is not None and above.name in QUOTIENTS:
                return once(above.inputs[0] * q) / once(above.inputs[1] * p)
            return once(x * q) / p if np.shape(p) == np.shape(x) else once(x * q) * once(1 / p)
        if above is not None and above.name in QUOTIENTS:
            return above.inputs[0] / once(above.inputs[1] * y)
        return None

    def contracted(self, equation: jex.JaxprEqn, inputs: list[Any], before: Mapping[Any, Any], few: Any) -> list[Any]:
        """Return operands of a sum in float16 with the first product not rounded: a fused multiply-add.

        ``before``: values as they were before they were rounded; ``few``: whether nothing else reads a variable.
        """
        if equation.primitive.name not in (*SUMS, "reduce_sum") or equation.outvars[0].aval.dtype != np.float16:
            return inputs
        for i, v in enumerate(equation.invars):
            source = self.of(v)
            if source is not None and source.name in ("mul", "scaled") and v in before and few(v):
                return [*inputs[:i], before[v], *inputs[i + 1 :]]
        return inputs


def _inverse(of: Source, once: Once) -> Any:
    """Return 1 / what an operation makes; of one with a constant above, that is multiplied by its inverse."""
    if of.name == "over":
        return of.inputs[1] * once(1 / of.inputs[0])
    return INVERSES[of.name](*of.inputs)


def _scaled_by(x: Any, of: Source | None, factor: Any, once: Once) -> Any:
    """Return x · factor, a constant that x was multiplied by (``of``) as one with the factor."""
    if of is None or of.name != "scaled":
        return x * once(factor)
    return of.inputs[0] * once(of.inputs[1] * once(factor))


def _times(constant: Any, x: Any, of: Source | None, once: Once) -> Any:
    """Return a constant times x, whose own constant (``of``) is one with it."""
    if of is not None and of.name == "scaled":
        return of.inputs[0] * once(of.inputs[1] * constant)
    return constant * x


def _exponential_minus_one(x: Any, once: Once) -> Any:
    """Return exp(x) − 1 as XLA makes it: of small x as tanh(x / 2) · (exp(x) + 1)."""
    e = once(jnp.exp(x))
    return jnp.where(jnp.abs(x) > 0.5, e - 1, once(jnp.tanh(once(x / 2))) * once(e + 1))


def _shift(equation: jex.JaxprEqn, inputs: Sequence[Any], of: Sequence[Source | None], once: Once) -> Any | None:
    """Return a constant that is added after another as one with it: (A + B) + C, and (A − x) + C as (A + C) − x."""
    sign = -1 if equation.primitive.name == "sub" else 1
    for i, source in enumerate(of):
        fixed = hasattr(equation.invars[1 - i], "val") and (i == 0 or sign == 1)
        if source is not None and source.name in ("shifted", "mirrored") and fixed:
            x, constant = source.inputs
            whole = once(constant + sign * inputs[1 - i])
            return whole + x if source.name == "shifted" else whole - x
    return None


def _logarithm(of: Source, once: Once) -> Any | None:
    """Return the logarithm of what an exponential, a root or a power makes."""
    if of.name == "exp":
        return of.inputs[0]
    if of.name in ("sqrt", "rsqrt"):
        return (0.5 if of.name == "sqrt" else -0.5) * once(jnp.log(of.inputs[0]))
    return of.inputs[1] * once(jnp.log(of.inputs[0])) if of.name == "pow" else None
