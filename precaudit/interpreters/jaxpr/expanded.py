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
    """Return x to an integer power by rounded squares; a negative one is one over it."""
    exponent, square, power = abs(params["y"]), x, jnp.ones_like(x)
    made, rounded = power, x
    while exponent:
        if exponent & 1:
            made = square if made is power else stored(made) * rounded
        exponent >>= 1
        if exponent:
            square = rounded * rounded
            rounded = stored(square)
    return 1.0 / stored(made) if params["y"] < 0 else made


def _one_minus_square(x: jax.Array, _params: Mapping[str, Any], stored: Callable[[Any], Any]) -> Any:
    """(1 − x)(1 + x), as JAX writes 1 − x²."""
    return stored(1.0 - x) * stored(1.0 + x)


def _exp2(x: jax.Array, _params: Mapping[str, Any], stored: Callable[[Any], Any]) -> Any:
    """exp(x · ln 2), as JAX lowers it."""
    return jnp.exp(stored(x * stored(jnp.log(2.0))))


EXPANDED = {"exp2": _exp2, "logistic": _logistic, "integer_pow": _power, "one_minus_square": _one_minus_square}
