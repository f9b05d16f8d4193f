"""Typed PRNG keys: no numbers. A program is handed them as they are; files and hashes hold their bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from precaudit.numbers.arrays import Array


def is_key(x: ArrayLike) -> bool:
    """Whether an array, or what one of such a shape and format is described by, is of typed keys."""
    return hasattr(x, "dtype") and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def is_numbers(x: ArrayLike) -> bool:
    """Whether a value is an array of numbers or truth values: it has a format and is of no keys."""
    return hasattr(x, "dtype") and not is_key(x)


def key_bits(x: ArrayLike) -> Any:
    """Return the bits of keys, uint32 with an axis more; any other value as it is."""
    return jax.random.key_data(x) if is_key(x) else x


def wrap_key(x: object, like: jax.Array) -> Any:
    """Return keys of given bits that draw as ``like``, an array or its description; ``x`` where that is no key."""
    return jax.random.wrap_key_data(jnp.asarray(x), impl=_impl(like)) if is_key(like) else x


def _impl(like: Any) -> Any:
    """Return how keys draw; JAX tells it of arrays and of what stands for them while it traces."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), like)
    return found[0]


def readable(x: ArrayLike) -> bool:
    """Whether all elements of an array lie with this process, or a copy of each does."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def on_host(x: ArrayLike) -> Array:
    """Return a value as an array of the host, keys as their bits; what lies with several processes is gathered.

    All of these have to call it then, in the same order.
    """
    bits = key_bits(x)
    if readable(x):
        return np.asarray(bits)
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(bits, tiled=True))
