"""The shadow of a random program is that program written in 64 bits from the start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from jax import lax

from precaudit.interpreters.jaxpr import shadow
from tests.helpers.primitive_cases import low
from tests.helpers.random_programs import program, trees

X = np.array([[0.5, -1.25, 2.0, 0.75], [-0.375, 1.5, -2.5, 0.25]], np.float32)


def rounded(x):
    return x.astype(low(x)).astype(x.dtype)


def narrowed(x):
    return lax.reduce_precision(x, 5, 3) if x.dtype == jnp.float32 else x


def flat(x):
    return x.reshape(-1)


def folded(x):
    """Reduce by a reducer of our own; what every element adds is a multiple of it, so that the order tells nothing."""
    return x + lax.reduce(flat(x), np.asarray(0, x.dtype), lambda a, b: a + narrowed(b) * 1.0, (0,)) / 8


def spectrum(x):
    wide = jnp.complex64 if x.dtype == jnp.float32 else jnp.complex128
    z = jnp.fft.fft(jnp.atleast_1d(x).astype(wide)) * (0.5 + 0.25j)
    return (jnp.real(jnp.fft.ifft(z)) + jnp.abs(z) * 0.125).reshape(x.shape)


def scattered(x):
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    index = np.array([[0]], np.int32)
    y = lax.scatter_apply(flat(x), index, lambda v: rounded(v) * 2, numbers, update_shape=(1,))
    return lax.scatter_add(y, index, flat(x)[-1:], numbers).reshape(x.shape)


def ranked(x):
    order = jnp.argsort(flat(x), stable=True)
    return (flat(x)[order] + lax.top_k(flat(x), x.size)[0] * 0.5).reshape(x.shape)


def summed(x):
    return (lax.cumsum(flat(x)) * 0.25 + lax.cumlogsumexp(jnp.sin(flat(x)))).reshape(x.shape)


def windowed(x):
    y = flat(x)
    return (lax.reduce_window(y, np.asarray(-np.inf, x.dtype), lax.max, (2,), (1,), "SAME")[: y.size]).reshape(x.shape)


def solved(x):
    return lax.custom_linear_solve(lambda v: 4 * v, x, lambda _, b: rounded(b) / 4, lambda _, b: b / 4)


def product(x, y):
    return jnp.outer(flat(x), flat(y)).astype(low(x)).astype(x.dtype)[0].reshape(x.shape) * 0.5


def dotted(x, y):
    return x * jnp.dot(flat(x).astype(low(x)), flat(y).astype(low(x)), preferred_element_type=x.dtype) * 0.125


OPERATIONS = {
    "sin": jnp.sin, "tanh": jnp.tanh, "rounded": rounded, "narrowed": narrowed, "folded": folded,
    "spectrum": spectrum, "scattered": scattered, "ranked": ranked, "summed": summed, "windowed": windowed,
    "solved": solved, "logistic": lax.logistic, "negated": lax.neg,
    "counted": lambda x: x * lax.argmax(flat(x), 0, np.int32).astype(x.dtype) * 0.25,
}  # fmt: skip
PAIRS = {
    "add": lax.add, "mul": lambda x, y: jnp.sin(x) * y, "max": lax.max, "product": product, "dotted": dotted,
    "where": lambda x, y: jnp.where(x > y, x, y * 0.5), "atan2": lax.atan2,
}  # fmt: skip
TREES = trees(OPERATIONS, PAIRS)
QUICK = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def check(tree):
    f = program(tree, OPERATIONS | PAIRS)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found, wanted = shadow(f)(X), f(jnp.asarray(X, jnp.float64))
    assert found.dtype == np.float64
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-9, atol=1e-9)


@pytest.mark.turn  # 5 s
@settings(max_examples=12, **QUICK)
@given(TREES)
def test_a_random_program(tree):
    check(tree)


@pytest.mark.slow
@settings(max_examples=120, **QUICK)
@given(TREES)
def test_many_random_programs(tree):
    check(tree)
