"""Moments against sums in longer words and against ordinals by search, in every format; blocks; shapes."""

import subprocess
import sys
from bisect import bisect_right
from dataclasses import fields
from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precaudit.numbers.arrays import ordinals, widen
from precaudit.numbers.formats import FORMATS
from precaudit.schema.metrics import moments as module
from precaudit.schema.metrics.moments import Moments, moments

BF16 = ml_dtypes.bfloat16
TRAP = 1 + 2.0**-8 + 2.0**-40  # above a tie of bfloat16, on it once FP32 has rounded
EDGES = [
    0.0, -0.0, 1.0, -1.0, TRAP, -TRAP, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-24, 1 + 3 * 2.0**-24, 2.0, -2.0,
    np.nan, np.inf, -np.inf, 2.0**-133, -(2.0**-134), 1.5 * 2.0**-133, 2.0**-149, 2.0**-126 * (1 - 2.0**-9),
    5e-324, -5e-324, 1e-310, 448.0, 464.0, 65504.0, 65520.0, 57344.0, 3.3895313892515355e38, 3.4e38,
    -3.4028235e38, 1e200, -1e200, 1.7e308, -1.7e308,
]  # fmt: skip
SUMS = ("ee", "rr", "cc", "er", "cr", "e", "abs_e")


@cache
def table(name):
    """Return every finite value ≥ 0 of a format of at most 16 bits; a value's index is its ordinal."""
    dtype = FORMATS[name].dtype
    words = np.arange(1 << (8 * dtype.itemsize - 1), dtype=np.uint16 if dtype.itemsize == 2 else np.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaNs warn
        wide = words.view(dtype).astype(np.float64)
    return [Fraction(x) for x in wide[np.isfinite(wide)].tolist()]


def ordinal(x, name):
    """Round a finite Python float to a format by exact arithmetic and return its ordinal."""
    if name in ("float32", "float64"):
        with np.errstate(over="ignore"):
            word = np.array([x], name).view(np.int32 if name == "float32" else np.int64).tolist()[0]
        return word if word >= 0 else -(word & (2**31 - 1 if name == "float32" else 2**63 - 1))
    values = table(name)
    size = Fraction(abs(x))
    i = bisect_right(values, size) - 1
    gap = values[i + 1] - values[i] if i + 1 < len(values) else values[i] - values[i - 1]
    past = (size - values[i]) / gap
    i += past > Fraction(1, 2) or (past == Fraction(1, 2) and i % 2)
    return -min(i, len(values)) if x < 0 else min(i, len(values))


def oracle(c, r):
    """Return what Moments holds, element by element and in long double, from the definitions."""
    x, y = c.astype(np.float64), r.astype(np.float64)
    with np.errstate(all="ignore"):
        e = x - y
        ok = np.isfinite(e)
        e, a, b = (np.where(ok, v, 0).astype(np.longdouble) for v in (e, x, y))
        terms = {"ee": e * e, "rr": b * b, "cc": a * a, "er": e * b, "cr": a * b, "e": e, "abs_e": np.abs(e)}
    found = {k: (v.sum(2), np.abs(v).sum(2)) for k, v in terms.items()}
    found |= {f"channel_{k}": (terms[k].sum(0).reshape(-1), 0) for k in ("ee", "rr")}
    bad = far = 0
    worst = (0.0, 0, 0, 0)
    for (t, h, k), fine in np.ndenumerate(ok):
        cv, rv = float(x[t, h, k]), float(y[t, h, k])
        bad += not fine and cv != rv
        if abs(e[t, h, k]) > worst[0]:
            worst = (abs(e[t, h, k]), t, h, k)
        if np.isfinite(cv):
            far = max(far, abs(ordinal(cv, c.dtype.name) - ordinal(rv if fine else 0.0, c.dtype.name)))
    tops = {"top": np.abs(e).max(2), "channel_top": np.abs(e).max(0).reshape(-1)}
    return found, tops, {"n": c.size, "nonfinite": bad, "worst": worst[1:], "max_ulp": far}


def check(c, r):
    found = moments(c, r)
    summed, tops, exact = oracle(c, r)
    for name, (value, magnitude) in summed.items():
        got = getattr(found, name)
        assert got.dtype == np.float64
        assert got.shape == value.shape
        assert (np.abs(got - value) <= 1e-13 * np.maximum(magnitude, np.abs(value)) + 1e-320).all(), name
    for name, value in tops.items():
        assert np.array_equal(getattr(found, name), value.astype(np.float64)), name
    assert {name: getattr(found, name) for name in exact} == exact
    return found


def stored(values, name):
    """Return FP64 values in a format."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(values).astype(FORMATS[name].dtype)


def normal(shape, seed=0, spread=4):
    """Return normal values over some powers of two, FP64."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape) * 2.0 ** rng.integers(-spread, spread, shape)


def same(a, b):
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(Moments))


@pytest.mark.parametrize("reference", ["float64", "float32"])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_against_long_sums(name, reference):
    r = stored(normal((7, 3, 37)), reference)
    c = stored(r.astype(np.float64) * (1 + 0.01 * normal(r.shape, 1, 1)), name)
    found = check(c, r)
    assert found.max_ulp > 0
    assert found.nonfinite == int((~np.isfinite(widen(c))).sum())


@pytest.mark.parametrize("reference", ["float64", "float32"])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_edges_against_edges(name, reference):
    """Every edge against every edge, one pair a cell, so that no large value hides a small one's distance."""
    left, right = np.meshgrid(EDGES, EDGES, indexing="ij")
    c, r = stored(left, name).reshape(-1, 1, 1), stored(right, reference).reshape(-1, 1, 1)
    with np.errstate(all="ignore"):
        squares = np.isfinite(c.astype(np.float64) ** 2 + r.astype(np.float64) ** 2).reshape(-1)
    summed, tops, exact = oracle(c, r)
    found = moments(c, r)
    assert np.array_equal(found.top, tops["top"].astype(np.float64))
    assert {k: getattr(found, k) for k in exact} == exact
    for k in SUMS:  # squares of 1e200 overflow, and that is all they do
        assert np.allclose(getattr(found, k)[squares], summed[k][0][squares].astype(np.float64), 1e-13, 0), k
    for i in range(len(c)):
        one = moments(c[i : i + 1], r[i : i + 1])
        assert one.max_ulp == oracle(c[i : i + 1], r[i : i + 1])[2]["max_ulp"], (c[i], r[i])


@pytest.mark.parametrize(
    ("value", "steps_above_one"),
    [(1 + 2.0**-8, 0), (1 + 3 * 2.0**-8, 2), (TRAP, 1), (1 + 2.0**-8 - 2.0**-40, 0), (1 + 2.0**-7, 1)],
)
def test_bfloat16_is_rounded_once(value, steps_above_one):
    one = np.ones((1, 1, 1), BF16)
    for sign in (1, -1):
        assert moments(one * BF16(sign), np.full((1, 1, 1), sign * value)).max_ulp == steps_above_one


@settings(max_examples=300)
@given(st.floats(allow_nan=False, allow_infinity=False, width=64), st.integers(0, 0x7F7F), st.booleans())
def test_bfloat16_distance_of_any_value(y, word, negative):
    c = np.array([word | negative << 15], np.uint16).view(BF16).reshape(1, 1, 1)
    r = np.array(y).reshape(1, 1, 1)
    expected = int(ordinals(c.reshape(-1))[0]) - ordinal(y, "bfloat16")
    assert moments(c, r).max_ulp == abs(expected)


@pytest.mark.parametrize("scale", [2.0**-130, 2.0**-134, 2.0**-140, 1.0, 2.0**126])
def test_bfloat16_distances_in_every_range(scale):
    """Sorted into rows of one element each: the largest of all would hide what the others are."""
    values = np.random.default_rng(5).normal(size=200) * scale
    values[::3] = np.round(values[::3] / scale * 8) / 8 * scale  # ties
    zero = np.zeros((1, 1, 1), BF16)
    for y in values:
        assert moments(zero, np.full((1, 1, 1), y)).max_ulp == abs(ordinal(float(y), "bfloat16"))


def test_float64_distances_do_not_wrap():
    for value, expected in ((2.0, 1 << 63), (3.0, (1 << 63) + (1 << 52))):
        c = np.full((1, 1, 1), value)
        assert moments(c, -c).max_ulp == moments(-c, c).max_ulp == expected
    largest = np.float32(3.4028235e38)
    c = np.full((1, 1, 1), largest)
    assert moments(c, -c).max_ulp == 2 * 0x7F7FFFFF


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16"])
def test_threads_change_no_bit(name):
    r = normal((50, 5, 1500), 6)
    c = stored(r * (1 + 1e-3 * normal(r.shape, 7, 1)), name)
    c[40, 2, 700] = np.nan
    one = moments(c, r, threads=1)
    assert len(module._blocks(r.shape)) > 2
    assert one.nonfinite == 1
    for threads in (2, 7, None):
        assert same(one, moments(c, r, threads=threads))


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("constants", [{"SPLIT": 100}, {"SPLIT": 1 << 40}, {"ROWS": 1, "SPLIT": 1}, {"BLOCKS": 2}])
def test_blocks_change_roundings_alone(name, constants, monkeypatch):
    r = normal((60, 3, 1500), 8)
    c = stored(r * (1 + 1e-3 * normal(r.shape, 9, 1)), name)
    before, blocks = moments(c, r), module._blocks(r.shape)
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    assert module._blocks(r.shape) != blocks
    after = moments(c, r)
    for f in fields(Moments):
        a, b = getattr(before, f.name), getattr(after, f.name)
        if f.name in ("channel_ee", "channel_rr"):
            assert np.allclose(a, b, 1e-13, 0)
        else:
            assert np.array_equal(a, b), f.name


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_empty(shape):
    found = moments(np.ones(shape, np.float32), np.ones(shape))
    assert (found.n, found.nonfinite, found.max_ulp, found.worst) == (0, 0, 0, (0, 0, 0))
    assert found.ee.shape == found.top.shape == shape[:2]
    assert found.channel_ee.shape == found.channel_top.shape == (shape[1] * shape[2],)
    assert not found.ee.any()
    assert not found.channel_top.any()


def test_one_element():
    found = moments(np.full((1, 1, 1), 3.0, np.float32), np.full((1, 1, 1), -2.0))
    sums = [float(getattr(found, k)[0, 0]) for k in (*SUMS, "top")]
    assert sums == [25, 4, 9, -10, -6, 5, 5, 5]
    assert [found.channel_ee[0], found.channel_rr[0], found.channel_top[0]] == [25, 4, 5]
    assert (found.n, found.worst) == (1, (0, 0, 0))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_all_nan(name):
    found = check(np.full((2, 3, 5), np.nan).astype(FORMATS[name].dtype), np.ones((2, 3, 5)))
    assert found.nonfinite == 30
    assert found.worst == (0, 0, 0)


@pytest.mark.parametrize("shape", [(1, 1, 50257), (8, 1, 50257), (3, 2, 2500)])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_long_rows(shape, name):
    r = normal(shape, 10)
    c = stored(r + 1e-3 * normal(shape, 11), name)
    e = c.astype(np.float64) - r
    found = moments(c, r, threads=2)
    assert np.allclose(found.ee, (e * e).sum(2), 1e-12, 0)
    assert np.allclose(found.channel_ee, (e * e).sum(0).reshape(-1), 1e-13, 0)
    assert np.array_equal(found.channel_top, np.abs(e).max(0).reshape(-1))
    assert found.worst == np.unravel_index(np.abs(e).argmax(), shape)
    assert found.max_ulp == np.abs(ordinals(c) - ordinals(r.astype(c.dtype))).max()


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16", "float8_e5m2"])
def test_strides_and_alignment_change_nothing(name):
    r = normal((40, 6, 500), 12)
    c = stored(r * (1 + 0.01 * normal(r.shape, 13, 1)), name)
    plain = moments(c, r)
    assert plain.max_ulp > 0
    for axes in ((1, 0, 2), (2, 1, 0), (1, 2, 0)):
        back = np.argsort(axes)
        c2, r2 = (np.ascontiguousarray(x.transpose(axes)).transpose(back) for x in (c, r))
        assert not c2.flags.c_contiguous
        assert same(plain, moments(c2, r2))
        assert same(plain, moments(c, r2, threads=2))
    assert same(plain, moments(c[::-1][::-1], np.repeat(r, 2, axis=2)[:, :, ::2]))
    odd = np.frombuffer(b"x" + c.tobytes(), c.dtype, offset=1).reshape(c.shape)  # at an odd address, and read-only
    assert same(plain, moments(odd, r))


def test_what_was_given_is_left_as_it_was():
    c, r = np.ones((2, 2, 2), np.float32), np.ones((2, 2, 2))
    moments(c, r)
    assert c.flags.writeable
    assert r.flags.writeable
    assert (c == 1).all()


def test_the_first_of_equal_worsts():
    c, r = np.zeros((300, 4, 100), np.float32), np.zeros((300, 4, 100))
    for at in ((250, 0, 3), (17, 3, 2), (17, 2, 99), (17, 2, 40)):
        c[at] = -1.5 if at[0] == 17 else 1.5
    c[17, 2, 5], r[17, 2, 6], r[2, 1, 1] = np.nan, -np.inf, np.nan
    assert moments(c, r).worst == (17, 2, 40)


def test_sums_overflow_in_silence():
    r = np.full((40, 1, 20000), 1e153)
    found = moments(-r, r)
    assert len(module._blocks(r.shape)) > 2
    assert np.isinf(found.ee).all()
    assert found.channel_rr == pytest.approx(40e306)
    found = moments(np.zeros_like(r), r * 4)  # blocks stay finite, their sum does not
    assert np.isinf(found.channel_rr).all()
    assert found.channel_top.max() == 4e153


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 5)])
def test_shapes_must_agree(shape):
    with pytest.raises(ValueError, match="must be the same"):
        moments(np.ones(shape), np.ones((2, 3) if len(shape) == 2 else (2, 3, 4)))


def test_importing_is_cheap():
    code = "import sys, precaudit.schema.metrics.moments; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
