"""pass@k, McNemar and intervals against SciPy, published tables and sums over all outcomes."""

from itertools import combinations
from math import comb

import pytest
from scipy.stats import binomtest

from precaudit.checks.rollouts.answers import (
    answers_sentence,
    mcnemar,
    pair_answers,
    pass_at,
    status_under_limit,
    wilson,
)


def outcomes(both, gained, lost, neither):
    pairs = [(1, 1)] * both + [(0, 1)] * gained + [(1, 0)] * lost + [(0, 0)] * neither
    return pair_answers([bool(a) for a, _ in pairs], [bool(b) for _, b in pairs])


@pytest.mark.parametrize(("k", "n"), [(0, 1), (1, 1), (0, 10), (81, 263), (15, 148), (56, 56), (1055, 1319)])
def test_wilson_is_scipy_s(k, n):
    expected = binomtest(k, n).proportion_ci(method="wilson")
    assert wilson(k, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_as_published():
    """Newcombe 1998 ("Two-sided confidence intervals for the single proportion"), table I, method 3."""
    assert [round(x, 4) for x in wilson(81, 263)] == [0.2553, 0.3662]
    assert [round(x, 4) for x in wilson(15, 148)] == [0.0624, 0.1605]


@pytest.mark.parametrize(("k", "n"), [(0, 0), (-1, 3), (4, 3)])
def test_wilson_of_nothing_is_refused(k, n):
    with pytest.raises(ValueError, match="at least one question"):
        wilson(k, n)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(k):
    questions = [(0, 4), (1, 4), (3, 5), (5, 5)]
    expected = 0.0
    for c, n in questions:
        draws = list(combinations([True] * c + [False] * (n - c), k))
        expected += sum(map(any, draws)) / len(draws) / len(questions)
    found = pass_at([c for c, _ in questions], [n for _, n in questions], k)
    assert found.value == pytest.approx(expected, abs=1e-15)
    assert 0 <= found.low < found.value < found.high <= 1


def test_pass_at_one_of_one_sample_each_is_the_share_of_questions():
    found = pass_at([1] * 81 + [0] * 182, [1] * 263, 1)
    assert (round(found.low, 4), round(found.high, 4)) == (0.2553, 0.3662)
    assert found.value == pytest.approx(81 / 263)


@pytest.mark.parametrize(("correct", "samples", "k"), [([], [], 1), ([1], [1], 2), ([2], [1], 1), ([1], [1, 1], 1)])
def test_what_cannot_be_counted_is_refused(correct, samples, k):
    with pytest.raises(ValueError, match=r"questions|samples"):
        pass_at(correct, samples, k)


@pytest.mark.parametrize(("b", "c"), [(1, 0), (7, 1), (3, 3), (12, 2), (0, 20)])
def test_mcnemar_is_the_sum_of_its_binomial_tail(b, c):
    n = b + c
    tail = sum(comb(n, i) for i in range(min(b, c) + 1)) / 2**n
    assert mcnemar(b, c) == mcnemar(c, b) == pytest.approx(min(1.0, 2 * tail))


def test_mcnemar_of_nothing_changed_is_one():
    assert mcnemar(0, 0) == 1.0


def test_the_paired_interval_as_published():
    """Fagerland, Lydersen, Laake 2014 (Statistics in Medicine 33), airway data, the square-and-add interval."""
    found = outcomes(1, 7, 1, 12)
    assert found.difference == pytest.approx(6 / 21)
    assert (round(found.low, 3), round(found.high, 3)) == (0.026, 0.507)
    assert found.p == pytest.approx(2 * 9 / 256)


def test_exchanging_the_policies_exchanges_the_signs():
    one, other = outcomes(30, 9, 4, 13), outcomes(30, 4, 9, 13)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))
    assert one.p == other.p


def test_the_paired_interval_covers():
    """Over all tables of 12 questions, the true difference is in the interval about 95 % of the time."""
    cells, n, covered = (0.45, 0.1, 0.2, 0.25), 12, 0.0
    for a in range(n + 1):
        for b in range(n + 1 - a):
            for c in range(n + 1 - a - b):
                d = n - a - b - c
                ways = comb(n, a) * comb(n - a, b) * comb(n - a - b, c)
                found = outcomes(a, b, c, d)
                inside = found.low <= cells[1] - cells[2] <= found.high
                covered += inside * ways * cells[0] ** a * cells[1] ** b * cells[2] ** c * cells[3] ** d
    assert 0.93 < covered < 0.99


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ((500, 10, 12, 478), "unchanged: the difference is −0.2 points, 95 % −1.1 to 0.7"),
        ((5, 1, 1, 5), "undecided: the difference is 0.0 points, 95 % "),
        ((500, 5, 40, 455), "worse: the difference is −3.5 points, 95 % "),
        ((500, 40, 5, 455), "better: the difference is 3.5 points, 95 % "),
        ((0, 0, 0, 3), "undecided: the difference is 0.0 points, 95 % "),
    ],
)
def test_a_sentence_has_its_interval(table, word):
    # the first: 1.96 √22 / 10 = 0.92 points about −0.2 by the normal approximation
    text = answers_sentence(outcomes(*table))
    assert text.startswith(word)
    assert f"{sum(table)} questions" in text


def test_other_or_no_questions_are_refused():
    for first, second in (([True], [True, False]), ([], [])):
        with pytest.raises(ValueError, match="the same questions"):
            pair_answers(first, second)


@pytest.mark.parametrize(
    ("limit", "expected"), [(-0.05, "pass"), (0.025, "pass"), (0.027, "unknown"), (0.506, "unknown"), (0.508, "fail")]
)
def test_a_limit_on_the_difference_is_held_to_its_interval(limit, expected):
    """The published interval of the airway data, to three digits, is 0.026 to 0.507."""
    assert status_under_limit(outcomes(1, 7, 1, 12), limit) == expected


def test_a_loss_that_is_sure_fails_and_one_that_is_not_is_undecided():
    """Of 100 questions 20 are lost and none gained (p = 2 / 2^20), or 2: no limit of 0 is known to hold."""
    assert status_under_limit(outcomes(40, 0, 20, 40), -0.05) == "fail"
    assert status_under_limit(outcomes(58, 0, 2, 40), -0.05) == "unknown"
    assert status_under_limit(outcomes(600, 0, 0, 400), 0.0) == "unknown"
    assert status_under_limit(outcomes(600, 0, 0, 400), -0.05) == "pass"
