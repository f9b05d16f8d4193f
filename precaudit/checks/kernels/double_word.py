"""Numbers as unevaluated sums of two float32, high and low: what keeps a difference of two near numbers.

Error-free sums (Knuth; Dekker 1971), product and sum of such numbers as in Joldes, Muller & Popescu 2017. They hold as
long as a compiler keeps the order of float sums, as XLA and Mosaic do. Products that errors are read from are of
factors of twelve bits, exact in float32, so a fused multiply-add changes nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

Pair = tuple[Any, Any]  # high, low: |low| ≤ ulp(high) / 2 where it is normalised
TWELVE = -(1 << 12)  # mask of a float32's sign, exponent and eleven stored bits
LN2 = float(np.log(2.0))
LN2_HIGH = 0.693115234375  # fifteen bits: its product with an exponent is exact
BIAS, STORED = 127, 23


def two_sum(a: jax.Array, b: jax.Array) -> Pair:
    """Return a + b rounded, and what the rounding lost, exactly; float32 of any shapes that broadcast."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def normalise(a: jax.Array, b: jax.Array) -> Pair:
    """Return the same for |a| ≥ |b| or a = 0."""
    total = a + b
    return total, b - (total - a)


def add(x: Pair, y: ArrayLike) -> Pair:
    """Return a pair plus a float32."""
    total, lost = two_sum(x[0], y)
    return normalise(total, lost + x[1])


def scale_pair(x: Pair, factor: float) -> Pair:
    """Return a pair times a constant that is known in FP64; its low part may be as large as ulp(high)."""
    if factor == 1.0:
        return x
    most = float(np.float32(factor).view(np.int32).__and__(TWELVE).astype(np.int32).view(np.float32))
    high, low = x
    head = _head(high)
    return normalise(head * most, high * float(np.float32(factor - most)) + ((high - head) + low) * most)


def log(x: Pair) -> Pair:
    """Return the natural logarithm of a positive pair, 3e-8 off: k ln 2 + log1p(f − 1), f in [0.75, 1.5)."""
    high, low = x
    k = ((_bits(high) + (1 << STORED - 1)) >> STORED) - BIAS
    f = lax.bitcast_convert_type(_bits(high) - (k << STORED), jnp.float32)
    exponent = k.astype(jnp.float32)
    found = normalise(
        exponent * LN2_HIGH, jnp.log1p(f - 1.0) + (low / high + exponent * float(np.float32(LN2 - LN2_HIGH)))
    )
    known = (high > 0) & (high < jnp.inf)
    return jnp.where(known, found[0], jnp.log(high)), jnp.where(known, found[1], 0.0)


def _bits(x: jax.Array) -> Any:
    return lax.bitcast_convert_type(x, jnp.int32)


def _head(x: jax.Array) -> Any:
    """Return the first twelve bits of a float32."""
    return lax.bitcast_convert_type(_bits(x) & TWELVE, jnp.float32)
