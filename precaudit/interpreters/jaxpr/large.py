"""Products with a large matrix in FP64, a block at a time: an output matrix lifted whole is its own size four times."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from precaudit.interpreters.jaxpr.wide import up, wide_dtype

LARGE = 1 << 25  # elements from which an operand is lifted in blocks
BLOCK = 1 << 23  # elements of a block


def stays(equation: jex.JaxprEqn, i: int, x: ArrayLike) -> bool:
    """Whether operand i of an equation is a large one of a product, still in its narrow format, cut along a free axis.

    What is smaller, or was lifted, is lifted whole.
    """
    if equation.primitive.name != "dot_general" or i > 1 or not hasattr(x, "dtype"):
        return False
    return wide_dtype(x.dtype) != x.dtype and np.size(x) >= LARGE and bool(_free(equation.params, i, np.ndim(x)))


def large_product(equation: jex.JaxprEqn, inputs: Sequence[Any]) -> Any:
    """Return a product of which one operand is lifted block by block, along its first free axis."""
    numbers = equation.params["dimension_numbers"]
    i = 0 if stays(equation, 0, inputs[0]) else 1
    matrix, other = inputs[i], up(inputs[1 - i])
    free = _free(equation.params, i, matrix.ndim)
    axis, length = free[0], matrix.shape[free[0]]
    rows = max(1, BLOCK // (matrix.size // length))
    first = len(numbers[1][0]) + (0 if i == 0 else len(_free(equation.params, 0, other.ndim)))

    def block(start: Any, size: int) -> Any:
        part = up(lax.dynamic_slice_in_dim(matrix, start, size, axis))
        pair = (part, other) if i == 0 else (other, part)
        return lax.dot_general(*pair, dimension_numbers=numbers, preferred_element_type=np.float64)

    whole = length // rows
    made = jax.lax.map(lambda start: block(start, rows), jnp.arange(whole) * rows)
    made = jnp.moveaxis(made, 0, first)
    made = made.reshape(*made.shape[:first], whole * rows, *made.shape[first + 2 :])
    if whole * rows < length:
        made = jnp.concatenate([made, block(whole * rows, length - whole * rows)], axis=first)
    return made


def _free(params: Mapping[str, Any], i: int, axes: int) -> list[int]:
    """Return the axes of operand i that are neither summed nor batched."""
    contracted, batched = params["dimension_numbers"]
    return [a for a in range(axes) if a not in (*contracted[i], *batched[i])]
