"""Distances between next-token distributions."""

from collections.abc import Iterable

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.schema.records.base import json_number
from precaudit.schema.records.errors import Distribution


def log_softmax(x: Array) -> Array:
    """Log softmax over the last axis in FP64."""
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


PEAKED = 1e-6  # of the probability beside the most likely token; E δ² − (E δ)² keeps ten digits above
SMALL = 1e-4  # below, eᵈ − 1 − d is taken from its series: a difference of FP64 numbers has no digits left


def is_distribution(logits: Array) -> bool:
    """Whether a row of logits [V] has a softmax: no NaN, and a largest that is finite. −∞ is a token that cannot be."""
    return bool(np.isfinite(logits.max(initial=-np.inf)))


def kl(p_logits: Array, q_logits: Array) -> float:
    """KL(p ‖ q) in nats between the softmaxes of two logit rows [V]; NaN when either holds NaN.

    Σ p (eᵈ − 1 − d) with d = log q − log p: Σ p eᵈ = 1, and no term is negative, where −Σ p d is a difference of large
    ones. A token of probability 0 in p adds its q.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        p, q = log_softmax(p_logits.astype(np.float64)), log_softmax(q_logits.astype(np.float64))
        d = q - p
        close = np.exp(p) * np.where(
            np.abs(d) < SMALL, d * d * (0.5 + d / 6 + d * d / 24), np.expm1(np.minimum(d, 1)) - d
        )
        possible = np.where(d > 1, np.exp(q) - np.exp(p) * (1 + d), close)
        return float(np.sum(np.where(np.isneginf(p), np.exp(q), possible)))


def total_variation(p_logits: Array, q_logits: Array) -> float:
    """½ Σ |p − q| of the softmaxes of two logit rows [V]: the share of draws that one would make otherwise; may be NaN.

    1 minus it is how often speculative sampling accepts a draft of q for p (Leviathan et al. 2023, corollary 3.6).
    |p − q| = min(p, q) (eᵈ − 1), d = |log q − log p|: where they are close the difference keeps its digits.
    """
    with np.errstate(invalid="ignore"):
        p, q = log_softmax(p_logits.astype(np.float64)), log_softmax(q_logits.astype(np.float64))
        low, high = np.minimum(p, q), np.maximum(p, q)
        d = np.where(np.isneginf(high), 0, high - low)
        apart = np.where(d > 1, np.exp(high) - np.exp(low), np.exp(low) * np.expm1(np.minimum(d, 1)))
        return float(0.5 * np.sum(apart))


def expected_kl(logits: Array, errors: Iterable[Array]) -> Array:
    """Return the mean [R] of ½ Var_p(δ) in nats: KL, to second order, of R logit rows [R, V] under errors δ.

    ``errors``: blocks [S, V] of any float format, one of them in FP64 at a time. A row's own draws are few: errors of
    other rows, brought to its size by the caller, are more of them. Of a row that is nearly all one token δ is taken
    from that token's: E δ² − (E δ)² would have no digits left.
    """
    p, total, n = np.exp(log_softmax(logits)), np.zeros(len(logits)), 0
    top = p.argmax(axis=1)
    rest = p.copy()
    rest[np.arange(len(p)), top] = 0
    peaked = rest.sum(axis=1) < PEAKED
    for block in errors:
        e = block.astype(np.float64)
        spread = p[~peaked]
        total[~peaked] += (0.5 * np.maximum(spread @ (e * e).T - (spread @ e.T) ** 2, 0.0)).sum(axis=1)
        for r in np.flatnonzero(peaked):
            d = e - e[:, top[r], None]
            total[r] += 0.5 * ((d * d) @ rest[r] - (d @ rest[r]) ** 2).sum()
        n += len(e)
    return total / max(n, 1)


def roundoff_kl(logits: Array) -> Array:
    """Return the KL [R] that FP64 itself makes of rows [R, V]: ½ (4 u max|x|)²."""
    return np.asarray(0.5 * (4 * 2.0**-53 * np.abs(np.where(np.isneginf(logits), 0, logits)).max(axis=-1)) ** 2)


def top_ids(x: Array, k: int) -> Array:
    """Return the indices of the ``k`` largest, largest first, lower index first where equal; NaN counts as largest."""
    k = min(k, len(x))
    y = np.where(np.isnan(x), np.inf, x)
    threshold = np.partition(y, len(y) - k)[len(y) - k]
    candidates = np.flatnonzero(y >= threshold)
    return candidates[np.lexsort((candidates, -y[candidates]))][:k]


def distribution(candidate: Array, reference: Array, positions: Array, noise: Array | None) -> Distribution:
    """Compare next-token distributions row by row: logits [T, V] in FP64 (docs/files.md).

    ``noise`` [T]: KL of emulated rounding. The chosen token is the candidate's top-1 (greedy decoding). A row with NaN
    agrees in nothing: rank V, KL NaN.
    """
    names = ("kl", "tv", "top1", "top5", "top50", "rank", "logprob_error", "gap")
    rows: dict[str, list[float]] = {name: [] for name in names}
    with np.errstate(invalid="ignore"):
        for c, r in zip(candidate, reference, strict=True):
            rows["kl"].append(kl(r, c))
            rows["tv"].append(total_variation(r, c))
            order_c, order_r = top_ids(c, 50), top_ids(r, 50)
            finite = is_distribution(c)
            for k in (1, 5, 50):
                same = len(np.intersect1d(order_c[:k], order_r[:k])) if finite else 0
                rows[f"top{k}"].append(same / min(k, len(c)))
            best = order_r[0]
            rows["rank"].append(int((c > c[best]).sum()) if finite else len(c))
            chosen = int(order_c[0])
            rows["logprob_error"].append(float(log_softmax(c)[chosen] - log_softmax(r)[chosen]))
            rows["gap"].append(float(r[best] - r[order_r[1]]) if len(r) > 1 else float("inf"))
    return Distribution(
        positions=tuple(int(p) for p in positions),
        kl_noise=None if noise is None else tuple(json_number(x) for x in noise),
        rank=tuple(int(x) for x in rows["rank"]),
        top1=tuple(rows["top1"]),
        top5=tuple(rows["top5"]),
        top50=tuple(rows["top50"]),
        kl=tuple(json_number(x) for x in rows["kl"]),
        logprob_error=tuple(json_number(x) for x in rows["logprob_error"]),
        gap=tuple(json_number(x) for x in rows["gap"]),
        tv=tuple(json_number(x) for x in rows["tv"]),
    )
