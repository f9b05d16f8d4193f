"""The decoder's operations from their textbook formulas, FP64 with a Rounding at every named place.

Shapes: T rows, D width, H query heads, G key/value heads, K head dimension, S keys.
"""

import numpy as np

from precaudit.formats import Array
from precaudit.numpy_decoder.rounding import Rounding


def rms_norm(x: Array, weight: Array, eps: float, r: Rounding) -> Array:
    """X / √(mean(x²) + eps) · weight (Zhang & Sennrich 2019, eq. 4); x [T, D]."""
    scale = r.norm_scale(1.0 / np.sqrt(np.einsum("td,td->t", x, x) / x.shape[1] + eps))
    return r.norm(r.norm_inner(x * scale[:, None]) * weight)


def linear(x: Array, weight: Array, bias: Array | None, r: Rounding) -> Array:
    """X · weightᵀ + bias; weight [out, in]. The product's rounding is the place ``linear``, the sum's the caller's."""
    y = r.dot(x, weight.T)
    return y if bias is None else r.linear(y) + bias


def rope_angles(positions: Array, theta: float, head_dim: int) -> Array:
    """Return position · theta^(−2i/K) [T, K/2] (Su et al. 2021)."""
    half = head_dim // 2
    return np.asarray(positions, np.float64)[:, None] * theta ** (-np.arange(half) / half)


def rope(x: Array, positions: Array, theta: float, r: Rounding) -> Array:
    """Rotate pairs (i, i + K/2) of x [T, H, K] by the angle position · theta^(−2i/K) (Su et al. 2021)."""
    half = x.shape[-1] // 2
    angle = rope_angles(positions, theta, x.shape[-1])
    cos, sin = r.rope_table(np.cos(angle))[:, None], r.rope_table(np.sin(angle))[:, None]
    a, b = x[..., :half], x[..., half:]
    out = np.empty_like(x)
    out[..., :half] = a * cos - b * sin
    out[..., half:] = b * cos + a * sin
    return out


def scores(q: Array, k: Array, r: Rounding) -> Array:
    """Q · kᵀ / √K for one head: q [T, K], k [S, K] → [T, S]."""
    return r.scores(r.score_dot(r.dot(q, k.T)) * (1.0 / np.sqrt(q.shape[1])))


def softmax(s: Array, positions: Array, r: Rounding) -> Array:
    """Softmax over the keys s ≤ position of each row; s [T, S], positions [T]."""
    weights, total = _exponentials(s.copy(), positions, r)
    return r.probs(weights / total)


def _exponentials(s: Array, positions: Array, r: Rounding) -> tuple[Array, Array]:
    """exp(s − max) with masked entries 0, and its row sums; overwrites s."""
    first = int(positions[0]) + 1  # every row sees the keys before
    tail = s[:, first:]
    tail[np.arange(first, s.shape[1]) > np.asarray(positions)[:, None]] = -np.inf
    with np.errstate(invalid="ignore"):
        s -= s.max(axis=1, keepdims=True)
    s = r.shifted(s)
    np.exp(s, out=s)
    s = r.exponential(s)
    return s, s.sum(axis=1, keepdims=True)


def attend(s: Array, v: Array, positions: Array, r: Rounding) -> Array:
    """softmax(s) · v for one head: s [T, S] (overwritten), v [S, K] → [T, K], rows at ascending positions.

    Divides after the product where nothing is rounded.
    """
    weights, total = _exponentials(s, positions, r)
    if r.exact("probs") and r.dot is np.matmul:
        return r.attn_out(weights @ v / total)
    return r.attn_out(r.dot(r.probs(weights / total), v))


def silu(x: Array) -> Array:
    """X / (1 + exp(−x))."""
    y = np.negative(x)
    with np.errstate(over="ignore"):
        np.exp(y, out=y)
    y += 1.0
    return np.divide(x, y, out=y)


def swiglu(gate: Array, up: Array, r: Rounding) -> Array:
    """silu(gate) · up (Shazeer 2020); [T, F]."""
    s = r.silu(silu(r.gate_up(gate)))
    s *= r.gate_up(up)
    return r.mlp_act(s)
