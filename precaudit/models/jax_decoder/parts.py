"""The operations a decoder layer consists of, as one replaceable record.

Shapes: B batch, T new positions, S cached positions, D width, H query heads, G key/value heads, K head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, named_scope
from jax.ad_checkpoint import checkpoint_name as tap

from precaudit.errors import UserError
from precaudit.models.jax_decoder.arithmetic import Arithmetic, batched_product, dot
from precaudit.models.jax_decoder.integers import (
    IntegerMatrix,
    IntegerRows,
    dequantise_rows,
    integer_product,
    quantise_rows,
)
from precaudit.models.jax_decoder.kernels import flash, sdpa
from precaudit.schema.policies import Policy


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, a: Arithmetic) -> jax.Array:
    """X / sqrt(mean(x²) + eps) · weight over the last axis [..., D]; rounded before and after the weight."""
    y = x.astype(a.norm)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + jnp.asarray(eps, a.norm))
    return (y.astype(a.activations).astype(weight.dtype) * weight).astype(a.activations)


def rms_norm_once(x: jax.Array, weight: jax.Array, eps: float, a: Arithmetic) -> jax.Array:
    """RMS norm that is rounded once, after the weight."""
    y = x.astype(a.norm)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + jnp.asarray(eps, a.norm))
    return (y * weight.astype(a.norm)).astype(a.activations)


def project(x: jax.Array, weight: jax.Array | IntegerMatrix, bias: jax.Array | None, a: Arithmetic) -> jax.Array:
    """X · weightᵀ (+ bias); weight [out, in]."""
    if isinstance(weight, IntegerMatrix):
        y = integer_product(x, weight, a.activations, a, a.inputs_in_int8)
    else:
        y = dot(x, weight, (x.ndim - 1, 1), a.activations, a)
    return y if bias is None else (y.astype(bias.dtype) + bias).astype(a.activations)


def split_fused(y: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """Return the projections that one product y [..., N] of fused weights holds one after another, ``sizes`` of N."""
    return jnp.split(y, list(accumulate(sizes[:-1])), axis=-1)


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array, a: Arithmetic) -> jax.Array:
    """Rotate pairs (i, i + R/2) of x [B, T, H, K] by tables [B, T, R/2] (Su et al. 2021); dimensions after R stay."""
    turned = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :turned].astype(a.rope), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    out = [first * cos - second * sin, second * cos + first * sin]
    if turned < x.shape[-1]:
        out.append(x[..., turned:].astype(a.rope))
    return jnp.concatenate(out, axis=-1).astype(a.activations)


def attention_scores(q: jax.Array, k: jax.Array, scale: float, a: Arithmetic) -> jax.Array:
    """Q · kᵀ · scale: q [B, T, H, K], k [B, S, G, K] → [B, H, T, S]; the product and the scaled score are rounded."""
    b, t, h, d = q.shape
    grouped = q.reshape(b, t, k.shape[2], h // k.shape[2], d)
    products = batched_product("btgrk,bsgk->bgrts", grouped, k, a.scores, a)
    scaled = products.astype(jnp.float32) * jnp.float32(scale)
    return scaled.astype(a.scores).reshape(b, h, t, k.shape[1])


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """Cap · tanh(x / cap) in float32, rounded to x's format."""
    return (jnp.float32(cap) * jnp.tanh(x.astype(jnp.float32) / jnp.float32(cap))).astype(x.dtype)


def masked_softmax(scores: jax.Array, mask: jax.Array, a: Arithmetic) -> jax.Array:
    """Softmax over keys with the row maximum subtracted; scores [B, H, T, S], mask [B, 1, T, S] true where seen."""
    s = jnp.where(mask, scores.astype(a.softmax), -jnp.inf)
    e = jnp.exp(s - jnp.max(s, axis=-1, keepdims=True))
    return (e / jnp.sum(e, axis=-1, keepdims=True)).astype(a.probs)


def attend(probs: jax.Array, v: jax.Array, a: Arithmetic) -> jax.Array:
    """Weighted sum of values: probs [B, H, T, S], v [B, S, G, K] → [B, T, H, K]."""
    b, h, t, s = probs.shape
    grouped = probs.reshape(b, v.shape[2], h // v.shape[2], t, s)
    return batched_product("bgrts,bsgk->btgrk", grouped, v, a.attn_out, a).reshape(b, t, h, v.shape[3])


def geglu(gate: jax.Array, up: jax.Array, a: Arithmetic) -> jax.Array:
    """gelu(gate) · up [B, T, F] with tanh's approximation, as ``swiglu``."""
    with named_scope("gate_out"):
        act = tap(jax.nn.gelu(gate.astype(jnp.float32), approximate=True).astype(a.mlp), "gate_out")
    return (act * up.astype(a.mlp)).astype(a.activations)


def swiglu(gate: jax.Array, up: jax.Array, a: Arithmetic) -> jax.Array:
    """silu(gate) · up [B, T, F]; silu in float32, rounded to the MLP's format, then the product."""
    with named_scope("gate_out"):
        act = tap(jax.nn.silu(gate.astype(jnp.float32)).astype(a.mlp), "gate_out")
    return (act * up.astype(a.mlp)).astype(a.activations)


def route(logits: jax.Array, used: int, renormalise: bool, a: Arithmetic) -> jax.Array:
    """Weights of the ``used`` largest of softmax(logits) [B, T, E], 0 for the others; softmax in float32."""
    top, chosen = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), used)
    if renormalise:
        top = top / jnp.sum(top, axis=-1, keepdims=True)
    return jnp.sum(jax.nn.one_hot(chosen, logits.shape[-1]) * top[..., None], axis=-2).astype(a.activations)


def causal_mask(rows: jax.Array, keys: int, starts: jax.Array) -> jax.Array:
    """Return [B, 1, T, S]: row r sees keys start ≤ s ≤ r. A row of padding sees itself, so that no row is empty."""
    s = jnp.arange(keys)[None, None, :]
    r = rows[:, :, None]
    seen = ((s <= r) & (s >= starts[:, None, None])) | (s == r)
    return seen[:, None]


def near(rows: jax.Array, keys: int, window: int) -> jax.Array:
    """Return [B, 1, T, S]: whether key s is among the last ``window`` keys of row r, itself included."""
    return (jnp.arange(keys)[None, None, :] > rows[:, :, None] - window)[:, None]


def cache_write(cache: jax.Array, layer: jax.Array, rows: jax.Array, slots: jax.Array | None) -> Any:
    """Write rows [B, T, G, K] into cache [L, B, S, G, K] in place: at slot 0 of every sequence, or one row at slots.

    A cache of integers takes them quantised, and their scales beside them.
    """
    if isinstance(cache, IntegerRows):
        values, scales = quantise_rows(rows)
        held = cache_write(cache.values, layer, values, slots)
        return IntegerRows(held, cache_write(cache.scales, layer, scales, slots), cache.read)
    rows = rows.astype(cache.dtype)
    zeros = (jnp.int32(0),) * rows.ndim
    if slots is None:
        return lax.dynamic_update_slice(cache, rows[None], (layer, *zeros))
    for b in range(rows.shape[0]):
        cache = lax.dynamic_update_slice(cache, rows[None, b : b + 1], (layer, jnp.int32(b), slots[b], *zeros[2:]))
    return cache


def cache_read(cache: jax.Array, layer: jax.Array) -> jax.Array:
    """Return one layer's rows [B, S, G, K]; of integers scale · integer."""
    if isinstance(cache, IntegerRows):
        return dequantise_rows(cache_read(cache.values, layer), cache_read(cache.scales, layer), cache.read)
    return lax.dynamic_index_in_dim(cache, layer, axis=0, keepdims=False)


@dataclass(frozen=True)
class Parts:
    """The operations; ``dataclasses.replace(parts, rope=…)`` is another decoder.

    A policy whose ``attention`` is ``sdpa`` or ``flash`` uses that part in place of scores, softmax and attend.

    >>> from dataclasses import replace
    >>> from precaudit import Parts
    >>> def sharper(q, k, scale, a):
    ...     return attention_scores(q, k, 2 * scale, a)
    >>> replace(Parts(), scores=sharper).scores.__name__  # precaudit.load("tiny", parts=…) audits it
    'sharper'
    """

    norm: Callable[..., jax.Array] = rms_norm
    project: Callable[..., jax.Array] = project
    cut: Callable[..., list[jax.Array]] = split_fused
    rope: Callable[..., jax.Array] = rope
    scores: Callable[..., jax.Array] = attention_scores
    softmax: Callable[..., jax.Array] = masked_softmax
    attend: Callable[..., jax.Array] = attend
    sdpa: Callable[..., jax.Array] = sdpa
    flash: Callable[..., jax.Array] = flash
    activate: Callable[..., jax.Array] = swiglu
    route: Callable[..., jax.Array] = route
    mask: Callable[..., jax.Array] = causal_mask
    cache_write: Callable[..., jax.Array] = cache_write
    cache_read: Callable[..., jax.Array] = cache_read


def check_parts(policy: Policy, parts: Parts) -> None:
    """Raise UserError for operations of one's own that the policy's attention kernel would pass over."""
    usual = Parts()
    for name in ("scores", "softmax", "attend") if policy.attention != "naive" else ():
        if getattr(parts, name) is not getattr(usual, name):
            raise UserError(
                f"parts: {name} is not used under attention = {policy.attention}; replace the part {policy.attention} "
                "itself, or use attention = naive"
            )
