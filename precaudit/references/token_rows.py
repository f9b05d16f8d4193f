"""Token ids among a program's inputs as rows of sequences."""

import numpy as np

from precaudit.numbers.arrays import Array


def token_rows(ids: Array, each: bool = False) -> Array:
    """Return token ids [B, T], [T] or one as [B, T]; ``each``: ids [N] are of N sequences, one of each."""
    return ids[:, None] if each and ids.ndim == 1 else np.atleast_2d(ids)


def of_sequences(ids: Array, starts: int, before: int = 0) -> bool:
    """Whether token ids [N] are of N sequences: an input says as many starts, or as many sequences came before."""
    return ids.ndim == 1 and 1 < len(ids) in (starts, before)
