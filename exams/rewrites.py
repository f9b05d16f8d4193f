"""Honest programs: the decoder's operations written another way, as compilers, kernels and people do. All must pass."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from precaudit.models.jax_decoder import Parts
from precaudit.models.jax_decoder.arithmetic import dot
from precaudit.models.jax_decoder.parts import attend, masked_softmax, project
from precaudit.numbers.formats import FORMATS
from precaudit.recording.tracing.subject import Subject, load

BLOCK = 16
f32 = jnp.float32


def backwards(x: Any, w: Any, bias: Any, a: Any) -> Any:
    """A projection whose sums run from the last term to the first."""
    return project(x[..., ::-1], w[:, ::-1], bias, a)


def in_halves(x: Any, w: Any, bias: Any, a: Any) -> Any:
    """A projection as two products over half the terms each, added in float32: another block size."""
    n = x.shape[-1] // 2
    parts = [
        jnp.einsum("...i,oi->...o", x[..., s], w[:, s], preferred_element_type=jnp.float32, precision=a.matmul)
        for s in (slice(None, n), slice(n, None))
    ]
    y = (parts[0] + parts[1]).astype(a.activations)
    return y if bias is None else (y.astype(bias.dtype) + bias).astype(a.activations)


def fused(x: Any, w: Any, bias: Any, a: Any) -> Any:
    """A projection cut out of one product with two matrices, as a fused QKV is."""
    y = dot(x, jnp.concatenate([w[::-1], w]), (x.ndim - 1, 1), a.activations, a)[..., w.shape[0] :]
    return y if bias is None else (y.astype(bias.dtype) + bias).astype(a.activations)


def blocked_softmax(s: Any, mask: Any, a: Any) -> Any:
    """Softmax with the running maximum and rescaled sums of flash attention, over blocks of keys."""
    x = jnp.where(mask, s.astype(a.softmax), -jnp.inf)
    top = jnp.full((*x.shape[:-1], 1), -jnp.inf, a.softmax)
    total = jnp.zeros_like(top)
    for i in range(0, x.shape[-1], BLOCK):
        block = x[..., i : i + BLOCK]
        new = jnp.maximum(top, block.max(axis=-1, keepdims=True))
        safe = jnp.where(jnp.isfinite(new), new, 0.0)
        total = total * jnp.exp(top - safe) + jnp.exp(block - safe).sum(axis=-1, keepdims=True)
        top = new
    return (jnp.exp(x - top) / total).astype(a.probs)


def blocked_attend(p: Any, v: Any, a: Any) -> Any:
    """The weighted sum of values, a block of keys at a time, added in float32."""
    b, h, t, s = p.shape
    grouped = p.reshape(b, v.shape[2], h // v.shape[2], t, s).astype(jnp.float32)
    wide = v.astype(jnp.float32)
    total = sum(
        jnp.einsum("bgrts,bsgk->btgrk", grouped[..., i : i + BLOCK], wide[:, i : i + BLOCK], precision="highest")
        for i in range(0, s, BLOCK)
    )
    return jnp.asarray(total).reshape(b, t, h, v.shape[3]).astype(a.attn_out)


def repeated_heads(p: Any, v: Any, a: Any) -> Any:
    """Grouped queries by repeating the values instead of reshaping the probabilities."""
    return attend(p, jnp.repeat(v, p.shape[1] // v.shape[2], axis=2), a)


def by_logarithm(s: Any, mask: Any, a: Any) -> Any:
    """Softmax as exp(log softmax), the maximum subtracted first.

    exp(x − log Σ exp x) is another matter: its relative error grows with |log Σ exp x| (Blanchard, Higham & Higham
    2021, §4), and the gate says so in float32.
    """
    x = jnp.where(mask, s.astype(a.softmax), -jnp.inf)
    return jnp.exp(jax.nn.log_softmax(x, axis=-1)).astype(a.probs)


def norm_by_dot(x: Any, w: Any, eps: Any, a: Any) -> Any:
    """RMS norm whose mean square is a product and whose root divides."""
    y = x.astype(a.norm)
    mean = jnp.einsum("...d,...d->...", y, y, precision="highest")[..., None] / y.shape[-1]
    y = y / jnp.sqrt(mean + jnp.asarray(eps, a.norm))
    return (y.astype(a.activations).astype(w.dtype) * w).astype(a.activations)


def by_einsum(x: Any, w: Any, bias: Any, a: Any) -> Any:
    """A projection by einsum in place of dot_general."""
    y = jnp.einsum("...i,oi->...o", x, w, preferred_element_type=jnp.float32, precision=a.matmul)
    y = y.astype(a.activations)
    return y if bias is None else (y.astype(bias.dtype) + bias).astype(a.activations)


def heads_first(q: Any, k: Any, scale: Any, a: Any) -> Any:
    """Scores with heads before positions, [B, H, T, K] · [B, H, K, S], as many kernels lay them out."""
    repeated = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    left, right = jnp.transpose(q, (0, 2, 1, 3)), jnp.transpose(repeated, (0, 2, 3, 1))
    products = jnp.matmul(left, right, preferred_element_type=jnp.float32, precision=a.matmul).astype(a.scores)
    return (products.astype(jnp.float32) * jnp.float32(scale)).astype(a.scores)


def unnormalised(rounded):
    """P cast to v's format before the division, which comes last; float32 scores (flash attention's epilogue)."""
    totals = []

    def softmax(s, mask, a):
        x = jnp.where(mask, s.astype(f32), -jnp.inf)
        e = jnp.exp(x - x.max(axis=-1, keepdims=True))
        p = lax.reduce_precision(e, 8, 7) if a.probs == FORMATS["bfloat16"].dtype else e
        totals.append((p if rounded else e).sum(axis=-1))
        return p.astype(a.probs)

    def weighted(p, v, a):
        out = attend(p, v, replace(a, attn_out=FORMATS["float32"].dtype))
        return (out / jnp.moveaxis(totals.pop(), 1, 2)[..., None]).astype(a.attn_out)

    return replace(Parts(), softmax=softmax, attend=weighted)


def rounded_first(s, mask, a):
    """P rounded before the division, and after."""
    x = jnp.where(mask, s.astype(f32), -jnp.inf)
    e = jnp.exp(x - x.max(axis=-1, keepdims=True))
    e = lax.reduce_precision(e, 8, 7) if a.probs == FORMATS["bfloat16"].dtype else e
    return (e / e.sum(axis=-1, keepdims=True)).astype(a.probs)


def running(block):
    """Probabilities relative to a running maximum over blocks of keys, sums in float32, one division at the end."""
    held = []

    def softmax(s, mask, a):
        held.append(jnp.where(mask, s.astype(f32), -jnp.inf))
        return masked_softmax(s, mask, a)

    def weighted(_p, v, a):
        s = held.pop()
        b, h, t, n = s.shape
        wide = jnp.repeat(v.astype(f32), h // v.shape[2], axis=2)
        top, mass = jnp.full((b, h, t, 1), -jnp.inf), jnp.zeros((b, h, t, 1))
        out = jnp.zeros((b, h, t, v.shape[3]))
        for i in range(0, n, block):
            part = s[..., i : i + block]
            new = jnp.maximum(top, part.max(axis=-1, keepdims=True))
            safe = jnp.where(jnp.isfinite(new), new, 0.0)
            shrink, e = jnp.exp(top - safe), jnp.exp(part - safe)
            mass = mass * shrink + e.sum(axis=-1, keepdims=True)
            q = lax.reduce_precision(e, 8, 7) if a.probs != f32 else e
            out = out * shrink + jnp.einsum("bhts,bshk->bhtk", q, wide[:, i : i + block], precision="highest")
            top = new
        return jnp.moveaxis(out / mass, 1, 2).astype(a.attn_out)

    return replace(Parts(), softmax=softmax, attend=weighted)


def cut_sums(x, w, _bias, a):
    """A projection whose float32 sum is cut towards zero every 16 terms, as a tensor core does."""

    def step(total, i):
        part = jnp.einsum(
            "...i,oi->...o", lax.dynamic_slice_in_dim(x, i, 16, x.ndim - 1), lax.dynamic_slice_in_dim(w, i, 16, 1),
            precision="highest", preferred_element_type=f32,
        )  # fmt: skip
        high, low = two_sum(total, part)
        toward = jnp.where((low != 0) & (jnp.sign(low) != jnp.sign(high)), jnp.nextafter(high, 0.0), high)
        return toward, None

    first = jnp.zeros((*x.shape[:-1], w.shape[0]), f32)
    return lax.scan(step, first, jnp.arange(0, x.shape[-1], 16))[0].astype(a.activations)


def two_sum(a, b):
    """The rounded sum and its error (Knuth 1998, §4.2.2)."""
    s = a + b
    z = s - a
    return s, (a - (s - z)) + (b - z)


def moved(x, places):
    """Positive x moved by units in the last place, at most 4 either way: arithmetic of a device, not a formula."""
    for i in range(4):
        x = jnp.where(
            (x > 0) & (jnp.abs(places) > i), lax.nextafter(x, jnp.sign(places) * jnp.full_like(x, jnp.inf)), x
        )
    return x


def rough_exp(s, mask, a):
    """Softmax whose exp is off by up to 4 units in the last place, and its reciprocal by 2⁻²²."""
    x = jnp.where(mask, s.astype(f32), -jnp.inf)
    e = jnp.exp(x - x.max(axis=-1, keepdims=True))
    e = moved(e, jnp.round(4 * jnp.sin(1e4 * jnp.arange(e.size, dtype=f32).reshape(e.shape))))
    one = 1 / e.sum(axis=-1, keepdims=True)
    return (e * moved(one, jnp.full_like(one, 2))).astype(a.probs)


ATTENTIONS = {
    "divided at the end": unnormalised(False), "rounded sums divided at the end": unnormalised(True),
    "P rounded before the division": replace(Parts(), softmax=rounded_first),
    "running maxima, blocks of 16": running(16), "running maxima, blocks of 32": running(32),
}  # fmt: skip
DEVICES = {
    "sums truncated every 16": replace(Parts(), project=cut_sums),
    "rough exponential and reciprocal": replace(Parts(), softmax=rough_exp),
}
# Probabilities that are divided by their sum later are none: such programs are judged without scores and probs.
WHOLE = "P rounded before the division"
HIDDEN = {name: "q,k,v,attn_out,attn_proj,resid_out,logits" for name in ATTENTIONS if name != WHOLE}
REWRITES = {
    "sums backwards": replace(Parts(), project=backwards),
    "sums in halves": replace(Parts(), project=in_halves),
    "fused projections": replace(Parts(), project=fused),
    "blocked attention": replace(Parts(), softmax=blocked_softmax, attend=blocked_attend),
    "values repeated": replace(Parts(), attend=repeated_heads),
    "log softmax": replace(Parts(), softmax=by_logarithm),
    "norm by dot": replace(Parts(), norm=norm_by_dot),
    "softmax remat": replace(Parts(), softmax=jax.checkpoint(masked_softmax, static_argnums=(2,))),
    "einsum for dot_general": replace(Parts(), project=by_einsum),
    "heads first": replace(Parts(), scores=heads_first),
    "loop for scan": Parts(),
    **ATTENTIONS,
    **DEVICES,
}


def rewritten(name: str, policy: str, device: str = "cpu") -> Subject:
    """Return tiny under a policy, written another way."""
    subject = replace(load("tiny", policy, None, device, REWRITES[name]), lift={"nextafter": lambda x, _towards: x})
    return replace(subject, policy=replace(subject.policy, layers="unrolled")) if name == "loop for scan" else subject


def points(name: str) -> str:
    """Return the points a rewritten program has."""
    return HIDDEN.get(name, "all")
