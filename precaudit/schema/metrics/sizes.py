"""Sizes of an error: over the tensor, and the worst token, head and channel with its index."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from precaudit.numbers.arrays import Array, widen
from precaudit.numbers.formats import FORMATS
from precaudit.schema.metrics.moments import Moments, moments
from precaudit.schema.records.base import Number, json_number
from precaudit.schema.records.errors import Scope, Worst

MIN_CHANNEL_ROWS = 8  # below that a channel's norm is a handful of elements
EXPONENT = 0x7FF0000000000000  # of FP64's bits: of a normal number they are 2^⌊log₂|y|⌋


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
        with np.errstate(invalid="ignore", over="ignore"):
            error = candidate - reference
        finite = np.isfinite(error)
        if finite.all():
            return cls(candidate, reference, error, 0)
        bad = ~finite & (candidate != reference)
        clean = np.where(finite, reference, 0.0)
        return cls(candidate, clean, np.where(finite, error, 0.0), int(bad.sum()))


def canonical(x: Array, axes: str) -> Array:
    """Return FP64 ``x`` as [T, H, K]: scores [H, T, S] become [T, H, S], [T, D] becomes [T, 1, D]."""
    return arrange_axes(widen(x) if x.dtype != np.float64 else x, axes)


def arrange_axes(x: Array, axes: str) -> Array:
    """Return ``x`` as [T, H, K] in its own format."""
    if axes == "HTS":
        return x.transpose(1, 0, 2)
    return x[:, None, :] if x.ndim == 2 else x


def norm(x: Array) -> float:
    """‖x‖₂."""
    flat = x.reshape(-1)
    return float(np.sqrt(np.dot(flat, flat)))


def ratio(a: float, b: float) -> float:
    """Return a / b with 0 / 0 = 0 and a / 0 = ∞."""
    return 0.0 if a == 0 else float("inf") if b == 0 else a / b


def sizes(stored: Array, reference: Array, axes: str, positions: Sequence[int] | Array) -> dict[str, Any]:
    """Return the sizes of an error as fields of an ErrorRecord.

    ``stored``: the candidate in its own format and axes; ``reference``: FP64 in the canonical layout. mae, max_diff: of
    |c − r|. rel_l2: ‖c − r‖ / ‖r‖. cosine: ⟨c, r⟩ / (‖c‖ ‖r‖). max_ulp: distance in the candidate's format after
    rounding the reference to it. bits_lost: log₂(rel_l2 / u) of that format, 0 at or below u. snr: dB, of r over c − r.
    gain: ⟨c − r, r⟩ / ⟨r, r⟩. mean: of c − r. Non-finite elements are counted and left out of the others.
    """
    m = moments(arrange_axes(stored, axes), reference)
    ee, rr, cc = (float(x.sum()) for x in (m.ee, m.rr, m.cc))
    e, r, c, n = ee**0.5, rr**0.5, cc**0.5, m.n
    relative = ratio(e, r)
    found: dict[str, Any] = {
        "dtype": stored.dtype.name,
        "n": n,
        "nonfinite": m.nonfinite,
        "mae": json_number(m.abs_e.sum() / n) if n else 0.0,
        "max_diff": json_number(m.top.max(initial=0.0)),
        "rel_l2": json_number(relative),
        "cosine": json_number(m.cr.sum() / (c * r)) if e and r and c else float(e == 0),
        "max_ulp": m.max_ulp,
        "bits_lost": json_number(bits_lost(relative, FORMATS[stored.dtype.name].unit_roundoff)),
        "snr": json_number(-20.0 * np.log10(relative)) if 0 < relative < np.inf else "inf" if e == 0 else "-inf",
        "gain": json_number(ratio(float(m.er.sum()), rr)) if rr else 0.0,
        "mean": json_number(m.e.sum() / n) if n else 0.0,
        "scopes": scopes(m, positions, axes),
    }
    if n:
        t, h, k = m.worst
        values = (json_number(arrange_axes(stored, axes)[t, h, k]), json_number(reference[t, h, k]))
        found["worst"] = Worst(index=own_index((t, h, k), axes), candidate=values[0], reference=values[1])
    return found


def own_index(index: tuple[int, ...], axes: str) -> tuple[int, ...]:
    """Return a canonical index [t, h, k] along the point's own axes."""
    t, h, k = index
    return (h, t, k) if axes == "HTS" else (t, h, k) if len(axes) == 3 else (t, k)


def bits_lost(relative: float, unit_roundoff: float) -> float:
    """Return log₂(relative / u): the significand bits of the format that an error takes, 0 where it is within u."""
    return float(np.log2(max(relative / unit_roundoff, 1.0)))


def scopes(m: Moments, positions: Sequence[int] | Array, axes: str) -> dict[str, Scope]:
    """Return the worst token, head and channel by rel_l2 and max_diff.

    Tokens are named by position. Channels need at least 8 positions; points over keys or vocabulary have none.
    """
    parts = {"token": (m.ee.sum(axis=1), m.rr.sum(axis=1), m.top.max(axis=1, initial=0.0))}
    if axes[-1] == "K" or axes == "HTS":
        parts["head"] = (m.ee.sum(axis=0), m.rr.sum(axis=0), m.top.max(axis=0, initial=0.0))
    if axes[-1] in "KDF" and len(m.ee) >= MIN_CHANNEL_ROWS:
        parts["channel"] = (m.channel_ee, m.channel_rr, m.channel_top)
    found: dict[str, Scope] = {}
    for name, (ee, rr, top) in parts.items():
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(ee == 0, 0.0, np.sqrt(ee / rr))
        scope: Scope = {"rel_l2": _largest(relative), "max_diff": _largest(top)}
        if name == "token" and len(ee):
            scope = {k: (v, int(positions[i])) for k, (v, i) in scope.items()}
        found[name] = scope
    return found


def _largest(values: Array) -> tuple[Number, int]:
    i = int(np.argmax(values)) if values.size else 0
    return (json_number(values[i]) if values.size else 0.0, i)


def explained_share(candidate: Array, reference_error: float, emulation: Array) -> float:
    """1 − ‖c − ê‖² / ‖c − r‖²: the share of the error an emulation reproduces (docs/numerics.md).

    Where the candidate has no error at all: 1 if the emulation has none either, else −∞.
    """
    return share_of(norm(candidate - emulation), reference_error)


def share_of(left: float, error: float) -> float:
    """Return the share of an error that is not left, of both norms."""
    if error == 0:
        return 1.0 if left == 0 else float("-inf")
    return 1.0 - (left / error) ** 2


def half_ulp(y: Array, name: str) -> Array:
    """Return ulp(y)/2 of format ``name``: u · 2^⌊log₂|y|⌋; below the smallest normal number, that: XLA flushes."""
    from precaudit.schema.metrics._residue_kernel import (  # numba takes a third of a second to import
        as_kernel_input,
        half_ulps,
    )

    out = np.empty(np.shape(y))
    half_ulps(as_kernel_input(y).reshape(-1), smallest_normal(name), FORMATS[name].unit_roundoff, out.reshape(-1))
    return out


def smallest_normal(name: str) -> float:
    """Return the smallest normal number of format ``name``."""
    return float(ml_dtypes.finfo(FORMATS[name].dtype).smallest_normal)


def error_sizes(emulation: Array, reference: Array) -> dict[str, Any]:
    """Return the sizes of an emulation's own error, FP64 arrays of one shape."""
    with np.errstate(invalid="ignore"):
        error = emulation - reference
    bad = int((~np.isfinite(error)).sum())
    error = np.where(np.isfinite(error), error, 0.0)
    size = np.abs(error)
    return {
        "n": error.size,
        "nonfinite": bad,
        "mae": json_number(size.mean()),
        "max_diff": json_number(size.max()),
        "rel_l2": json_number(ratio(norm(error), norm(reference))),
    }
