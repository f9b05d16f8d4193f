"""FP64 passes that are compiled with the least effort."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np

from precaudit.interpreters.jaxpr import effort
from precaudit.interpreters.jaxpr.effort import least_effort

X = np.random.default_rng(3).standard_normal((7, 33))


def test_values_are_fp64_s_to_the_last_bits():
    """x tanh(x) e^x / Σ |x| of rows, by mpmath."""

    def call(x):
        return x * jnp.tanh(x) * jnp.exp(x) / jnp.abs(x).sum(axis=1, keepdims=True)

    with jax.enable_x64(True):
        made = np.asarray(jax.jit(call, compiler_options=least_effort())(X))
    with mpmath.workdps(40):
        x = np.vectorize(mpmath.mpf)(X)
        exact = x * np.vectorize(mpmath.tanh)(x) * np.vectorize(mpmath.exp)(x) / abs(x).sum(axis=1, keepdims=True)
        off = abs(made / exact - 1).max()
    assert off < 16 * 2.0**-53


def test_an_option_that_a_compiler_has_not_is_left_out(monkeypatch):
    plain = {"xla_backend_optimization_level": 0}
    assert plain.items() <= least_effort().items()
    monkeypatch.setattr(effort, "QUICKLY", {"xla_cpu_no_such_option": 1, "xla_cpu_enable_fast_math": False})
    assert least_effort() == plain | {"xla_cpu_enable_fast_math": False}
