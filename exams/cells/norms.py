"""Norms: another epsilon, another mean, another weight."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from exams.cells.cell import Cell
from exams.cells.changes import PREFILL, after, in_part, in_step, in_weight, in_weights
from exams.cells.rounded import f32, narrow
from precaudit.models.jax_decoder.parts import rms_norm

FIRST, SECOND = 0, 1  # a layer's norms


def scaled(by: Any) -> Any:
    """Return an RMS norm whose rows are divided by ``by(x, eps)`` instead."""

    def norm(x: Any, w: Any, eps: float, a: Any) -> Any:
        y = x.astype(f32)
        y = y / by(y, f32(eps))
        return (y.astype(a.activations) * w).astype(a.activations)

    return norm


def mean(y: Any) -> Any:
    return jnp.mean(y, axis=-1, keepdims=True)


def centred(x: Any, w: Any, eps: float, a: Any) -> Any:
    y = x.astype(f32)
    return rms_norm(y - mean(y), w, eps, a)


def grouped(x: Any, w: Any, eps: float, a: Any) -> Any:
    halves = x.reshape(*x.shape[:-1], 2, -1)
    return rms_norm(halves, w.reshape(2, -1), eps, a).reshape(x.shape)


def narrow_square(x: Any, w: Any, eps: float, a: Any) -> Any:
    y = x.astype(f32)
    square = narrow(mean(narrow(y * y)))
    y = y * lax.rsqrt(square + f32(eps))
    return (y.astype(a.activations) * w).astype(a.activations)


def fast_root(y: Any, eps: Any) -> Any:
    """Return the root by the constant 0x5f3759df without a step of Newton's."""
    bits = lax.bitcast_convert_type(mean(y * y) + eps, jnp.int32)
    return 1 / lax.bitcast_convert_type(jnp.int32(0x5F3759DF) - (bits >> 1), f32)


def twice(x: Any, w: Any, eps: float, a: Any) -> Any:
    return rms_norm(rms_norm(x, w, eps, a), w, eps, a)


def weighted_first(x: Any, w: Any, eps: float, a: Any) -> Any:
    y = x.astype(f32) * w.astype(f32)
    return (y * lax.rsqrt(mean(y * y) + f32(eps))).astype(a.activations)


def with_weight(change: Any) -> Any:
    return lambda x, w, eps, a: rms_norm(x, change(w), eps, a)


def first_token_left(x: Any, w: Any, eps: float, a: Any) -> Any:
    return rms_norm(x, w, eps, a).at[:, 0].set((x[:, 0] * w).astype(a.activations))


def of_final(wrong: Any) -> Any:
    return in_step("norm", lambda honest, x, w, name: (wrong if name == "final_norm" else honest)(x, w, name))


def other_epsilon(eps: float) -> Any:
    return lambda x, w, _, a: rms_norm(x, w, eps, a)


EPSILON = "epsilon|\\beps\\b"
HERE, AFTER = ("attn_norm",), ("mlp_norm",)
NORMS = (
    Cell("norm: epsilon 1e-6", "default of the config class not overridden", HERE, EPSILON,
         in_part("norm", other_epsilon(1e-6), FIRST)),
    Cell("norm: epsilon 1e-3", "default of a framework's LayerNorm", AFTER, EPSILON,
         in_part("norm", other_epsilon(1e-3), SECOND)),
    Cell("norm: epsilon 1e-2", "epsilon of a fused kernel", HERE, EPSILON, in_part("norm", other_epsilon(1e-2), FIRST)),
    Cell("norm: epsilon omitted", "fused kernel without epsilon", AFTER, EPSILON,
         in_part("norm", other_epsilon(0.0), SECOND)),
    Cell("norm: epsilon after the root", "port from a paper's formula", HERE, EPSILON,
         in_part("norm", scaled(lambda y, eps: jnp.sqrt(mean(y * y)) + eps), FIRST)),
    Cell("norm: mean subtracted", "LayerNorm for RMSNorm", HERE, "mean|layer ?norm|centred",
         in_part("norm", centred, FIRST)),
    Cell("norm: sum for mean", "l2 normalise for RMSNorm", AFTER, "sum|mean|0\\.088|√",
         in_part("norm", scaled(lambda y, eps: jnp.sqrt(jnp.sum(y * y, axis=-1, keepdims=True) + eps)), SECOND)),
    Cell("norm: mean over D - 1", "unbiased variance of torch.var", HERE, "D ?[−-] ?1|unbiased|bessel",
         in_part("norm", scaled(lambda y, eps: jnp.sqrt(mean(y * y) * 128 / 127 + eps)), FIRST), equal="0\\.996"),
    Cell("norm: divided by the deviation", "variance for mean square", AFTER, "deviation|variance|mean",
         in_part("norm", scaled(lambda y, eps: jnp.sqrt(jnp.var(y, axis=-1, keepdims=True) + eps)), SECOND)),
    Cell("norm: mean absolute value", "L1 norm", HERE, "absolute|L1|mean of \\|x\\|",
         in_part("norm", scaled(lambda y, eps: mean(jnp.abs(y)) + eps), FIRST)),
    Cell("norm: of each half", "tensor-parallel norm without all-reduce", AFTER, "half|halves|group|part",
         in_part("norm", grouped, SECOND)),
    Cell("norm: twice", "norm in block and in attention", HERE, "twice", in_part("norm", twice, FIRST)),
    Cell("norm: root without Newton's step", "approximate rsqrt", AFTER, "rsqrt|root|approx",
         in_part("norm", scaled(fast_root), SECOND, bits=True)),
    Cell("norm: square in bfloat16", "mean of squares without an upcast", HERE, "bfloat16",
         in_part("norm", narrow_square, FIRST)),
    Cell("norm: weight plus 1", "Gemma's offset in a Llama", HERE, "1 \\+|\\+ 1|offset|plus",
         in_part("norm", with_weight(lambda w: w + 1), FIRST)),
    Cell("norm: weight omitted", "elementwise_affine=False", AFTER, "weight",
         in_part("norm", with_weight(jnp.ones_like), SECOND)),
    Cell("norm: weight twice", "weight folded into the projection and kept", HERE, "weight.*(twice|squared|²)|twice",
         in_part("norm", with_weight(lambda w: w * w), FIRST)),
    Cell("norm: weight before the mean", "weight folded into the input", AFTER, "weight|before",
         in_part("norm", weighted_first, SECOND)),
    Cell("norm: weight reversed", "channel order of another layout", HERE, "revers|order|permut|channels exchanged",
         in_part("norm", with_weight(lambda w: w[::-1]), FIRST)),
    Cell("norm: weight shifted by a channel", "off by one in a kernel's index", AFTER, "shift|channel.*next|roll",
         in_part("norm", with_weight(lambda w: jnp.roll(w, 1)), SECOND)),
    Cell("norm: weight of the other norm", "input and post-attention norm exchanged", HERE,
         "mlp_norm|other norm|post_attention|another (norm|tensor)",
         in_weights(lambda w: {"attn_norm": w["attn_norm"].at[2].set(w["mlp_norm"][2])})),
    Cell("norm: weight of the next layer", "layer index off by one while loading", AFTER, "layer 3|next layer",
         in_weights(lambda w: {"mlp_norm": w["mlp_norm"].at[2].set(w["mlp_norm"][3])})),
    Cell("norm: weight stored as w - 1 in bfloat16", "conversion between offset and plain weights", HERE,
         "weight.*(− 1|- 1|\\+ 1|1 \\+).*bfloat16|bfloat16.*1|weight",
         in_weight("attn_norm", lambda w: narrow(narrow(w.astype(f32) - 1) + 1))),
    Cell("norm: first token left as it is", "special case of a BOS token", AFTER, "token|position 0|first",
         in_part("norm", first_token_left, SECOND, (PREFILL,))),
    Cell("norm: times 1.02", "learned gain left in", HERE, "1\\.02",
         in_part("norm", lambda x, w, eps, a: rms_norm(x, w.astype(f32) * 1.02, eps, a), FIRST)),
    Cell("norm: clipped at 2", "activation clipping of a quantised export", AFTER, "clip|clamp|largest|at 2",
         in_part("norm", after(rms_norm, lambda y: jnp.clip(y, -2, 2)), SECOND)),
    Cell("final norm omitted", "head reads the residual stream", ("final_norm",), "omitted|no norm|not normal",
         of_final(lambda x, w, name: (x * w[name]).astype(x.dtype)), layer=None),
    Cell("final norm: weight plus 1", "offset in the last norm alone", ("final_norm",), "1 \\+|\\+ 1|offset|plus",
         in_step("norm", lambda honest, x, w, name: honest(x, {name: w[name] + (name == "final_norm")}, name)
                 if name in w else honest(x, w, name)), layer=None),
)  # fmt: skip
