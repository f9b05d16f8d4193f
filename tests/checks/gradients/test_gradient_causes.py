"""Each array that fails is explained: planted mistakes by name, correct kernels pass, absence is said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precaudit.checks.gradients.awkward import FLOATS
from precaudit.checks.gradients.case import KERNEL
from precaudit.checks.gradients.check import gradcheck
from precaudit.errors import UserError
from precaudit.reports.gradients import failures, inputs_table
from tests.helpers.gradient_mistakes import CORRECT, MISTAKES
from tests.helpers.selected import few

FORMS = ("float32", "bfloat16")
EVERY = [f"{name}, {form}" for name in MISTAKES for form in FORMS]
KEPT = "another epsilon behind rounding to bfloat16, bfloat16", "a scan late by one, float32"
RIGHT = [f"{name}, {form}" for name in CORRECT for form in FORMS]


def check(planted, form, hostile=False):
    given = lambda seed: planted.inputs(seed, form)  # noqa: E731
    return gradcheck(planted.kernel, planted.reference, given, seeds=1, hostile=hostile)


@pytest.mark.turn  # 15 s
@pytest.mark.parametrize("which", few(EVERY, *KEPT))
def test_a_planted_mistake_is_named_for_each_array(which):
    name, _, form = which.rpartition(", ")
    found = check(MISTAKES[name], form)
    told = {f.array: f.cause for f in found.found if f.verdict.status != "pass"}
    assert {f.side for f in found.found if f.verdict.status != "pass"} == {KERNEL}
    assert set(told) == set(MISTAKES[name].told)
    for array, words in MISTAKES[name].told.items():
        assert words in told[array], (array, told[array])


@pytest.mark.parametrize("which", few(RIGHT, "gradients by hand, bfloat16"))
def test_a_correct_kernel_passes(which):
    name, _, form = which.rpartition(", ")
    found = check(CORRECT[name], form)
    assert found.exit_code == 0, found.conclusions


def softmax(x):
    return jnp.exp(x - x.max(-1, keepdims=True)) / jnp.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)


def unshifted(x):
    return jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def overflowing():
    x = 8 * np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    return gradcheck(unshifted, softmax, (x,))


@pytest.mark.turn  # 8 s
def test_hostile_inputs_stand_beside_ordinary_ones_and_each_failure_has_a_cause(overflowing):
    rows = {row[0]: row for row in inputs_table(overflowing).rows}
    assert next(iter(rows)) == "ordinary"
    assert set(FLOATS) < set(rows)
    assert rows["ordinary"][2].endswith(": 2 pass")
    assert rows["large"][2].endswith(": 2 nonfinite")
    failing = [f for f in overflowing.found if f.verdict.status not in ("pass", "not run")]
    assert all(f.cause for f in failing)
    assert [row[-1] for row in failures(overflowing).rows if row[3] == "nonfinite"] == [
        f.cause for f in failing if f.verdict.status == "nonfinite"
    ]
    large = next(f for f in failing if f.case == "input 0 large" and f.array == "out")
    assert large.cause.startswith("exp at ")
    assert "(unshifted) gives it first: out of its format's range" in large.cause


def inverse_rms(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))


def scaled_rms(x):
    largest = jnp.max(jnp.abs(x), -1, keepdims=True)
    return x / largest * jax.lax.rsqrt(jnp.mean((x / largest) ** 2, -1, keepdims=True))


HUGE = 1e25 * np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)


def test_values_that_float32_holds_nothing_of_are_unknown_where_both_sides_lose_them():
    found = gradcheck(inverse_rms, inverse_rms, (HUGE,), argnums=(), hostile=False)
    assert found.exit_code == 3
    assert "float32 leaves its range on both sides (mul at " in found.conclusions[0]


def test_a_side_that_leaves_its_range_and_stores_finite_values_fails_with_the_line():
    found = gradcheck(inverse_rms, scaled_rms, (HUGE,), argnums=(), hostile=False)
    assert found.exit_code == 1
    assert "mul at " in found.conclusions[0]
    assert "(inverse_rms) exceeds its format's range" in found.conclusions[0]


@pytest.mark.parametrize("shape", [(0, 16), (4, 0)])
def test_inputs_without_an_element_are_refused(shape):
    with pytest.raises(UserError, match="has no element: there is nothing to compare"):
        gradcheck(softmax, softmax, (np.zeros(shape, np.float32),), hostile=False)


def test_what_no_known_mistake_explains_is_said():
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    found = gradcheck(lambda x: jnp.sin(x) + 0.01 * jnp.cos(7 * x), jnp.sin, (x,), argnums=(), hostile=False)
    assert "none of the known mistakes explains it" in found.conclusions[0]
