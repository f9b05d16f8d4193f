"""Which products a device sums in 16 bits is read from sums that are known, whatever adds them up."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from precaudit.checks.probing import narrow_sums as sums


def in_own_format(terms, dtype, lanes):
    """Return a sum of terms in their format: lanes by themselves, then the lanes one after the other."""
    total = np.zeros(lanes, dtype)
    for part in terms.astype(dtype).reshape(-1, lanes):
        total = (total.astype(np.float64) + part.astype(np.float64)).astype(dtype)
    found = dtype(0)
    for x in total:
        found = dtype(float(found) + float(x))
    return float(found)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32, 128])
def test_no_order_of_a_narrow_sum_finds_what_float32_does(dtype, lanes):
    terms = sums.known_terms(sums.LARGE[np.dtype(dtype).name])
    assert terms.sum() == sums.TERMS / 4
    assert np.array_equal(terms.astype(dtype).astype(np.float64), terms)
    assert np.abs(np.cumsum(terms)).max() < 2**23
    assert in_own_format(terms, np.float32, lanes) == sums.TERMS / 4
    with np.errstate(over="ignore"):
        assert in_own_format(terms, dtype, lanes) != sums.TERMS / 4


@pytest.mark.turn  # 8 s
def test_a_product_that_is_summed_narrowly_is_told(monkeypatch):
    """Of a backend that adds batched products in their format, that kind alone is named."""
    wide = jnp.einsum

    def einsum(equation, x, y):
        if equation != "bsef,efd->bsed":
            return wide(equation, x, y)

        def step(total, xy):
            return (total + xy[0][..., None] * xy[1]).astype(x.dtype), None

        start = jnp.zeros((*x.shape[:3], y.shape[2]), x.dtype)
        return jax.lax.scan(step, start, (jnp.moveaxis(x, -1, 0), jnp.moveaxis(y, 1, 0)))[0]

    monkeypatch.setattr(sums.jnp, "einsum", einsum)
    found = sums.narrow_sums.__wrapped__()
    named = [x for x in found if x.equation == "bsef,efd->bsed"]
    assert {x.dtype for x in named} >= {"bfloat16"}
    assert (
        named[0]
        .text("cpu")
        .startswith(
            "XLA sums a bfloat16 product `bsef,efd->bsed` (of experts) in bfloat16 on this cpu: 128 came out as "
        )
    )
    monkeypatch.undo()
    assert {x.equation for x in found} - {x.equation for x in sums.narrow_sums()} <= {"bsef,efd->bsed"}


def test_products_with_float32_sums_are_not():
    """What the device makes of the same sums in float32 is exact in every kind."""
    for dtype in sums.LARGE:
        terms = sums.known_terms(sums.LARGE[dtype])
        for p in sums.PRODUCTS:
            x, w = (jnp.asarray(y, dtype) for y in sums._operands(p, 1, terms))
            made = jnp.einsum(p.equation, x, w, preferred_element_type=jnp.float32)
            assert np.all(np.asarray(made) == sums.TERMS / 4), p.kind
