"""Small programs for the rules of lint: the lines marked ``#!`` are those a rule fires at; those without fire nowhere.

``FIRES`` and ``SILENT``: {rule: programs}, each with the shapes of its phases.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name as tap
from jax.experimental import pallas as pl


@dataclass(frozen=True)
class Small:
    """A program, the arguments of each of its phases, and what else a rule looks at."""

    call: Callable[..., Any]
    phases: tuple[tuple[Any, ...], ...]
    severity: str = ""
    donated: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    extents: dict[str, tuple[float, float]] | None = None  # of a run: the least and the largest value of each point
    platform: str = "cpu"


FIRES: dict[str, list[Small]] = {}
SILENT: dict[str, list[Small]] = {}


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


f32, i32 = shape, partial(shape, dtype=jnp.int32)
bf16, f16 = partial(shape, dtype=jnp.bfloat16), partial(shape, dtype=jnp.float16)
f64 = partial(shape, dtype=np.float64)


def program(where, rule, *given, phases=None, **more):
    """Enter a program under a rule: with its arguments, or with those of each phase."""

    def enter(call):
        where.setdefault(rule, []).append(Small(call, phases or (given,), **more))
        return call

    return enter


fires, silent = partial(program, FIRES), partial(program, SILENT)


# rounded-scores


@fires("rounded-scores", bf16(8, 16), bf16(8, 16))
def scores_of_a_bfloat16_product(q, k):
    scores = jnp.einsum("tk,sk->ts", q, k)  #!
    scores = jnp.where(jnp.tri(8, dtype=bool), scores.astype(jnp.float32) / 4, -jnp.inf)
    return jax.nn.softmax(scores)


@fires("rounded-scores", f16(8, 16), f16(8, 16), f32(8, 8))
def scores_that_are_rounded_later(q, k, bias):
    scores = jnp.matmul(q, k.T, preferred_element_type=jnp.float32) * 0.25
    scores = (scores + bias).astype(jnp.float16)  #!
    wide = tap(scores, "scores").astype(jnp.float32)
    probs = jnp.exp(wide - wide.max(-1, keepdims=True))
    return probs * (1 / probs.sum(-1, keepdims=True))


@fires("rounded-scores", bf16(8, 16), bf16(32, 16), bf16(32, 16))
def scores_of_attention_in_blocks(q, k, v):
    def block(carry, kv):
        most, total, out = carry
        scores = (q @ kv[0].T).astype(jnp.float32)  #!
        new = jnp.maximum(most, scores.max(-1, keepdims=True))
        shrink, probs = jnp.exp(most - new), jnp.exp(scores - new)
        out = out * shrink + probs @ kv[1].astype(jnp.float32)
        return (new, total * shrink + probs.sum(-1, keepdims=True), out), None

    first = jnp.full((8, 1), -1e30), jnp.zeros((8, 1)), jnp.zeros((8, 16))
    (_, total, out), _ = lax.scan(block, first, (k.reshape(4, 8, 16), v.reshape(4, 8, 16)))
    return out / total


@silent("rounded-scores", bf16(8, 16), bf16(8, 16))
def scores_in_float32(q, k):
    scores = jnp.einsum("tk,sk->ts", q, k, preferred_element_type=jnp.float32)
    return jax.nn.softmax(scores).astype(jnp.bfloat16)


@silent("rounded-scores", bf16(8, 16), bf16(16, 8))
def a_gate_is_no_softmax(x, w):
    return jnp.exp((x @ w).astype(jnp.float32)).sum(-1)


@silent("rounded-scores", bf16(8, 16), f32(8, 16))
def the_mask_alone_is_narrow(q, k):
    mask = jnp.where(jnp.tri(8, dtype=bool), 0.0, -1e9).astype(jnp.bfloat16)
    return jax.nn.softmax(q.astype(jnp.float32) @ k.T + mask.astype(jnp.float32))


@fires("rounded-scores", bf16(16, 32), bf16(32, 512), i32(16))
def cross_entropy_in_tiles_of_a_scan(h, head, labels):
    def tile(carry, given):
        most, total, gold = carry
        w, k = given
        logits = (h @ w).astype(jnp.float32)  #!
        new = jnp.maximum(most, logits.max(-1))
        total = total * jnp.exp(most - new) + jnp.exp(logits - new[:, None]).sum(-1)
        hit = labels[:, None] == k * 128 + jnp.arange(128)
        return (new, total, gold + jnp.where(hit, logits, 0.0).sum(-1)), None

    tiles = head.reshape(32, 4, 128).swapaxes(0, 1)
    first = jnp.full(16, -jnp.inf), jnp.zeros(16), jnp.zeros(16)
    (most, total, gold), _ = lax.scan(tile, first, (tiles, jnp.arange(4)))
    return jnp.mean(most + jnp.log(total) - gold)


@fires("rounded-scores", bf16(16, 32), bf16(32, 512), i32())
def logsumexp_in_tiles_of_a_loop(h, head, tiles):
    def tile(k, total):
        logits = h @ lax.dynamic_slice(head, (0, k * 128), (32, 128))  #!
        return jnp.logaddexp(total, jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))

    return lax.fori_loop(0, tiles, tile, jnp.full(16, -jnp.inf))


@fires("rounded-scores", bf16(16, 32), bf16(32, 512))
def logsumexp_in_a_kernel(h, head):
    def body(h_ref, w_ref, most_ref, total_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            most_ref[...] = jnp.full(most_ref.shape, -jnp.inf)
            total_ref[...] = jnp.zeros(total_ref.shape)

        logits = jnp.dot(h_ref[...], w_ref[...]).astype(jnp.float32)  #!
        new = jnp.maximum(most_ref[...], logits.max(-1))
        total_ref[...] = total_ref[...] * jnp.exp(most_ref[...] - new) + jnp.exp(logits - new[:, None]).sum(-1)
        most_ref[...] = new

    row = pl.BlockSpec((16,), lambda _: (0,))
    most, total = pl.pallas_call(
        body, grid=(4,), out_specs=[row, row], out_shape=[jax.ShapeDtypeStruct((16,), jnp.float32)] * 2,
        in_specs=[pl.BlockSpec((16, 32), lambda _: (0, 0)), pl.BlockSpec((32, 128), lambda k: (0, k))], interpret=True,
    )(h, head)  # fmt: skip
    return most + jnp.log(total)


@fires("rounded-scores", bf16(16, 32), bf16(32, 512), f32(16))
def a_softmax_made_again_for_a_gradient(h, head, lse):
    logits = jnp.dot(h, head, preferred_element_type=jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    again = (h @ head).astype(jnp.float32)  #!
    return jnp.exp(again - lse[:, None])


@silent("rounded-scores", bf16(16, 32), bf16(32, 512), i32(16))
def cross_entropy_in_float32(h, head, labels):
    logits = jnp.dot(h, head, preferred_element_type=jnp.float32)
    gold = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
    return -gold.mean().astype(jnp.bfloat16), jnp.log(jnp.sum(jnp.abs((h @ head).astype(jnp.float32)), -1))


@silent("rounded-scores", bf16(16, 32), bf16(32, 512))
def a_softplus_is_no_cross_entropy(h, head):
    return jnp.log1p(jnp.exp((h @ head).astype(jnp.float32))).sum(-1)


# narrow-exp


@fires("narrow-exp", bf16(4, 32), severity="error")
def loss_of_bfloat16_logits(logits):
    return -jax.nn.log_softmax(logits)[:, 0].mean()  #!


@fires("narrow-exp", bf16(4, 32), severity="error")
def logsumexp_of_float16_exponentials(logits):
    terms = jnp.exp(logits)  #!
    return jnp.log(jnp.sum(terms, -1, dtype=jnp.float32))


@fires("narrow-exp", f32(4, 32), severity="error")
def log_probabilities_rounded(logits):
    return jax.nn.log_softmax(logits).astype(jnp.bfloat16)  #!


@fires("narrow-exp", f16(4, 32), severity="error")
def log_of_a_softmax(logits):
    probs = jax.nn.softmax(logits.astype(jnp.float32))
    return jnp.log(probs.astype(jnp.float16) + jnp.float16(1e-4))  #!


@fires("narrow-exp", bf16(4, 32), severity="warning")
def softmax_in_bfloat16(scores):
    return jax.nn.softmax(scores)  #!


@fires("narrow-exp", f16(4, 32), severity="warning")
def gate_in_float16(x):
    return jax.nn.silu(x)  #!


@silent("narrow-exp", bf16(4, 32))
def loss_in_float32(logits):
    return -jax.nn.log_softmax(logits.astype(jnp.float32))[:, 0].mean()


@silent("narrow-exp", bf16(4, 32))
def loss_rounded_once_it_is_one_number(logits):
    return jax.scipy.special.logsumexp(logits.astype(jnp.float32), axis=-1).sum().astype(jnp.bfloat16)


@silent("narrow-exp", bf16(4, 32))
def probabilities_rounded(scores):
    return jax.nn.softmax(scores.astype(jnp.float32)).astype(jnp.bfloat16)


# narrow-statistics


@fires("narrow-statistics", bf16(4, 32))
def mean_of_squares_in_bfloat16(x):
    scale = jnp.mean(x * x, -1, keepdims=True)  #!
    return x * lax.rsqrt(scale + 1e-5)


@fires("narrow-statistics", f32(4, 32))
def variance_rounded_and_cast_back(x):
    variance = jnp.var(x, -1, keepdims=True).astype(jnp.bfloat16)  #!
    return x / jnp.sqrt(variance.astype(jnp.float32) + 1e-5)


@fires("narrow-statistics", f16(4, 32))
def a_product_with_itself(x):
    squares = jnp.einsum("td,td->t", x, x)  #!
    return x * ((squares / 32) ** -0.5)[:, None]


@silent("narrow-statistics", bf16(4, 32))
def statistics_in_float32(x):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype)


@silent("narrow-statistics", bf16(4, 32))
def squares_alone_are_narrow(x):
    return lax.rsqrt(jnp.mean(x * x, -1, dtype=jnp.float32) + 1e-5)


@silent("narrow-statistics", bf16(4, 32), bf16(4, 32))
def a_root_of_no_sum(m, v):
    return m / (jnp.sqrt(v * v) + jnp.mean(m))


# narrow-scan


@fires("narrow-scan", bf16(4, 32))
def cumulative_sum(x):
    return jnp.cumsum(x, -1)  #!


@fires("narrow-scan", f16(64))
def window(x):
    return lax.reduce_window(x, jnp.float16(0), lax.add, (16,), (1,), "valid")  #!


@fires("narrow-scan", bf16(100, 32))
def a_sum_carried_by_a_scan(rows):
    def add(total, row):
        wide = total.astype(jnp.float32) + row.astype(jnp.float32) ** 2  #!
        return wide.astype(jnp.bfloat16), None

    return lax.scan(add, jnp.zeros(32, jnp.bfloat16), rows)[0]


@fires("narrow-scan", bf16(4, 32, 32), bf16(8, 32))
def a_gradient_added_up_by_the_backward_pass(xs, w):
    def loss(w):
        def one(total, x):
            return total + jnp.sum((w @ x).astype(jnp.float32)), None  #!

        return lax.scan(one, 0.0, jnp.tile(xs, (4, 1, 1)))[0]

    return jax.grad(loss)(w)


@fires("narrow-scan", bf16(32), i32())
def a_sum_carried_by_a_loop(x, steps):
    def more(state):
        return state[0] < steps

    def step(state):
        return state[0] + 1, state[1] + x  #!

    return lax.while_loop(more, step, (0, x))


@silent("narrow-scan", bf16(4, 32))
def cumulative_sum_in_float32(x):
    return jnp.cumsum(x.astype(jnp.float32), -1).astype(x.dtype)


@silent("narrow-scan", bf16(4, 32))
def a_plain_sum(x):
    return jnp.sum(x, -1) + lax.reduce(x, jnp.bfloat16(0), lax.add, (1,)) + lax.cummax(x, 1)[:, 0]


@silent("narrow-scan", bf16(32), bf16(16, 32, 32))
def a_residual_stream(x, weights):
    return lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)[0]


@silent("narrow-scan", bf16(4, 32))
def a_sum_of_few(rows):
    return lax.scan(lambda total, row: (total + row, None), rows[0], rows)[0]


# cancelled-one


@fires("cancelled-one", f32(8), severity="warning")
def a_logarithm_of_one_and_a_small_value(x):
    return jnp.log(1.0 + x)  #!


@fires("cancelled-one", f32(8), bf16(8), severity="warning")
def an_entropy_of_a_sigmoid(x, y):
    p = jax.nn.sigmoid(x)
    wide = jnp.exp(y.astype(jnp.float32))
    return jnp.log(1 - p) + (wide - 1.0)  #!


@fires("cancelled-one", f32(8), severity="warning")
def a_softplus_that_is_written_out(x):
    return jnp.log(jnp.exp(x) + 1)  #!


@silent("cancelled-one", f32(8))
def functions_that_are_made_for_small_values(x):
    return jnp.log1p(x) + jnp.expm1(x) + jax.nn.softplus(x) + jax.nn.log_sigmoid(-x)


@silent("cancelled-one", f32(8), i32(8))
def ones_that_lose_nothing(x, n):
    """Beside whole numbers, other constants, and a one that no logarithm is of."""
    counts = jnp.log(1 + n.astype(jnp.float32)) + jnp.log(n.astype(jnp.float32) + 1.0)
    return counts + jnp.log(2.0 + x) + (jnp.exp(x) - 2.0) + (1.0 - jnp.exp(x)) / (1.0 + x)


# fast-variance


@fires("fast-variance", f32(8, 64), severity="warning")
def a_norm_with_a_fast_variance(x):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.mean(x**2, -1, keepdims=True) - mean**2  #!
    return (x - mean) * lax.rsqrt(variance + 1e-5)


@fires("fast-variance", bf16(8, 64), severity="warning")
def flax_s_statistics(x):
    """What flax.nnx.LayerNorm computes unless use_fast_variance=False."""
    wide = x.astype(jnp.float32)
    mean, squares = jnp.mean(wide, -1), jnp.mean(lax.square(wide), -1)
    return jnp.maximum(0.0, squares - lax.square(mean))  #!


@silent("fast-variance", f32(8, 64))
def a_variance_of_differences(x):
    return jnp.var(x, -1) + jnp.mean(jnp.square(x - x.mean(-1, keepdims=True)), -1)


@silent("fast-variance", f32(8, 64), f32(8, 64))
def squares_of_two_things(x, y):
    """Of two variables, of a sum that is no mean's square, and squares that are added."""
    apart = jnp.mean(x**2, -1) - jnp.mean(y, -1) ** 2
    return apart + jnp.mean(x**2, -1) - jnp.mean(x, -1) + jnp.mean(x**2, -1) + jnp.mean(x, -1) ** 2


# unshifted-exp


@fires("unshifted-exp", f32(8, 16), f32(16, 32), severity="warning")
def a_log_of_a_sum_that_is_written_out(x, w):
    return jnp.log(jnp.sum(jnp.exp(x @ w), -1))  #!


@fires("unshifted-exp", f32(8, 16), f32(16, 32), f32(32), severity="warning")
def a_softmax_that_is_written_out(x, w, b):
    e = jnp.exp((x @ w + b) / 8.0)  #!
    return e / e.sum(-1, keepdims=True)


@silent("unshifted-exp", f32(8, 16), f32(16, 32))
def softmaxes_of_the_library(x, w):
    y = x @ w
    shifted = jnp.exp(y - lax.stop_gradient(y.max(-1, keepdims=True)))
    return jax.nn.softmax(y), jax.nn.logsumexp(y, -1), jax.nn.log_softmax(y), shifted / shifted.sum(-1, keepdims=True)


@silent("unshifted-exp", f32(8, 16), f32(16, 32))
def exponentials_that_are_bounded_or_in_no_sum(x, w):
    """Of capped logits, of what is not positive, and where no sum divides."""
    y = x @ w
    capped = jnp.exp(30.0 * jnp.tanh(y / 30.0))
    below = jnp.exp(-jnp.abs(y))
    return capped / capped.sum(-1, keepdims=True), below / below.sum(-1, keepdims=True), jnp.exp(y) * y


# lost-constant


@fires("lost-constant", f16(4, 4), severity="warning")
def a_mask_that_is_infinite(scores):
    return jnp.where(jnp.tri(4, dtype=bool), scores, -1e9)  #!


@fires("lost-constant", bf16(4, 4), severity="warning")
def a_float32_minimum_in_bfloat16(scores):
    mask = jnp.where(jnp.tri(4, dtype=bool), 0.0, jnp.finfo(jnp.float32).min)
    return scores + mask.astype(jnp.bfloat16)  #!


@fires("lost-constant", f16(4, 4), f16(4, 4), severity="error")
def zero_times_infinity(scores, mask):
    return scores + (1 - mask) * -1e9  #!


@fires("lost-constant", f16(4, 32), severity="warning")
def an_epsilon_that_is_zero(x):
    scale = jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True).astype(jnp.float16) + 1e-8  #!
    return x * lax.rsqrt(scale)


@fires("lost-constant", f16(4, 32), severity="warning")
def an_epsilon_that_is_subnormal(x):
    return x / (jnp.abs(x).sum() + 1e-6)  #!


@fires("lost-constant", f16(4, 4), severity="warning")
def a_mask_of_a_step_of_a_scan(scores):
    def step(total, row):
        return total + jnp.where(jnp.arange(4) < 2, row, -1e9), None  #!

    return lax.scan(step, jnp.zeros(4, jnp.float16), scores)[0]


@fires("lost-constant", f16(4, 4), bf16(4, 4), severity="warning")
def a_mask_that_is_multiplied_before_it_is_cast(scores, seen):
    mask = (1 - seen.astype(jnp.float32)) * -1e9
    return scores + mask.astype(jnp.float16)  #!


@fires("lost-constant", bf16(4, 4), severity="warning")
def two_masks_that_add_up_to_infinity(scores):
    causal = jnp.where(jnp.tri(4, dtype=bool), 0, jnp.finfo(jnp.bfloat16).min).astype(jnp.bfloat16)
    padded = jnp.where(jnp.arange(4) < 2, 0, jnp.finfo(jnp.bfloat16).min).astype(jnp.bfloat16)
    return scores + causal + padded  #!


@fires("lost-constant", f16(4, 4), severity="warning")
def a_lowest_number_and_a_score(scores):
    mask = jnp.where(jnp.tri(4, dtype=bool), 0, jnp.finfo(jnp.float16).min).astype(jnp.float16)
    return scores + mask  #!


@fires("lost-constant", f16(4, 4), severity="warning")
def a_mask_in_eight_bits(scores):
    return jnp.where(jnp.tri(4, dtype=bool), scores, -1e4).astype(jnp.float8_e4m3fn)  #!


@fires("lost-constant", bf16(4, 32), f16(4, 32), severity="warning")
def bounds_that_are_zero_and_one(p, q):
    return jnp.log1p(-jnp.clip(p, 1e-7, 1 - 1e-7)), jnp.log(jnp.clip(q, 1e-12, None))  #!


@fires("lost-constant", bf16(4, 32), severity="warning")
def an_epsilon_that_one_swallows(p):
    one = jnp.ones((), p.dtype) + 1e-7  #!
    return jnp.log(one - p)


@fires("lost-constant", f16(4, 32), severity="warning")
def a_least_divisor_that_is_zero(x):
    return x / jnp.maximum(jnp.abs(x).sum(), 1e-12)  #!


@silent("lost-constant", f16(4, 4), bf16(4, 4))
def masks_that_fit(narrow, wide):
    seen = jnp.tri(4, dtype=bool)
    narrow = jnp.where(seen, narrow, -jnp.inf), jnp.where(seen, narrow, jnp.finfo(jnp.float16).min)
    return narrow, jnp.where(seen, wide, -1e9), wide + jnp.where(seen, 0.0, -1e30).astype(jnp.bfloat16)


@silent("lost-constant", f16(4, 4), bf16(4, 4), bf16(4, 4))
def masks_that_are_added_once(narrow, wide, seen):
    mask = (1 - seen) * jnp.finfo(jnp.bfloat16).min
    return narrow + jnp.where(jnp.tri(4, dtype=bool), 0, -1e4).astype(jnp.float16), wide + mask


@silent("lost-constant", bf16(4, 32), f32(4, 32), f16(4, 32))
def numbers_that_are_held(x, y, z):
    averages = 0.9 * x + 0.1 * x * x, 0.999 * y + 0.001 * y * y, x + 0.001 * x
    return averages, jnp.clip(x, 0.0, 1.0), y / (1 + 1e-6), jnp.where(z > 0, z, 0.0), z * jnp.float16(2.0**-14)


@silent("lost-constant", bf16(4, 32), f32(4, 32), f16(4, 32))
def epsilons_that_are_there(x, y, z):
    near = lax.rsqrt(jnp.mean(x * x) + 1e-6), jnp.log(y + 1e-12)
    return near, z / (jnp.abs(z).sum() + 1e-3), z + 0.0, jnp.sqrt(jnp.maximum(z, 0.0))


# left-f64


@fires("left-f64", f32(4), severity="note")
def a_cast_to_float64(x):
    return jnp.sin(x.astype(np.float64)) * 2  #!


@fires("left-f64", f64(4), f32(4), severity="error", platform="tpu")
def an_argument_in_float64(x, y):
    z = x.astype(np.float32)  #!
    return z + y


@silent("left-f64", f32(4), i32(4))
def no_float64(x, i):
    return jnp.where(i > 0, x * 2.5, np.pi)


@silent("left-f64", f32(4), platform="tpu")
def wide_integers(x):
    return jnp.arange(4, dtype=np.int64) + x.astype(np.int64)


# there-and-back


@fires("there-and-back", f32(4, 32))
def rounded_and_read_wide(x):
    narrow = jnp.tanh(x).astype(jnp.bfloat16)  #!
    return narrow.reshape(32, 4).astype(jnp.float32) * 2


@fires("there-and-back", f16(4, 32))
def cast_up_and_down(x):
    return x.astype(jnp.float32).astype(jnp.float16) * 2  #!


@silent("there-and-back", f32(4, 32), bf16(32, 32))
def rounded_and_multiplied(x, w):
    narrow = x.astype(jnp.bfloat16)
    return narrow @ w + narrow.astype(jnp.float32).sum().astype(jnp.bfloat16)


@silent("there-and-back", bf16(4, 32))
def something_between(x):
    return jnp.tanh(x.astype(jnp.float32)).astype(jnp.bfloat16)


@silent("there-and-back", f32(4, 32))
def rounded_and_returned(x):
    narrow = x.astype(jnp.bfloat16)
    return narrow, narrow.astype(jnp.float32)


@silent("there-and-back", f32(4, 32))
def rounded_explicitly(x):
    return lax.reduce_precision(x, 8, 7) * 2


# overflow


@fires("overflow", f16(4, 32), extents={"hidden": (-1.0, 70_000.0)}, severity="error")
def more_than_float16_holds(x):
    return tap(x * 3, "hidden") + 1  #!


@fires("overflow", f16(4, 32), f16(32, 32), extents={"out": (-20_000.0, 3.0), "hidden": (0, 9e4)}, severity="warning")
def nearly_more_than_float16_holds(x, w):
    hidden = tap(x.astype(jnp.float32), "hidden")
    return tap(hidden.astype(jnp.float16) @ w, "out")  #!


@fires("overflow", bf16(4, 32), extents={"raw": (-np.inf, 3.0), "scaled": (-np.inf, 3.0)}, severity="error")
def the_first_infinity_alone(x):
    raw = tap(x * x, "raw")  #!
    return tap(raw / 2, "scaled")


@fires("overflow", f16(4, 4), extents={"masked": (-np.inf, np.inf)}, severity="error")
def an_infinity_that_is_no_mask(scores):
    return tap(jnp.where(jnp.tri(4, dtype=bool), scores, -jnp.inf), "masked")  #!


@silent("overflow", bf16(4, 32), extents={"hidden": (-1e30, 1e30)})
def bfloat16_holds_it(x):
    return tap(x * 3, "hidden")


@silent("overflow", f16(4, 32), extents={"hidden": (-9, 16_000.0), "other": (0, 1e6), "odd": (np.nan, np.nan)})
def within_float16(x):
    return tap(tap(x * 3, "hidden"), "odd")


@silent("overflow", f16(4, 4), extents={"masked": (-1e30, 12.0), "other": (-np.inf, 12.0)})
def masks_of_a_wider_run(scores):
    masked = tap(jnp.where(jnp.tri(4, dtype=bool), scores, jnp.finfo(scores.dtype).min), "masked")
    return masked, tap(jnp.where(jnp.tri(4, dtype=bool), scores, -jnp.inf), "other")


# refused-preset


@fires("refused-preset", bf16(4, 32), bf16(32, 8), severity="error", platform="tpu")
def bfloat16_sums(x, w):
    return lax.dot(x, w, precision=lax.DotAlgorithmPreset.BF16_BF16_BF16)  #!


@fires("refused-preset", f32(4, 32), f32(32, 8), severity="note")
def tensor_float32(x, w):
    return jnp.einsum("ab,bc->ac", x, w, precision=lax.DotAlgorithmPreset.TF32_TF32_F32)  #!


@silent("refused-preset", f32(4, 32), f32(32, 8), platform="tpu")
def three_passes(x, w):
    return lax.dot(x, w, precision=lax.DotAlgorithmPreset.BF16_BF16_F32_X3)


@silent("refused-preset", f32(4, 32), f32(32, 8), platform="tpu")
def highest(x, w):
    return jnp.matmul(x, w, precision="highest")


# one-pass-product


@fires("one-pass-product", f32(64, 256), f32(256, 128))
def float32_product(x, w):
    return x @ w  #!


@fires("one-pass-product", bf16(64, 256), f32(256, 128), bf16(128, 128))
def one_wide_operand_of_two_products(x, w, u):
    y = jnp.einsum("ab,bc->ac", jnp.tanh(x.astype(jnp.float32)), w)  #!
    return y.astype(jnp.bfloat16) @ u


@silent("one-pass-product", f32(64, 256), f32(256, 128))
def six_passes(x, w):
    return jnp.matmul(x, w, precision="highest")


@silent("one-pass-product", bf16(64, 256), bf16(256, 128))
def bfloat16_values_cast_up(x, w):
    return jnp.einsum("ab,bc->ac", x.astype(jnp.float32).reshape(64, 256), w.astype(jnp.float32))


@silent("one-pass-product", bf16(64, 256), bf16(4, 256, 256))
def bfloat16_values_cast_up_in_a_loop(x, weights):
    def layer(x, w):
        return jax.jit(lambda x, w: x.astype(jnp.float32) @ w)(x, w.astype(jnp.float32)).astype(x.dtype), None

    return lax.scan(layer, x, weights)[0]


# two-units


@fires("two-units", phases=((f32(1, 256), f32(256, 512)), (f32(64, 256), f32(256, 512))))
def one_row_and_many(x, w):
    return x @ w  #!


@fires("two-units", phases=((f32(64, 256), f32(256, 512)), (f32(256), f32(256, 512))))
def many_rows_and_a_vector(x, w):
    return jnp.tanh(x).dot(w)  #!


@silent("two-units", phases=((f32(1, 256), f32(256, 512)), (f32(64, 256), f32(256, 512))))
def one_row_and_many_exactly(x, w):
    return jnp.matmul(x, w, precision="highest")


@silent("two-units", phases=((bf16(1, 256), bf16(256, 512)), (bf16(64, 256), bf16(256, 512))))
def one_row_and_many_in_bfloat16(x, w):
    return x @ w


@silent("two-units", phases=((f32(32, 256), f32(256, 512)), (f32(64, 256), f32(256, 512))))
def many_rows_and_more(x, w):
    return x @ w


# hidden-bf16


@fires("hidden-bf16", i32(64), f32(512, 128), f32(128, 128))
def rows_that_a_product_reads(tokens, table, w):
    rows = table[tokens]  #!
    return rows @ w


@fires("hidden-bf16", f32(64, 128), f32(128, 128))
def activations_saved_for_a_gradient(x, w):
    def loss(w):
        hidden = jnp.tanh(x @ w)
        return jnp.sum(jnp.tanh(hidden @ w))  #!

    return jax.grad(loss)(w)


@fires("hidden-bf16", f32(64, 256), f32(256, 256), f32(256, 256))
def two_results_of_one_fusion(x, w, v):
    a, b = x[:, :128], x[:, 128:]
    first = jnp.tanh(a) * b  #!
    second = jnp.tanh(b) * a  #!
    both = jnp.concatenate([first, second], -1)
    return (both @ w) @ (both @ v).T


@silent("hidden-bf16", f32(64, 256), f32(256, 256), f32(256, 256))
def two_results_that_exact_products_read(x, w, v):
    a, b = x[:, :128], x[:, 128:]
    both = jnp.concatenate([jnp.tanh(a) * b, jnp.tanh(b) * a], -1)
    return jnp.matmul(both, w, precision="highest") @ jnp.matmul(both, v, precision="highest").T


@silent("hidden-bf16", i32(64), f32(512, 128), f32(128, 128))
def rows_that_an_exact_product_reads(tokens, table, w):
    rows = table[tokens]
    return jnp.matmul(rows, w, precision="highest")


@silent("hidden-bf16", i32(64), f32(512, 128), bf16(128, 128))
def rows_that_the_program_rounds(tokens, table, w):
    rows = table[tokens]
    return rows.astype(jnp.bfloat16) @ w


# added-rounding


@fires("added-rounding", f32(256, 512), f32(512, 512), f32(512, 512))
def a_product_that_a_product_reads(x, w, u):
    y = x @ w  #!
    return y @ u


@fires("added-rounding", f32(256, 512), f32(512, 512), f32(512, 512))
def a_product_that_a_batch_of_products_reads(x, w, u):
    y = jnp.einsum("ab,bc->ac", x, w)  #!
    return jnp.einsum("abc,cd->abd", y.reshape(16, 16, 512), u)


@silent("added-rounding", f32(256, 512), f32(512, 512), f32(512, 512))
def a_product_that_an_exact_product_reads(x, w, u):
    y = jnp.matmul(x, w, precision="highest")
    return jnp.matmul(y, u, precision="highest")


@silent("added-rounding", f32(256, 512), f32(512, 512), bf16(512, 512))
def a_product_that_the_program_rounds(x, w, u):
    y = (x @ w).astype(jnp.bfloat16)
    return y @ u


@silent("added-rounding", bf16(256, 512), bf16(512, 512))
def a_bfloat16_product(x, w):
    return jnp.tanh(x @ w)


# custom-call


@fires("custom-call", f32(64, 512))
def largest(x):
    return lax.top_k(x, 4)[0]  #!


@fires("custom-call", f32(128, 128))
def kernel(x):
    def body(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...])

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)  #!


@silent("custom-call", f32(64, 512))
def largest_of_all(x):
    return jnp.max(x, -1), jnp.argmax(x, -1)


@silent("custom-call", f32(512, 64), i32(8), i32(8))
def indices_that_are_packed(table, i, j):
    return table[i, j]


@silent("custom-call", f32(512, 64), i32(8))
def gathered(x, i):
    return x.at[i].get(mode="promise_in_bounds")


# cache-alias


@fires("cache-alias", f32(1024), f32(), donated=(0,))
def another_format(cache, x):
    return cache.astype(jnp.bfloat16) + x.astype(jnp.bfloat16)


@fires("cache-alias", f32(1024), f32(), donated=(0,))
def another_length(cache, x):
    return jnp.concatenate([cache, cache]) + x


@silent("cache-alias", f32(1024), f32(), donated=(0,))
def the_same_format(cache, x):
    return cache.at[3].set(x)


@silent("cache-alias", f32(1024), f32())
def nothing_donated(cache, x):
    return cache[:8] + x


# narrow-integers


def turned(x, positions):
    """RoPE on the last axis of x [T, D]."""
    half = x.shape[-1] // 2
    angle = positions.astype(jnp.float32)[:, None] * 1e4 ** (-jnp.arange(half) / half)
    a, b = x[:, :half].astype(jnp.float32), x[:, half:].astype(jnp.float32)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


@fires("narrow-integers", bf16(300, 16), severity="error")
def positions_by_a_cumulative_sum(x):
    return turned(x, jnp.cumsum(jnp.ones(300, x.dtype)) - 1)  #!


@fires("narrow-integers", f16(3000, 16), severity="error")
def positions_made_in_float16(x):
    return turned(x, jnp.arange(3000, dtype=x.dtype))  #!


@fires("narrow-integers", bf16(4, 512), severity="error")
def places_in_an_expert_compared_with_its_capacity(router):
    chosen = jax.nn.one_hot(jnp.argmax(router, -1), 8, dtype=jnp.bfloat16)
    chosen = jnp.tile(chosen, (256, 1))
    place = jnp.cumsum(chosen, 0)  #!
    return jnp.where(place <= 512, chosen, 0)


@fires("narrow-integers", f32(512, 8), bf16(512), severity="error")
def the_last_token_by_a_count(table, mask):
    last = (mask > 0).astype(jnp.bfloat16).sum(dtype=jnp.bfloat16) - 1  #!
    return table[last.astype(jnp.int32)]


@fires("narrow-integers", bf16(512, 512), severity="error")
def distances_added_to_scores(scores):
    far = jnp.arange(512, dtype=jnp.bfloat16)  #!
    return jax.nn.softmax((scores - 0.25 * far).astype(jnp.float32))


@silent("narrow-integers", f32(4, 512))
def a_mask_that_is_added_to_scores(scores):
    mask = jnp.where(jnp.tri(4, 512, dtype=bool), 0, -10_000).astype(jnp.bfloat16)
    return jax.nn.softmax(scores + mask.astype(jnp.float32))


@fires("narrow-integers", bf16(8, 16), i32(8), severity="warning")
def positions_of_any_size(x, positions):
    return turned(x, positions.astype(x.dtype))  #!


@fires("narrow-integers", i32(1), bf16(4, 512), severity="warning")
def lengths_compared_in_bfloat16(lengths, x):
    seen = jnp.arange(512) < lengths.astype(jnp.bfloat16).astype(jnp.int32)  #!
    return jnp.where(seen, x, 0)


@fires("narrow-integers", bf16(300, 16), severity="error")
def positions_counted_by_a_scan(x):
    def step(position, row):
        return position + 1, turned(row[None], position[None])  #!

    return lax.scan(step, jnp.zeros((), jnp.bfloat16), x)[1]


@fires("narrow-integers", bf16(20, 20, 16), severity="error")
def positions_counted_by_two_scans(x):
    def step(position, row):
        return position + 1, turned(row[None], position[None])  #!

    def block(position, rows):
        return lax.scan(step, position, rows)

    return lax.scan(block, jnp.zeros((), jnp.bfloat16), x)[1]


@silent("narrow-integers", bf16(128, 16), i32(128))
def positions_that_fit(x, steps):
    def step(position, row):
        return position + 1, turned(row[None], position[None])

    counted = lax.scan(step, jnp.zeros((), jnp.bfloat16), x)[1]
    other = jnp.clip(steps, 0, 255), steps % 256, 2 * jnp.arange(128), steps.astype(jnp.int8)
    return counted, turned(x, jnp.arange(128, dtype=x.dtype)), [turned(x, o.astype(x.dtype)) for o in other]


@silent("narrow-integers", bf16(300, 16), i32(4))
def positions_in_int32(x, lengths):
    positions = jnp.cumsum(jnp.ones(300, jnp.int32)) - 1
    seen = positions[None] < lengths[:, None]
    return turned(x, positions).astype(x.dtype), seen.astype(x.dtype) @ x


@silent("narrow-integers", bf16(4, 512), bf16(512, 64), i32(4))
def numbers_that_place_nothing(x, w, lengths):
    mean = (x @ w) / lengths.astype(x.dtype)[:, None]
    near = jnp.where(lengths.astype(x.dtype) > 0, 1, 0)
    quantised = jnp.clip(jnp.round(x * 16), -127, 127).astype(jnp.int8)
    sums = lax.dot(quantised, w.astype(jnp.int8), preferred_element_type=jnp.int32)
    return mean, near, jax.nn.softmax((sums.astype(x.dtype) * 0.01).astype(jnp.float32)), x[:, :300] > x[:, 200:500]


@silent("narrow-integers", bf16(256, 16))
def a_loop_that_ends_before(x):
    def step(state):
        i, out = state
        return i + 1, out + turned(x, jnp.full(256, i, jnp.bfloat16))

    return lax.while_loop(lambda state: state[0] < 250, step, (0, jnp.zeros((256, 16))))


# narrow-moments


@fires("narrow-moments", bf16(32, 32), bf16(32, 32), severity="error")
def an_average_that_forgets_nothing(mean, gradient):
    return 0.999 * mean + 0.001 * (gradient * gradient)  #!


@fires("narrow-moments", bf16(32, 32), f32(32, 32), severity="error")
def a_second_moment_made_in_float32_and_kept_in_bfloat16(moment, gradient):
    wide = moment.astype(jnp.float32)
    wide = 0.999 * wide + 0.001 * gradient**2  #!
    return wide.astype(jnp.bfloat16), gradient / jnp.sqrt(wide + 1e-8)


@fires("narrow-moments", bf16(32), f32(1000, 32), severity="error")
def a_moment_that_a_loop_keeps(moment, gradients):
    def step(moment, gradient):
        moment = moment + (0.001 * (gradient - moment.astype(jnp.float32))).astype(moment.dtype)  #!
        return moment, None

    return lax.scan(step, moment, gradients)[0]


@fires("narrow-moments", bf16(32), f32(32), severity="warning")
def momentum_in_bfloat16(momentum, gradient):
    return (0.9 * momentum.astype(jnp.float32) + gradient).astype(momentum.dtype)  #!


@fires("narrow-moments", f16(32), f32(32), f32(), severity="warning")
def a_moment_whose_decay_is_given(moment, gradient, decay):
    wide = decay * moment.astype(jnp.float32) + (1 - decay) * gradient  #!
    return wide.astype(moment.dtype)


@fires("narrow-moments", bf16(32), f32(32), severity="error")
def a_moment_in_a_kernel(moment, gradient):
    def body(m_ref, g_ref, out_ref):
        wide = 0.999 * m_ref[...].astype(jnp.float32) + 0.001 * g_ref[...] ** 2  #!
        out_ref[...] = wide.astype(out_ref.dtype)

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(moment.shape, moment.dtype), interpret=True)(
        moment, gradient
    )


@silent("narrow-moments", f32(32), bf16(32))
def a_moment_in_float32(moment, gradient):
    moment = 0.999 * moment + 0.001 * gradient.astype(jnp.float32) ** 2
    return moment, gradient / jnp.sqrt(moment + 1e-8).astype(gradient.dtype)


@silent("narrow-moments", bf16(4, 32), bf16(32, 32))
def residuals_and_mixtures_are_no_averages(x, w):
    y = jnp.tanh(x @ w)
    return 0.5 * x + 0.5 * y, x + 0.1 * y, (0.9 * x + 0.1 * y) @ w


@silent("narrow-moments", bf16(32, 32), f32(32, 32), f32(32, 32))
def parameters_in_bfloat16_beside_moments_in_float32(w, moment, gradient):
    moment = 0.9 * moment + 0.1 * gradient
    return (w.astype(jnp.float32) - 1e-3 * moment).astype(w.dtype), moment


# narrow-angles


def frequencies(n, dtype=jnp.float32):
    return (1e4 ** (-jnp.arange(n) / n)).astype(dtype)


@fires("narrow-angles", i32(300), severity="error")
def frequencies_rounded(positions):
    inverse = (1e4 ** (-jnp.arange(64) / 64)).astype(jnp.bfloat16)  #!
    return jnp.cos(positions.astype(jnp.float32)[:, None] * inverse.astype(jnp.float32))


@fires("narrow-angles", i32(300), bf16(64), severity="error")
def frequencies_that_are_given_in_bfloat16(positions, inverse):
    angle = positions.astype(jnp.float32)[:, None] * inverse.astype(jnp.float32)  #!
    return jnp.sin(angle), jnp.cos(angle)


@fires("narrow-angles", i32(300), f32(64), severity="error")
def an_angle_in_bfloat16(positions, inverse):
    angle = (positions.astype(jnp.float32)[:, None] * inverse).astype(jnp.bfloat16)  #!
    return jnp.exp(1j * angle.astype(jnp.complex64))


@fires("narrow-angles", f16(8), severity="error")
def steps_of_a_diffusion(t):
    angle = t.astype(jnp.float32)[:, None] * frequencies(64)  #!
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


@fires("narrow-angles", i32(2, 64, 3), f32(3, 32), severity="warning")
def three_axes_by_a_product(positions, inverse):
    angle = jnp.einsum("bti,if->btf", positions.astype(jnp.float32), inverse)  #!
    return jnp.cos(angle)


@fires("narrow-angles", i32(2, 64), severity="note")
def an_outer_product(positions):
    return jnp.cos(jnp.einsum("bt,f->btf", positions.astype(jnp.float32), frequencies(32)))  #!


@fires("narrow-angles", i32(2, 64, 3), f32(3, 32), severity="error", platform="tpu")
def three_axes_on_a_tpu(positions, inverse):
    return jnp.sin(positions.astype(jnp.float32) @ inverse)  #!


@silent("narrow-angles", i32(300), bf16(300, 128))
def angles_in_float32(positions, x):
    angle = positions.astype(jnp.float32)[:, None] * frequencies(64)
    return x[:, :64] * jnp.cos(angle).astype(x.dtype), x[:, 64:] * jnp.sin(angle.astype(jnp.float32)).astype(x.dtype)


@silent("narrow-angles", i32(2, 64, 3), f32(3, 32), platform="tpu")
def three_axes_by_an_exact_product(positions, inverse):
    return jnp.sin(jnp.matmul(positions.astype(jnp.float32), inverse, precision="highest"))


@silent("narrow-angles", bf16(8, 32), bf16(32, 32), bf16(8, 3))
def sines_of_activations(x, w, coordinates):
    hidden = jnp.sin(30 * (x @ w))
    return jnp.sin(hidden.astype(jnp.float32)), jnp.sin(
        coordinates[..., None] * jnp.exp2(jnp.arange(10, dtype=x.dtype))
    )


@silent("narrow-angles", bf16(300, 16))
def positions_are_of_another_rule(x):
    return turned(x, jnp.cumsum(jnp.ones(300, x.dtype)) - 1)
