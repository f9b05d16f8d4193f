"""Products in float32 that cancel, made term after term: drawn sums may all be much nearer to FP64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precaudit
from precaudit.interpreters.jaxpr.emulate import emulate_program
from precaudit.references.traced import compiled
from precaudit.references.traced.remade import FUSED

# Of a step of optax's L-BFGS: an update and a direction, whose product is a twentieth of what its terms add up to
UPDATE = np.float32([
    -0.031454287469387054, -0.042295195162296295, 0.036053530871868134, -0.0036774552427232265, -0.09317296743392944,
    -0.004032500088214874, -0.073631152510643, 0.021640028804540634, -0.03135138377547264, 0.07476317882537842,
    -0.03380771353840828, 0.03115116059780121, -0.018113285303115845, -0.023890875279903412, -0.02085929363965988,
    0.03491166979074478,
])  # fmt: skip
DIRECTION = np.float32([
    0.01487753912806511, -0.12379259616136551, 0.12928791344165802, 0.2186138927936554, -0.026468362659215927,
    0.05116777494549751, -0.08124446868896484, -0.0032390961423516273, 0.09681142121553421, -0.11638091504573822,
    0.02159017324447632, 0.0016629871679469943, 0.0007193343481048942, 0.1063363254070282, -0.05497511848807335,
    -0.0416748970746994,
])  # fmt: skip


def in_order(x, y):
    """Return a product, term after term with fused multiply-adds: two float32 numbers multiply exactly in FP64."""
    total = np.float32(0)
    for a, b in zip(x, y, strict=True):
        total = np.float32(np.float64(total) + np.float64(a) * np.float64(b))
    return total


def test_the_emulation_is_term_after_term_bit_for_bit():
    x, y = np.random.default_rng(0).standard_normal((2, 40, 16)).astype(np.float32)
    jaxpr = jax.make_jaxpr(lambda x, y: jnp.einsum("ij,ij->i", x, y))(x, y)
    with jax.enable_x64(True):
        (found,) = jax.tree.leaves(emulate_program(jaxpr, FUSED)(np.uint64(0), x, y, held={}))
    assert np.asarray(found, np.float32).tolist() == [in_order(a, b) for a, b in zip(x, y, strict=True)]


@pytest.mark.parametrize("tried", [True, False])
def test_a_product_that_cancels_passes_as_it_was_made(tried, monkeypatch):
    if not tried:
        monkeypatch.setattr(compiled, "single_product", lambda _: False)
    made = jax.jit(jnp.dot)(UPDATE, DIRECTION)
    judged = precaudit.check(jnp.dot, UPDATE, DIRECTION)
    assert judged.exit_code == 0 or (made == in_order(UPDATE, DIRECTION) and not tried)


def test_one_product_that_cancels_is_rounding(tmp_path):
    """0.0098 of terms that add up to 2 in size: what one order leaves in float32 says little of others."""
    x = jax.random.normal(jax.random.key(0), (600, 8))[288]
    program = precaudit.Program(
        lambda w, x: x @ w, jax.random.normal(jax.random.key(3), (8,)), {"a": (x,)}, outputs="y"
    )
    found = precaudit.gate(precaudit.compare(precaudit.trace(program, tmp_path / "run"), program))
    assert {*found.counts} == {"pass"}
