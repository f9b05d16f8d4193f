"""Numerics: how a result is rounded, in what its sums are kept, what approximates a function."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from exams.cells.activations import gated
from exams.cells.cell import Cell
from exams.cells.changes import in_part
from exams.cells.rounded import at_random, away, f32, mantissa, narrow, rounded, to_odd, toward_zero
from exams.cells.scores import softmax
from precaudit.models.jax_decoder.parts import attend, attention_scores, masked_softmax, project, rms_norm, rope

V, PROJ, DOWN = 2, 3, 6


def summed(to: str, block: int = 1) -> Any:
    """A projection whose sum over the contraction is kept in a narrow format."""

    def part(x: Any, w: Any, _bias: Any, a: Any) -> Any:
        xs = jnp.moveaxis(x.astype(f32).reshape(*x.shape[:-1], -1, block), -2, 0)
        ws = jnp.moveaxis(w.astype(f32).reshape(w.shape[0], -1, block), 1, 0)

        def add(total: Any, pair: Any) -> Any:
            one = jnp.einsum("...i,oi->...o", *pair, precision="highest")
            return narrow(total + narrow(one, to), to), None

        total, _ = lax.scan(add, jnp.zeros((*x.shape[:-1], w.shape[0]), f32), (xs, ws))
        return total.astype(a.activations)

    return part


def by_bits(part: str, honest: Any, how: Any, call: int | None = None) -> Any:
    """Round a part's result by its bits."""
    return in_part(part, rounded(honest, how), call, bits=True)


def operands(how: Any) -> Any:
    """A projection whose operands are rounded first."""
    return lambda x, w, b, a: project(how(x), how(w), b, a)


def double(y: Any) -> Any:
    """Rounded to float16 on the way to bfloat16."""
    return narrow(narrow(y, "float16"))


def fast_exponential(x: Any) -> Any:
    """Schraudolph's exponential: the exponent's bits of x · log2 e."""
    bits = (jnp.maximum(x, -80.0) * (2**23 / np.log(2)) + (127 << 23) - 366393).astype(jnp.int32)
    return jnp.where(jnp.isfinite(x), lax.bitcast_convert_type(bits, f32), 0)


def of_degree_two(x: Any) -> Any:
    """An exponential of a polynomial of degree two between powers of two."""
    y = jnp.maximum(x, -80.0) / np.log(2)
    n = jnp.floor(y)
    r = (y - n) * np.log(2)
    return jnp.where(jnp.isfinite(x), (1 + r + r * r / 2) * jnp.exp2(n), 0)


def narrow_mean(x: Any, w: Any, eps: float, a: Any) -> Any:
    """A mean square that is summed in bfloat16 and a root that is not."""
    y = x.astype(f32)
    total = lax.fori_loop(
        0, y.shape[-1], lambda i, t: narrow(t + narrow(jnp.square(y[..., i]))), jnp.zeros(y.shape[:-1], f32)
    )
    y = y * lax.rsqrt(total[..., None] / y.shape[-1] + f32(eps))
    return (y.astype(a.activations) * w).astype(a.activations)


def coarse_sigma(x: Any) -> Any:
    """A sigmoid of a table of 64 rows."""
    return x * jax.nn.sigmoid(jnp.round(x * 4) / 4)


ZERO, RANDOM = "toward zero|trunc|cut", "random|stochastic"
BF16, F32 = ("bf16",), ("fp32-highest",)
NUMERICS = tuple(
    Cell(f"numerics: {name}", origin, points, names, change, policies=policies)
    for name, origin, points, names, change, policies in (
        ("norm toward zero", "truncating store", ("attn_norm",), ZERO,
         by_bits("norm", rms_norm, toward_zero, 0), BF16),
        ("q toward zero", "truncating store", ("q",), ZERO, by_bits("rope", rope, toward_zero, 0), BF16),
        ("v toward zero", "truncating store", ("v",), ZERO, by_bits("project", project, toward_zero, V), BF16),
        ("attn_proj toward zero", "truncating store", ("attn_proj",), ZERO,
         by_bits("project", project, toward_zero, PROJ), BF16),
        ("mlp_out toward zero", "truncating store", ("mlp_out",), ZERO,
         by_bits("project", project, toward_zero, DOWN), BF16),
        ("scores toward zero", "truncating store", ("scores",), ZERO,
         by_bits("scores", attention_scores, toward_zero), BF16),
        ("probs toward zero", "truncating store", ("probs",), ZERO,
         by_bits("softmax", masked_softmax, toward_zero), BF16),
        ("attn_out toward zero", "truncating store", ("attn_out",), ZERO,
         by_bits("attend", attend, toward_zero), BF16),
        ("v at random", "stochastic rounding left on", ("v",), RANDOM,
         by_bits("project", project, at_random, V), BF16),
        ("mlp_out at random", "stochastic rounding left on", ("mlp_out",), RANDOM,
         by_bits("project", project, at_random, DOWN), BF16),
        ("probs at random", "stochastic rounding left on", ("probs",), RANDOM,
         by_bits("softmax", masked_softmax, at_random), BF16),
        ("v to odd", "round to odd for a second rounding", ("v",), "odd",
         by_bits("project", project, to_odd, V), BF16),
        ("attn_proj ties away", "half added before the cut", ("attn_proj",), "",
         by_bits("project", project, away, PROJ), BF16),
        ("v rounded twice", "float16 on the way to bfloat16", ("v",), "",
         in_part("project", rounded(project, double), V), BF16),
        ("v to 4 bits", "V cut to few bits", ("v",), "4 bits|bits",
         in_part("project", rounded(project, lambda y: mantissa(y, 4)), V), BF16),
        ("k to 5 bits", "K cut to few bits", ("k",), "5 bits|bits",
         in_part("rope", rounded(rope, lambda y: mantissa(y, 5)), 1), BF16),
        ("q in float8", "fp8 queries", ("q",), "float8|e4m3|3 bits",
         in_part("rope", rounded(rope, lambda y: narrow(y, "e4m3")), 0), BF16),
        ("mlp_out summed in bfloat16", "accumulator in the operands' format", ("mlp_out",),
         "bfloat16.*sum|sum.*bfloat16|bfloat16", in_part("project", summed("bfloat16"), DOWN),
         ("bf16", "fp32-highest")),
        ("attn_proj summed in bfloat16 by blocks of 16", "partial sums stored narrow", ("attn_proj",), "bfloat16",
         in_part("project", summed("bfloat16", 16), PROJ), ("bf16", "fp32-highest")),
        ("mlp_out summed in float16", "fp16 accumulator", ("mlp_out",), "float16",
         in_part("project", summed("float16"), DOWN), ("bf16", "fp32-highest")),
        ("v by TF32", "allow_tf32", ("v",), "tf32|10 bits",
         in_part("project", operands(lambda x: narrow(x, "tf32")), V), F32),
        ("mlp_out by one pass of bfloat16", "default precision of a TPU", ("mlp_out",), "bfloat16|one pass",
         in_part("project", operands(narrow), DOWN), F32),
        ("attn_proj in float16", "autocast to half", ("attn_proj",), "float16",
         in_part("project", operands(lambda x: narrow(x, "float16")), PROJ), F32),
        ("v stored in bfloat16", "cast of a result", ("v",), "bfloat16",
         in_part("project", rounded(project, narrow), V), F32),
        ("exponential of Schraudolph", "fast exponential", ("probs",), "exponential|approx|Schraudolph",
         in_part("softmax", softmax(fast_exponential), bits=True), ("bf16", "fp32-highest")),
        ("exponential of degree two", "polynomial exponential", ("probs",), "exponential|approx|polynom",
         in_part("softmax", softmax(of_degree_two)), ("bf16", "fp32-highest")),
        ("mean square summed in bfloat16", "reduction in the input's format", ("attn_norm",), "bfloat16",
         in_part("norm", narrow_mean, 0), ("bf16", "fp32-highest")),
        ("sigmoid of a table", "lookup table of an accelerator", ("gate_out",), "",
         gated(coarse_sigma), ("bf16", "fp32-highest")),
    )
)  # fmt: skip
