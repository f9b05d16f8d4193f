"""Sizes of an error: over the tensor, and the worst token, head and channel with its index."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from precaudit.formats import FORMATS, Array, as_format, ordinals, widen
from precaudit.records import Number, Scope, Worst, number

MIN_CHANNEL_ROWS = 8  # below that a channel's norm is a handful of elements


@dataclass(frozen=True)
class Difference:
    """Two tensors in the canonical layout [T, H, K] in FP64, and where both are finite.

    ``error`` is candidate − reference with 0 where they cannot be subtracted; ``nonfinite`` counts the elements where
    either is NaN or infinite, equal infinities aside: a NaN agrees with nothing, not even with a NaN.
    """

    candidate: Array
    reference: Array
    error: Array
    nonfinite: int

    @classmethod
    def of(cls, candidate: Array, reference: Array) -> "Difference":
        """Subtract FP64 arrays of one shape; infinities are compared before values."""
        with np.errstate(invalid="ignore"):
            error = candidate - reference
        finite = np.isfinite(error)
        if finite.all():
            return cls(candidate, reference, error, 0)
        bad = ~finite & (candidate != reference)
        clean = np.where(finite, reference, 0.0)
        return cls(candidate, clean, np.where(finite, error, 0.0), int(bad.sum()))


def canonical(x: Array, axes: str) -> Array:
    """Return FP64 ``x`` as [T, H, K]: scores [H, T, S] become [T, H, S], [T, D] becomes [T, 1, D]."""
    y = widen(x) if x.dtype != np.float64 else x
    if axes == "HTS":
        return y.transpose(1, 0, 2)
    return y[:, None, :] if y.ndim == 2 else y


def norm(x: Array) -> float:
    """‖x‖₂."""
    flat = x.reshape(-1)
    return float(np.sqrt(np.dot(flat, flat)))


def ratio(a: float, b: float) -> float:
    """Return a / b with 0 / 0 = 0 and a / 0 = ∞."""
    return 0.0 if a == 0 else float("inf") if b == 0 else a / b


def sizes(d: Difference, stored: Array, axes: str) -> dict[str, Any]:
    """Return the sizes of an error as fields of an ErrorRecord; ``stored`` is the candidate in its own format.

    mae, max_diff: of |c − r|. rel_l2: ‖c − r‖ / ‖r‖. cosine: ⟨c, r⟩ / (‖c‖ ‖r‖). max_ulp: distance in the candidate's
    format after rounding the reference to it. bits_lost: log₂(rel_l2 / u) of that format, 0 at or below u. snr: dB, of
    r over c − r. gain: ⟨c − r, r⟩ / ⟨r, r⟩. mean: of c − r. Non-finite elements are counted and left out of the others.
    """
    size = np.abs(d.error)
    e, r = norm(d.error), norm(d.reference)
    c = d.candidate if d.nonfinite == 0 else np.where(np.isfinite(d.candidate), d.candidate, 0.0)
    n = d.error.size
    found: dict[str, Any] = {
        "n": n,
        "nonfinite": d.nonfinite,
        "mae": number(size.sum() / n) if n else 0.0,
        "max_diff": number(size.max(initial=0.0)),
        "rel_l2": number(ratio(e, r)),
        "cosine": number(np.vdot(c, d.reference) / (norm(c) * r)) if e and r and norm(c) else number(float(e == 0)),
        "max_ulp": max_ulp(d, stored, axes),
    }
    relative = ratio(e, r)
    found["bits_lost"] = number(bits_lost(relative, FORMATS[stored.dtype.name].unit_roundoff))
    found["snr"] = number(-20.0 * np.log10(relative)) if 0 < relative < np.inf else "inf" if e == 0 else "-inf"
    found["gain"] = number(ratio(float(np.vdot(d.error, d.reference)), r * r)) if r else 0.0
    found["mean"] = number(d.error.sum() / n) if n else 0.0
    if n:
        found["worst"] = worst(d, size, axes)
    return found


def bits_lost(relative: float, unit_roundoff: float) -> float:
    """Return log₂(relative / u): the significand bits of the format that an error takes, 0 where it is within u."""
    return float(np.log2(max(relative / unit_roundoff, 1.0)))


def max_ulp(d: Difference, stored: Array, axes: str) -> int:
    """Return the largest distance in units in the last place of the candidate's format, over finite elements."""
    c = stored.transpose(1, 0, 2) if axes == "HTS" else stored
    rounded = as_format(d.reference, stored.dtype.name).reshape(c.shape)
    distance = np.abs(ordinals(c) - ordinals(rounded))
    finite = np.isfinite(d.candidate).reshape(c.shape)
    return int(distance.max(initial=0, where=finite))


def worst(d: Difference, size: Array, axes: str) -> Worst:
    """Return the element with the largest error, indexed along the point's own axes."""
    t, h, k = (int(i) for i in np.unravel_index(int(size.argmax()), size.shape))
    index = (h, t, k) if axes == "HTS" else (t, h, k) if len(axes) == 3 else (t, k)
    return Worst(index=index, candidate=number(d.candidate[t, h, k]), reference=number(d.reference[t, h, k]))


def scopes(d: Difference, positions: Sequence[int] | Array, axes: str) -> dict[str, Scope]:
    """Return the worst token, head and channel by rel_l2 and max_diff.

    Tokens are named by position. Channels need at least 8 positions; points over keys or vocabulary have none.
    """
    size = np.abs(d.error)
    found: dict[str, Scope] = {}
    names: dict[str, tuple[int, ...]] = {"token": (1, 2)}
    if axes[-1] == "K" or axes == "HTS":
        names["head"] = (0, 2)
    if axes[-1] in "KDF" and len(size) >= MIN_CHANNEL_ROWS:
        names["channel"] = (0,)
    squares = {"rel_l2": d.error * d.error, "reference": d.reference * d.reference}
    for name, axis in names.items():
        sums = {k: x.sum(axis=axis).reshape(-1) for k, x in squares.items()}
        scope: Scope = {"max_diff": _largest(size.max(axis=axis).reshape(-1))}
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.sqrt(sums["rel_l2"] / sums["reference"])
        scope["rel_l2"] = _largest(np.where(sums["rel_l2"] == 0, 0.0, relative))
        if name == "token":
            scope = {k: (v, int(positions[i])) for k, (v, i) in scope.items()}
        found[name] = scope
    return found


def _largest(values: Array) -> tuple[Number, int]:
    i = int(np.argmax(values)) if values.size else 0
    return (number(values[i]) if values.size else 0.0, i)


def explained(candidate: Array, reference_error: float, emulation: Array) -> float:
    """1 − ‖c − ê‖² / ‖c − r‖²: the share of the error an emulation reproduces (docs/design.md §1).

    Where the candidate has no error at all: 1 if the emulation has none either, else −∞.
    """
    left = norm(candidate - emulation)
    if reference_error == 0:
        return 1.0 if left == 0 else float("-inf")
    return 1.0 - (left / reference_error) ** 2
