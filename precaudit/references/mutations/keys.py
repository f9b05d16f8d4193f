"""A key that attention leaves out: not seen at all, or its value dropped after softmax."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from precaudit.models.numpy_decoder.model import all_probs, all_scores
from precaudit.models.numpy_decoder.operators import AttentionRule
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.references.mutations.forms import Form, Inputs, key_head_of, on_inputs, on_scores
from precaudit.references.mutations.variants import Variant


def missing_keys(o: Inputs, candidate: Array, emulated: Array) -> Iterator[Variant]:
    """Yield attention without the one key that explains most of candidate − emulated [T, H, K]."""
    if o.row.kind == "softmax":
        gone = np.flatnonzero((np.abs(candidate).max(axis=(0, 1)) == 0) & (np.abs(emulated).max(axis=(0, 1)) > 0))
        ways: dict[str, Callable[[int], Form]] = {"omitted": unseen_key}
        found = {"omitted": int(gone[0])} if len(gone) else {}
    else:
        ways = {"omitted": unseen_key, "value dropped": valueless}
        found = _best(o, candidate - emulated)
    for how, key in found.items():
        says = {
            "omitted": f"no row attends to key {key}",
            "value dropped": f"the value of key {key} is taken as zero",
        }
        yield Variant(f"key {key} {how}", "semantics", says[how], ways[how](key), fitted=True)


def unseen_key(key: int) -> Form:
    """Return probabilities or attention's output without a key."""
    return on_scores(partial(_hide, key))


def _hide(key: int, _o: Inputs, s: Array) -> Array:
    s = s.copy()
    s[:, :, key] = -np.inf
    return s


def valueless(key: int) -> Form:
    """Return attention's output with a key's value zero."""

    def values(o: Inputs) -> tuple[Array, ...]:
        q, k, v = o.values
        v = v.copy()
        v[key] = 0.0
        return q, k, v

    return on_inputs(values)


def _best(o: Inputs, left: Array) -> dict[str, int]:
    """Return for each way the key s whose absence comes nearest to ``left`` D [T, H, K].

    Dropping a value adds −pₛvₛ. Leaving a key out adds w (y − vₛ), w = pₛ / (1 − pₛ). What stays of ‖D‖² is
    ‖D‖² − 2⟨D, d⟩ + ‖d‖², without ‖D‖² summed over heads for every s.
    """
    q, k, v = o.values
    rule = AttentionRule.of(o.config, o.layer)
    p = o.probs
    if p is None:
        p = all_probs(all_scores(q, k, rule, FP64), np.asarray(o.positions), rule.window, FP64)
    dropped, hidden = np.zeros(len(k)), np.zeros(len(k))
    clean = np.where(np.isfinite(left), left, 0.0)
    for h, g in enumerate(key_head_of(o, q.shape[1])):
        d, y, vs = clean[:, h], p[h] @ v[:, g], v[:, g]
        by_value, sizes = d @ vs.T, (vs * vs).sum(axis=1)
        dropped += (2 * p[h] * by_value + p[h] ** 2 * sizes).sum(axis=0)
        w = np.where(p[h] < 1, p[h] / np.maximum(1 - p[h], 1e-300), 0.0)
        along = (d * y).sum(axis=1, keepdims=True) - by_value
        length = (y * y).sum(axis=1, keepdims=True) - 2 * y @ vs.T + sizes
        hidden += (-2 * w * along + w**2 * length).sum(axis=0)
    return {"omitted": int(np.argmin(hidden)), "value dropped": int(np.argmin(dropped))}
