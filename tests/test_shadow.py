"""The FP64 shadow of a program is its formula: every cast and rounding gone, every construct kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from precaudit.numpy_decoder.forward import Wanted, forward
from precaudit.numpy_decoder.model import Model
from precaudit.numpy_decoder.rounding import FP64
from precaudit.tracing.subject import load
from precaudit.transforms import reap
from precaudit.transforms.shadow import CannotLift, shadow

X = np.linspace(-1.3, 2.1, 12).reshape(3, 4)
W = np.random.default_rng(3).normal(size=(5, 4, 4))
BF = jnp.bfloat16


@jax.custom_jvp
def halved(x):
    return x / 2


halved.defjvp(lambda p, t: (halved(p[0]), t[0] / 2))


def program(x, w):
    y = jnp.dot(x.astype(BF), w[0].astype(BF), preferred_element_type=jnp.float32)
    y = lax.reduce_precision(jax.jit(jnp.tanh)(y), 5, 2)
    y, ys = lax.scan(lambda c, m: ((c @ m).astype(jnp.float16).astype(jnp.float32), c.sum()), y, w)
    y = lax.cond(y.sum() > 0, lambda v: v.astype(BF).astype(jnp.float32) + 1, lambda v: v - 1, y)
    y = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, (s[1] * 1.5).astype(BF).astype(jnp.float32)), (0, y))[1]
    y = jax.checkpoint(lambda v: jnp.exp(v.astype(jnp.float8_e4m3fn).astype(jnp.float32) / 50))(y)
    return halved(y), ys, jnp.argmax(y, axis=-1)


def in_numpy(x, w):
    y = np.tanh(x @ w[0])
    ys = []
    for m in w:
        ys.append(y.sum())
        y = y @ m
    y = y + 1 if y.sum() > 0 else y - 1
    y = np.exp(y * 1.5**3 / 50)
    return y / 2, np.array(ys), y.argmax(axis=-1)


def test_every_construct_in_float64():
    with jax.enable_x64(True):
        out = shadow(program)(X.astype(np.float32), W.astype(np.float32))
    wanted = in_numpy(X.astype(np.float32).astype(np.float64), W.astype(np.float32).astype(np.float64))
    assert [o.dtype for o in out[:2]] == [np.float64] * 2
    for a, b in zip(out, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-12)


def test_the_gradient_is_that_of_the_formula():
    def loss(x):
        return jnp.sum(jnp.sin(x.astype(BF).astype(jnp.float32)) ** 2)

    x = X.astype(np.float32)
    with jax.enable_x64(True):
        found = jax.grad(shadow(loss))(jnp.asarray(x, jnp.float64))
    np.testing.assert_allclose(np.asarray(found), np.sin(2 * x.astype(np.float64)), rtol=1e-12)


def test_integers_stay_integers_and_saturate():
    def f(x):
        return jnp.round(x * 100).astype(jnp.int8).astype(jnp.float32) / 100

    with jax.enable_x64(True):
        out = shadow(f)(X.astype(np.float32))
    np.testing.assert_allclose(
        np.asarray(out), np.clip(np.round(X.astype(np.float32) * 100.0), -128, 127) / 100, rtol=1e-6
    )


def bits(x):
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & ~0xFFFF, jnp.float32)


def test_what_has_no_meaning_in_float64_is_said():
    with jax.enable_x64(True), pytest.raises(CannotLift, match="--lift bitcast_convert_type="):
        shadow(bits)(X.astype(np.float32))


def test_a_meaning_can_be_given():
    def callback(x):
        return jax.pure_callback(lambda v: np.sin(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 2

    with jax.enable_x64(True):
        out = shadow(callback, {"pure_callback": jnp.sin})(X.astype(np.float32))
    np.testing.assert_allclose(np.asarray(out), 2 * np.sin(X.astype(np.float32).astype(np.float64)), rtol=1e-12)


@pytest.mark.parametrize("policy", ["bf16", "fp32-highest"])
def test_the_decoder_s_shadow_is_the_reference(policy):
    """Constants the program holds in float32, such as 1/√K, leave 1e-8."""
    s, tokens = load("tiny", policy, None, "cpu"), np.arange(3, 40, dtype=np.int32)
    n, half = len(tokens), s.config.head_dim // 2
    angle = np.arange(n)[:, None] * s.config.rope_theta ** (-np.arange(half) / half)
    rows = np.arange(n, dtype=np.int32)[None]
    with jax.enable_x64(True):
        call = shadow(lambda p, t, x, b, r: reap(s.decoder.prefill)(p, t, x, b, r, None))
        (logits, _), taps = call(
            s.parameters, ([np.cos(angle)], [np.sin(angle)]), tokens[None], np.zeros(1, np.int32), rows
        )
    found = {}
    wanted = Wanted({*taps, "logits"}, None, [np.arange(n)])
    forward(
        Model(s.config, s.checkpoint.tensors.read),
        [tokens],
        [FP64],
        wanted,
        lambda i, at, p, x: found.update({(at, p): x}),
    )
    seen = np.tril(np.ones((n, n)))
    for (layer, point), r in found.items():
        x = np.asarray(logits if point == "logits" else taps[point] if layer is None else taps[point][layer])[0]
        keep = seen if point == "scores" else 1.0
        assert np.linalg.norm((x - r) * keep) <= 5e-8 * np.linalg.norm(r * keep), (layer, point)
