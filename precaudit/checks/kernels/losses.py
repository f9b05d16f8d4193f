"""The GRPO loss of log-probabilities: what is left once the vocabulary is gone, plain arithmetic on [..., T]."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Normalisation = Literal["tokens", "sequences", "positions"]
LOW, HIGH, BETA = 0.2, 0.2, 0.04


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities [..., T] of chosen tokens by three policies, their advantages, and a mask: 0 leaves one out."""

    logp: jax.Array
    old: jax.Array
    ref: jax.Array
    advantages: jax.Array
    mask: jax.Array


@dataclass(frozen=True)
class GrpoRule:
    """Where the ratio is clipped, the weight β of KL, and what the sum is divided by.

    ``over``: the mean over ``tokens`` (Yu et al. 2025), the mean over ``sequences`` of the mean over their tokens (Shao
    et al. 2024), or the sum over the number of ``positions`` (Liu et al. 2025).
    """

    low: float = LOW
    high: float = HIGH
    beta: float = BETA
    over: Normalisation = "tokens"


def grpo(scores: TokenScores, rule: GrpoRule, rest: ArrayLike = 0.0) -> Any:
    """Return the loss, a float32 scalar; ``rest``: what logp lacks of its value.

    Of a token: β (e^d − d − 1) − min(r A, clip(r, 1 − low, 1 + high) A), r = exp(logp − old), d = ref − logp (Shao et
    al. 2024, eq. 3 and 4; k3 of Schulman 2020). Nothing but masked tokens gives 0.
    """
    logp, advantages = scores.logp, scores.advantages
    ratio, d = jnp.exp((logp - scores.old) + rest), (scores.ref - logp) - rest
    kl = jnp.expm1(d) - d
    clipped = jnp.clip(ratio, 1.0 - rule.low, 1.0 + rule.high)
    each = rule.beta * kl - jnp.minimum(ratio * advantages, clipped * advantages)
    kept = scores.mask.astype(jnp.float32)
    each = jnp.where(kept > 0, each * kept, 0.0)
    if rule.over == "tokens":
        return each.sum() / jnp.maximum(kept.sum(), 1.0)
    if rule.over == "sequences":
        return jnp.mean(each.sum(-1) / jnp.maximum(kept.sum(-1), 1.0))
    return each.sum() / each.size
