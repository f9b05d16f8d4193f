"""Programs whose jaxprs hold literals of float0: the tangents of integers, which hold no number."""

import jax
import jax.numpy as jnp
import numpy as np

import precaudit


def test_a_literal_without_a_number_is_traced_and_judged():
    """As int8 training hands them on: its trace ended with NumPy's own message."""

    @jax.jit
    def scaled(x, _tangent):
        return x * 2

    def call(w, x):
        return scaled(jnp.tanh(x @ w), np.zeros((), jax.dtypes.float0))

    draw = np.random.default_rng(0)
    w, x = (jnp.asarray(draw.standard_normal(s), jnp.bfloat16) for s in ((8, 8), (4, 8)))
    literals = [v for e in jax.make_jaxpr(call)(w, x).jaxpr.eqns for v in e.invars if hasattr(v, "val")]
    assert any(v.aval.dtype == jax.dtypes.float0 for v in literals)
    precaudit.assert_explained(call, w, x)
