"""A rounding that a program writes out and reads back, which XLA:CPU keeps beside sums that it hands on unrounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precaudit
from precaudit.interpreters.jaxpr.emulator import Emulator
from precaudit.interpreters.jaxpr.realisations import Realisation, converts_twice


def rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def residual(w, x):
    """Read a sum in float32, then what was rounded to bfloat16 on purpose."""
    return rounded((x @ w + x).astype(jnp.float32) * 3) ** 2


def norm(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def gradient(w, x):
    return jax.grad(lambda w: jnp.mean(norm(x + x @ w).astype(jnp.float32) ** 3))(w)


@pytest.fixture(scope="module")
def operands():
    keys = jax.random.split(jax.random.key(0))
    w, x = (jax.random.normal(key, shape) for key, shape in zip(keys, ((64, 64), (24, 64)), strict=True))
    return (w / 8).astype(jnp.bfloat16), x.astype(jnp.bfloat16)


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("program", [residual, gradient])
def test_it_passes(program, operands):
    assert converts_twice(jax.make_jaxpr(program)(*operands).jaxpr)
    precaudit.assert_explained(program, *operands)


@pytest.mark.parametrize(
    "moved",
    [
        lambda x: jnp.array(x, copy=True),
        jax.lax.optimization_barrier,
        lambda x: jnp.concatenate(jnp.split(x, 2, -1), -1),
    ],
    ids=["copied", "behind a barrier", "split"],
)
def test_what_is_moved_before_it_is_converted_may_be_unrounded(moved, tmp_path):
    """XLA takes copies and barriers away, and with them the rounding: correct gradients failed."""
    keys = [jax.random.key(i) for i in (20, 21, 22)]
    w = (jax.random.normal(keys[0], (32, 128)) * 0.2).astype(jnp.bfloat16)
    x, t = jax.random.normal(keys[1], (2, 40, 32)).astype(jnp.bfloat16), jax.random.randint(keys[2], (2, 40), 0, 128)

    def capped(w, x, t):
        def loss(w):
            y = moved(jnp.tanh(x @ w / jnp.bfloat16(30)) * jnp.bfloat16(30)).astype(jnp.float32)
            return -jnp.take_along_axis(jax.nn.log_softmax(y), t[..., None], -1).mean()

        return jax.value_and_grad(loss)(w)

    program = precaudit.Program(capped, w, {"a": (x, t)}, outputs=("loss", "gradient"))
    precaudit.compare(precaudit.trace(program, tmp_path / "run"), program)
    assert set(precaudit.gate(tmp_path / "run").counts) == {"pass"}


def test_a_norm_s_statistics_may_be_of_what_is_not_rounded(operands):
    """As a TPU has them: in a fusion of their own, beside values from what is stored."""

    def norm_of_sum(x, y):
        return norm(x + y)

    x = operands[1]
    y = x[::-1] * jnp.bfloat16(0.3)
    jaxpr = jax.make_jaxpr(norm_of_sum)(x, y)
    wide = np.asarray(x, np.float64) + np.asarray(y, np.float64)
    rounded_sum = wide.astype(x.dtype).astype(np.float64)

    def expected(statistics):
        scale = 1 / np.sqrt(np.mean(statistics**2, -1, keepdims=True) + 1e-5)
        return (rounded_sum * scale).astype(x.dtype).astype(np.float64)

    with jax.enable_x64(True):
        (made,) = Emulator({}, (), Realisation("statistics")).run(jaxpr.jaxpr, jaxpr.consts, (x, y))
        (usual,) = Emulator({}, (), Realisation()).run(jaxpr.jaxpr, jaxpr.consts, (x, y))
    assert (np.asarray(made) == expected(wide)).all()
    assert (np.asarray(usual) == expected(rounded_sum)).all()
    assert (np.asarray(made) != np.asarray(usual)).any()


def test_one_conversion_is_not_two():
    assert not converts_twice(
        jax.make_jaxpr(lambda x: (x + x).astype(jnp.float32) ** 2)(jnp.ones(3, jnp.bfloat16)).jaxpr
    )
    assert not converts_twice(jax.make_jaxpr(lambda x: (x * 2).astype(jnp.bfloat16))(jnp.ones(3)).jaxpr)
