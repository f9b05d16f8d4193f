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
    lines = tuple(_pad(jnp.moveaxis(x, axis, -1), size) for x in values)
    place = lax.broadcasted_iota(np.int32, lines[0].shape, lines[0].ndim - 1)
    steps = np.array([(1 << level, 1 << at) for level in range(1, size.bit_length()) for at in reversed(range(level))])
    if len(steps):
        steps = jnp.asarray(steps, np.int32)
        compared = _over(before, lines[0].ndim)

        def step(i: jax.Array, state: Any) -> Any:
            return _exchange(state[0], state[1], n, steps[i, 0], steps[i, 1], compared)

        lines, _ = lax.fori_loop(0, len(steps), step, (lines, place))
    return tuple(jnp.moveaxis(x[..., :n], -1, axis) for x in lines)


def _pad(x: jax.Array, size: int) -> Any:
    more = [(0, 0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1], 0)]
    return lax.pad(x, jnp.zeros((), x.dtype), more)


def _over(before: Before, rank: int) -> Before:
    """Return the comparison of arrays, by their elements."""
    for _ in range(rank):
        before = jax.vmap(before)
    return before


def _exchange(lines: jax.Array, place: jax.Array, n: int, level: jax.Array, distance: jax.Array, before: Before) -> Any:
    """Exchange elements ``distance`` apart that stand wrongly: blocks of ``level`` rise and fall in turn.

    ``place``: where each element stood; from ``n`` on they were padded, and come last.
    """
    at = lax.broadcasted_iota(np.int32, place.shape, place.ndim - 1)
    partner = at[(0,) * (at.ndim - 1)] ^ distance
    others, other_place = tuple(x[..., partner] for x in lines), place[..., partner]
    forward = before(*(x for pair in zip(lines, others, strict=True) for x in pair))
    backward = before(*(x for pair in zip(others, lines, strict=True) for x in pair))
    there, other_there = place < n, other_place < n
    first = jnp.where(
        there & other_there,
        forward & ~backward | ~(forward ^ backward) & (place < other_place),
        there & ~other_there | ~(there ^ other_there) & (place < other_place),
    )
    keep = first == ((at & distance == 0) == (at & level == 0))
    return tuple(jnp.where(keep, x, y) for x, y in zip(lines, others, strict=True)), jnp.where(keep, place, other_place)
