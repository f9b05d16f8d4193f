"""Scores and softmax: scale, caps, heads, normalisation."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from exams.cells.cell import Cell
from exams.cells.changes import DECODE, after, in_part
from exams.cells.rounded import f32, mantissa, narrow
from precaudit.models.jax_decoder.parts import attend, attention_scores, masked_softmax, soft_cap

WIDTH, HEAD, QUERIES = 128, 32, 4


def times(factor: float) -> Any:
    """Scores with another scale than 1/√K."""
    return lambda q, k, scale, a: attention_scores(q, k, scale * factor, a)


def with_keys(change: Any) -> Any:
    return lambda q, k, scale, a: attention_scores(q, change(k), scale, a)


def with_queries(change: Any) -> Any:
    return lambda q, k, scale, a: attention_scores(change(q), k, scale, a)


def tiled(q: Any, k: Any, scale: float, a: Any) -> Any:
    """Keys tiled where they are to be repeated."""
    return attention_scores(q, jnp.tile(k, (1, 1, q.shape[2] // k.shape[2], 1)), scale, a)


def tiled_values(probs: Any, v: Any, a: Any) -> Any:
    return attend(probs, jnp.tile(v, (1, 1, probs.shape[1] // v.shape[2], 1)), a)


def distances(t: int, s: int) -> Any:
    """How far key s lies before row t [T, S], rows at the end of the keys."""
    return (jnp.arange(t)[:, None] + s - t) - jnp.arange(s)[None]


def alibi(q: Any, k: Any, scale: float, a: Any) -> Any:
    y = attention_scores(q, k, scale, a)
    slopes = 2.0 ** (-2.0 * jnp.arange(1, QUERIES + 1))
    bias = slopes[:, None, None] * distances(y.shape[2], y.shape[3])
    return (y.astype(f32) - bias[None]).astype(y.dtype)


def softmax(exponential: Any = jnp.exp, added: float = 0.0, over: int = -1, kept: Any = None) -> Any:
    """A softmax that is put together otherwise."""

    def part(scores: Any, mask: Any, a: Any) -> Any:
        s = jnp.where(mask, scores.astype(f32), -jnp.inf)
        top = jnp.max(s, axis=over, keepdims=True)
        e = exponential(s - jnp.where(jnp.isfinite(top), top, 0))
        total = jnp.sum(e, axis=over, keepdims=True) + added
        p = e / jnp.where(total > 0, total, 1)
        return (p if kept is None else kept(p)).astype(a.probs)

    return part


def narrow_softmax(to: str) -> Any:
    def part(scores: Any, mask: Any, a: Any) -> Any:
        s = jnp.where(mask, narrow(scores.astype(f32), to), -jnp.inf)
        e = narrow(jnp.exp(narrow(s - jnp.max(s, axis=-1, keepdims=True), to)), to)
        total = lax.fori_loop(0, e.shape[-1], lambda i, t: narrow(t + e[..., i], to), jnp.zeros(e.shape[:-1], f32))
        return narrow(e / total[..., None], to).astype(a.probs)

    return part


def unmasked_sum(scores: Any, mask: Any, a: Any) -> Any:
    """Masked after the softmax, without a sum of its own."""
    p = masked_softmax(scores, jnp.ones_like(mask), a)
    return jnp.where(mask, p, 0).astype(a.probs)


def dropped(p: Any) -> Any:
    """Dropout of a tenth, left on."""
    keep = (jnp.arange(p.size).reshape(p.shape) * 7919 % 10) != 0
    return jnp.where(keep, p / 0.9, 0)


def largest(p: Any) -> Any:
    """The four largest alone, not normalised again."""
    return jnp.where(p >= jnp.sort(p, axis=-1)[..., -min(4, p.shape[-1]), None], p, 0)


def averaged(y: Any) -> Any:
    """The mean of all heads in place of each."""
    return jnp.broadcast_to(jnp.mean(y.astype(f32), axis=2, keepdims=True), y.shape).astype(y.dtype)


def transposed(probs: Any, v: Any, a: Any) -> Any:
    """Heads and tokens exchanged by a reshape without a transpose."""
    y = attend(probs, v, a)
    return jnp.swapaxes(y, 1, 2).reshape(y.shape)


S, P, MIX = ("scores",), ("probs",), ("attn_out",)
SCORES = (
    Cell("scores: scale omitted", "kernel called with scale=1", S, "scale.*(omitted|not applied)|not scaled",
         in_part("scores", times(HEAD**0.5)), equal="5\\.65"),
    Cell("scores: scale 1/K", "scaled before and in the kernel", S, "twice|1/K", in_part("scores", times(HEAD**-0.5)),
         equal="0\\.17"),
    Cell("scores: scale 1/√D", "hidden size for head size", S, "√D|width|0\\.5\\b", in_part("scores", times(0.5))),
    Cell("scores: scale of half a head", "head_dim of a rotary half", S, "1\\.41|half|√2",
         in_part("scores", times(2**0.5))),
    Cell("scores: scale times 1.02", "rounded softmax scale", S, "1\\.02", in_part("scores", times(1.02))),
    Cell("scores: scale times log2 e", "exp2 kernel's scale before exp", S, "1\\.44|log",
         in_part("scores", times(1.4426950408889634))),
    Cell("scores: capped at 50", "soft cap of another family", S, "cap|tanh",
         in_part("scores", after(attention_scores, lambda y: soft_cap(y, 50.0)))),
    Cell("scores: capped at 5", "soft cap without need", S, "cap|tanh",
         in_part("scores", after(attention_scores, lambda y: soft_cap(y, 5.0)))),
    Cell("scores: clipped at 4", "clamped against overflow", S, "clip|clamp|largest|at 4",
         in_part("scores", after(attention_scores, lambda y: jnp.clip(y, -4, 4)))),
    Cell("scores: keys tiled for repeated", "tile for repeat_interleave", S, "interleav|tiled|groups|heads",
         in_part("scores", tiled)),
    Cell("scores: key heads exchanged", "shards of a KV head in the wrong order", S,
         "heads (are )?(exchanged|swapped|interleav|revers|shifted|in another order)|head.*exchanged",
         in_part("scores", with_keys(lambda k: k[:, :, ::-1]))),
    Cell("scores: first key head for all", "multi-query broadcast of a grouped model", S,
         "head 0|first head|one head|all the first",
         in_part("scores", with_keys(lambda k: jnp.broadcast_to(k[:, :, :1], k.shape)))),
    Cell("scores: query heads reversed", "head order of another checkpoint", S, "heads|revers",
         in_part("scores", with_queries(lambda q: q[:, :, ::-1]))),
    Cell("scores: keys shifted by one", "off by one in a block's start", S, "shift|next key|one key|slot",
         in_part("scores", with_keys(lambda k: jnp.roll(k, 1, axis=1)))),
    Cell("scores: last quarter of a head dropped", "head size padded and cut", S, "dimension|channel|part|of the sum",
         in_part("scores", with_queries(lambda q: q.at[..., 24:].set(0)))),
    Cell("scores: linear biases added", "ALiBi left on beside RoPE", S, "alibi|linear|bias|position",
         in_part("scores", alibi)),
    Cell("scores: constant added", "bias of an attention mask", S, "constant|\\+ 0\\.5|0\\.5|shift",
         in_part("scores", after(attention_scores, lambda y: (y.astype(f32) + 0.5).astype(y.dtype)))),
    Cell("scores: one head times 1.1", "learned temperature of a head", S, "head 3.*1\\.1|1\\.1.*head 3|1\\.1",
         in_part("scores", after(attention_scores, lambda y: y.at[:, 3].multiply(1.1)))),
    Cell("scores: keys in float8", "fp8 attention without being asked", S, "float8|e4m3|3 bits|8.bit",
         in_part("scores", with_keys(lambda k: narrow(k, "e4m3")))),
    Cell("scores: both sides in float8", "fp8 attention's QKᵀ", S, "float8|e4m3|3 bits|8.bit",
         in_part("scores", lambda q, k, s, a: attention_scores(narrow(q, "e4m3"), narrow(k, "e4m3"), s, a))),
    Cell("scores: queries cut to 4 bits of mantissa", "block floating point", S, "4 bits|bits",
         in_part("scores", with_queries(lambda q: mantissa(q, 4)))),
    Cell("probs: 1 added to the sum", "softmax off by one", P, "1 (is )?added|\\+ 1|off by one|sink",
         in_part("softmax", softmax(added=1.0))),
    Cell("probs: base 2", "exp2 without log2 e", P, "base 2|exp2|2\\^|0\\.693|ln ?2|log",
         in_part("softmax", softmax(jnp.exp2))),
    Cell("probs: over heads", "softmax over the wrong axis", P, "axis|over (the )?heads",
         in_part("softmax", softmax(over=1))),
    Cell("probs: over queries", "softmax over rows in place of keys", P, "axis|over (the )?(queries|rows)",
         in_part("softmax", softmax(over=2), phases=("prefill",))),
    Cell("probs: temperature 1.25", "sampling temperature inside attention", P, "0\\.8|1\\.25|temperature",
         in_part("softmax", lambda s, m, a: masked_softmax(s.astype(f32) / 1.25, m, a))),
    Cell("probs: masked after", "mask multiplied after softmax", P, "mask|normalis|sum to",
         in_part("softmax", unmasked_sum, phases=("prefill",))),
    Cell("probs: dropout left on", "model in training mode", P, "dropout|zeroed|dropped|0\\.9|1\\.11",
         in_part("softmax", softmax(kept=dropped))),
    Cell("probs: four largest alone", "top-k sparse attention", P, "largest|top|sparse|small",
         in_part("softmax", softmax(kept=largest))),
    Cell("probs: in float16", "softmax computed in half precision", P, "float16",
         in_part("softmax", narrow_softmax("float16")), policies=("fp32-highest",)),
    Cell("probs: in bfloat16", "softmax without an upcast", P, "bfloat16",
         in_part("softmax", narrow_softmax("bfloat16"))),
    Cell("probs: in float8", "fp8 attention's P", P, "float8|e4m3|3 bits",
         in_part("softmax", softmax(kept=lambda p: narrow(p, "e4m3")))),
    Cell("probs: to 8 bits of fixed point", "integer softmax", P, "1/255|integer|8.bit|fixed|int8",
         in_part("softmax", softmax(kept=lambda p: jnp.round(p * 255) / 255))),
    Cell("attn_out: value heads exchanged", "shards of a KV head in the wrong order", MIX, "heads|head.*exchanged",
         in_part("attend", lambda p, v, a: attend(p, v[:, :, ::-1], a))),
    Cell("attn_out: values tiled for repeated", "tile for repeat_interleave", MIX, "interleav|tiled|groups|heads",
         in_part("attend", tiled_values)),
    Cell("attn_out: values shifted by one", "off by one in a block's start", MIX, "shift|next|slot|one key",
         in_part("attend", lambda p, v, a: attend(p, jnp.roll(v, 1, axis=1), a))),
    Cell("attn_out: no transpose before the reshape", "view for transpose", MIX, "transpos|reshape|heads",
         in_part("attend", transposed, phases=("prefill",))),
    Cell("attn_out: values times 1.02", "dequantisation scale a little off", MIX, "1\\.02",
         in_part("attend", lambda p, v, a: attend(p, (v.astype(f32) * 1.02).astype(v.dtype), a))),
    Cell("attn_out: a key's value omitted", "block of keys cut short", MIX, "key 20|value.*(dropped|zero)",
         in_part("attend", lambda p, v, a: attend(p, v.at[:, 20].set(0), a))),
    Cell("attn_out: one head zero", "pruned head", MIX, "head 1.*(zero|0)|zero.*head 1",
         in_part("attend", after(attend, lambda y: y.at[:, :, 1].set(0)))),
    Cell("attn_out: decode averages heads", "grouped queries merged in a decode kernel", MIX, "mean|average|heads",
         in_part("attend", after(attend, averaged), phases=(DECODE,))),
)  # fmt: skip
