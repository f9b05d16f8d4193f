"""Other ways to sum attention: a block of keys at a time, and softmax without its maximum."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from precaudit.models.numpy_decoder.model import all_scores
from precaudit.models.numpy_decoder.operators import AttentionRule, flash_attend
from precaudit.models.numpy_decoder.rounding import Blocks, Cast, Rounding
from precaudit.numbers.arrays import Array, identity
from precaudit.references.mutations.forms import Inputs, key_head_of
from precaudit.schema.metrics.rows import unseen


@dataclass(frozen=True)
class Flash:
    """Attention a block of keys at a time with a running maximum (Dao et al. 2022, algorithm 1).

    Exponentials are rounded as probabilities before they are normalised; ``total`` rounds the running output and sum,
    ``rescale``: what the sum and the output are multiplied with where the maximum rises.
    """

    block: int = 128
    total: Callable[[Array], Array] = identity
    rescale: tuple[Cast, Cast] = (np.exp, np.exp)

    def __call__(self, o: Inputs, r: Rounding) -> Array:
        """Return attention's output [T, H, K]."""
        q, k, v = o.values
        rule = AttentionRule.of(o.config, o.layer)
        hidden = unseen(np.asarray(o.positions), len(k), rule.window)
        s = np.where(hidden, -np.inf, all_scores(q, k, rule, r))
        running, blocks = replace(r, running=self.total), Blocks(self.block, o.start)
        heads = enumerate(key_head_of(o, q.shape[1]))
        return np.stack([flash_attend(s[h], v[:, g], running, blocks, self.rescale) for h, g in heads], axis=1)


def not_rescaled(block: int) -> Iterator[tuple[str, str, Flash]]:
    """Yield (name, what it means, form) of blocks whose sums are not rescaled when the running maximum rises."""
    ways: dict[str, tuple[Cast, Cast]] = {
        "sum and output": (np.ones_like, np.ones_like),
        "output": (np.exp, np.ones_like),
        "sum": (np.ones_like, np.exp),
    }
    for name, rescale in ways.items():
        says = f"the running {name} of blocks of {block} keys are not rescaled when the maximum rises"
        says = says if "and" in name else says.replace(" are not", " is not")
        yield f"{name} not rescaled", says, Flash(block=block, rescale=rescale)


def without_shift(s: Array) -> Array:
    """Return softmax of float32 scores without their maximum: exp overflows above 88.7, where FP64 would not.

    XLA multiplies by the sum's reciprocal and flushes it to zero below the smallest normal number.
    """
    e = np.exp(s.astype(np.float32))
    inverse = np.float32(1) / e.sum(axis=-1, keepdims=True)
    inverse = np.where(np.abs(inverse) < np.finfo(np.float32).tiny, np.float32(0), inverse)
    return np.asarray(e * inverse, np.float64)


def narrow_softmax(
    narrow: Callable[[Array], Array], total: Callable[[Array], Array], one_by_one: bool = False, fused: bool = False
) -> Callable[..., Array]:
    """Return softmax whose shifted scores, exponentials and quotient are rounded by ``narrow``, sums by ``total``.

    ``one_by_one``: after every term. ``fused``: sums are of exponentials before they are rounded, as XLA on a CPU adds
    them up in the loop that makes them.
    """

    def softmax(s: Array) -> Array:
        s = narrow(s)
        unrounded = np.exp(narrow(s - s.max(axis=-1, keepdims=True)))
        e = narrow(unrounded)
        if not one_by_one:
            return narrow(e / total((unrounded if fused else e).sum(axis=-1, keepdims=True)))
        whole = np.zeros(e.shape[:-1])
        for i in range(e.shape[-1]):
            whole = total(whole + e[..., i])
        return narrow(e / whole[..., None])

    return softmax
