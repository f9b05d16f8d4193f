"""Products whose terms lie on several devices, as these make them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
from jax import lax

from precaudit.interpreters.jaxpr.sums import float_bits
from precaudit.schema.records.devices import SplitSum


def product_in_parts(
    equation: jex.JaxprEqn,
    inputs: Sequence[Any],
    split: SplitSum,
    product: Callable[[list[Any]], Any],
    rounded: Callable[[Any, int], Any],
) -> Any:
    """Return a product of operands made in parts, each of terms that follow one another, and then added.

    ``product``: of a part's operands, in FP64; ``rounded``: a part, or a sum of parts, as its format holds it, by its
    number. The first contracted axis that the parts divide is cut; where none is, the product is whole.
    """
    contracted = equation.params["dimension_numbers"][0]
    axes = next((both for both in zip(*contracted, strict=True) if inputs[0].shape[both[0]] % split.parts == 0), None)
    if axes is None:
        return product(list(inputs))
    size, total = inputs[0].shape[axes[0]] // split.parts, None
    for n in range(split.parts):
        cut = [lax.slice_in_dim(x, n * size, (n + 1) * size, axis=a) for x, a in zip(inputs, axes, strict=True)]
        part = rounded(product(cut), 2 * n)
        total = part if total is None else total + part
        if n and float_bits(split.summed) == 16:
            total = rounded(total, 2 * n + 1)
    return total
