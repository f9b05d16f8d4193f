"""Drawing tokens: greedy, or from softmax(logits / temperature), cut to the top k and the top p.

The log-probability of what was drawn is that of log softmax(logits / temperature) over the whole vocabulary, in
float32: what verl's trainer computes (``logits.div_(temperature)`` in verl/workers/actor/dp_actor.py), whatever top k
and top p cut. Greedy: of temperature 1.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.errors import UserError
from precaudit.schema.digits import digits

IMPL = "threefry2x32"  # JAX's default, written out: a seed means the same tokens whatever the configuration
Kind = Literal["greedy", "whole", "cut"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. ``temperature`` 0: greedy. ``top_k``, ``top_p``: None cuts nothing.

    Raises UserError for a value that is none.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        if not (self.temperature >= 0 and np.isfinite(self.temperature)):
            raise UserError(f"--temperature {digits(self.temperature, 6)}: a number from 0 (greedy) on is wanted")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"--top-k {self.top_k}: at least 1 is wanted")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {digits(self.top_p, 6)}: above 0 and at most 1 is wanted")
        if not 0 <= self.seed < 1 << 32:
            raise UserError(f"--seed {self.seed}: 0 to {(1 << 32) - 1} is wanted")

    @property
    def kind(self) -> Kind:
        """What has to be compiled."""
        if self.temperature == 0:
            return "greedy"
        return "whole" if self.top_k is None and self.top_p in (None, 1) else "cut"

    @property
    def scoring_temperature(self) -> float:
        """The temperature that log-probabilities are of: 1 of greedy tokens."""
        return self.temperature or 1.0

    def knobs(self, vocab: int, rows: int) -> "Knobs":
        """Return what a compiled program is given for batches of ``rows`` sequences."""
        key = jax.random.key_data(jax.random.key(self.seed, impl=IMPL))
        k = vocab if self.top_k is None else min(self.top_k, vocab)
        return Knobs(
            np.asarray(key),
            np.float32(self.scoring_temperature),
            np.int32(k),
            np.float32(self.top_p or 1),
            np.int32(rows),
        )


@partial(jax.tree_util.register_dataclass, data_fields=["key", "temperature", "top_k", "top_p", "rows"], meta_fields=[])
@dataclass(frozen=True)
class Knobs:
    """A key's data [2] uint32, temperature and top p in float32, top k and how many sequences there are in int32."""

    key: Any
    temperature: Any
    top_k: Any
    top_p: Any
    rows: Any


def draw_tokens(
    kind: Kind, knobs: Knobs, logits: jax.Array, numbers: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return tokens [B] int32 and their log-probabilities [B] float32 of logits [B, V].

    A row's key is that of its sequence's number [B] and the token's position in it [B], and rows are drawn one after
    another in a loop whose length no compiler knows: what a row draws depends on no other, on no batch and on no
    program that this is a part of, to the last bit.
    """

    def row(b: Any, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token, share = draw_one(kind, knobs, logits[b], numbers[b], positions[b])
        return found[0].at[b].set(token), found[1].at[b].set(share)

    batch = len(logits)
    blank = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.float32)
    if batch == 1:  # of one row a compiler knows which, and would move its arithmetic out of the loop
        logits, numbers, positions = (jnp.concatenate([x, jnp.zeros_like(x)]) for x in (logits, numbers, positions))
    return lax.fori_loop(jnp.int32(0), knobs.rows, row, blank)


def draw_one(
    kind: Kind, knobs: Knobs, logits: jax.Array, number: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return a token and its log-probability of logits [V].

    Gumbel's trick (Maddison, Tarlow, Minka 2014, "A* sampling"): argmax of log p + Gumbel noise.
    """
    scaled = logits.astype(jnp.float32) / knobs.temperature
    scores = logits
    if kind != "greedy":
        allowed = (
            jnp.where(kept_tokens(scaled, knobs.top_k, knobs.top_p), scaled, -jnp.inf) if kind == "cut" else scaled
        )
        scores = allowed + noise(knobs, number, position, len(logits))
    token = jnp.argmax(scores).astype(jnp.int32)
    return token, jax.nn.log_softmax(scaled)[token]


def noise(knobs: Knobs, number: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    """Return the Gumbel noise [V] float32 of a token of a sequence."""
    key = jax.random.wrap_key_data(knobs.key, impl=IMPL)
    key = jax.random.fold_in(jax.random.fold_in(key, number), position)
    return jax.random.gumbel(key, (vocab,), jnp.float32, mode="high")  # low resolution draws nothing below 2⁻²³


def kept_tokens(scaled: jax.Array, k: jax.Array, p: jax.Array) -> jax.Array:
    """Return [V]: which of logits / temperature [V] the top k, then the top p of what they leave, keep.

    The top p are the fewest largest whose probabilities, made to add up to 1 after k, reach p. What equals the smallest
    that is kept is kept, too.
    """
    ordered = jnp.flip(jnp.sort(scaled))
    first = jnp.arange(len(scaled)) < k
    shares = jax.nn.softmax(jnp.where(first, ordered, -jnp.inf))
    before = jnp.cumsum(shares) - shares
    least = jnp.min(jnp.where(first & (before < p), ordered, jnp.inf))
    return scaled >= least
