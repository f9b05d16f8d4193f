"""GRPO loss over hidden states and a head matrix: logits are made a tile at a time, in both passes, and not kept.

log p = log softmax(hidden · headᵀ / temperature)[token]. Forward: tiles of logits give sums as pairs of float32
(``streaming``). Backward, with d = g (1[token] − p) / temperature made again a tile at a time: dhidden = d · head, tile
after tile of the vocabulary for some tokens; dhead = dᵀ · hidden, tile after tile of tokens for some columns. Both are
added up in pairs. The logits are made three times, so that neither pass holds more than tiles, beyond inputs,
gradients and some float32 a token (the losses' own, and ``ColumnSums``).

A tile's product is not what a large one is: XLA:CPU adds up 128 terms at a time in large products, and all of a small
one after another. Logits of 256 terms are 5.7e-7 off so, 4.1e-7 as a part of all of them (root mean square, ``make
kernels``), and that, not the sums over tiles, was what a plain streamed kernel lost in log p and in both gradients.
Here parts of 128 terms are added in pairs: 4.2e-7. A TPU's matrix unit adds up by itself, in an order not known here.

It is a scan and no Pallas kernel: which of them is faster on a TPU can be timed on one alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.checks.kernels import losses
from precaudit.checks.kernels.double_word import Pair, add
from precaudit.checks.kernels.losses import GrpoRule, TokenScores
from precaudit.checks.kernels.streaming import ColumnSums, probabilities

ARGNUMS = (0, 1)
BLOCK = (256, 2048)  # tokens and columns of a tile
WIDTH = 128  # terms of a product that are added up at once


def kernel(
    hidden: jax.Array,
    head: jax.Array,
    tokens: jax.Array,
    old: jax.Array,
    ref: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    temperature: float = 1.0,
    block: tuple[int, int] = BLOCK,
    **loss: Any,
) -> Any:
    """Return the GRPO loss, a float32 scalar, of ``hidden`` [..., T, D] and ``head`` [V, D], floats of any format.

    ``tokens``, ``old``, ``ref``, ``advantages``, ``mask`` [..., T]; ``loss``: fields of ``GrpoRule``. Derivatives
    by all but ``tokens`` and ``mask``, in the formats of what they are by. Any T, V and D.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    logp, rest = token_log_probabilities(rows, head, tokens.reshape(-1), temperature, block)
    scores = TokenScores(logp.reshape(tokens.shape), old, ref, advantages, mask)
    return losses.grpo(scores, GrpoRule(**loss), rest.reshape(tokens.shape))


def reference(
    hidden: jax.Array,
    head: jax.Array,
    tokens: jax.Array,
    old: jax.Array,
    ref: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    temperature: float = 1.0,
    **loss: Any,
) -> Any:
    """Return the same by all logits at once, in float32, and their ``log_softmax``."""
    logits = jnp.einsum(
        "...td,vd->...tv", hidden.astype(jnp.float32), head.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    logp = jax.nn.log_softmax(logits / temperature, axis=-1)
    chosen = jnp.take_along_axis(logp, tokens[..., None], -1)[..., 0]
    return losses.grpo(TokenScores(chosen, old, ref, advantages, mask), GrpoRule(**loss))


def inputs(
    seed: int,
    dtype: str = "float32",
    size: tuple[int, int, int] = (12, 300, 48),
    spread: float = 2.0,
    temperature: float = 1.0,
) -> tuple[Any, ...]:
    """Return hidden [T, D], head [V, D] for logits of standard deviation ``spread``, tokens, and what is near log p.

    Every other token is a likely one. Every third ratio is beyond the clip; some advantages are 0; the last tokens are
    masked.
    """
    random = np.random.default_rng(seed)
    t, v, d = size
    head = jnp.asarray(random.standard_normal((v, d)) / d**0.5, dtype)
    hidden = spread * random.standard_normal((t, d))
    tokens = random.integers(0, v, t).astype(np.int32)
    hidden[::2] += 2 * spread * np.asarray(head, np.float64)[tokens[::2]]
    hidden = jnp.asarray(hidden, dtype)
    x = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / temperature
    x -= x.max(1, keepdims=True)
    logp = x[np.arange(t), tokens] - np.log(np.exp(x).sum(1))
    old = logp + 0.1 * random.standard_normal(t) + np.where(np.arange(t) % 3 == 0, 0.5, 0.0)
    advantages = np.where(np.arange(t) % 7 == 3, 0.0, random.standard_normal(t))
    mask = np.arange(t) < max(t - 2, 1)
    ref = logp + 0.1 * random.standard_normal(t)
    return (hidden, head, tokens, *(y.astype(np.float32) for y in (old, ref, advantages, mask)))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def token_log_probabilities(
    hidden: jax.Array, head: jax.Array, tokens: jax.Array, temperature: float, block: tuple[int, int]
) -> Pair:
    """Return log-probabilities [T] of tokens [T], ``hidden`` [T, D], ``head`` [V, D], and what float32 lost of them.

    Derivatives are the first's.
    """
    return _forward(hidden, head, tokens, temperature, block)[0]


def _forward(hidden: jax.Array, head: jax.Array, tokens: jax.Array, temperature: float, block: tuple[int, int]) -> Any:
    by_tokens, by_columns = Tiles(len(hidden), block[0]), Tiles(len(head), block[1])

    def some(i: jax.Array) -> ColumnSums:
        h, token = by_tokens.cut(hidden, i), by_tokens.cut(tokens, i)[:, None]

        def with_columns(sums: ColumnSums, j: jax.Array) -> ColumnSums:
            x = jnp.where(by_columns.fresh(j)[None], tile_product(h, by_columns.cut(head, j), (1, 1)), -jnp.inf)
            return sums.with_tile(x, (by_columns.rows(j)[None] == token) & by_columns.fresh(j)[None], temperature, 1)

        return by_columns.fold(with_columns, ColumnSums.none(jnp.zeros((len(h), 1), jnp.float32)))

    sums = by_tokens.concatenate(some)
    high, low = sums.log_probability(temperature)
    return (high[:, 0], low[:, 0]), (hidden, head, tokens, sums)


def _backward(temperature: float, block: tuple[int, int], saved: Any, g: jax.Array) -> Any:
    hidden, head, tokens, sums = saved
    by_tokens, by_columns = Tiles(len(hidden), block[0]), Tiles(len(head), block[1])
    each = (hidden, tokens[:, None], sums._replace(chosen=(g[0] / temperature)[:, None]))

    def slopes(rows: jax.Array, w: jax.Array, j: jax.Array) -> Any:
        h, token, known = rows
        p = probabilities(tile_product(h, w, (1, 1)), known, temperature)
        return (jnp.where(by_columns.rows(j)[None] == token, 1.0, 0.0) - p) * known.chosen

    def of_tokens(i: jax.Array) -> Any:
        rows = by_tokens.cut(each, i)

        def with_columns(total: Pair, j: jax.Array) -> Pair:
            w = by_columns.cut(head, j)
            d = jnp.where(by_columns.fresh(j)[None], slopes(rows, w, j), 0.0)
            return tile_product(d, w, (1, 0), total)

        return by_columns.fold(with_columns, _nothing(rows[0]))[0].astype(hidden.dtype)

    def of_columns(j: jax.Array) -> Any:
        w = by_columns.cut(head, j)

        def with_tokens(total: Pair, i: jax.Array) -> Pair:
            rows = by_tokens.cut(each, i)
            d = jnp.where(by_tokens.fresh(i)[:, None], slopes(rows, w, j), 0.0)
            return tile_product(d, rows[0], (0, 0), total)

        return by_tokens.fold(with_tokens, _nothing(w))[0].astype(head.dtype)

    return by_tokens.concatenate(of_tokens), by_columns.concatenate(of_columns), None


token_log_probabilities.defvjp(_forward, _backward)


class Tiles(NamedTuple):
    """Rows 0 to ``n`` by ``size``; the last tile begins earlier where it would end beyond ``n``."""

    n: int
    wanted: int

    @property
    def size(self) -> int:
        """How many rows a tile has."""
        return min(self.n, self.wanted)

    def start(self, i: jax.Array) -> Any:
        """Return the first row of tile ``i``."""
        return jnp.minimum(i * self.size, self.n - self.size)

    def rows(self, i: jax.Array) -> Any:
        """Return the rows of tile ``i``."""
        return self.start(i) + jnp.arange(self.size)

    def fresh(self, i: jax.Array) -> Any:
        """Return which of them were in no tile before."""
        return self.rows(i) >= i * self.size

    def cut(self, x: jax.Array, i: jax.Array) -> Any:
        """Return tile ``i`` of arrays of ``n`` rows."""
        return jax.tree.map(lambda y: lax.dynamic_slice_in_dim(y, self.start(i), self.size), x)

    def fold(self, step: Callable[[Any, Any], Any], start: Any) -> Any:
        """Return ``step(step(start, 0), 1)`` and so on."""
        return lax.fori_loop(0, -(-self.n // self.size), lambda i, x: step(x, i), start)

    def concatenate(self, make: Callable[[Any], Any]) -> Any:
        """Return the arrays of ``n`` rows whose tiles ``make`` returns."""
        like = jax.eval_shape(make, jnp.int32(0))
        whole = jax.tree.map(lambda x: jnp.zeros((self.n, *x.shape[1:]), x.dtype), like)

        def step(found: Any, i: jax.Array) -> Any:
            return jax.tree.map(lambda y, x: lax.dynamic_update_slice_in_dim(y, x, self.start(i), 0), found, make(i))

        return self.fold(step, whole)


def tile_product(a: jax.Array, b: jax.Array, axes: tuple[int, int], total: Pair | None = None) -> Any:
    """Return a · b, float32, summed along an axis of each; added to ``total``, a pair, where there is one.

    WIDTH terms at a time, the parts added up in pairs; on a TPU at once.
    """
    pair = total is not None

    def at_once(a: jax.Array, b: jax.Array, *total: Any) -> Any:
        found = _dot(a, b, axes)
        return add(total, found) if pair else found

    def in_parts(a: jax.Array, b: jax.Array, *total: Any) -> Any:
        n = a.shape[axes[0]]

        def part(k: int) -> Any:
            end = min(k + WIDTH, n)
            return _dot(lax.slice_in_dim(a, k, end, axis=axes[0]), lax.slice_in_dim(b, k, end, axis=axes[1]), axes)

        parts = map(part, range(0, n, WIDTH))
        found = total or (next(parts), jnp.float32(0.0))
        for more in parts:
            found = add(found, more)
        return found if pair else found[0]

    return lax.platform_dependent(a, b, *(total or ()), tpu=at_once, default=in_parts)


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> Any:
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(
        a, b, (((axes[0],), (axes[1],)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _nothing(x: jax.Array) -> Pair:
    zeros = jnp.zeros(x.shape, jnp.float32)
    return zeros, zeros
