"""GRPO loss over logits in Pallas for a TPU: log-probabilities streamed over the vocabulary, nothing more of its size.

Forward: tiles of logits once, in float32: a running maximum and sum of exponentials (Milakov & Gimelshein 2018) and the
chosen logit. Backward: tiles once more, dlogits = g (1[token] − p) / temperature, p = exp((x − max) / temperature) /
sum, rounded once to the logits' format. Beyond inputs and dlogits it takes four float32 a token. Elsewhere the same
kernel runs in interpret mode.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from precaudit.checks.kernels import losses
from precaudit.checks.kernels.double_word import Pair
from precaudit.checks.kernels.losses import GrpoRule, TokenScores
from precaudit.checks.kernels.streaming import ColumnSums, probabilities

ARGNUMS = (0,)
BLOCK = (16, 2048)  # tokens and columns of a tile
ROWS, LANES = 8, 128  # that a TPU pads arrays to


def kernel(
    logits: jax.Array,
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
    """Return the GRPO loss, a float32 scalar, of ``logits`` [..., T, V] in any float format.

    ``tokens``, ``old``, ``ref``, ``advantages``, ``mask`` [..., T]; ``loss``: fields of ``GrpoRule``. Derivatives
    by all but ``tokens`` and ``mask``; that by logits is in their format. Any T and V.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    logp, rest = token_log_probabilities(rows, tokens.reshape(-1), temperature, block)
    scores = TokenScores(logp.reshape(tokens.shape), old, ref, advantages, mask)
    return losses.grpo(scores, GrpoRule(**loss), rest.reshape(tokens.shape))


def reference(
    logits: jax.Array,
    tokens: jax.Array,
    old: jax.Array,
    ref: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    temperature: float = 1.0,
    **loss: Any,
) -> Any:
    """Return the same by ``log_softmax`` in float32."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)
    chosen = jnp.take_along_axis(logp, tokens[..., None], -1)[..., 0]
    return losses.grpo(TokenScores(chosen, old, ref, advantages, mask), GrpoRule(**loss))


def inputs(
    seed: int, dtype: str = "float32", size: tuple[int, int] = (24, 1000), spread: float = 4.0, temperature: float = 1.0
) -> tuple[Any, ...]:
    """Return logits [T, V] of standard deviation ``spread``, tokens, and what is near their log-probabilities.

    Every third ratio is beyond the clip; some advantages are 0; the last tokens are masked.
    """
    random = np.random.default_rng(seed)
    t, v = size
    logits = jnp.asarray(spread * random.standard_normal(size), dtype)
    tokens = random.integers(0, v, t).astype(np.int32)
    wide = np.asarray(logits, np.float64) / temperature
    logp = wide[np.arange(t), tokens] - np.log(np.exp(wide).sum(1))
    old = logp + 0.1 * random.standard_normal(t) + np.where(np.arange(t) % 3 == 0, 0.5, 0.0)
    advantages = np.where(np.arange(t) % 7 == 3, 0.0, random.standard_normal(t))
    mask = np.arange(t) < max(t - 2, 1)
    ref = logp + 0.1 * random.standard_normal(t)
    return (logits, tokens, *(x.astype(np.float32) for x in (old, ref, advantages, mask)))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def token_log_probabilities(logits: jax.Array, tokens: jax.Array, temperature: float, block: tuple[int, int]) -> Pair:
    """Return log-probabilities [T] of tokens [T] under logits [T, V] / temperature, and what float32 lost of them.

    Derivatives are the first's.
    """
    return _forward(logits, tokens, temperature, block)[0]


def _forward(logits: jax.Array, tokens: jax.Array, temperature: float, block: tuple[int, int]) -> Any:
    way = TileLayout.of(logits.shape, block)
    each = jax.ShapeDtypeStruct(way.layout_shape((logits.shape[0], 1)), jnp.float32)
    run = partial(
        pl.pallas_call,
        partial(_stream, logits.shape[1], way.axis, temperature),
        grid=way.grid,
        in_specs=[way.tile, way.row],
        out_specs=[way.row] * 4,
        out_shape=[each] * 4,
        name="grpo_forward",
    )
    sums = ColumnSums(*_anywhere(run, way.lay_out(logits), way.lay_out(tokens[:, None])))
    high, low = sums.log_probability(temperature)
    return (high.reshape(-1), low.reshape(-1)), (logits, tokens, sums)


def _backward(temperature: float, block: tuple[int, int], saved: Any, g: jax.Array) -> Any:
    logits, tokens, sums = saved
    way = TileLayout.of(logits.shape, block)
    run = partial(
        pl.pallas_call,
        partial(_gradient, way.axis, temperature),
        grid=way.grid,
        in_specs=[way.tile, *[way.row] * 5],
        out_specs=way.tile,
        name="grpo_backward",
        out_shape=jax.ShapeDtypeStruct(way.layout_shape(logits.shape), logits.dtype),
    )
    slope = way.lay_out((g[0] / temperature)[:, None])
    rows = (way.lay_out(tokens[:, None]), sums.shift, sums.high, sums.low, slope)
    return way.lay_out(_anywhere(run, way.lay_out(logits), *rows)), None


token_log_probabilities.defvjp(_forward, _backward)


class TileLayout(NamedTuple):
    """How tiles lie: the vocabulary along ``axis`` 1, or 0 with tokens along the lanes.

    A TPU's compiler hands over [1024, 151643] with tokens along its 128 lanes: that takes less padding. A kernel that
    wants the other order is given a copy, and so is who reads its gradient: twice the logits.
    """

    axis: int
    block: tuple[int, int]
    grid: tuple[int, int]

    @classmethod
    def of(cls, shape: tuple[int, int], block: tuple[int, int]) -> "TileLayout":
        """Return the way of the layout that is padded less, rows to 8 and lanes to 128."""
        (t, v), (rows, columns) = shape, block
        turned = _up(t, LANES) * _up(v, ROWS) < _up(t, ROWS) * _up(v, LANES)
        block = (LANES if turned else rows, columns)
        return cls(0 if turned else 1, block, (pl.cdiv(t, block[0]), pl.cdiv(v, columns)))

    def layout_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return a shape as it lies."""
        return shape if self.axis else shape[::-1]

    def lay_out(self, x: jax.Array) -> Any:
        """Return an array as it lies, or one that lies so as it was."""
        return x if self.axis else x.T

    @property
    def tile(self) -> Any:
        """Blocks of logits: grid (tokens, vocabulary)."""
        return pl.BlockSpec(
            self.layout_shape(self.block), (lambda i, j: (i, j)) if self.axis else (lambda i, j: (j, i))
        )

    @property
    def row(self) -> Any:
        """Blocks of one number a token."""
        at = (lambda i, _j: (i, 0)) if self.axis else (lambda i, _j: (0, i))
        return pl.BlockSpec(self.layout_shape((self.block[0], 1)), at)


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _anywhere(run: Any, *arrays: Any) -> Any:
    """Compile a kernel for a TPU, interpret it elsewhere."""
    return lax.platform_dependent(*arrays, tpu=lambda *x: run()(*x), default=lambda *x: run(interpret=True)(*x))


def _columns(x_ref: jax.Array, axis: int) -> Any:
    """Return the vocabulary's index of every element of a tile."""
    return pl.program_id(1) * x_ref.shape[axis] + lax.broadcasted_iota(jnp.int32, x_ref.shape, axis)


def _stream(v: int, axis: int, temperature: float, x_ref: jax.Array, token_ref: jax.Array, *out: Any) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        for ref, x in zip(out, ColumnSums.none(out[0]), strict=True):
            ref[...] = x

    column = _columns(x_ref, axis)
    x = jnp.where(column < v, x_ref[...].astype(jnp.float32), -jnp.inf)  # beyond the last column a tile holds anything
    sums = ColumnSums(*(ref[...] for ref in out)).with_tile(x, column == token_ref[...], temperature, axis)
    for ref, x in zip(out, sums, strict=True):
        ref[...] = x


def _gradient(
    axis: int,
    temperature: float,
    x_ref: jax.Array,
    token_ref: jax.Array,
    shift: jax.Array,
    high: jax.Array,
    low: jax.Array,
    slope: jax.Array,
    d_ref: jax.Array,
) -> None:
    sums = ColumnSums(shift[...], high[...], low[...], None)
    p = probabilities(x_ref[...].astype(jnp.float32), sums, temperature)
    hot = jnp.where(_columns(x_ref, axis) == token_ref[...], 1.0, 0.0)
    d_ref[...] = ((hot - p) * slope[...]).astype(d_ref.dtype)
