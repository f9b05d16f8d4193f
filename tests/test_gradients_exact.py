"""FP64 outputs and gradients of a reference that rounds, against formulas written in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.gradients.exact import exact


def rounded_reference(x, temperature):
    return jax.nn.log_softmax((x * 0.7).astype(jnp.bfloat16) / temperature.astype(jnp.bfloat16))


def test_a_reference_in_bfloat16_has_its_formula_in_fp64():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((4, 33)), jnp.bfloat16)
    t, c = np.float32(1.5), rng.standard_normal((4, 33)).astype(np.float32)
    out, (dx,) = exact(rounded_reference, (x, t), c, (0,))
    k = float(np.float32(0.7)) / 1.5
    z = np.asarray(x, np.float64) * k
    logp = z - np.log(np.exp(z).sum(1, keepdims=True))
    gradient = k * (c - np.exp(logp) * c.astype(np.float64).sum(1, keepdims=True))
    own = np.asarray(rounded_reference(x, jnp.asarray(t)), np.float64)
    assert np.abs(own - logp).max() > 1e-3
    for found, expected in ((out, logp), (dx, gradient)):
        assert np.asarray(found).dtype == np.float64
        np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-13)


def test_a_literal_beside_an_explicit_cast_keeps_the_casts_format():
    x = np.float32(1.0)
    inside, _ = exact(lambda x: x.astype(jnp.bfloat16) * 0.7, (x,), x, (0,))
    before, _ = exact(lambda x: (x * 0.7).astype(jnp.bfloat16), (x,), x, (0,))
    assert float(inside) == 0.69921875  # 179 / 256
    assert float(before) == float(np.float32(0.7))
