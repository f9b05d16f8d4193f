"""FP64 exponentials, the logistic function and RoPE, against mpmath, the textbook in NumPy and complex numbers."""

import math

import mpmath
import numpy as np
import pytest

from precaudit.numpy_decoder._exponential_kernel import exponentials as rows
from precaudit.numpy_decoder.operators import exponentials, hide, rope, silu, softmax
from precaudit.numpy_decoder.rounding import FP64


def exp(x):
    """Return exp(x) of the kernel, for x ≤ 0: rows of [0, x], whose maximum is 0."""
    s = np.stack([np.zeros_like(x), x], axis=1)
    rows(s, np.zeros(len(x), int), np.full(len(x), 2), np.empty(len(x)))
    return s[:, 1]


def test_exponentials_are_within_an_ulp():
    draw = np.random.default_rng(0)
    edges = [0.0, -0.0, -1e-300, -math.log(2) / 2, -708.39, -708.4, -740.0, -745.13]
    x = np.concatenate([edges, -draw.exponential(3.0, 2000), -draw.uniform(0, 745, 2000)])
    with mpmath.workdps(40):
        for at, found in zip(x, exp(x), strict=True):
            expected = mpmath.exp(mpmath.mpf(float(at)))
            assert abs(mpmath.mpf(float(found)) - expected) <= 1.0 * math.ulp(float(expected)), at


def test_what_leaves_the_range_is_zero_and_what_is_not_a_number_stays_none():
    assert exp(np.asarray([-746.0, -1e300, -np.inf])).tolist() == [0.0, 0.0, 0.0]
    assert np.isnan(exp(np.asarray([np.nan]))).all()


@pytest.mark.parametrize(
    ("shape", "window"),
    [((30, 45), None), ((30, 45), 1), ((3, 16, 45), 7), ((30, 45), 40), ((3, 16, 45), None), ((5, 3), None)],
)
def test_rows_see_the_keys_up_to_their_own(shape, window):
    """Against a mask and NumPy's own exponentials; the last shape's rows stand after more keys than there are."""
    draw = np.random.default_rng(1)
    s, positions = draw.standard_normal(shape) * 20, np.arange(shape[-2]) + 15
    hidden = hide(s.copy(), positions, window)
    e = np.exp(hidden - hidden.max(axis=-1, keepdims=True))
    found, total = exponentials(s.copy(), positions, window, FP64)
    np.testing.assert_allclose(found, e, rtol=4e-16, atol=0)
    np.testing.assert_allclose(total[..., 0], e.sum(-1), rtol=1e-15, atol=0)
    assert (found == 0).sum() == (e == 0).sum()


def test_a_row_with_what_is_not_finite_is_not_finite():
    s = np.zeros((4, 6))
    s[0, 1], s[1, 2], s[2] = np.nan, np.inf, -np.inf
    found = softmax(s, np.full(4, 5), None, FP64)
    assert np.isnan(found[:3]).any(axis=1).all()
    np.testing.assert_allclose(found[3], 1 / 6, rtol=1e-15)
    assert np.isnan(softmax(np.zeros((1, 3)), np.asarray([-1]), None, FP64)).all()  # sees no key


def test_rope_is_a_product_of_complex_numbers():
    """(a + bi) · factor · exp(i · position · frequency), the dimensions beyond those that turn as they were."""
    draw = np.random.default_rng(4)
    x, positions, each = draw.standard_normal((5, 2, 10)), np.asarray([0, 3, 7, 100, 4000]), 30.0 ** -np.arange(4)
    found = rope(x, positions, (each, 1.25), FP64)
    pairs = x[..., :4] + 1j * x[..., 4:8]
    turned = pairs * 1.25 * np.exp(1j * positions[:, None] * each)[:, None]
    np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag, x[..., 8:]], -1), rtol=0, atol=1e-12)


def test_silu_is_the_textbooks():
    x = np.concatenate([np.linspace(-800, 800, 3001), np.random.default_rng(2).standard_normal(2000) * 5])
    with mpmath.workdps(40):
        expected = np.asarray([float(mpmath.mpf(float(v)) / (1 + mpmath.exp(-mpmath.mpf(float(v))))) for v in x])
    np.testing.assert_allclose(silu(x), expected, rtol=6e-16, atol=4e-306)  # where exp(−x) overflows it is 0
    assert silu(np.asarray([[np.inf, -0.0]])).tolist() == [[np.inf, -0.0]]
    assert np.isnan(silu(np.asarray([np.nan]))).all()
    strided = np.random.default_rng(3).standard_normal((6, 8))
    assert silu(strided.T).tolist() == silu(strided).T.tolist()
