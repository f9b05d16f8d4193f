"""Typed PRNG keys: no numbers. A program is handed them as they are; files and hashes hold their bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.arrays import Array


def is_key(x: Any) -> bool:
    """Whether an array, or what one of such a shape and format is described by, is of typed keys."""
    return hasattr(x, "dtype") and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def is_numbers(x: Any) -> bool:
    """Whether a value is an array of numbers or truth values: it has a format and is of no keys."""
    return hasattr(x, "dtype") and not is_key(x)


def bits(x: Any) -> Any:
    """Return the bits of keys, uint32 with an axis more; any other value as it is."""
    return jax.random.key_data(x) if is_key(x) else x


def keyed(x: Any, like: Any) -> Any:
    """Return keys of given bits that draw as ``like``, an array or its description; ``x`` where that is no key."""
    return jax.random.wrap_key_data(jnp.asarray(x), impl=_impl(like)) if is_key(like) else x


def _impl(like: Any) -> Any:
    """Return how keys draw; JAX tells it of arrays and of what stands for them while it traces."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), like)
    return found[0]


def on_host(x: Any) -> Array:
    """Return a value as an array of the host, keys as their bits."""
    return np.asarray(bits(x))
