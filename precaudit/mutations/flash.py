"""Other ways to sum attention: a block of keys at a time, and softmax without its maximum."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from precaudit.arrays import Array, identity
from precaudit.metrics.rows import unseen
from precaudit.mutations.forms import Inputs, grouped
from precaudit.numpy_decoder.model import all_scores
from precaudit.numpy_decoder.operators import Rule
from precaudit.numpy_decoder.rounding import Rounding


@dataclass(frozen=True)
class Flash:
    """Attention a block of keys at a time with a running maximum (Dao et al. 2022, algorithm 1).

    Exponentials are rounded as probabilities before they are normalised; ``total`` rounds the running output and sum.
    """

    block: int = 128
    total: Callable[[Array], Array] = identity

    def __call__(self, o: Inputs, r: Rounding) -> Array:
        """Return attention's output [T, H, K]."""
        q, k, v = o.values
        rule = Rule.of(o.config, o.layer)
        hidden = unseen(np.asarray(o.positions), len(k), rule.window)
        s = np.where(hidden, -np.inf, all_scores(q, k, rule, r))
        heads = enumerate(grouped(o, q.shape[1]))
        return np.stack([self.attend(s[h], v[:, g], r) for h, g in heads], axis=1)

    def attend(self, s: Array, v: Array, r: Rounding) -> Array:
        """Return one head's output [T, K] from its scores [T, S], −inf where masked, and values [S, K]."""
        top, mass = np.full((len(s), 1), -np.inf), np.zeros((len(s), 1))
        out = np.zeros((len(s), v.shape[1]))
        for i in range(0, s.shape[1], self.block):
            part = s[:, i : i + self.block]
            new = np.maximum(top, part.max(axis=1, keepdims=True))
            with np.errstate(invalid="ignore"):
                shrink = np.where(np.isfinite(top), np.exp(top - new), 0.0)
                e = np.where(np.isfinite(part), np.exp(part - new), 0.0)
            mass = self.total(mass * shrink + e.sum(axis=1, keepdims=True))
            out = self.total(out * shrink + r.dot(r.probs(e), v[i : i + self.block]))
            top = new
        with np.errstate(invalid="ignore"):
            return r.attn_out(out / mass)


def unshifted(s: Array, r: Rounding) -> Array:
    """Return softmax of float32 scores without their maximum: exp overflows above 88.7, where FP64 would not.

    XLA multiplies by the sum's reciprocal and flushes it to zero below the smallest normal number.
    """
    e = np.exp(s.astype(np.float32))
    inverse = np.float32(1) / e.sum(axis=-1, keepdims=True)
    inverse = np.where(np.abs(inverse) < np.finfo(np.float32).tiny, np.float32(0), inverse)
    return np.asarray(e * inverse, np.float64)


def narrow_softmax(narrow: Callable[[Array], Array], total: Callable[[Array], Array]) -> Callable[..., Array]:
    """Return softmax whose shifted scores, exponentials and quotient are rounded by ``narrow``, sums by ``total``."""

    def softmax(s: Array, r: Rounding) -> Array:
        s = narrow(s)
        e = narrow(np.exp(narrow(s - s.max(axis=-1, keepdims=True))))
        return narrow(e / total(e.sum(axis=-1, keepdims=True)))

    return softmax
