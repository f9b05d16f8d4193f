"""Products and sums whose terms lie on several devices, as these make them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.extend.core as jex
from jax import lax

from precaudit.interpreters.jaxpr.sums import float_bits
from precaudit.schema.records.devices import SplitSum


def sum_in_parts(
    equation: jex.JaxprEqn,
    inputs: Sequence[Any],
    split: SplitSum,
    make: Callable[[list[Any]], list[Any]],
    rounded: Callable[[Any, int], Any],
) -> Any:
    """Return a product of operands, or a ``reduce_sum``, in parts, each of terms that follow one another, then added.

    ``make``: of a part's operands, in FP64; ``rounded``: a part, or a sum of parts, as its format holds it, by its
    number. The first axis of the sum that the parts divide is cut; where none is, it is whole.
    """
    axes = next((each for each in _summed(equation) if inputs[0].shape[each[0]] % split.parts == 0), None)
    if axes is None:
        return make(list(inputs))[0]
    size, total = inputs[0].shape[axes[0]] // split.parts, None
    for n in range(split.parts):
        cut = [lax.slice_in_dim(x, n * size, (n + 1) * size, axis=a) for x, a in zip(inputs, axes, strict=True)]
        part = rounded(make(cut)[0], 2 * n)
        total = part if total is None else total + part
        if n and float_bits(split.summed) == 16:
            total = rounded(total, 2 * n + 1)
    return total


def _summed(equation: jex.JaxprEqn) -> Iterable[Sequence[int]]:
    """Yield the axes that are summed over, of each operand."""
    if equation.primitive.name == "reduce_sum":
        return ((axis,) for axis in sorted(equation.params["axes"]))
    return zip(*equation.params["dimension_numbers"][0], strict=True)
