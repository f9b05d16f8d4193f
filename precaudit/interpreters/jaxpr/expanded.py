"""Operations of narrow formats as XLA makes them, of simpler ones, each rounded."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def complex_product(x: jax.Array, y: jax.Array, stored: Callable[[Any], Any]) -> Any:
    """(a + bi)(c + di) = (ac − bd) + (ad + bc)i, every product rounded."""
    (a, b), (c, d) = (x.real, x.imag), (y.real, y.imag)
    return lax.complex(stored(a * c) - stored(b * d), stored(a * d) + stored(b * c))


def _logistic(x: jax.Array, _params: Mapping[str, Any], stored: Callable[[Any], Any]) -> Any:
    """1 / (1 + exp(−x))."""
    return 1.0 / stored(1.0 + stored(jnp.exp(-x)))


def _power(x: jax.Array, params: Mapping[str, Any], stored: Callable[[Any], Any]) -> Any:
    """Return x to an integer power; the cube of a rounded square."""
    return stored(x * x) * x if params["y"] == 3 else lax.integer_pow(x, params["y"])


def _one_minus_square(x: jax.Array, _params: Mapping[str, Any], stored: Callable[[Any], Any]) -> Any:
    """(1 − x)(1 + x), as JAX writes 1 − x²."""
    return stored(1.0 - x) * stored(1.0 + x)


EXPANDED = {"logistic": _logistic, "integer_pow": _power, "one_minus_square": _one_minus_square}
