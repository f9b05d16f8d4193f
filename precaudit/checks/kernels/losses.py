"""The GRPO loss of log-probabilities: what is left once the vocabulary is gone, plain arithmetic on [..., T]."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Normalisation = Literal["tokens", "sequences", "positions"]
LOW, HIGH, BETA = 0.2, 0.2, 0.04


def grpo(
    logp: jax.Array,
    old: jax.Array,
    ref: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    low: float = LOW,
    high: float = HIGH,
    beta: float = BETA,
    over: Normalisation = "tokens",
    rest: ArrayLike = 0.0,
) -> Any:
    """Return the loss, a float32 scalar, of log-probabilities [..., T] of chosen tokens.

    Of a token: β (e^d − d − 1) − min(r A, clip(r, 1 − low, 1 + high) A), r = exp(logp − old), d = ref − logp (Shao et
    al. 2024, eq. 3 and 4; k3 of Schulman 2020). ``mask``: 0 leaves a token out. ``over``: the mean over ``tokens`` (Yu
    et al. 2025), the mean over ``sequences`` of the mean over their tokens (Shao et al.), or the sum over the number of
    ``positions`` (Liu et al. 2025). Nothing but masked tokens gives 0.
    """
    ratio, d = jnp.exp((logp - old) + rest), (ref - logp) - rest
    kl = jnp.expm1(d) - d
    each = beta * kl - jnp.minimum(ratio * advantages, jnp.clip(ratio, 1.0 - low, 1.0 + high) * advantages)
    kept = mask.astype(jnp.float32)
    each = jnp.where(kept > 0, each * kept, 0.0)
    if over == "tokens":
        return each.sum() / jnp.maximum(kept.sum(), 1.0)
    if over == "sequences":
        return jnp.mean(each.sum(-1) / jnp.maximum(kept.sum(-1), 1.0))
    return each.sum() / each.size
