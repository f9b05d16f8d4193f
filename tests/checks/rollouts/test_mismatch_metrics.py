"""Rollout against trainer: values by hand, properties, and values that are no log-probabilities."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precaudit.checks.rollouts.mismatch import METRICS, SMALLER_IS_WORSE, Mismatch, k3, mismatch

LN2 = math.log(2)
# ρ is 2, 1 and ¼ and all probabilities are powers of two, so that each value can be followed on paper
TRAIN = np.log([[1 / 2, 1 / 4], [1 / 8, 1.0]])
ROLL = np.log([[1 / 4, 1 / 4], [1 / 2, 1.0]])
MASK = np.array([[1, 1], [1, 0]])
BY_HAND = {
    "kl": LN2 / 3,  # −(ln 2 + 0 − 2 ln 2) / 3
    "k3_kl": (1 / 4 + LN2) / 3,  # (2 − ln 2 − 1) + 0 + (¼ + 2 ln 2 − 1)
    "training_ppl": 4 + math.sqrt(2),  # 2^1.5 and 8
    "rollout_ppl": 3.0,  # 4 and 2
    "log_ppl_diff": 0.75 * LN2,  # −½ ln 2 and 2 ln 2
    "log_ppl_abs_diff": 1.25 * LN2,
    "log_ppl_diff_max": 2 * LN2,
    "log_ppl_diff_min": -LN2 / 2,
    "ppl_ratio": 2 + math.sqrt(2) / 4,  # 2^−½ and 4
    "chi2_token": 0.6875,  # (4 + 1 + 1/16) / 3 − 1
    "chi2_seq": 1.03125,  # Πρ is 2 and ¼: (4 + 1/16) / 2 − 1
    "rollout_is_eff_sample_size": 7 / 9,  # weights 2, 1, ½: (3.5 / 3)² / (5.25 / 3)
    "rollout_is_ratio_fraction_high": 0.0,  # ρ = 2 is not above 2
    "rollout_is_ratio_fraction_low": 1 / 3,
    "rollout_probs_diff_mean": 5 / 24,  # ¼, 0, 3/8
    "rollout_probs_diff_max": 3 / 8,
    "rollout_probs_diff_std": math.sqrt(21) / 24,
    "rollout_actor_probs_pearson_corr": -2 / math.sqrt(7),
    "abs_diff_mean": LN2,  # of 0, ln 2, 2 ln 2
    "abs_diff_p50": LN2,
    "abs_diff_p90": 1.8 * LN2,
    "abs_diff_p99": 1.98 * LN2,
    "abs_diff_max": 2 * LN2,
    "clip_fraction": 2 / 3,
}


def test_every_metric_is_what_paper_says():
    found = mismatch(TRAIN, ROLL, MASK)
    assert set(BY_HAND) == set(METRICS)
    for name, expected in BY_HAND.items():
        assert getattr(found, name) == pytest.approx(expected, rel=1e-14, abs=1e-15), name
    assert (found.sequences, found.tokens, found.empty, found.left_out, found.faults) == (2, 3, 0, 0, {})
    assert (found.first_divergence, found.diverged_sequence, found.overflowed, found.saturated) == (0, 0, (), 0)


def test_weights_are_clamped_on_both_sides_and_fractions_are_strict():
    delta = np.log([[2.5, 0.4, 1.0, 1.0]])
    found = mismatch(delta - 2, np.full((1, 4), -2.0), np.ones((1, 4)))
    assert found.rollout_is_ratio_fraction_high == found.rollout_is_ratio_fraction_low == 0.25
    assert found.rollout_is_eff_sample_size == pytest.approx((4.5 / 4) ** 2 / (6.25 / 4))  # 2, ½, 1, 1


@pytest.mark.parametrize(("ratio", "clipped"), [(1.21, 1), (1.19, 0), (0.81, 0), (0.79, 1)])
def test_a_ratio_is_clipped_outside_a_fifth(ratio, clipped):
    roll = np.array([[-1.0, -1.0, -1.0]])
    found = mismatch(roll + np.array([0, 0, math.log(ratio)]), roll, np.array([[0, 1, 1]]))
    assert found.clip_fraction == clipped / 2
    assert found.first_divergence == (1 if clipped else None)  # counted in tokens of the sequence, not in columns


def test_the_first_divergence_is_the_earliest_of_all_sequences():
    roll = np.full((3, 4), -1.0)
    train = roll.copy()
    train[0, 3], train[2, 1] = -2, -2
    found = mismatch(train, roll, np.ones((3, 4)))
    assert (found.first_divergence, found.diverged_sequence) == (1, 2)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 1000))
@settings(max_examples=50)
def test_identical_inputs_differ_in_nothing(rows, columns, seed):
    x = -np.random.default_rng(seed).exponential(3, (rows, columns))
    found = mismatch(x, x, np.ones(x.shape))
    zero = ("kl", "k3_kl", "log_ppl_diff", "log_ppl_abs_diff", "chi2_token", "chi2_seq", "abs_diff_max",
            "clip_fraction", "rollout_probs_diff_mean", "rollout_probs_diff_max")  # fmt: skip
    assert all(getattr(found, name) == 0 for name in zero)
    assert found.rollout_is_eff_sample_size == pytest.approx(1, abs=1e-15)
    assert found.ppl_ratio == 1
    assert found.training_ppl == found.rollout_ppl
    assert found.first_divergence is None


@given(st.integers(0, 1000))
@settings(max_examples=30)
def test_padding_order_and_what_stands_in_it_change_nothing(seed):
    rng = np.random.default_rng(seed)
    train, roll = -rng.exponential(2, (2, 3, 4))
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    whole = mismatch(train, roll, mask)
    for filler in (np.nan, np.inf, -np.inf, 1e300):
        assert mismatch(np.where(mask, train, filler), np.where(mask, roll, filler), mask) == whole
    other = mismatch(train[::-1], roll[::-1], mask[::-1])
    assert all(getattr(other, k) == pytest.approx(getattr(whole, k), rel=1e-12) for k in METRICS)
    assert 0 < whole.rollout_is_eff_sample_size <= 1
    assert whole.k3_kl >= 0
    assert whole.rollout_probs_diff_max <= 1


@pytest.mark.parametrize("delta", [1e-20, 1e-12, -1e-9, 9.9e-5, 1.1e-4, -0.3, 5.0, -40.0, 700.0])
def test_k3_keeps_its_digits(delta):
    with mpmath.workdps(60):
        expected = float(mpmath.e ** mpmath.mpf(delta) - 1 - mpmath.mpf(delta))
    assert float(k3(np.array(delta))) == pytest.approx(expected, rel=3e-12, abs=0)


@given(st.integers(0, 1000))
@settings(max_examples=15)
def test_small_and_large_differences_against_many_digits(seed):
    rng = np.random.default_rng(seed)
    roll = -rng.exponential(2, (2, 5)) - 1e-9
    train = np.minimum(roll + rng.standard_normal((2, 5)) * 10.0 ** rng.integers(-9, 2), -1e-12)
    found = mismatch(train, roll, np.ones((2, 5)))
    with mpmath.workdps(50):
        d = [
            [mpmath.mpf(a) - mpmath.mpf(b) for a, b in zip(x, y, strict=True)] for x, y in zip(train, roll, strict=True)
        ]
        flat = [x for row in d for x in row]
        expected = {
            "chi2_token": sum(mpmath.e ** (2 * x) - 1 for x in flat) / len(flat),
            "chi2_seq": sum(mpmath.e ** (2 * sum(row)) - 1 for row in d) / len(d),
            "k3_kl": sum(mpmath.e**x - 1 - x for x in flat) / len(flat),
        }
        size = sum(abs(mpmath.e ** (2 * x) - 1) for x in flat)
    rounding = float(np.abs(np.concatenate([train, roll])).max()) * 2.0**-52  # of δ: FP64 subtracts
    for name, exact in expected.items():
        assert getattr(found, name) == pytest.approx(float(exact), rel=1e-6, abs=10 * rounding * (1 + float(size))), (
            name
        )


def test_what_overflows_is_infinite_and_said():
    train, roll = np.array([[-1.0, -1.0]]), np.array([[-2000.0, -1.0]])
    found = mismatch(train, roll, np.ones((1, 2)))
    assert set(found.overflowed) == {"k3_kl", "chi2_token", "chi2_seq", "rollout_ppl"}
    assert {getattr(found, name) for name in found.overflowed} == {"inf"}
    assert found.saturated == 2  # a token, and the sequence it is in
    assert found.kl == pytest.approx(-999.5)
    assert found.rollout_probs_diff_max == pytest.approx(math.exp(-1))
    assert not [name for name in METRICS if getattr(found, name) == "nan"]


def test_verl_s_bound_is_counted_and_not_applied():
    found = mismatch(np.array([[-1.0]]), np.array([[-26.0]]), np.ones((1, 1)))
    assert found.chi2_token == pytest.approx(math.expm1(50))
    assert (found.saturated, found.overflowed) == (2, ())


@pytest.mark.parametrize(
    ("value", "name"), [(math.nan, "NaN"), (0.1, "positive"), (math.inf, "positive"), (-math.inf, "-inf")]
)
@pytest.mark.parametrize("side", ["trainer", "rollout"])
def test_what_is_no_log_probability_is_named_and_its_sequence_left_out(side, value, name):
    train, roll = TRAIN.copy(), ROLL.copy()
    (train if side == "trainer" else roll)[0, 1] = value
    found = mismatch(train, roll, MASK)
    assert found.faults == {f"{side}: {name}": 1}
    assert (found.left_out, found.sequences, found.tokens) == (1, 1, 1)
    assert found.kl == pytest.approx(2 * LN2)  # of the other sequence alone
    assert (found.rollout_probs_diff_std, found.rollout_actor_probs_pearson_corr) == (None, None)  # of one token
    assert found.diverged_sequence == 1


def test_zero_is_a_log_probability():
    assert mismatch(np.zeros((1, 2)), np.zeros((1, 2)), np.ones((1, 2))).faults == {}


@pytest.mark.parametrize("mask", [np.zeros((2, 2)), np.ones((2, 2))])
def test_nothing_to_judge_gives_no_number(mask):
    found = mismatch(np.full((2, 2), np.nan), np.zeros((2, 2)), mask)
    assert found.sequences == found.tokens == 0
    assert [getattr(found, name) for name in METRICS] == [None] * len(METRICS)
    assert (found.empty, found.left_out) == ((0, 2) if mask.any() else (2, 0))
    assert found.faults == ({"trainer: NaN": 4} if mask.any() else {})


def test_an_empty_sequence_is_not_one_of_perplexity_one():
    whole = mismatch(TRAIN, ROLL, MASK)
    more = mismatch(np.vstack([TRAIN, TRAIN[:1]]), np.vstack([ROLL, ROLL[:1]]), np.vstack([MASK, [[0, 0]]]))
    assert more.empty == 1
    assert all(getattr(more, name) == getattr(whole, name) for name in METRICS)


def test_constant_probabilities_have_no_correlation():
    assert (
        mismatch(np.full((1, 3), -1.0), ROLL[:1, [0, 1, 0]], np.ones((1, 3))).rollout_actor_probs_pearson_corr is None
    )


def test_shapes_have_to_agree():
    with pytest.raises(ValueError, match="one \\[sequences, tokens\\] is wanted"):
        mismatch(np.zeros((1, 2)), np.zeros((2, 1)), np.ones((1, 2)))


def test_metrics_are_fields():
    assert set(METRICS) | {"first_divergence", "diverged_sequence"} < set(Mismatch.__struct_fields__)
    assert set(SMALLER_IS_WORSE) < set(METRICS)
