"""(|A|·|B|)ᵢ of every element of an operation: what its componentwise error bound grows with (Higham 2002, §3.5).

An operation evaluated on the absolute values of its inputs and tensors sums |terms| where it sums terms. Single
precision products are enough for a bound.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.model import Model, all_probs, all_scores, attention
from precaudit.models.numpy_decoder.operations import operations
from precaudit.models.numpy_decoder.operators import AttentionRule
from precaudit.models.numpy_decoder.passes import operand_roundoff
from precaudit.models.numpy_decoder.rounding import FP64, Rounding, single_precision_dot
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.policies import Policy

LARGEST = 600.0  # exponents beyond overflow FP64 with the factors around them
SINGLE = Rounding(dot=single_precision_dot)


def inner_roundoff(point: str, policy: Policy, config: DecoderConfig) -> float:
    """Return the largest unit roundoff inside an operation: of what it rounds on the way, else of its float32 sums.

    Probabilities that stay in float32 are rounded where the device multiplies them in narrower parts.
    """
    row = POINTS[point]
    keys = row.inner
    if any({"linear", "biased"} & set(group) for group in row.inner_places(config)):
        keys = (*keys, "activations")
    formats = [policy.format_of(key) for key in keys]
    narrow = operand_roundoff(policy.matmul) if row.kind == "mix" and policy.probs == "float32" else 0.0
    return max(narrow, *(FORMATS[name].unit_roundoff for name in ("float32", *formats)))


def rowwise(point: str, model: Model, layer: int | None, inputs: Sequence[Array]) -> Array:
    """Return |A|·|B| of an operation on rows (attention aside), in the shape of its output.

    RoPE is bounded by the sum of the two magnitudes it mixes, |a cos| + |b sin| ≤ |a| + |b|.
    """
    row, absolute = POINTS[point], [np.abs(x) for x in inputs]
    if row.kind == "head":
        return model.logits(absolute[0], [SINGLE], np.abs)[0]
    if row.kind == "route":
        return routing_magnitude(inputs[0], model.config.experts_used)
    context = model.context(layer, np.zeros(len(inputs[0])), SINGLE)
    weight = context.weight

    def magnitude(name: str) -> Array | None:
        found = weight(name)
        return None if found is None else np.abs(found)

    if row.normalises_inside(model.config):
        # What is summed is divided by its true size, not by that of the sum of sizes.
        operation = operations(model.config)[point]
        scales: list[Array] = []
        operation(replace(context, rounding=replace(FP64, norm_scale=lambda s: _note(scales, s))), *inputs)
        given = replace(SINGLE, norm_scale=lambda _s: scales.pop(0))
        out = operation(replace(context, weight=magnitude, rounding=given), *absolute)
    else:
        out = model.apply(point, replace(context, weight=magnitude), absolute)
    if row.rotates:
        half = model.config.rotary_size // 2
        both = out[..., :half] + out[..., half : 2 * half]
        return np.concatenate([both, both, out[..., 2 * half :]], axis=-1)
    return out


def _note(scales: list[Array], s: Array) -> Array:
    scales.append(s)
    return s


def attention_magnitude(q: Array, k: Array, v: Array, positions: Array, rule: AttentionRule, u: float) -> Array:
    """Return P|V| · (1 + (e^(2 max|s| u) − 1) / u) [T, H, K], u the unit roundoff of the scores.

    Scores off by s·u at most move a probability by a factor of e^(2 max|s| u) at most, and |s| ≤ ‖q‖ ‖k‖ · scale. To
    first order in u that is 1 + 2 max|s|; scores above 1/u are amplified to errors larger than that.
    """
    out = attention(q, k, np.abs(v), positions, rule, SINGLE)
    longest = np.sqrt(np.einsum("sgk,sgk->sg", k, k).max(axis=0))
    sizes = np.sqrt(np.einsum("thk,thk->th", q, q)) * np.repeat(longest, q.shape[1] // k.shape[1])
    exponent = np.minimum(2.0 * rule.scale * sizes * u, LARGEST)
    return out * (1.0 + np.expm1(exponent) / u)[:, :, None]


def score_magnitude(q: Array, k: Array, rule: AttentionRule) -> Array:
    """Return |Q|·|K|ᵀ · scale [H, T, S]; a cap only shrinks errors."""
    return all_scores(np.abs(q), np.abs(k), replace(rule, cap=None), SINGLE)


def probability_magnitude(s: Array, positions: Array, window: int | None) -> Array:
    """Return p · (1 + |s − max s|) [H, T, S]: the exponential's error is relative to its argument."""
    with np.errstate(invalid="ignore"):
        return all_probs(s, positions, window, SINGLE) * (1.0 + np.abs(s - s.max(axis=2, keepdims=True)))


def routing_magnitude(logits: Array, used: int) -> Array:
    """Return w · 2 (1 + |r − max r|) [T, E] of the chosen experts: a weight is a quotient of exponentials."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    weights = np.exp(shifted)
    chosen = shifted >= np.sort(shifted, axis=1)[:, [-used]]
    total = np.where(chosen, weights, 0.0).sum(axis=1, keepdims=True)
    return np.where(chosen, weights / total, 0.0) * 2.0 * (1.0 + np.abs(shifted))
