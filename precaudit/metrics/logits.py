"""Distances between next-token distributions."""

import numpy as np

from precaudit.formats import Array


def log_softmax(x: Array) -> Array:
    """Log softmax over the last axis in FP64."""
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl(p_logits: Array, q_logits: Array) -> float:
    """KL(p ‖ q) in nats between the softmaxes of two logit rows [V]; NaN when either holds NaN."""
    with np.errstate(invalid="ignore"):
        p, q = log_softmax(p_logits.astype(np.float64)), log_softmax(q_logits.astype(np.float64))
        return float(np.sum(np.exp(p) * (p - q)))
