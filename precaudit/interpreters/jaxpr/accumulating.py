"""Sums of matrix products in another format, everything else in FP64: what accumulation alone makes of a program."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.interpreters.jaxpr.multiplying import elementwise_factors
from precaudit.interpreters.jaxpr.plant import Planted
from precaudit.interpreters.jaxpr.rounding import round_once
from precaudit.interpreters.jaxpr.rules import solve_alone
from precaudit.interpreters.jaxpr.sums import float_bits
from precaudit.interpreters.jaxpr.together import evaluate_together
from precaudit.numbers.formats import FORMATS, parse_accumulation


def emulate_accumulation(
    function: Callable[..., Any],
    formats: Collection[str],
    names: Collection[str],
    steps: Sequence[int] | None = None,
) -> Callable[..., dict[str, tuple[Any, ...]]]:
    """Return ``g(values, *args) → {tap: (in FP64, with sums in each format)}`` of some taps, all of them planted.

    ``formats``: as ``parse_accumulation`` takes them; ``steps``: as ``planting`` does. Under
    ``jax.enable_x64(True)``; raises as ``plant`` does.
    """
    every: list[Callable[[Collection[str]], Planted]] = [lambda taps: Planted({}, "read", taps)]
    every += [partial(Accumulated, text=text) for text in formats]
    run = evaluate_together(function, every, lambda _value, told: told, steps)

    def some(values: object, *args: Any) -> dict[str, tuple[Any, ...]]:
        return {name: made for name, made in run(values, *args).items() if name in names}

    return some


class Accumulated(Planted):
    """The FP64 shadow whose matrix products of floats are summed as ``text`` says, a format or one in blocks.

    Each product, then each partial sum is rounded to nearest, in the order of the contracted dimension; in blocks:
    float32 inside a block, the running sum rounded once a block (``models/numpy_decoder/accumulation.py``).
    """

    def __init__(self, names: Collection[str], text: str) -> None:
        super().__init__({}, "read", names)
        name, self.block = parse_accumulation(text)
        self.stored = partial(round_once, dtype=FORMATS[name].dtype)

    def operation(self, equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluate one operation."""
        if equation.primitive.name == "custom_linear_solve":  # whose operator JAX transposes, which rounds here
            return solve_alone(self.run, equation.params, inputs)
        if equation.primitive.name != "dot_general" or not all(float_bits(v.aval.dtype) for v in equation.invars):
            return super().operation(equation, inputs)
        x, y, shape = elementwise_factors(equation, [round_once(x, np.float32) for x in inputs])
        terms = len(x)
        if self.block == 1:
            step = partial(self._term, x, y)
            return [lax.fori_loop(0, terms, step, jnp.zeros(shape))]
        total = jnp.zeros(shape)
        for first in range(0, terms, self.block):
            part = lax.fori_loop(first, min(first + self.block, terms), partial(_in_single, x, y), jnp.zeros(shape))
            total = self.stored(round_once(total + part, np.float32))
        return [total]

    def _term(self, x: jax.Array, y: jax.Array, i: jax.Array, total: jax.Array) -> Any:
        return self.stored(total + self.stored(x[i] * y[i]))


def _in_single(x: jax.Array, y: jax.Array, i: jax.Array, total: jax.Array) -> Any:
    """Return a sum of float32 after its next term, as a fused multiply-add makes it."""
    return round_once(total + x[i] * y[i], np.float32)
