"""Infinities that rounding decides, as those of a mask at its boundary: top-p of probabilities, a threshold."""

from collections.abc import Sequence

import numpy as np

from precaudit.numbers.arrays import Array, widen
from precaudit.schema.records.errors import ErrorRecord


def few_infinite(e: ErrorRecord) -> bool:
    """Whether a few elements are infinite in the run or in FP64 alone: of a mask, that rounding may decide."""
    return e.unknown is None and 0 < 2 * e.nonfinite < e.n


def as_decided(stored: Array, exact: Array, realisations: Sequence[Array]) -> Array:
    """Return FP64 values with what was stored where rounding decides whether an element is infinite.

    There honest realisations that round alike are of two minds. An infinity that all of them make, as the logarithm of
    what is too small for its format, is the program's own and stays; so does what is not a number.
    """
    found, known = widen(stored), exact
    with np.errstate(invalid="ignore"):
        apart = (np.isfinite(found) != np.isfinite(known)) & ~np.isnan(found) & ~np.isnan(known)
    if not realisations or not apart.any():
        return exact
    finite = np.stack([np.isfinite(widen(x)[apart]) for x in realisations])
    decided = np.zeros(exact.shape, bool)
    decided[apart] = finite.any(axis=0) & ~finite.all(axis=0)
    return np.where(decided, found, exact)
