"""What a line of a program's source would gain: the emulated program with float32 where the line makes less.

Every line whose results are of a narrow format, or whose products a device makes of narrower parts of float32 operands,
has a place in a vector of truth values that the compiled function takes, so that one compilation tries them all. Where
a line is raised its results are rounded to float32 instead, what only moves or selects them rounds nothing, its
products are those of float32, and everything that reads them computes as before.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from linecache import getline
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from precaudit.interpreters.jaxpr.emulate import evaluate_planted
from precaudit.interpreters.jaxpr.emulator import Emulator
from precaudit.interpreters.jaxpr.jax_versions import bodies
from precaudit.interpreters.jaxpr.labels import of_equation
from precaudit.interpreters.jaxpr.multiplying import is_compilers_choice
from precaudit.interpreters.jaxpr.plant import Values
from precaudit.interpreters.jaxpr.products import PRODUCTS
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.interpreters.jaxpr.rounding import EXACT, round_once
from precaudit.interpreters.jaxpr.shadow import Lift
from precaudit.interpreters.jaxpr.sums import float_bits

WIDE = np.dtype(np.float32)
MANTISSA = 23  # bits of float32's
NOTHING_ELSE = Realisation()


class Line(NamedTuple):
    """A line of a program's source that rounds to less than float32."""

    file: str
    number: int

    @property
    def source(self) -> str:
        """Return ``file.py:12``."""
        return f"{Path(self.file).name}:{self.number}"

    @property
    def text(self) -> str:
        """Return what stands there; empty where the file is not there any more."""
        return getline(self.file, self.number).strip()


def rounding_lines(jaxpr: jex.Jaxpr, how: Realisation = NOTHING_ELSE) -> dict[Line, int]:
    """Return the lines that make less than float32 in an open jaxpr, in its order, and the bytes that float32 adds.

    ``how``: as the device makes them.
    """
    found: dict[Line, int] = {}
    for e, line, times in _operations(jaxpr):
        if line is None or e.primitive.name in EXACT:
            continue
        size = sum((WIDE.itemsize - n) * prod(v.aval.shape) for v in e.outvars if (n := _narrow(v)))
        if size or _reduces(e) or in_parts(e, how):
            found[line] = found.get(line, 0) + times * size
    return found


def product_lines(jaxpr: jex.Jaxpr, how: Realisation) -> set[Line]:
    """Return the lines of an open jaxpr's products that a device makes of narrower parts of float32 operands."""
    return {line for e, line, _ in _operations(jaxpr) if line is not None and in_parts(e, how)}


def _operations(
    jaxpr: jex.Jaxpr, call: Line | None = None, times: int = 1
) -> Iterator[tuple[jex.JaxprEqn, Line | None, int]]:
    """Yield the equations without a body, the line that each was made in, and how many times it is run.

    What a function of JAX's own makes is of the line that calls it (``call``).
    """
    for e in jaxpr.eqns:
        line = users_line(e) or call
        inside = [body for value in e.params.values() for body in bodies(value)]
        steps = times * (e.params["length"] if e.primitive.name == "scan" else 1)
        for body in inside:
            yield from _operations(body, line, steps)
        if not inside:
            yield e, line, times


def users_line(equation: jex.JaxprEqn) -> Line | None:
    """Return the innermost line of the user's code that an equation was made in; None where JAX kept none."""
    stack = of_equation(equation).stack
    return Line(*stack[0][:2]) if stack else None


def raising(
    jaxpr: jex.ClosedJaxpr, how: Realisation, lines: Sequence[Line], lift: Mapping[str, Lift] | None = None
) -> Callable[..., list[Any]]:
    """Return ``g(seed, raised, *leaves) → outputs`` of a closed jaxpr as its equations round, some lines in float32.

    ``raised``: a truth value [len(lines)] for every line. All else as
    ``precaudit.interpreters.jaxpr.emulate.emulate_program``.
    """
    order = {line: i for i, line in enumerate(lines)}

    def run(seed: jax.Array | None, raised: Any, *leaves: Any, held: Values | None = None) -> list[Any]:
        def interpreter(names: Collection[str]) -> _Raised:
            return _Raised(dict(lift or {}), names, how, seed, order, raised)

        return evaluate_planted(interpreter, jaxpr, leaves, held)[0]

    return run


class _Raised(Emulator):
    """Evaluates an emulated program with some lines in float32."""

    def __init__(
        self,
        lift: Mapping[str, Lift],
        names: Collection[str],
        how: Realisation,
        seed: jax.Array | None,
        order: Mapping[Line, int],
        raised: Any,
    ) -> None:
        super().__init__(lift, names, how, seed)
        self.order, self.raised = order, raised
        self.place: int | None = None
        self.moved = False

    def operation(self, equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluate one operation and round what it gives, to float32 where its line is raised."""
        line = users_line(self.equation_with_line(equation))
        self.place = None if line is None else self.order.get(line)
        self.moved = equation.primitive.name in EXACT
        out = super().operation(equation, inputs)
        if self.place is None:
            return out
        if in_parts(equation, self.how):
            return self._or_whole(equation, inputs, out)
        return [jnp.where(self.raised[self.place], inputs[0], out[0])] if _reduces(equation) else out

    def _or_whole(self, equation: jex.JaxprEqn, inputs: list[Any], out: list[Any]) -> list[Any]:
        """Return a product of float32 operands where its line is raised, with the same draws."""
        how, self.how = self.how, replace(self.how, unit="any", made=None)
        self.count -= 1
        product = super().operation(equation, inputs)
        self.how = how
        return [jnp.where(self.raised[self.place], x, y) for x, y in zip(product, out, strict=True)]

    def store(self, variable: jex.Var | jex.Literal, x: jax.Array, factor: float) -> Any:
        """Return a result as its format holds it, or float32 where that is raised."""
        narrow = super().store(variable, x, factor)
        if not _narrow(variable):
            return narrow
        if self.moved:
            return x
        if self.place is None:
            return narrow
        return jnp.where(self.raised[self.place], round_once(x, WIDE, factor), narrow)


def in_parts(equation: jex.JaxprEqn, how: Realisation) -> bool:
    """Whether a device makes a product of narrower parts of float32 operands: below the highest precision."""
    return how.unit in ("matrix", "gpu") and equation.primitive.name in PRODUCTS and is_compilers_choice(equation)


def _reduces(equation: jex.JaxprEqn) -> bool:
    """Whether an equation rounds to less than float32 and gives that in a wider format: no compiler leaves it out."""
    return equation.primitive.name == "reduce_precision" and equation.params["mantissa_bits"] < MANTISSA


def _narrow(variable: jex.Var | jex.Literal) -> int:
    """Return the bytes of an element of a float format narrower than float32; 0 of others."""
    bits = float_bits(getattr(variable.aval, "dtype", None))
    return bits // 8 if bits < WIDE.itemsize * 8 else 0
