"""Rollout against trainer under the names that verl logs, in FP64 from two arrays of log-probabilities.

Names and definitions: verl's ``compute_offpolicy_metrics`` and ``compute_is_metrics`` (token level, threshold 2) in
``verl/trainer/ppo/rollout_corr_helper.py``, and ``calculate_debug_metrics`` in ``verl/utils/debug/metrics.py``. What is
otherwise here: no 1e-8 in denominators (identical inputs give 1 and 0 exactly); δ is not clamped to ±20 before it is
squared in chi2 (``saturated`` counts what verl clamps); a sequence without tokens is left out (verl counts it with a
perplexity of 1); one with a value that is no log-probability is left out and named in ``faults``.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.schema.records.base import Number, Record, json_number

THRESHOLD = 2.0  # rollout_is_threshold, verl's default; the lower one is its inverse
SAFETY_BOUND = 20.0  # |δ| above which verl clamps
CLIP = 0.2  # ε of PPO's and GRPO's clipped ratio
SERIES = 1e-4  # |δ| below which e^δ − 1 − δ is taken from its series: the difference has few digits left
SMALLER_IS_WORSE = ("rollout_is_eff_sample_size", "rollout_actor_probs_pearson_corr")


class Mismatch(Record, frozen=True, omit_defaults=False):
    """Two policies on the same tokens: δ = log π_train − log π_rollout, ρ = e^δ; E over tokens, S over sequences.

    kl E[−δ]; k3_kl E[ρ − δ − 1]; training_ppl, rollout_ppl S[exp(−mean log p)]; log_ppl_diff S[mean −δ], and of its
    sizes, its maximum and minimum; ppl_ratio S[exp(mean −δ)]; chi2_token E[ρ²] − 1; chi2_seq S[exp(2 Σδ)] − 1;
    rollout_is_eff_sample_size (E w)² / E w² with w = ρ clamped to [½, 2], a fraction;
    rollout_is_ratio_fraction_high, _low: ρ > 2, ρ < ½; rollout_probs_diff of |p_train − p_rollout| (std: n − 1);
    rollout_actor_probs_pearson_corr of the probabilities. Nats.

    Ours: abs_diff, mean, quantiles (linear) and maximum of |δ|; clip_fraction: ρ outside [0.8, 1.2]; first_divergence:
    the smallest token index at which it is, and diverged_sequence the row.

    ``sequences``, ``tokens``: judged. ``empty``: sequences without tokens. ``left_out``: sequences with a fault.
    ``faults``: {what: tokens}. ``overflowed``: metrics that are inf. ``saturated``: tokens and sequences with |δ| or
    |Σδ| > 20. None: not defined (nothing judged, one token, probabilities all equal).
    """

    sequences: int
    tokens: int
    empty: int
    left_out: int
    faults: Mapping[str, int]
    overflowed: tuple[str, ...] = ()
    saturated: int = 0
    kl: Number | None = None
    k3_kl: Number | None = None
    abs_diff_mean: Number | None = None
    training_ppl: Number | None = None
    rollout_ppl: Number | None = None
    log_ppl_diff: Number | None = None
    log_ppl_abs_diff: Number | None = None
    log_ppl_diff_max: Number | None = None
    log_ppl_diff_min: Number | None = None
    ppl_ratio: Number | None = None
    chi2_token: Number | None = None
    chi2_seq: Number | None = None
    rollout_is_eff_sample_size: Number | None = None
    rollout_is_ratio_fraction_high: Number | None = None
    rollout_is_ratio_fraction_low: Number | None = None
    rollout_probs_diff_mean: Number | None = None
    rollout_probs_diff_max: Number | None = None
    rollout_probs_diff_std: Number | None = None
    rollout_actor_probs_pearson_corr: Number | None = None
    abs_diff_p50: Number | None = None
    abs_diff_p90: Number | None = None
    abs_diff_p99: Number | None = None
    abs_diff_max: Number | None = None
    clip_fraction: Number | None = None
    first_divergence: int | None = None
    diverged_sequence: int | None = None


METRICS = tuple(
    name
    for name in Mismatch.__struct_fields__[Mismatch.__struct_fields__.index("kl") :]
    if name not in ("first_divergence", "diverged_sequence")
)


def mismatch(trainer: Array, rollout: Array, mask: Array) -> Mismatch:
    """Return the Mismatch of log-probabilities [sequences, tokens], of any float format, where ``mask`` is true.

    What stands outside the mask is not read. Raises ValueError where shapes differ.
    """
    train, roll = np.asarray(trainer, np.float64), np.asarray(rollout, np.float64)
    where = np.asarray(mask, bool)
    if train.ndim != 2 or train.shape != roll.shape or train.shape != where.shape:
        raise ValueError(f"shapes {train.shape}, {roll.shape} and {where.shape}; one [sequences, tokens] is wanted")
    train, roll = np.where(where, train, 0.0), np.where(where, roll, 0.0)
    faults: Counter[str] = Counter()
    bad = np.zeros(len(where), bool)
    for side, values in (("trainer", train), ("rollout", roll)):
        for name, found in _faults(values).items():
            bad |= found.any(axis=1)
            if count := int(found.sum()):
                faults[f"{side}: {name}"] = count
    empty = ~where.any(axis=1)
    kept = np.flatnonzero(~(bad | empty))
    counts = (len(kept), int(where[kept].sum()), int(empty.sum()), int(bad.sum()))
    if not len(kept):
        return Mismatch(sequences=0, tokens=0, empty=counts[2], left_out=counts[3], faults=dict(faults))
    with np.errstate(over="ignore", under="ignore"):
        made, saturated = _metrics(train[kept], roll[kept], where[kept])
    first = _first_divergence(train[kept] - roll[kept], where[kept])
    return Mismatch(
        sequences=counts[0],
        tokens=counts[1],
        empty=counts[2],
        left_out=counts[3],
        faults=dict(faults),
        overflowed=tuple(k for k, x in made.items() if x is not None and np.isinf(x)),
        saturated=saturated,
        **{k: None if x is None else json_number(x) for k, x in made.items()},
        first_divergence=None if first is None else first[1],
        diverged_sequence=None if first is None else int(kept[first[0]]),
    )


def _faults(values: Array) -> dict[str, Array]:
    """Return {what: where} of what is no log-probability of a token that was drawn."""
    with np.errstate(invalid="ignore"):
        return {"NaN": np.isnan(values), "positive": values > 0, "-inf": np.isneginf(values)}


def _metrics(train: Array, roll: Array, mask: Array) -> tuple[dict[str, float | None], int]:
    """Return the metrics of sequences that all have tokens and no fault, and how many δ and Σδ are beyond ±20."""
    a, b = train[mask], roll[mask]
    delta = a - b
    lengths = mask.sum(axis=1)
    sums = (train - roll).sum(axis=1, where=mask)
    diff = -sums / lengths
    ppl = [np.exp(-x.sum(axis=1, where=mask) / lengths).mean() for x in (train, roll)]
    weights = np.clip(np.exp(delta), 1 / THRESHOLD, THRESHOLD)
    apart = np.exp(np.maximum(a, b)) * -np.expm1(-np.abs(delta))
    size = np.abs(delta)
    p50, p90, p99 = np.quantile(size, (0.5, 0.9, 0.99))
    return {
        "kl": float(-delta.mean()),
        "k3_kl": float(k3(delta).mean()),
        "abs_diff_mean": float(np.abs(delta).mean()),
        "training_ppl": float(ppl[0]),
        "rollout_ppl": float(ppl[1]),
        "log_ppl_diff": float(diff.mean()),
        "log_ppl_abs_diff": float(np.abs(diff).mean()),
        "log_ppl_diff_max": float(diff.max()),
        "log_ppl_diff_min": float(diff.min()),
        "ppl_ratio": float(np.exp(diff).mean()),
        "chi2_token": float(np.expm1(2 * delta).mean()),
        "chi2_seq": float(np.expm1(2 * sums).mean()),
        "rollout_is_eff_sample_size": float(weights.mean() ** 2 / (weights * weights).mean()),
        "rollout_is_ratio_fraction_high": float((delta > np.log(THRESHOLD)).mean()),
        "rollout_is_ratio_fraction_low": float((delta < -np.log(THRESHOLD)).mean()),
        "rollout_probs_diff_mean": float(apart.mean()),
        "rollout_probs_diff_max": float(apart.max()),
        "rollout_probs_diff_std": float(apart.std(ddof=1)) if len(apart) > 1 else None,
        "rollout_actor_probs_pearson_corr": _pearson(np.exp(a), np.exp(b)),
        "abs_diff_p50": float(p50),
        "abs_diff_p90": float(p90),
        "abs_diff_p99": float(p99),
        "abs_diff_max": float(size.max()),
        "clip_fraction": float(_is_clipped(delta).mean()),
    }, int((size > SAFETY_BOUND).sum() + (np.abs(sums) > SAFETY_BOUND).sum())


def k3(delta: Array) -> Array:
    """Return e^δ − 1 − δ, which is never negative, with its digits where δ is small; inf where e^δ is."""
    near = delta * delta * (0.5 + delta / 6 + delta * delta / 24)
    with np.errstate(over="ignore"):
        return np.asarray(np.where(np.abs(delta) < SERIES, near, np.expm1(delta) - delta))


def _pearson(x: Array, y: Array) -> float | None:
    """Return the correlation of two arrays [N]; None where one is constant."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    x, y = ((z - z.mean()) / np.abs(z - z.mean()).max() for z in (x, y))
    return float(np.clip((x @ y) / np.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def _is_clipped(delta: Array) -> Array:
    return np.asarray((delta > np.log1p(CLIP)) | (delta < np.log1p(-CLIP)))


def _first_divergence(delta: Array, mask: Array) -> tuple[int, int] | None:
    """Return (row, token index in its row) of the first clipped token, fewest tokens into a sequence first."""
    clipped = _is_clipped(delta) & mask
    if not clipped.any():
        return None
    order = np.where(clipped, np.cumsum(mask, axis=1) - 1, np.iinfo(np.int64).max)
    row, column = np.unravel_index(int(np.argmin(order)), order.shape)
    return int(row), int(order[row, column])
