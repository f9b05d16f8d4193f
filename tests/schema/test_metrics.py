"""Sizes against closed forms; NaN, infinities and zeros."""

import ml_dtypes
import mpmath
import numpy as np
import pytest

from precaudit.schema.metrics.logits import distribution, expected_kl, is_distribution, kl, roundoff_kl, total_variation
from precaudit.schema.metrics.sizes import canonical, explained_share, sizes


def measure(c, r, axes="THK"):
    return sizes(c, canonical(r, axes), axes, range(10, 10 + (c.shape[1] if axes == "HTS" else len(c))))


def test_sizes_of_a_known_error():
    r = np.ones((2, 2, 2))
    c = r.astype(np.float32)
    c[1, 0, 1] = 1.5
    found = measure(c, r)
    assert (found["n"], found["nonfinite"]) == (8, 0)
    assert found["mae"] == pytest.approx(0.5 / 8)
    assert found["max_diff"] == 0.5
    assert found["rel_l2"] == pytest.approx(0.5 / 8**0.5)
    assert found["cosine"] == pytest.approx(8.5 / (9.25**0.5 * 8**0.5))
    assert found["max_ulp"] == 1 << 22  # half of float32's 2^23 steps between 1 and 2
    assert found["worst"].index == (1, 0, 1)
    where = found["scopes"]
    assert where["token"]["rel_l2"] == (pytest.approx(0.5 / 2), 11)
    assert where["head"]["rel_l2"] == (pytest.approx(0.25), 0)
    assert "channel" not in where  # two positions are too few


def test_channels_need_eight_positions():
    r = np.ones((8, 1, 3))
    c = r.copy()
    c[:, 0, 2] *= 1.25
    assert measure(c, r)["scopes"]["channel"]["rel_l2"] == (pytest.approx(0.25), 2)


def test_nonfinite_is_counted_before_values():
    r = np.array([[1.0, np.inf, 2.0, np.nan, -np.inf]])
    c = np.array([[np.nan, np.inf, 2.5, np.nan, np.inf]])
    found = measure(c, r, "TD")
    assert found["nonfinite"] == 3  # NaN for 1, NaN for NaN, +inf for −inf; equal infinities agree
    assert found["max_diff"] == 0.5


def test_zero_against_zero_is_no_error():
    found = measure(np.zeros((3, 1, 4), np.float32), np.zeros((3, 1, 4)))
    assert (found["rel_l2"], found["cosine"], found["max_ulp"]) == (0.0, 1.0, 0)
    found = measure(np.ones((1, 1, 1), np.float32), np.zeros((1, 1, 1)))
    assert found["rel_l2"] == "inf"


def test_ulps_are_of_the_candidate_s_format():
    r = np.array([[1.0, -1.0]])
    c = np.array([[1.0078125, -0.99609375]], ml_dtypes.bfloat16)  # one step of 2^-7 up; one of 2^-8 towards zero
    assert measure(c, r, "TD")["max_ulp"] == 1


def test_scores_are_indexed_along_their_own_axes():
    r = np.zeros((2, 3, 4))
    c = r.copy()
    c[1, 2, 3] = 1.0
    assert measure(c, r, "HTS")["worst"].index == (1, 2, 3)


def test_explained_is_one_zero_or_negative():
    r, e = np.zeros(4), np.ones(4)
    assert explained_share(r + e, 2.0, r + e) == 1.0
    assert explained_share(r + e, 2.0, r) == 0.0
    assert explained_share(r + e, 2.0, r - e) == -3.0
    assert explained_share(r, 0.0, r) == 1.0
    assert explained_share(r, 0.0, e) == float("-inf")


def test_total_variation_of_two_bernoullis():
    p, q = np.log([0.25, 0.75]), np.log([0.5, 0.5])
    assert total_variation(p, q + 7.0) == total_variation(q, p) == pytest.approx(0.25)
    assert total_variation(p, p + 3.0) == pytest.approx(0, abs=1e-15)
    assert np.isnan(total_variation(np.array([np.nan, 0.0]), q))
    assert np.isnan(total_variation(np.array([np.inf, 0.0]), q))


def test_total_variation_of_masked_tokens():
    none, never = np.array([0.0, -np.inf, -np.inf]), np.array([-np.inf, 0.0, -np.inf])
    assert total_variation(none, never) == 1
    assert total_variation(none, none) == 0
    assert total_variation(np.log([0.5, 0.5, 1e-300]), np.array([0.0, 0.0, -900.0])) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("size", [1e-14, 1e-9, 1e-3, 1.0, 30.0])
def test_total_variation_keeps_its_digits(size):
    """Of mpmath's softmaxes with 60 digits."""
    rng = np.random.default_rng(3)
    x = rng.normal(0, 3, 50)
    y = x + size * rng.normal(size=50)
    with mpmath.workdps(60):
        p, q = ([mpmath.exp(mpmath.mpf(float(v))) for v in row] for row in (x, y))
        wanted = sum(abs(a / sum(p) - b / sum(q)) for a, b in zip(p, q, strict=True)) / 2
    found = total_variation(x, y)
    assert found == pytest.approx(float(wanted), rel=1e-12, abs=2e-15)
    assert found <= np.sqrt(kl(x, y) / 2) * (1 + 1e-6) + 1e-15  # Pinsker's inequality


def test_kl_of_two_bernoullis():
    p, q = np.log([0.25, 0.75]), np.log([0.5, 0.5])
    assert kl(p, q + 7.0) == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5))
    assert np.isnan(kl(np.array([np.nan, 0.0]), q))


def test_tokens_that_cannot_be_are_left_out_of_a_softmax():
    """−∞ in both is a token that is not there: all numbers are those of the others alone."""
    rng = np.random.default_rng(0)
    exact, off = rng.normal(size=(3, 40)), 1e-3 * rng.normal(size=(5, 40))
    made = exact + off[:3]
    wide = [np.concatenate([np.full((3, 3), -np.inf), x, np.full((3, 8), -np.inf)], 1) for x in (exact, made)]
    for i in range(3):
        assert kl(wide[0][i], wide[1][i]) == pytest.approx(kl(exact[i], made[i]), rel=1e-12)
        assert total_variation(wide[0][i], wide[1][i]) == pytest.approx(total_variation(exact[i], made[i]), rel=1e-12)
    assert roundoff_kl(wide[0]) == pytest.approx(roundoff_kl(exact))
    errors = np.pad(off, ((0, 0), (3, 8)))
    assert expected_kl(wide[0], [errors]) == pytest.approx(expected_kl(exact, [off]), rel=1e-12)
    found, alone = (distribution(y, x, np.arange(3), None) for x, y in (wide, (exact, made)))
    for name in ("kl", "tv", "top1", "rank", "gap", "logprob_error"):
        assert getattr(found, name) == pytest.approx(getattr(alone, name))


def test_a_token_that_is_possible_in_one_alone():
    """Where q is 0 and p is not, KL(p ‖ q) is infinite; where p is 0 alone, it is finite: of p = (1, 0) −log q₁."""
    p, q = np.log([0.5, 0.25, 0.25]), np.array([np.log(2 / 3), np.log(1 / 3), -np.inf])
    assert kl(p, q) == np.inf
    assert kl(np.array([0.0, -np.inf]), np.log([0.9, 0.1])) == pytest.approx(-np.log(0.9), rel=1e-12)
    assert np.isnan(kl(p, np.array([np.nan, 0, 0])))


@pytest.mark.parametrize(
    ("row", "has"),
    [([0, -np.inf], True), ([-np.inf] * 2, False), ([0, np.nan], False), ([0, np.inf], False), ([], False)],
)
def test_which_rows_have_a_softmax(row, has):
    assert is_distribution(np.asarray(row, float)) is has
