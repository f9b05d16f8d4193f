"""Log-sum-exp over tiles of logits, with sums and log-probabilities as pairs of float32.

A log-probability of −60 in one float32 is 2e-6 off, and so is a ratio exp(log p − old) made of it, whatever made the
log-probability. Here it is the pair (chosen − shift) / temperature − log(sum).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from precaudit.checks.kernels.double_word import Pair, add, log, normalise, scale_pair, two_sum

LOWEST = -1e30  # a finite start: −∞ minus −∞ would be NaN
REACH = 16.0  # exponents up to it need no new shift, and V e¹⁶ is far from overflow


class ColumnSums(NamedTuple):
    """What is known of some columns: Σ exp((x − shift) / temperature) = ``high`` + ``low``, and the chosen logit.

    ``shift``: a maximum of the columns so far, or one that was and lies within REACH of it: a sum that is not scaled
    again is not rounded again.
    """

    shift: Any
    high: Any
    low: Any
    chosen: Any

    @classmethod
    def none(cls, like: jax.Array) -> "ColumnSums":
        """Return what is known of no columns."""
        zero = jnp.zeros_like(like)
        return cls(jnp.full_like(like, LOWEST), zero, zero, zero)

    def with_tile(self, x: jax.Array, hot: jax.Array, temperature: float, axis: int) -> "ColumnSums":
        """Return the sums with a tile of logits, float32, −∞ where there is no column; ``hot``: where it is chosen."""
        most = jnp.max(x, axis=axis, keepdims=True)
        shift = jnp.where((most - self.shift) / temperature > REACH, most, self.shift)
        shift = jnp.where(most != most, most, shift)
        before = jnp.exp((self.shift - shift) / temperature)
        total = pairwise_sum(scaled_exponentials(x, shift, 0.0, temperature), axis)
        high, low = add((self.high * before, self.low * before), total)
        return ColumnSums(shift, high, low, self.chosen + jnp.sum(jnp.where(hot, x, 0.0), axis=axis, keepdims=True))

    def log_probability(self, temperature: float) -> Pair:
        """Return log p of the chosen as a pair; what is not finite has no second part."""
        x = scale_pair(two_sum(self.chosen, -self.shift), 1.0 / temperature)
        total = log((self.high, self.low))
        high, lost = two_sum(x[0], -total[0])
        found = normalise(high, lost + (x[1] - total[1]))
        finite = jnp.isfinite(high) & jnp.isfinite(found[1])
        return jnp.where(finite, found[0], high), jnp.where(finite, found[1], 0.0)


def scaled_exponentials(x: jax.Array, shift: jax.Array, scale: ArrayLike, temperature: float) -> Any:
    """Return exp((x − shift) / temperature) · (1 − scale), as far off as the device's exp is.

    The exponent is a pair: in one float32 one of −90 is 4e-6 off, and so is what it makes. −∞ gives 0.
    """
    apart, lost = two_sum(jnp.maximum(x, 2 * LOWEST), -shift)
    high, low = scale_pair((jnp.maximum(apart, LOWEST), lost), 1.0 / temperature)
    found = jnp.exp(high)
    return found + found * (low - scale)


def probabilities(x: jax.Array, sums: ColumnSums, temperature: float) -> Any:
    """Return exp((x − shift) / temperature) / (high + low)."""
    return scaled_exponentials(x, sums.shift, sums.low / sums.high, temperature) / sums.high


def pairwise_sum(x: jax.Array, axis: int) -> Any:
    """Return the sum along an axis of two, kept with length 1: halves added to each other while they are of one size.

    Off by log₂ n roundings at most, half a rounding in the mean, where a sum term after term is off by √n of them.
    """
    n = x.shape[axis]
    while n > 1 and n % 2 == 0:
        n //= 2
        x = (x[:, :n] + x[:, n:]) if axis else (x[:n] + x[n:])
    return jnp.sum(x, axis=axis, keepdims=True)
