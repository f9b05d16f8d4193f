"""Sorts by any comparison, as HLO has them: Batcher's bitonic network (Knuth, vol. 3, §5.3.4), stable."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Before = Callable[..., Any]


def in_order(values: Sequence[Any], axis: int, before: Before) -> tuple[Any, ...]:
    """Return arrays of one shape [..., n, ...] sorted together along an axis.

    ``before``: of scalars (a0, b0, a1, b1, …), one pair an array, whether a comes first; what is equal keeps its order.
    """
    n = values[0].shape[axis]
    size = 1 << max(n - 1, 0).bit_length()
    place = lax.broadcasted_iota(np.int32, values[0].shape, axis)
    lines = [_padded(jnp.moveaxis(x, axis, -1), size) for x in values]
    lines.append(_padded(jnp.moveaxis(place, axis, -1), size, size))
    steps = size.bit_length() - 1
    for level in range(1, steps + 1):
        for distance in reversed(range(level)):
            lines = _exchanged(lines, 1 << level, 1 << distance, before)
    return tuple(jnp.moveaxis(x[..., :n], -1, axis) for x in lines[:-1])


def _padded(x: Any, size: int, value: int = 0) -> Any:
    pads = [(0, 0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1], 0)]
    return lax.pad(x, np.zeros((), x.dtype) + np.asarray(value, x.dtype), pads) if size > x.shape[-1] else x


def _exchanged(lines: Sequence[Any], level: int, distance: int, before: Before) -> list[Any]:
    """Exchange elements ``distance`` apart that stand wrongly: blocks of ``level`` rise and fall in turn."""
    size = lines[0].shape[-1]
    pairs = [x.reshape(*x.shape[:-1], size // (2 * distance), 2, distance) for x in lines]
    first, second = [x[..., 0, :] for x in pairs], [x[..., 1, :] for x in pairs]
    starts = np.arange(0, size, 2 * distance)[:, None]
    rising = jnp.broadcast_to(jnp.asarray(starts & level == 0), first[0].shape)
    wrong = jnp.where(rising, _precedes(second, first, before), _precedes(first, second, before))
    made = [jnp.stack([jnp.where(wrong, b, a), jnp.where(wrong, a, b)], -2) for a, b in zip(first, second, strict=True)]
    return [x.reshape(line.shape) for x, line in zip(made, lines, strict=True)]


def _precedes(a: Sequence[Any], b: Sequence[Any], before: Before) -> Any:
    """Return where a comes before b. The last array is the place it had; what was padded has the largest."""
    size = 2 * a[0].shape[-1] * a[0].shape[-2]
    compared = before
    for _ in range(a[0].ndim):
        compared = jax.vmap(compared)
    forward = compared(*(x for pair in zip(a[:-1], b[:-1], strict=True) for x in pair))
    backward = compared(*(x for pair in zip(b[:-1], a[:-1], strict=True) for x in pair))
    earlier = forward | (~backward & (a[-1] < b[-1]))
    a_there, b_there = a[-1] < size, b[-1] < size
    return jnp.where(a_there & b_there, earlier, a_there & ~b_there)
