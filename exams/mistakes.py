"""Decoders with one mistake in them, in one layer or all, in prefill, decode or both; and what diagnosis has to say."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import msgspec
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from safetensors.numpy import load_file, save_file

from precaudit.models.jax_decoder import Parts
from precaudit.models.jax_decoder.arithmetic import Arithmetic, dot
from precaudit.models.jax_decoder.decoder import Decoder
from precaudit.models.jax_decoder.parameters import rope_tables
from precaudit.models.jax_decoder.parts import (
    attend,
    attention_scores,
    cache_read,
    masked_softmax,
    project,
    rms_norm,
    rope,
    swiglu,
)
from precaudit.recording.tracing.subject import Subject, load
from precaudit.schema.prompts import Prompt, encode_prompt

f32 = jnp.float32
WINDOW = 8
TEXT = "def read(path):\n    with open(path) as f:\n        return [line"
OTHER = "class Reader:\n    def close(self):\n        self.open = False\n"
_WHERE: list[tuple[Any, Any]] = []  # (layer, cache slots of the new rows, None in prefill) while a layer is traced


@dataclass(frozen=True)
class Mistake:
    """``part`` of Parts made ``wrong``; ``call``: which of the calls of that part in a layer, None all.

    ``point``, ``kind``, ``cause``: what diagnosis must find first; ``cause`` None: none reproduces it. ``policy``: what
    is announced. ``phases``: where it is made. ``model``: what is loaded for a faulty layer.
    ``at``: the first faulty layer of a ``whole`` one. ``prompts`` run in one batch, ``steps`` after decode0.
    ``seen_by``: the same cause as another prompt has it.
    """

    name: str
    part: str
    wrong: Callable[..., Any]
    point: str
    kind: str
    cause: str | None
    policy: str = "bf16"
    phases: tuple[str, ...] = ("prefill", "decode")
    call: int | None = None
    calls: int = 1
    whole: bool = False
    model: Callable[[int | None], str] = lambda _layer: "tiny"
    at: int | None = None
    prompts: tuple[str, ...] = (TEXT,)
    steps: int = 2
    seen_by: str | None = None

    def subject(self, layer: int | None) -> Subject:
        """Return tiny with the mistake in one layer or in all (None); ``whole`` ones change the subject itself."""
        if self.whole:
            return self.wrong(load("tiny", self.policy, None, "cpu"))
        return load(self.model(layer), self.policy, None, "cpu", self.parts(layer))

    def parts(self, layer: int | None, base: Parts | None = None) -> Parts:
        """Return the decoder's parts with the mistake in one layer, or in all (None)."""
        base = base or Parts()
        honest, count = getattr(base, self.part), 0

        def part(*args: Any) -> Any:
            nonlocal count
            here, count = count % self.calls, count + 1
            if not _WHERE or (self.call is not None and here != self.call):
                return honest(*args)
            at, slots = _WHERE[-1]
            if ("prefill" if slots is None else "decode") not in self.phases:
                return honest(*args)
            if layer is None:
                return self.wrong(*args)
            return jax.tree.map(lambda a, b: jnp.where(at == layer, a, b), self.wrong(*args), honest(*args))

        return replace(base, **{self.part: part})


@contextmanager
def placed() -> Iterator[None]:
    """Let parts know in which layer and phase they are traced."""
    original, output = Decoder._layer, Decoder._logits

    def layer(self: Any, x: Any, cache: Any, w: Any, index: Any, step: Any) -> Any:
        _WHERE.append((index, step.slots))
        try:
            if not isinstance(self, TwiceRounded):
                return original(self, x, cache, w, index, step)
            with mock.patch("precaudit.models.jax_decoder.decoder.tap", twice_rounded):
                return original(self, x, cache, w, index, step)
        finally:
            _WHERE.pop()

    def logits(self: Any, *args: Any) -> Any:
        wrong = next((f for kind, f in OUTPUTS.items() if isinstance(self, kind)), None)
        if wrong is None:
            return output(self, *args)
        with mock.patch("precaudit.models.jax_decoder.decoder.dot", lambda *a: wrong(dot(*a))):
            return output(self, *args)

    with mock.patch.object(Decoder, "_layer", layer), mock.patch.object(Decoder, "_logits", logits):
        yield


class NarrowLogits(Decoder):
    """A decoder whose logits are rounded to bfloat16 before they are stored."""


class TwiceRounded(Decoder):
    """A decoder whose residual is rounded to bfloat16 before it is stored."""


def twice_rounded(x: Any, name: str) -> Any:
    return checkpoint_name(narrow(x, "bfloat16") if name in ("resid_mid", "resid_out") else x, name)


def residual_twice(subject: Subject) -> Subject:
    subject.__dict__["decoder"] = TwiceRounded(subject.config, Arithmetic.of(subject.policy), subject.parts)
    return subject


def altered() -> Path:
    """Return a copy of tiny's folder, which is removed at exit."""
    source = Path(load("tiny", device="cpu").checkpoint.path)
    folder = Path(tempfile.mkdtemp(prefix="precaudit-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    return folder


@cache
def sharpened(layer: int | None) -> str:
    """Return tiny with the query weights of one layer, or all, times 8: scores above 88."""
    folder = altered()
    tensors = load_file(folder / "model.safetensors")
    for name, x in tensors.items():
        if name.endswith("q_proj.weight") and (layer is None or f".{layer}." in name):
            tensors[name] = (x.astype("float32") * 8).astype(x.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@cache
def windowed(_layer: int | None) -> str:
    """Return tiny as a Mistral whose rows see WINDOW keys."""
    folder = altered()
    config = json.loads((folder / "config.json").read_text())
    config = {k: v for k, v in config.items() if k not in ("attention_bias", "mlp_bias")}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mistral", "sliding_window": WINDOW}))
    return str(folder)


def window_short(s: Any, mask: Any, a: Any) -> Any:
    """Hide the oldest key of rows whose window is full."""
    shifted = jnp.concatenate([jnp.zeros_like(mask[..., :1]), mask[..., :-1]], axis=-1)
    full = mask.sum(axis=-1, keepdims=True) == WINDOW
    return masked_softmax(s, jnp.where(full, mask & shifted, mask), a)


def narrow_logits(subject: Subject) -> Subject:
    subject.__dict__["decoder"] = NarrowLogits(subject.config, Arithmetic.of(subject.policy), subject.parts)
    return subject


def swapped_weights(subject: Subject) -> Subject:
    """Exchange the value projections of layers 1 and 3."""
    held = subject.parameters
    order = jnp.asarray([0, 3, 2, 1, 4])
    subject.__dict__["parameters"] = held | {"layers": held["layers"] | {"wv": held["layers"]["wv"][order]}}
    return subject


def narrow(x: Any, name: str) -> Any:
    if name == "float16":  # reduce_precision flushes its subnormals; a barrier keeps XLA from removing the pair
        return lax.optimization_barrier(x.astype(jnp.float16)).astype(f32)
    bits = {"bfloat16": (8, 7)}[name]
    return lax.reduce_precision(x, *bits)


def scores_in_bf16(q: Any, k: Any, scale: Any, a: Any) -> Any:
    return narrow(attention_scores(q, k, scale, a), "bfloat16")


def softmax_in_bf16(s: Any, mask: Any, a: Any) -> Any:
    x = jnp.where(mask, narrow(s.astype(f32), "bfloat16"), -jnp.inf)
    e = narrow(jnp.exp(narrow(x - x.max(axis=-1, keepdims=True), "bfloat16")), "bfloat16")
    return narrow(e / narrow(e.sum(axis=-1, keepdims=True), "bfloat16"), "bfloat16").astype(a.probs)


def scaled(factor: Callable[[int], float]) -> Callable[..., Any]:
    return lambda q, k, scale, a: attention_scores(q, k, scale * factor(q.shape[-1]), a)


def heads_interleaved(q: Any, k: Any, scale: Any, a: Any) -> Any:
    groups = k.shape[2]
    order = jnp.asarray([h % groups for h in range(q.shape[2])])
    return attention_scores(q, k[:, :, order], scale, a)


def rope_off(by: int) -> Callable[..., Any]:
    """Rotate once more by the angle of a position: positions off by that."""

    def late(x: Any, cos: Any, sin: Any, a: Any) -> Any:
        half = x.shape[-1] // 2
        angle = by * 10000.0 ** (-jnp.arange(half, dtype=f32) / half)
        c, s = jnp.cos(angle), jnp.sin(angle)
        return rope(x, cos * c - sin * s, sin * c + cos * s, a)

    return late


rope_late = rope_off(1)


def other_base(subject: Subject) -> Subject:
    """Give RoPE's tables another base than the configuration says."""
    config = msgspec.structs.replace(subject.config, rope_theta=500000.0)

    def tables(positions: int, lengths: Any = None) -> Any:
        return jax.device_put(rope_tables(config, positions, subject.policy, lengths), subject.device)

    subject.__dict__["tables"] = tables
    return subject


def rope_tables_in_bf16(x: Any, cos: Any, sin: Any, a: Any) -> Any:
    return rope(x, narrow(cos, "bfloat16"), narrow(sin, "bfloat16"), a)


def norm_with(scale: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def norm(x: Any, w: Any, eps: Any, a: Any) -> Any:
        y = x.astype(a.norm)
        y = (y * scale(y, jnp.asarray(eps, a.norm))).astype(a.activations)
        return (y.astype(w.dtype) * w).astype(a.activations)

    return norm


def with_epsilon(value: float) -> Callable[..., Any]:
    return lambda x, w, _eps, a: rms_norm(x, w, value, a)


def mask_ahead(s: Any, mask: Any, a: Any) -> Any:
    more = jnp.concatenate([jnp.ones_like(mask[..., :1]), mask[..., :-1]], axis=-1)
    return masked_softmax(s, mask | more, a)


def cache_in_fp8(cache: Any, layer: Any) -> Any:
    x = cache_read(cache, layer)
    return x.astype(jnp.float8_e4m3fn).astype(x.dtype)


def stale_entry(cache: Any, layer: Any) -> Any:
    return cache_read(cache, layer).at[:, 2].set(cache_read(cache, layer)[:, 1])


def stale_between(cache: Any, layer: Any) -> Any:
    """Read row 3 in place of row 5 at decode steps 1 to 4, and never at those whose cache is recorded whole."""
    x, step = cache_read(cache, layer), _WHERE[-1][1] - (length(TEXT) - 1)
    stale = x.at[:, 5].set(x[:, 3])
    return jnp.where(((step >= 1) & (step <= 4))[:, None, None, None], stale, x)


@cache
def length(text: str) -> int:
    return len(encode_prompt(Prompt(id="a", prompt=text), load("tiny", device="cpu").tokenizer)[1])


def exchanged(honest: Callable[..., Any]) -> Callable[..., Any]:
    """Give every prompt of a batch what belongs to its neighbour."""
    return lambda *args: jnp.flip(honest(*args), axis=0)


def in_batches(factor: float, honest: Callable[..., Any]) -> Callable[..., Any]:
    """Scale what more than one prompt makes together."""

    def scaled_together(*args: Any) -> Any:
        y = honest(*args)
        return y if y.shape[0] == 1 else (y.astype(f32) * factor).astype(y.dtype)

    return scaled_together


def zeros_read(cache: Any, layer: Any) -> Any:
    return jnp.zeros_like(cache_read(cache, layer))


def sums_in(name: str) -> Callable[..., Any]:
    """A projection summed one term after another in a narrow format."""

    def projection(x: Any, w: Any, _bias: Any, a: Any) -> Any:
        def term(total: Any, pair: Any) -> Any:
            xi, wi = pair
            product = narrow(xi.astype(f32)[..., None] * wi.astype(f32), name)
            return narrow(total + product, name), None

        first = jnp.zeros((*x.shape[:-1], w.shape[0]), f32)
        total, _ = lax.scan(term, first, (jnp.moveaxis(x, -1, 0), w.T))
        return total.astype(a.activations)

    return projection


def times(factor: float, honest: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: (honest(*args).astype(f32) * factor).astype(honest(*args).dtype)


def noisy(x: Any, w: Any, bias: Any, a: Any) -> Any:
    y = project(x, w, bias, a)
    return (y.astype(f32) * (1 + 0.03 * jnp.sin(jnp.arange(y.shape[-1], dtype=f32) * 1.7))).astype(y.dtype)


def no_maximum(s: Any, mask: Any, a: Any) -> Any:
    e = jnp.exp(jnp.where(mask, s.astype(a.softmax), -jnp.inf))
    return (e / e.sum(axis=-1, keepdims=True)).astype(a.probs)


def mask_short(s: Any, mask: Any, a: Any) -> Any:
    less = jnp.concatenate([mask[..., 1:], jnp.zeros_like(mask[..., :1])], axis=-1)
    return masked_softmax(s, mask & less, a)


def cache_in_int8(cache: Any, layer: Any) -> Any:
    x = cache_read(cache, layer).astype(f32)
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    return (jnp.round(x / jnp.where(scale > 0, scale, 1)) * scale).astype(cache.dtype)


def first_token_dropped(p: Any, v: Any, a: Any) -> Any:
    return attend(p, v.at[:, 0].multiply(0), a)


def clipped(gate: Any, up: Any, a: Any) -> Any:
    return jnp.clip(swiglu(gate, up, a), -0.5, 0.5)


def damped_norm(x: Any, w: Any, eps: Any, a: Any) -> Any:
    y = rms_norm(x, w, eps, a)
    return y.at[..., 5].multiply(1.5)


def token_zeroed(x: Any, w: Any, bias: Any, a: Any) -> Any:
    return project(x, w, bias, a).at[:, 7].set(0)


def head_zeroed(p: Any, v: Any, a: Any) -> Any:
    return attend(p, v, a).at[:, :, 3].set(0)


def values_scaled(p: Any, v: Any, a: Any) -> Any:
    return (attend(p, v, replace(a, attn_out=f32)) * 1.1).astype(a.attn_out)


def first_key_hidden(s: Any, mask: Any, a: Any) -> Any:
    return masked_softmax(s, mask.at[..., 0].set(False), a)


def weightless(x: Any, w: Any, eps: Any, a: Any) -> Any:
    return rms_norm(x, jnp.ones_like(w), eps, a)


def quick_gelu(gate: Any, up: Any, a: Any) -> Any:
    g = gate.astype(f32)
    return ((g * jax.nn.sigmoid(1.702 * g)).astype(a.mlp) * up.astype(a.mlp)).astype(a.activations)


def softmax_by(exp: Callable[[Any], Any]) -> Callable[..., Any]:
    """A softmax with another exponential."""

    def softmax(s: Any, mask: Any, a: Any) -> Any:
        x = jnp.where(mask, s.astype(a.softmax), -jnp.inf)
        e = jnp.where(mask, exp(jnp.where(mask, x - x.max(axis=-1, keepdims=True), 0.0)), 0.0)
        return (e / e.sum(axis=-1, keepdims=True)).astype(a.probs)

    return softmax


def by_bits(x: Any) -> Any:
    """Schraudolph's exp: the bits of 2^n (1 + f)."""
    bits = jnp.maximum(x * jnp.float32(2**23 / 0.6931471805599453) + jnp.float32(127 * 2**23), 0.0)
    return lax.bitcast_convert_type(bits.astype(jnp.int32), f32)


def wobbling(x: Any, w: Any, bias: Any, a: Any) -> Any:
    y = project(x, w, bias, a)
    wide = y.astype(f32)
    return (wide + 0.05 * jnp.sin(40.0 * wide)).astype(y.dtype)


def folded(gate: Any, up: Any, a: Any) -> Any:
    y = swiglu(gate, up, a).astype(f32)
    return (y - 0.3 * y * jnp.cos(9.0 * y)).astype(a.activations)


class ScaledLogits(Decoder):
    """A decoder whose logits are multiplied by 1.01."""


def scaled_logits(subject: Subject) -> Subject:
    subject.__dict__["decoder"] = ScaledLogits(subject.config, Arithmetic.of(subject.policy), subject.parts)
    return subject


def mean_square(y: Any) -> Any:
    return jnp.mean(y * y, axis=-1, keepdims=True)


D, F32, FIRST = ("decode",), "fp32-highest", {"call": 0, "calls": 2}
mean = norm_with(lambda y, e: lax.rsqrt(jnp.mean(y, axis=-1, keepdims=True) + e))
outside = norm_with(lambda y, e: 1 / (jnp.sqrt(mean_square(y)) + e))
sizes = norm_with(lambda y, e: 1 / (jnp.abs(y).mean(-1, keepdims=True) + e))
narrow_exp = softmax_by(lambda x: narrow(jnp.exp(x), "bfloat16"))
schraudolph = softmax_by(by_bits)
short_mean = norm_with(lambda y, e: lax.rsqrt(mean_square(y) * (y.shape[-1] / (y.shape[-1] - 1)) + e))
OUTPUTS = {NarrowLogits: lambda y: narrow(y, "bfloat16"), ScaledLogits: lambda y: y * jnp.float32(1.01)}
longer = scaled(lambda k: (k / (k + 1)) ** 0.5)
M = Mistake
MISTAKES = (
    M("scores in bf16", "scores", scores_in_bf16, "scores", "format", "scores in bfloat16", "bf16-fp32-scores"),
    M("softmax in bf16", "softmax", softmax_in_bf16, "probs", "format", "softmax in bfloat16", "fp32-highest"),
    M("scale 1/√(d+1)", "scores", longer, "scores", "semantics", "scale 1/√(K+1)"),
    M("scale twice in decode", "scores", scaled(lambda k: k**-0.5), "scores", "semantics", "scale twice", phases=D),
    M("RoPE off by one in decode", "rope", rope_late, "q", "semantics", "positions +1", phases=D, **FIRST),
    M("RoPE tables in bf16", "rope", rope_tables_in_bf16, "q", "format", "RoPE tables in bfloat16", **FIRST),
    M("epsilon outside", "norm", outside, "attn_norm", "semantics", "epsilon outside the root", F32, **FIRST),
    M("mean of sizes", "norm", sizes, "attn_norm", "semantics", "mean of sizes", **FIRST),
    M("mean for mean square", "norm", mean, "attn_norm", "semantics", "mean for mean square", **FIRST),
    M(
        "no maximum at large scores", "softmax", no_maximum, "probs", "semantics", "maximum not subtracted",
        phases=("prefill",), model=sharpened,
    ),
    M(
        "residual rounded twice", "residual", residual_twice, "resid_mid", "format", "residual in bfloat16", F32,
        whole=True, at=0,
    ),
    M("mask one short", "softmax", mask_short, "probs", "semantics", "mask one short", phases=("prefill",)),
    M("window one short", "softmax", window_short, "probs", "semantics", "window one short", model=windowed),
    M("KV cache in int8", "cache_read", cache_in_int8, "k_cache", "format", "cache in int8", phases=D),
    M("mask one ahead", "softmax", mask_ahead, "probs", "semantics", "mask one ahead", phases=("prefill",)),
    M("heads interleaved", "scores", heads_interleaved, "scores", "semantics", "heads interleaved"),
    M("stale KV entry", "cache_read", stale_entry, "k_cache", "state", "stale row", phases=D, **FIRST),
    M(
        "stale KV entry in steps 1 to 4", "cache_read", stale_between, "k_cache", "state", "stale row", phases=D,
        steps=6, **FIRST,
    ),
    M(
        "prompts' caches exchanged", "cache_read", exchanged(cache_read), "k_cache", "state", "row of prompt b",
        phases=D, prompts=(TEXT, OTHER), **FIRST,
    ),
    M(
        "prompts' rows exchanged", "attend", exchanged(attend), "attn_out", "state", "row of prompt b",
        prompts=(TEXT, OTHER), seen_by="row of prompt a",
    ),
    M("values × 1.02 in batches", "attend", in_batches(1.02, attend), "attn_out", "semantics", "× 1.02",
      prompts=(TEXT, OTHER)),
    M("KV cache in fp8", "cache_read", cache_in_fp8, "k_cache", "format", "cache in float8_e4m3fn", phases=D),
    M("cache reads zeros", "cache_read", zeros_read, "k_cache", "state", "rows not written", phases=D),
    M(
        "sums in fp16", "project", sums_in("float16"), "v", "format", "sums in float16", phases=("prefill",), call=2,
        calls=7,
    ),
    M("logits in bf16", "logits", narrow_logits, "logits", "format", "stored in bfloat16", whole=True),
    M("weights swapped", "weights", swapped_weights, "v", "semantics", "weights of layer 3", whole=True, at=1),
    # parts of a result, and keys
    # a factor for every column: described, and no cause
    M("columns scaled", "project", noisy, "v", "semantics", None, call=2, calls=7),
    M("first token's value dropped", "attend", first_token_dropped, "attn_out", "semantics", "key 0 value dropped"),
    M("activation clipped", "activate", clipped, "mlp_act", "semantics", "clipped at ±0.5"),
    M("one channel × 1.5", "norm", damped_norm, "attn_norm", "semantics", "channel 5 × 1.5", **FIRST),
    M(
        "a token's MLP is zero", "project", token_zeroed, "mlp_out", "semantics", "token 7 zeroed", call=6, calls=7,
        phases=("prefill",),
    ),
    M("head 3 is zero", "attend", head_zeroed, "attn_out", "semantics", "head 3 zeroed"),
    M("decode does not see key 0", "softmax", first_key_hidden, "probs", "semantics", "key 0 omitted", phases=D),
    M("values × 1.1 inside", "attend", values_scaled, "attn_out", "semantics", "× 1.1"),
    # other formulas
    M("norm without weight", "norm", weightless, "attn_norm", "semantics", "weight omitted", **FIRST),
    M("mean over D − 1", "norm", short_mean, "attn_norm", "semantics", "mean over D -1", **FIRST),
    M("quick gelu", "activate", quick_gelu, "mlp_act", "semantics", "activation quick gelu, x·σ(1.702 x)"),
    M("exponentials in bf16", "softmax", narrow_exp, "probs", "format", "exponentials in bfloat16", F32),
    M("exp by Schraudolph", "softmax", schraudolph, "probs", "semantics", "exp by Schraudolph's bits, no shift"),
    # numbers that are fitted
    M("scale × 0.98", "scores", scaled(lambda _k: 0.98), "scores", "semantics", "scale × √K 0.98"),
    M("epsilon 1e-6", "norm", with_epsilon(1e-6), "attn_norm", "semantics", "epsilon 1e-6", F32, **FIRST),
    M("epsilon 3e-6", "norm", with_epsilon(3e-6), "attn_norm", "semantics", "epsilon 3e-6", F32, **FIRST),
    M("RoPE base 500000", "rope", other_base, "q", "semantics", "RoPE base 500000", whole=True, at=0),
    M("RoPE off by three", "rope", rope_off(3), "q", "semantics", "offset of positions 3", **FIRST),
    M("logits × 1.01", "logits", scaled_logits, "logits", "semantics", "logit scale 1.01", whole=True),
    # outside the variants: none reproduces it
    M("values wobble", "project", wobbling, "v", "semantics", None, call=2, calls=7),
    M("gates fold over", "activate", folded, "mlp_act", "semantics", None),
)  # fmt: skip
