"""The decoder's operations from their textbook formulas, FP64 with a Rounding at every named place.

Shapes: T rows, D width, H query heads, G key/value heads, K head dimension, S keys. ``out``: where a result is made as
far as nothing is rounded after it; one of the inputs may lie there. None: in memory of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from math import erf

import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.rounding import Blocks, Cast, Rounding
from precaudit.numbers.arrays import Array, identity, rounder


@dataclass(frozen=True)
class AttentionRule:
    """How a layer attends: the factor on q · k, the cap of scores (c · tanh(s / c)), and the keys a row sees."""

    scale: float
    cap: float | None = None
    window: int | None = None

    @classmethod
    def of(cls, config: DecoderConfig, layer: int | None) -> "AttentionRule":
        """Return a layer's rule."""
        return cls(config.score_scale, config.score_cap, config.window_of(layer))

    def only_scales(self, r: Rounding) -> bool:
        """Whether scores are the products q · k times a positive factor, and nothing is rounded there."""
        return self.cap is None and self.scale > 0 and r.exact("score_dot") and r.exact("scores")


def rms_norm(x: Array, weight: Array, eps: float, r: Rounding, out: Array | None = None) -> Array:
    """X / √(mean(x²) + eps) · weight (Zhang & Sennrich 2019, eq. 4) over the last axis of x [..., D]."""
    scale = r.norm_scale(1.0 / np.sqrt(np.einsum("...d,...d->...", x, x) / x.shape[-1] + eps))
    inner = r.norm_inner(np.multiply(x, scale[..., None], out=out))
    return r.norm(np.multiply(inner, weight, out=out))


def rms_norm_once(x: Array, weight: Array, eps: float, r: Rounding, out: Array | None = None) -> Array:
    """RMS norm that is rounded once, after the weight."""
    scale = r.norm_scale(1.0 / np.sqrt(np.einsum("...d,...d->...", x, x) / x.shape[-1] + eps))
    return r.norm(np.multiply(np.multiply(x, scale[..., None], out=out), weight, out=out))


def linear(x: Array, weight: Array, bias: Array | None, r: Rounding, point: str = "") -> Array:
    """X · weightᵀ + bias; weight [out, in]; ``operand`` of x. The product's rounding is the place ``linear``.

    ``point``: the one that the product makes, where several devices may make its parts.
    """
    y = r.product_of(point)(r.operand(x), weight.T)
    return y if bias is None else r.linear(y) + bias


def rope_frequencies(config: DecoderConfig, layer: int | None, lengths: Array | None = None) -> tuple[Array, float]:
    """Return a layer's radians per position [R/2], R the dimensions turned, and the factor on cos and sin.

    θ^(−2i/R) (Su et al. 2021); linear: Chen et al. 2023; YaRN: Peng et al. 2023, §3.2; llama3: by wavelength, as in
    Llama 3.1's published code. [T, R/2] for rows of sequences that were ``lengths`` [T] long: LongRoPE (Ding et al.
    2024) divides by its long factors beyond the original context; dynamic NTK grows the base to
    θ · (s·length/original − s + 1)^(R/(R−2)) there (Peng et al. 2023, appendix A.1).
    """
    half, scaling, theta = config.rotary_size // 2, config.rope_scaling, config.rope_theta
    if config.local_rope_theta is not None and config.window_of(layer) is not None:
        theta, scaling = config.local_rope_theta, None
    plain = theta ** (-np.arange(half) / half)
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "longrope":
        divisors = np.asarray(scaling.divisors)
        if lengths is not None:
            divisors = np.where(lengths[..., None] > scaling.original, scaling.long, divisors)
        return plain / divisors, scaling.attention
    if scaling.kind == "dynamic":
        if lengths is None:
            return plain, 1.0
        grown = 1 + scaling.factor * (np.maximum(lengths, scaling.original) / scaling.original - 1)
        return plain * grown[..., None] ** (-np.arange(half) / (half - 1)), 1.0
    turns = scaling.original * plain / (2 * np.pi)  # within the original context
    if scaling.kind == "llama3":
        kept = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
        return plain * (kept + (1 - kept) / scaling.factor), 1.0
    low, high = (
        half * np.log(scaling.original / (b * 2 * np.pi)) / np.log(theta) for b in (scaling.fast, scaling.slow)
    )
    if scaling.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = np.clip((np.arange(half) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    return plain * ((1 - ramp) + ramp / scaling.factor), scaling.attention


def rope(x: Array, positions: Array, frequencies: tuple[Array, float], r: Rounding, out: Array | None = None) -> Array:
    """Rotate pairs (i, i + R/2) of the first R dimensions of x [T, H, K] by position · frequency (Su et al. 2021)."""
    from precaudit.models.numpy_decoder import _rope_kernel  # numba takes a third of a second to import

    each, factor = frequencies
    at = np.asarray(positions, np.float64)
    cos, sin = _turns(at.tobytes(), each.tobytes(), each.shape, factor)
    cos, sin = r.rope_table(cos), (r.rope_table if r.rope_sine is None else r.rope_sine)(sin)
    out = np.empty(x.shape) if out is None else out
    _rope_kernel.rotate(np.ascontiguousarray(x), cos, sin, out)
    return out


@lru_cache(maxsize=4)
def _turns(positions: bytes, each: bytes, shape: tuple[int, ...], factor: float) -> tuple[Array, Array]:
    """Return cos and sin [T, R/2], not to be written, of FP64 positions [T] times radians each: once for q and k."""
    angle = np.frombuffer(positions)[:, None] * np.frombuffer(each).reshape(shape)
    return np.cos(angle) * factor, np.sin(angle) * factor


def soft_cap(x: Array, cap: float | None) -> Array:
    """Cap · tanh(x / cap); x itself without a cap."""
    return x if cap is None else cap * np.tanh(x / cap)


def scores(q: Array, k: Array, rule: AttentionRule, r: Rounding) -> Array:
    """Q · kᵀ · scale, capped, for one head: q [T, K], k [S, K] → [T, S]."""
    return scale_scores(r.dot(q, k.T), rule, r)


def scale_scores(product: Array, rule: AttentionRule, r: Rounding) -> Array:
    """Return scores from products q · k; an array of their own."""
    s = r.score_dot(product) * rule.scale
    return r.scores(s if rule.cap is None else soft_cap(r.score_scaled(s), rule.cap))


def softmax(s: Array, positions: Array, window: int | None, r: Rounding) -> Array:
    """Softmax over the keys s ≤ position of each row, the last ``window`` of them; s [T, S] or [H, T, S]."""
    weights, total = exponentials(s.copy(), positions, window, r)
    return r.probs(weights / total)


def hide(s: Array, positions: Array, window: int | None) -> Array:
    """Set scores [..., T, S] of the keys a row does not see to −∞, in place: those after it, or before its window."""
    at = np.asarray(positions)[:, None]
    first, keys = int(positions[0]) + 1, s.shape[-1]  # every row sees the keys before
    np.copyto(s[..., first:], -np.inf, where=np.arange(first, keys) > at)
    if window is not None:
        np.copyto(s, -np.inf, where=np.arange(keys) <= at - window)
    return s


def exponentials(
    s: Array, positions: Array, window: int | None, r: Rounding, scale: float = 1.0
) -> tuple[Array, Array]:
    """exp(scale · s − max) over the keys each row sees and 0 elsewhere, and its row sums; overwrites s [..., T, S]."""
    if r.exact("shifted") and r.exact("exponential"):
        return _exact_exponentials(s, positions, window, scale)
    s *= scale
    hide(s, positions, window)
    with np.errstate(invalid="ignore"):
        s -= s.max(axis=-1, keepdims=True)
    s = r.shifted(s)
    np.exp(s, out=s)
    s = by_head(r.exponential, s)  # inaccuracies are drawn for a head
    return s, s.sum(axis=-1, keepdims=True)


def _exact_exponentials(s: Array, positions: Array, window: int | None, scale: float) -> tuple[Array, Array]:
    from precaudit.models.numpy_decoder._exponential_kernel import (
        fill_exponentials,  # numba takes a third of a second to import
    )

    end = np.clip(np.asarray(positions) + 1, 0, s.shape[-1])
    first = np.zeros_like(end) if window is None else np.clip(np.asarray(positions) + 1 - window, 0, end)
    heads = s.reshape(-1, *s.shape[-2:])
    total = np.empty(heads.shape[:-1])
    fill_exponentials(heads, scale, first, end, total)
    return heads.reshape(s.shape), total.reshape(*s.shape[:-1], 1)


def attend(s: Array, v: Array, positions: Array, window: int | None, r: Rounding, scale: float = 1.0) -> Array:
    """softmax(scale · s) · v: s [T, S] (overwritten), v [S, K] → [T, K], at ascending positions; or heads first in all.

    Divides after the product where nothing is rounded. Over blocks of keys where ``r`` has them.
    """
    if r.blocks is not None:
        return flash_attend(hide(s * scale, positions, window), v, r, r.blocks)
    weights, total = exponentials(s, positions, window, r, scale)
    if r.exact("probs") and r.dot is np.matmul:
        return r.attn_out(weights @ v / total)
    return r.attn_out(by_head(r.dot, r.probs(weights / total), v))


def flash_attend(
    s: Array, v: Array, r: Rounding, blocks: Blocks, rescale: tuple[Cast, Cast] = (np.exp, np.exp)
) -> Array:
    """softmax(s) · v, a block of keys at a time under a running maximum (Dao et al. 2022, algorithm 1).

    s [T, S] with −∞ where a key is not seen, v [S, K]; or heads first in both. Exponentials are rounded as
    probabilities before a block's product, and divided by their whole sum at the end. ``rescale``: what the difference
    of two running maxima multiplies the sum and the output with.
    """
    top, mass = np.full((*s.shape[:-1], 1), -np.inf), np.zeros((*s.shape[:-1], 1))
    out = np.zeros((*s.shape[:-1], v.shape[-1]))
    with np.errstate(invalid="ignore"):
        for first, end in pairwise(blocks.edges(s.shape[-1])):
            part = s[..., first:end]
            new = np.maximum(top, part.max(axis=-1, keepdims=True))
            base = np.where(new == -np.inf, 0.0, new)  # a row that has seen no key yet
            of_sum, of_output = (f(top - base) for f in rescale)
            e = by_head(r.exponential, np.exp(r.shifted(part - base)))
            mass = r.running(mass * of_sum + e.sum(axis=-1, keepdims=True))
            out = r.running(out * of_output + by_head(r.dot, r.probs(e), v[..., first:end, :]))
            top = new
        return r.attn_out(out / mass)


def by_head(function: Callable[..., Array], *arrays: Array) -> Array:
    """Return ``function`` of arrays [T, N], or of each head's of arrays [H, T, N]."""
    if arrays[0].ndim == 2 or function in (identity, np.matmul):
        return function(*arrays)
    return np.stack([function(*heads) for heads in zip(*arrays, strict=True)])


def silu(x: Array, curve: Cast = identity, out: Array | None = None) -> Array:
    """X / (1 + exp(−x))."""
    if curve is identity:
        from precaudit.models.numpy_decoder import _exponential_kernel  # numba takes a third of a second to import

        out = np.empty(x.shape) if out is None else out
        _exponential_kernel.fill_silu(np.ascontiguousarray(x).reshape(-1), out.reshape(-1))
        return out
    y = np.negative(x)
    with np.errstate(over="ignore"):
        np.exp(y, out=y)
    y += 1.0
    return x * curve(np.divide(1.0, y, out=y))


def gelu_tanh(x: Array, curve: Cast = identity, constants: Cast = identity) -> Array:
    """0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))) (Hendrycks & Gimpel 2016); ``constants`` rounds both numbers.

    1 + tanh cancels below zero: in float32 the sum is exactly 0 from about −5.9 on.
    """
    outer, cubic = constants(np.asarray([np.sqrt(2.0 / np.pi), 0.044715]))
    return 0.5 * x * curve(1.0 + curve(np.tanh(outer * (x + cubic * x**3))))


def gelu(x: Array, curve: Cast = identity) -> Array:
    """X Φ(x), Φ the normal distribution's (Hendrycks & Gimpel 2016)."""
    y = x / np.sqrt(2.0)
    return np.asarray(0.5 * x * (1.0 + curve(np.reshape([erf(z) for z in y.flat], y.shape))))


def quick_gelu(x: Array, curve: Cast = identity) -> Array:
    """X σ(1.702 x) (Hendrycks & Gimpel 2016)."""
    return silu(1.702 * x, curve) / 1.702


def relu(x: Array, _curve: Cast = identity) -> Array:
    """max(x, 0)."""
    return np.maximum(x, 0.0)


def hard_silu(x: Array, _curve: Cast = identity) -> Array:
    """X min(max(x + 3, 0), 6) / 6 (Howard et al. 2019, §5.2)."""
    return x * np.clip(x + 3.0, 0.0, 6.0) / 6.0


def linear_unit(x: Array, _curve: Cast = identity) -> Array:
    """X itself, as bilinear units have it (Shazeer 2020)."""
    return np.positive(x)


def sigmoid(x: Array, curve: Cast = identity) -> Array:
    """1 / (1 + exp(−x)), as the first gated units have it (Dauphin et al. 2017)."""
    with np.errstate(over="ignore"):
        return curve(1.0 / (1.0 + np.exp(-x)))


def tanh(x: Array, curve: Cast = identity) -> Array:
    """Tanh x."""
    return curve(np.tanh(x))


def relu_squared(x: Array, _curve: Cast = identity) -> Array:
    """max(x, 0)² (So et al. 2021)."""
    return np.maximum(x, 0.0) ** 2


def mish(x: Array, curve: Cast = identity) -> Array:
    """X tanh(log(1 + exp x)) (Misra 2019)."""
    return np.asarray(x * curve(np.tanh(np.logaddexp(0.0, x))))


# A configuration names one of the first two; the others are taken for them by mistake.
ACTIVATIONS: dict[str, Callable[..., Array]] = {
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "gelu": gelu,
    "quick_gelu": quick_gelu,
    "relu": relu,
    "hard_silu": hard_silu,
    "identity": linear_unit,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "relu_squared": relu_squared,
    "mish": mish,
}
# Programs that take a function in a narrow format hold its constants in that.
NARROW_CONSTANTS = {name: f"gelu_tanh, constants in {name}" for name in ("bfloat16", "float16")}
ACTIVATIONS |= {key: partial(gelu_tanh, constants=rounder(name)) for name, key in NARROW_CONSTANTS.items()}


def gated_product(gate: Array, up: Array, activation: str, r: Rounding) -> Array:
    """act(gate) · up (Shazeer 2020); [T, F]."""
    s = activate(gate, activation, r)
    s *= r.up(up)
    return r.mlp_act(s)


def activate(gate: Array, activation: str, r: Rounding, out: Array | None = None) -> Array:
    """act(gate) [T, F]; silu alone is made in ``out``."""
    function, x = ACTIVATIONS[activation], r.gate(gate)
    return r.silu(silu(x, r.curve, out) if function is silu else function(x, r.curve))
