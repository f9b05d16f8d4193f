"""The shadow of programs with large matrices: lifted a block at a time, and only the rows that are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precaudit.interpreters.jaxpr import large, shadow

DRAW = np.random.default_rng(5)


def drawn(*shape, dtype=jnp.bfloat16):
    return jnp.asarray(DRAW.standard_normal(shape), dtype)


@pytest.mark.parametrize(
    ("subscripts", "a", "b"),
    [
        ("td,vd->tv", (5, 8), (103, 8)),
        ("td,dv->tv", (5, 8), (8, 103)),
        ("vd,td->vt", (103, 8), (5, 8)),
        ("btd,vd->btv", (2, 5, 8), (103, 8)),
        ("btd,bvdx->btvx", (2, 5, 8), (2, 31, 8, 3)),
        ("de,de->", (40, 30), (40, 30)),
    ],
)
def test_a_product_in_blocks_is_the_product(subscripts, a, b, monkeypatch):
    monkeypatch.setattr(large, "LARGE", 100)
    monkeypatch.setattr(large, "BLOCK", 70)
    x, w = drawn(*a), drawn(*b)
    wanted = np.einsum(subscripts, np.asarray(x, np.float64), np.asarray(w, np.float64))
    with jax.enable_x64(True):
        made = shadow(lambda x, w: jnp.einsum(subscripts, x, w))(x, w)
    assert made.dtype == np.float64
    np.testing.assert_allclose(np.asarray(made), wanted, rtol=1e-13, atol=1e-13)


def formats(jaxpr):
    """Yield the format and shape of every value of a jaxpr, bodies included."""
    for equation in jaxpr.eqns:
        yield from ((v.aval.dtype.name, v.aval.shape) for v in equation.outvars if hasattr(v.aval, "dtype"))
        for value in equation.params.values():
            for body in jax.tree.leaves(value, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
                inner = getattr(body, "jaxpr", body)
                if hasattr(inner, "eqns"):
                    yield from formats(inner)


def test_a_large_table_is_nowhere_in_fp64(monkeypatch):
    """Tied embedding: rows are taken, then lifted; the output matrix is lifted in blocks."""
    monkeypatch.setattr(large, "LARGE", 1000)
    monkeypatch.setattr(large, "BLOCK", 256)
    table, tokens = drawn(200, 8), np.array([3, 199, 0], np.int32)

    def program(table, tokens):
        return table[tokens] @ table.T, table[5:9], jax.lax.dynamic_slice_in_dim(table, tokens[0], 4)

    with jax.enable_x64(True):
        seen = set(formats(jax.make_jaxpr(shadow(program))(table, tokens).jaxpr))
        logits, *parts = shadow(program)(table, tokens)
    wide = np.asarray(table, np.float64)
    np.testing.assert_allclose(np.asarray(logits), wide[tokens] @ wide.T, rtol=1e-13, atol=1e-13)
    assert all(np.array_equal(np.asarray(x), y) for x, y in zip(parts, (wide[5:9], wide[3:7]), strict=True))
    assert not any(name == "float64" and np.prod(shape) >= 1000 for name, shape in seen)
    assert ("float64", (3, 8)) in seen


def test_what_is_small_or_wide_is_lifted_whole(monkeypatch):
    monkeypatch.setattr(large, "LARGE", 1000)
    with jax.enable_x64(True):
        seen = set(formats(jax.make_jaxpr(shadow(lambda x, w: x @ w.T))(drawn(3, 8), drawn(100, 8)).jaxpr))
    assert ("float64", (8, 100)) in seen
