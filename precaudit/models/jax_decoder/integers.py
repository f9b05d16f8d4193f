"""Integers with scales on the device: matrices held so, and rows quantised as they are made.

Barriers keep what is rounded before or after: XLA takes a cast there and back for nothing (docs/numerics.md), and
another integer or row would be made of what was not rounded. ``reduce_precision`` would lose float16's subnormals.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.models.jax_decoder.arithmetic import Arithmetic
from precaudit.numbers.integers import INVERSE, ROWS


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["width"])
@dataclass(frozen=True)
class IntegerMatrix:
    """A matrix [N, in] as integers [..., G, N, n] and float32 scales [..., G, N].

    ``width``: in; the last group is padded. Leading axes, layers and experts, are sliced as those of arrays.
    """

    values: jax.Array
    scales: jax.Array
    width: int

    def astype(self, _dtype: object) -> "IntegerMatrix":
        """Return itself: what is held as integers has no other format."""
        return self

    def rows(self, index: jax.Array) -> jax.Array:
        """Return rows [..., in] of a matrix without leading axes in float32, scale · integer rounded once."""
        values = self.values[:, index].astype(jnp.float32) * self.scales[:, index][..., None]
        return jnp.moveaxis(values, 0, -2).reshape(*index.shape, -1)[..., : self.width]


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["read"])
@dataclass(frozen=True)
class IntegerRows:
    """A cache [L, B, S, G, K] as int8 with a float32 scale [L, B, S, G] for every row.

    ``read``: the format of what it gives.
    """

    values: jax.Array
    scales: jax.Array
    read: np.dtype[Any]

    @classmethod
    def empty(cls, shape: tuple[int, ...], read: np.dtype[Any]) -> "IntegerRows":
        """Return a cache of zeros."""
        return cls(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32), read)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what it holds."""
        return tuple(self.values.shape)


def integer_product(
    x: jax.Array, w: IntegerMatrix, out: np.dtype[Any], a: Arithmetic, in_int8: bool = False
) -> jax.Array:
    """Return x [..., in] · wᵀ [..., N], rounded once to ``out``.

    A group's integers are exact in x's format: its sum in float32, times its scale, is added to the others' in float32.
    ``in_int8``: x is quantised row by row, products of integers are summed in int32, and each group's sum is converted
    to float32; the row's scale multiplies what is left.
    """
    x, row = quantise_rows(x) if in_int8 else (x, None)
    groups, rows, size = w.values.shape
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, groups * size - w.width)])

    def of(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
        kind = jnp.int32 if in_int8 else jnp.float32
        how = {} if in_int8 else {"precision": a.matmul}
        contracted = (((x.ndim - 1,), (1,)), ((), ()))
        y = lax.dot_general(x, values.astype(x.dtype), contracted, preferred_element_type=kind, **how)
        return y.astype(jnp.float32) * scales

    if groups == 1:
        total = of(x, w.values[0], w.scales[0])
    else:
        parts = jnp.moveaxis(x.reshape(*x.shape[:-1], groups, size), -2, 0)
        zero = jnp.zeros((*x.shape[:-1], rows), jnp.float32)
        total, _ = lax.scan(lambda y, part: (y + of(*part), None), zero, (parts, w.values, w.scales))
    return (total if row is None else total * row[..., None]).astype(out)


def quantise_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return x [..., K] as int8 and scales float32 [...], one a row, in float32 (``precaudit/numbers/integers.py``)."""
    wide = lax.optimization_barrier(x).astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1)
    factor = jnp.where(largest > 0, jnp.float32(ROWS.most) / largest, jnp.float32(0))
    ratio = jnp.round(wide * factor[..., None])
    return jnp.where(ratio == ratio, ratio, jnp.float32(0)).astype(jnp.int8), largest * jnp.float32(INVERSE)


def dequantise_rows(values: jax.Array, scales: jax.Array, out: np.dtype[Any]) -> jax.Array:
    """Return scale · integer of values [..., K], scales [...], in float32, rounded to ``out``."""
    return lax.optimization_barrier((values.astype(jnp.float32) * scales[..., None]).astype(out))
