"""Stepwise accumulation bit for bit against scalar arithmetic in the format itself."""

import math

import ml_dtypes
import numpy as np
import pytest

from precaudit.errors import UserError
from precaudit.models.numpy_decoder.accumulation import (
    accumulating,
    fused_multiply_add,
    pairwise_matmul,
    rounding_products,
)
from precaudit.numbers.formats import parse_accumulation

SCALARS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def one_by_one(a, b, kind):
    """Sum with scalars of the format: NumPy and ml_dtypes round every product and every sum."""
    out = np.zeros((a.shape[0], b.shape[1]))
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(a.shape[0]):
            for j in range(b.shape[1]):
                total = kind(0)
                for k in range(a.shape[1]):
                    total = kind(total + kind(kind(a[i, k]) * kind(b[k, j])))
                out[i, j] = float(total)
    return out


@pytest.mark.parametrize("name", sorted(SCALARS))
@pytest.mark.parametrize("scale", [1.0, 2e-4, 60.0])
def test_every_step_is_rounded(name, scale):
    rng = np.random.default_rng(3)
    kind = SCALARS[name]
    a = (rng.normal(size=(4, 70)) * scale).astype(kind).astype(np.float64)
    b = (rng.normal(size=(70, 19)) * scale).astype(kind).astype(np.float64)
    assert np.array_equal(accumulating(name)(a, b), one_by_one(a, b, kind))


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_fused_multiply_add_rounds_each_sum_and_no_product(name):
    """Each product is exact in FP32 and added there, as XLA does: the sum is rounded twice, once to FP32."""
    rng, kind = np.random.default_rng(5), SCALARS[name]
    a, b = (rng.normal(size=s).astype(kind).astype(np.float64) for s in ((3, 40), (40, 7)))
    total = np.zeros((3, 7))
    for k in range(40):
        total = (total + np.outer(a[:, k], b[k])).astype(np.float32).astype(kind).astype(np.float64)
    found = fused_multiply_add(name)(a, b)
    assert np.array_equal(found, total)
    assert not np.array_equal(found, accumulating(name)(a, b))


def test_float16_overflows_to_infinity_and_nan_stays():
    a, b = np.array([[300.0, 300.0]]), np.array([[300.0], [1.0]])
    assert accumulating("float16")(a, b)[0, 0] == np.inf
    assert np.isnan(accumulating("bfloat16")(np.array([[np.nan, 1.0]]), b)[0, 0])


def test_blocks_round_once_a_block():
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(3, 64)), rng.normal(size=(64, 5))
    a, b = a.astype(np.float16).astype(float), b.astype(np.float16).astype(float)
    single = a.astype(np.float32) @ b.astype(np.float32)
    assert np.array_equal(accumulating("float16/64")(a, b), single.astype(np.float16).astype(float))
    exact = a @ b
    by_step, by_block = (np.abs(accumulating(n)(a, b) - exact).mean() for n in ("float16", "float16/16"))
    assert by_block < by_step


@pytest.mark.parametrize("text", ["float16/0", "float16/x", "int8", "float8_e5m2"])
def test_unknown_accumulation_is_refused(text):
    with pytest.raises(UserError):
        parse_accumulation(text)


def test_pairwise_sums_go_further_than_sequential_ones():
    """Ones in float16: one after another they stall at 2048, where ulp is 2; a tree of adders does not."""
    a, b = np.ones((2, 3000)), np.ones((3000, 1))
    assert (accumulating("float16")(a, b) == 2048).all()
    assert (pairwise_matmul("float16")(a, b) == 3000).all()
    x = np.array([[1.0, 2.0**-11, 2.0**-11, 2.0**-11]])
    assert pairwise_matmul("float16")(x, np.ones((4, 1)))[0, 0] == 1.0 + 2.0**-10


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_products_rounded_before_the_sum(name):
    """Held against ml_dtypes on FP32 products, which are exact, and Python's exact sum."""
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else np.float16
    draw = np.random.default_rng(7)
    a, b = (draw.normal(size=shape).astype(dtype).astype(np.float64) for shape in ((3, 40), (40, 5)))
    a[0, 0] = b[0, 0] = 2.0**-12  # a subnormal product in float16
    terms = (a[:, :, None].astype(np.float32) * b[None].astype(np.float32)).astype(dtype).astype(np.float64)
    want = [[math.fsum(terms[i, :, j]) for j in range(5)] for i in range(3)]
    np.testing.assert_allclose(rounding_products(name)(a, b), want, rtol=1e-14)
    np.testing.assert_allclose(rounding_products(name)(a, b.T.copy().T), want, rtol=1e-14)
