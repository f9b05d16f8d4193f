"""Rounding against exact rational arithmetic and ml_dtypes; ordinals; names."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.rounding import reduce_on_moved_grid, round_on_moved_grid
from precaudit.numbers.arrays import as_format, common_dtype, identity, ordinals, rescale_rounding, rounder, widen
from precaudit.numbers.formats import FORMATS, parse_format

MIN_EXPONENT = {"float32": -126, "bfloat16": -126, "float16": -14}
LARGEST = {"float32": 2.0**128, "bfloat16": 2.0**128, "float16": 2.0**16}


def nearest_even(x: float, name: str) -> float:
    """Round by exact rational arithmetic, from the definition."""
    if x == 0 or not np.isfinite(x):
        return x
    p = FORMATS[name].precision
    exponent = max(int(np.floor(np.log2(abs(x)))), MIN_EXPONENT[name])
    if Fraction(abs(x)) < Fraction(2) ** exponent and exponent > MIN_EXPONENT[name]:
        exponent -= 1
    quantum = Fraction(2) ** (exponent - p + 1)
    n = round(Fraction(x) / quantum)  # Python rounds halves to even
    value = n * quantum
    return float(np.copysign(np.inf, x)) if abs(value) >= LARGEST[name] else float(value)


@settings(max_examples=400)
@given(st.floats(allow_nan=False, width=64), st.sampled_from(sorted(MIN_EXPONENT)))
def test_rounding_is_to_nearest_even(x, name):
    want = nearest_even(x, name)
    assert rounder(name)(np.array([x]))[0] == want
    stored = as_format(np.array([x]), name)
    assert stored.dtype == FORMATS[name].dtype
    assert float(stored[0]) == want
    assert np.signbit(stored[0]) == np.signbit(x)


@pytest.mark.parametrize("name", sorted(MIN_EXPONENT))
def test_ties_overflow_and_subnormals(name):
    p = FORMATS[name].precision
    u = 2.0**-p
    tiny = 2.0 ** (MIN_EXPONENT[name] - p + 1)
    cases = [
        1 + u,
        1 + 3 * u,
        1 + u + 2.0**-50,
        tiny / 2,
        tiny * 0.75,
        tiny * 1.5,
        LARGEST[name],
        -LARGEST[name] * (1 - u / 2),
    ]
    got = rounder(name)(np.array(cases))
    assert got.tolist() == [nearest_even(x, name) for x in cases]
    assert as_format(np.array(cases), name).astype(np.float64).tolist() == got.tolist()
    assert np.isnan(rounder(name)(np.array([np.nan]))[0])
    assert np.isnan(as_format(np.array([np.nan]), name)[0])


def test_every_bfloat16_survives():
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    wide = widen(every)
    back = as_format(wide, "bfloat16")
    finite = np.isfinite(wide)
    assert (back.view(np.uint16)[finite] == every.view(np.uint16)[finite]).all()
    assert (np.isnan(wide) == np.isnan(rounder("bfloat16")(wide))).all()


@settings(max_examples=200)
@given(st.floats(allow_nan=False, width=64), st.sampled_from(sorted(MIN_EXPONENT)), st.floats(1.0, 2.0))
@example(2.0**1023, "float16", 2.0)
@example(2.0**1023, "bfloat16", 2.0)
@example(np.inf, "float16", 1.5)
def test_another_grid_is_the_same_rounding_of_scaled_values(x, name, factor):
    got = rescale_rounding(rounder(name), factor)(np.array([x]))[0]
    with np.errstate(over="ignore"):
        if name == "float16" and np.isfinite(nearest_even(x, name)) and abs(x * factor) > 65504:
            factor /= 2
        assert got == nearest_even(float(np.float64(x) * factor), name) / factor


@pytest.mark.parametrize(("name", "most"), [("float8_e4m3fn", 448), ("float8_e5m2", 57344), ("float16", 65504)])
@pytest.mark.parametrize("factor", [1.0, 1.2, 1.9])
def test_the_largest_number_of_a_format_overflows_on_no_grid(name, most, factor):
    """As of a tensor scaled to its format's range; what rounds to no number of the format does so on every grid."""
    values = np.array([most, 0.97 * most, -0.6 * most, 0.3 * most])
    with jax.enable_x64(True):
        numpys = rescale_rounding(rounder(name), factor)
        jaxs = functools.partial(round_on_moved_grid, dtype=FORMATS[name].dtype, factor=jnp.float64(factor))
        for moved in (numpys, jaxs):
            made = np.asarray(moved(values))
            assert np.abs(made / values - 1).max() <= FORMATS[name].unit_roundoff
            assert not np.isfinite(np.asarray(moved(np.array([2.0 * most])))).any()


def test_what_reduce_precision_draws_overflows_on_no_grid():
    largest = 65504.0  # of five bits of exponent and ten of mantissa
    with jax.enable_x64(True):
        made = reduce_on_moved_grid(jnp.array([largest, 0.999 * largest, -0.7 * largest]), 5, 10, jnp.float64(1.9))
        over = reduce_on_moved_grid(jnp.array([2 * largest]), 5, 10, jnp.float64(1.1))
    assert np.abs(np.asarray(made) / [largest, 0.999 * largest, -0.7 * largest] - 1).max() <= 2.0**-11
    assert np.isinf(np.asarray(over)).all()


@pytest.mark.parametrize("name", sorted(MIN_EXPONENT))
def test_rounding_keeps_the_shape_and_its_operand(name):
    x = np.random.default_rng(1).standard_normal((6, 4, 5))
    before = x.copy()
    for view in (x, x.transpose(2, 0, 1), x[::2, :, ::-1], x[0, 0, 0], x[:, :0]):
        got = rounder(name)(view)
        assert np.array_equal(got, np.vectorize(lambda y: nearest_even(y, name), otypes=[np.float64])(view))
        assert np.shape(got) == np.shape(view)
    assert np.array_equal(x, before)
    assert rescale_rounding(identity, 1.5)(np.array([3.0])) == [3.0]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_ordinals_count_neighbours(name):
    dtype = FORMATS[name].dtype
    x = np.array([-1.0, -0.0, 0.0, 1.0], dtype)
    up = np.nextafter(x, np.array(np.inf, dtype))
    assert (ordinals(up) - ordinals(x)).tolist() == [1, 1, 1, 1]
    ends = np.array([-FORMATS_MAX[name], FORMATS_MAX[name]], dtype)
    assert np.diff(ordinals(ends))[0] > 0  # int32 would wrap


FORMATS_MAX = {"float16": 65504.0, "bfloat16": 3.3e38, "float32": 3.4e38}


def test_wider_holds_both():
    half, brain = FORMATS["float16"].dtype, FORMATS["bfloat16"].dtype
    assert common_dtype(half, brain) == np.float32
    assert common_dtype(brain, brain) == brain
    assert common_dtype(brain, np.float32) == np.float32


def test_an_unknown_format_names_the_nearest():
    assert parse_format("bf16").name == "bfloat16"
    with pytest.raises(UserError, match="bfloat16"):
        parse_format("bfloat61")
