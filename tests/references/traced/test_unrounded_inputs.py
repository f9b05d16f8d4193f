"""A float32 result that reads a narrow input unrounded has its float32 noise, and a fault in it still fails."""

import ml_dtypes
import numpy as np
import pytest

from precaudit.references.traced.judged import INPUTS, PlaceRows, closes, local_numbers
from precaudit.schema.records.errors import LocalError

N, TERMS = 12, 64


def float32_sum(a, b, order):
    """Return a · b, products and sums in float32, one after another."""
    total = np.float32(0)
    for i in order:
        total = np.float32(total + np.float32(a[i]) * np.float32(b[i]))
    return total


@pytest.fixture(scope="module")
def made():
    """Scores q · k whose q = x · w is recorded in bfloat16, and read before it is rounded: exact, and as they come."""
    random = np.random.default_rng(3)
    x, w, k = random.normal(size=TERMS), random.normal(size=(TERMS, 16)), random.normal(size=(N, 16))
    x, w, k = (y.astype(np.float32).astype(np.float64) for y in (x, w, k))
    q = x @ w
    k -= np.outer(k @ q, q) / (q @ q)  # scores cancel: what is left is a thousandth of their terms
    k = (k + 1e-3 * q / np.sqrt(q @ q)).astype(np.float32).astype(np.float64)
    stored = q.astype(ml_dtypes.bfloat16).astype(np.float64)

    def score(seed):
        order = np.random.default_rng(seed)
        mine = np.array([float32_sum(x, w[:, j], order.permutation(TERMS)) for j in range(16)])
        return np.array([float32_sum(mine, row, order.permutation(16)) for row in k])[None]

    return (k @ stored)[None], (k @ q)[None], score


def record(stored, exact, honest, drawn, moved):
    found = local_numbers(stored.astype(np.float32), PlaceRows(exact, honest, drawn, moved))
    return LocalError(
        prompt="a", phase="call", step=0, layer=None, point="scores", candidate="r", reference="fp64",
        **found,
    )  # fmt: skip


def test_the_noise_is_that_of_what_was_read(made):
    exact, unrounded, score = made
    honest = {
        (): exact.astype(np.float32).astype(np.float64),
        (INPUTS,): unrounded.astype(np.float32).astype(np.float64),
    }
    drawn = [np.float32(exact * (1 + 2.0**-24)).astype(np.float64)] * 3  # of the sums over what was recorded alone
    moved = [score(seed) - honest[INPUTS,] for seed in range(3)]
    candidate = score(99)
    assert not closes(record(candidate, exact, honest, drawn, []))
    assert closes(record(candidate, exact, honest, drawn, moved))
    wrong = candidate + 0.02 * np.abs(unrounded).max()
    assert not closes(record(wrong, exact, honest, drawn, moved))


def test_a_result_of_what_was_recorded_has_no_such_noise(made):
    exact, unrounded, score = made
    honest = {
        (): exact.astype(np.float32).astype(np.float64),
        (INPUTS,): unrounded.astype(np.float32).astype(np.float64),
    }
    drawn = [np.float32(exact * (1 + 2.0**-24)).astype(np.float64)] * 3
    moved = [1e3 * (score(seed) - honest[INPUTS,]) for seed in range(3)]
    off = exact * (1 + 2.0**-14)
    assert not closes(record(off, exact, honest, drawn, moved))
