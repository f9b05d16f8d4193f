"""How far an array lies from the exact one, in roundings of its own format."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from jax.typing import ArrayLike


@dataclass(frozen=True)
class Distance:
    """``componentwise``: max of |error| over the half ulp of its exact value; ``normwise``: relative L2 error.

    ``once``: what rounding the exact values to the format leaves of the relative L2 error.
    ``worst``: index of the componentwise maximum. ``same_places``: NaN and each infinity stand where the exact ones
    do. Where it is False the two errors, over the places finite on both sides, say nothing of the whole.
    """

    componentwise: float
    normwise: float
    worst: tuple[int, ...]
    same_places: bool
    once: float = 0.0

    @property
    def roundings(self) -> float:
        """The normwise error in roundings of all elements to the format; 1 is the least there is."""
        return self.normwise / self.once if self.once else (np.inf if self.normwise else 0.0)


def measure_distance(found: ArrayLike, exact: ArrayLike) -> Distance:
    """Return the Distance of ``found``, of any float format, from ``exact``, FP64 of the same shape.

    One rounding of the exact value to the format of ``found`` is at most 1. Raises ValueError where shapes differ.
    """
    ours, true = np.asarray(found), np.asarray(exact, np.float64)
    if ours.shape != true.shape:
        raise ValueError(f"shape {ours.shape} against {true.shape}")
    info = ml_dtypes.finfo(ours.dtype)
    wide = ours.astype(np.float64)
    finite = np.isfinite(wide) & np.isfinite(true)
    same = bool(np.all(finite | (np.isnan(wide) & np.isnan(true)) | (wide == true)))
    size = np.where(finite, true, 0.0)
    error = np.abs(np.where(finite, wide, 0.0) - size)
    exponent = np.maximum(np.frexp(size)[1] - 1, int(info.minexp))
    exponent = np.where(size == 0, int(info.minexp), exponent)
    halves = error / np.ldexp(1.0, exponent - int(info.nmant) - 1)
    norm, lost = float(np.linalg.norm(size)), float(np.linalg.norm(error))
    with np.errstate(over="ignore"):
        once = float(np.linalg.norm(np.where(finite, size.astype(ours.dtype).astype(np.float64) - size, 0.0)))
    worst = np.unravel_index(int(np.argmax(halves)), halves.shape) if halves.size else ()
    return Distance(
        float(halves.max(initial=0.0)),
        lost / norm if norm else (np.inf if lost else 0.0),
        tuple(int(i) for i in worst),
        same,
        once / norm if norm else 0.0,
    )
