"""Whether answers changed: pass@k with intervals, and two policies on the same questions."""

from collections.abc import Sequence
from math import comb, sqrt
from statistics import NormalDist
from typing import Literal

import numpy as np

from precaudit.schema.digits import digits, tenths
from precaudit.schema.records.base import Record

LEVEL = 0.95
MARGIN = 0.05  # "unchanged" is said only of an interval that stays within these bounds


class Rate(Record, frozen=True, omit_defaults=False):
    """pass@k over ``questions``, in [0, 1], and its 95 % Wilson interval [low, high]."""

    k: int
    questions: int
    value: float
    low: float
    high: float


class Paired(Record, frozen=True, omit_defaults=False):
    """Two policies on the same questions, the second against the first.

    ``both``, ``neither``: answered by both or none; ``gained``, ``lost``: by the second or the first alone.
    ``difference``: share of the second less that of the first; [low, high]: 95 %. ``p``: exact McNemar, two-sided.
    """

    both: int
    gained: int
    lost: int
    neither: int
    difference: float
    low: float
    high: float
    p: float


def wilson(successes: float, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Return the Wilson score interval of ``successes`` of ``n`` (Wilson 1927; Newcombe 1998, method 3).

    A mean of values in [0, 1] may stand for successes / n: such values vary no more than zeros and ones do. Raises
    ValueError where n is 0 or successes are not in [0, n].
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} of {n}: at least one question is wanted, and no more successes than questions")
    z = NormalDist().inv_cdf((1 + level) / 2)
    p, zz = successes / n, z * z
    middle, reach = p + zz / (2 * n), z * sqrt(p * (1 - p) / n + zz / (4 * n * n))
    low, high = ((middle + s * reach) / (1 + zz / n) for s in (-1, 1))
    return (0.0 if successes == 0 else low), (1.0 if successes == n else high)


def pass_at(correct: Sequence[int], samples: Sequence[int], k: int) -> Rate:
    """Return pass@k: the mean over questions of 1 − C(n − c, k) / C(n, k), c of n samples correct.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1; unbiased. The interval is over
    questions, not samples, which depend on their question. Raises ValueError for no question, or fewer than k samples.
    """
    if not correct or len(correct) != len(samples):
        raise ValueError(f"{len(correct)} counts for {len(samples)} questions")
    if k < 1 or min(samples) < k or any(not 0 <= c <= n for c, n in zip(correct, samples, strict=True)):
        raise ValueError(f"pass@{k} needs {k} samples of every question, and at most as many correct as there are")
    each = [1 - comb(n - c, k) / comb(n, k) for c, n in zip(correct, samples, strict=True)]
    total = float(np.sum(each))
    low, high = wilson(min(total, len(each)), len(each))
    return Rate(k=k, questions=len(each), value=total / len(each), low=low, high=high)


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p of McNemar's exact test; 1 where no question changed."""
    from scipy.stats import binomtest

    return 1.0 if gained + lost == 0 else float(binomtest(gained, gained + lost, 0.5).pvalue)


def pair_answers(first: Sequence[bool], second: Sequence[bool]) -> Paired:
    """Return Paired of which questions two policies answered; raises ValueError for other or no questions.

    The interval is Newcombe's for paired data ("Improved confidence intervals for the difference between binomial
    proportions based on paired data", Statistics in Medicine 17, 1998, method 10).
    """
    if not len(first) or len(first) != len(second):
        raise ValueError(f"{len(first)} answers against {len(second)}: the same questions are wanted, at least one")
    a, b = np.asarray(first, bool), np.asarray(second, bool)
    both, gained, lost = int((a & b).sum()), int((~a & b).sum()), int((a & ~b).sum())
    neither = len(a) - both - gained - lost
    low, high = _interval(both, gained, lost, neither)
    return Paired(
        both=both,
        gained=gained,
        lost=lost,
        neither=neither,
        difference=(gained - lost) / len(a),
        low=low,
        high=high,
        p=mcnemar(gained, lost),
    )


def _interval(both: int, gained: int, lost: int, neither: int) -> tuple[float, float]:
    """Return Newcombe's interval of the second's share less the first's."""
    n, second, first = both + gained + lost + neither, both + gained, both + lost
    p2, p1 = second / n, first / n
    (l2, u2), (l1, u1) = wilson(second, n), wilson(first, n)
    product = both * neither - gained * lost
    corrected = max(product - n / 2, 0.0) if product > 0 else float(product)
    size = second * (n - second) * first * (n - first)
    phi = corrected / sqrt(size) if size else 0.0
    down = sqrt(max((p2 - l2) ** 2 - 2 * phi * (p2 - l2) * (u1 - p1) + (u1 - p1) ** 2, 0.0))
    up = sqrt(max((u2 - p2) ** 2 - 2 * phi * (u2 - p2) * (p1 - l1) + (p1 - l1) ** 2, 0.0))
    return p2 - p1 - down, p2 - p1 + up


def status_under_limit(found: Paired, limit: float) -> Literal["pass", "fail", "unknown"]:
    """Return what the interval says of a limit under the difference, a share: fail where it lies wholly below.

    pass: no part of it is below. unknown: it has the limit inside, and more questions are needed.
    """
    if found.high < limit:
        return "fail"
    return "pass" if found.low >= limit else "unknown"


def answers_sentence(found: Paired, margin: float = MARGIN) -> str:
    """Return what happened to the answers in one sentence, always with its interval.

    worse, better: p < 0.05. unchanged: not so, and the interval lies within ± ``margin``. Else undecided.
    """
    words = "worse" if found.difference < 0 else "better"
    if found.p >= 1 - LEVEL:
        words = "unchanged" if -margin <= found.low and found.high <= margin else "undecided"
    n = found.both + found.gained + found.lost + found.neither
    difference, low, high = (percentage_points(x) for x in (found.difference, found.low, found.high))
    return (
        f"{words}: the difference is {difference} points, 95 % {low} to {high} ({n} questions, {found.lost} lost, "
        f"{found.gained} gained, McNemar p = {digits(found.p, 2)})"
    )


def percentage_points(x: float) -> str:
    """Return a share in percentage points, to a tenth."""
    text = tenths(100 * x).replace("-", "−")
    return "0.0" if text == "−0.0" else text
