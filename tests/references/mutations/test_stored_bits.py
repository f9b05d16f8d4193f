"""Results rounded to few bits."""

import ml_dtypes
import numpy as np
import pytest

from precaudit.references.mutations.storing import to_bits

DRAW = np.random.default_rng(3)
X = DRAW.standard_normal(4096) * np.exp(DRAW.uniform(-5, 5, 4096))


def test_seven_bits_are_bfloat16s():
    assert np.array_equal(to_bits(7)(X), X.astype(ml_dtypes.bfloat16).astype(np.float64))


@pytest.mark.parametrize("bits", [1, 4, 10])
def test_what_is_kept_is_the_nearest(bits):
    kept = to_bits(bits)(X)
    step = np.ldexp(1.0, np.frexp(X)[1] - 1 - bits)
    assert np.all(np.abs(kept - X) <= step / 2)
    assert np.array_equal(np.rint(kept / step) * step, kept)
