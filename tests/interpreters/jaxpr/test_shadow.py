"""The FP64 shadow of a program is its formula: every cast and rounding gone, every construct kept."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from precaudit.interpreters.jaxpr import reap
from precaudit.interpreters.jaxpr.shadow import CannotLift, shadow
from precaudit.models.numpy_decoder.forward import Sequences, Wanted, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.recording.tracing.subject import load

X = np.linspace(-1.3, 2.1, 12).reshape(3, 4)
W = np.random.default_rng(3).normal(size=(5, 4, 4))
BF = jnp.bfloat16
LAST = 2.0**-53  # rounding of the products, which a compiler may fuse with the sum: for |z| below 0.3


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


def shadowed(f, *args, **given):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, shadow(f, **given)(*args))


def test_a_reducer_is_not_taken_for_the_body_of_a_call():
    pair = np.array([1.0, 3.0], np.float32)
    assert shadowed(lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b, (0,)), pair) == 4.0
    least = shadowed(lambda x: lax.reduce(x, np.float32(9), lambda a, b: jnp.minimum(a, b) * 2, (0,)), pair)
    assert least == 4.0  # min(min(9, 1) · 2, 3) · 2


def test_a_reducer_with_a_cast_is_lifted():
    def rounded(a, b):
        return (a.astype(BF) + b.astype(BF)).astype(jnp.float32)

    x = X.astype(np.float32)
    total = shadowed(lambda x: lax.reduce(x, np.float32(0), rounded, (0, 1)), x)
    np.testing.assert_allclose(total, x.astype(np.float64).sum(), rtol=1e-14)
    windows = shadowed(lambda x: lax.reduce_window(x, np.float32(0), rounded, (1, 2), (1, 1), "VALID"), x)
    np.testing.assert_allclose(windows, x[:, 1:].astype(np.float64) + x[:, :-1], rtol=1e-14)


NUMBERS = lax.ScatterDimensionNumbers((), (0,), (0,))


def test_a_scatter_applies_its_own_function():
    def f(x):
        return lax.scatter_apply(x, np.array([[1], [3]], np.int32), lambda v: v * v, NUMBERS, update_shape=(2,))

    x = X[0].astype(np.float32)
    wanted = x.astype(np.float64) ** np.array([1, 2, 1, 2])
    np.testing.assert_allclose(shadowed(f, x), wanted, rtol=1e-14)


def test_a_scatter_by_a_function_of_both_is_refused():
    update = jax.make_jaxpr(lambda a, b: a - 3 * b)(np.float32(1), np.float32(1)).jaxpr

    def f(x):
        how = {"indices_are_sorted": False, "unique_indices": False, "mode": lax.GatherScatterMode.CLIP}
        return lax.scatter_p.bind(
            x, np.array([[1]], np.int32), x[:1], update_jaxpr=update, update_consts=(), dimension_numbers=NUMBERS, **how
        )

    with pytest.raises(CannotLift, match=r"scatter cannot .*a function of both"):
        shadowed(f, X[0].astype(np.float32))


def rotated(x, angles):
    """RoPE as a product of complex numbers."""
    pairs = lax.complex(x[..., ::2], x[..., 1::2]) * jnp.exp(1j * angles) * (0.5 + 0.25j)
    return jnp.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape), pairs


def test_complex_numbers_are_lifted():
    x, angles = X.astype(np.float32), np.linspace(0, 3, 2).astype(np.float32)
    with jax.numpy_dtype_promotion("standard"):
        rows, pairs = shadowed(rotated, x, angles)
    wide = x.astype(np.float64)
    wanted = (wide[:, ::2] + 1j * wide[:, 1::2]) * np.exp(1j * angles.astype(np.float64)) * (0.5 + 0.25j)
    assert (rows.dtype, pairs.dtype) == (np.float64, np.complex128)
    np.testing.assert_allclose(pairs, wanted, rtol=1e-14)
    np.testing.assert_allclose(rows[:, ::2], wanted.real, rtol=1e-14)


def test_a_fourier_transform_is_in_complex128():
    def f(x):
        return jnp.fft.irfft(jnp.fft.rfft(x) * np.complex64(2j), n=4), jnp.abs(jnp.conj(jnp.fft.fft(x)))

    back, sizes = shadowed(f, X.astype(np.float32))
    wide = X.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(back, np.fft.irfft(np.fft.rfft(wide) * 2j, n=4), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(sizes, np.abs(np.fft.fft(wide)), rtol=1e-13)


def test_a_complex_argument_of_any_width():
    z = np.array([0.1 + 0.2j])
    assert abs(shadowed(lambda z: z * z, z) - z * z) <= LAST
    narrow = z.astype(np.complex64)
    assert abs(shadowed(lambda z: z * z, narrow) - narrow.astype(np.complex128) ** 2) <= LAST


def halvings(x, least):
    return lax.while_loop(
        lambda s: s[0] > least, lambda s: ((s[0] / 2).astype(BF).astype(jnp.float32), s[1] + 1), (x, 0)
    )


def test_a_loop_under_vmap_ends_for_each_element_apart():
    x, least = np.array([3.3, 40.1, 0.01], np.float32), np.float32(0.5)
    wide = x.astype(np.float64)
    steps = np.array([3, 7, 0])
    inner = shadowed(jax.vmap(partial(halvings, least=least)), x)
    with jax.enable_x64(True):
        outer = jax.vmap(shadow(partial(halvings, least=least)))(jnp.asarray(x))
    for found in (inner, outer):
        np.testing.assert_array_equal(found[0], wide / 2.0**steps)
        np.testing.assert_array_equal(found[1], steps)


def test_keys_and_integers_stay_and_random_numbers_are_the_program_s():
    def f(key, i, x):
        return x + jax.random.uniform(key, x.shape), i + 1, jax.random.split(key)[0]

    x, key = X.astype(np.float32), jax.random.key(5)
    with jax.enable_x64(True):
        out, i, split = shadow(f)(key, np.int64(7), x)
        assert split.dtype == key.dtype
    np.testing.assert_array_equal(out, x.astype(np.float64) + np.asarray(jax.random.uniform(key, x.shape)))
    assert (i.dtype, int(i)) == (np.int32, 8)


def test_keyword_arguments():
    with jax.enable_x64(True):
        assert float(shadow(lambda x, *, y: x - y)(np.float32(1), y=np.float32(3))) == -2.0


def sine(evaluate):
    """Return another primitive that is called sin."""
    primitive = Primitive("sin")
    primitive.def_abstract_eval(evaluate)
    primitive.def_impl(lambda x: evaluate(x) and jnp.sin(x).astype(jnp.float32))
    return primitive


def single(x):
    if x.dtype != jnp.float32:
        raise TypeError("sin takes float32 only\nand says so at length")
    return jax.core.ShapedArray(x.shape, x.dtype)


def test_what_a_primitive_raises_on_wide_operands_is_a_refusal_with_the_line():
    with pytest.raises(CannotLift, match=r"\(sin takes float32 only\) at .*test_shadow.py:") as error:
        shadowed(lambda x: sine(single).bind(x), X.astype(np.float32))
    assert (error.value.name, "test_shadow.py:" in error.value.where) == ("sin", True)


def test_a_result_that_stayed_narrow_is_a_refusal():
    narrow = sine(lambda x: jax.core.ShapedArray(x.shape, jnp.float32))
    with pytest.raises(CannotLift, match=r"it gives float32\[3, 4\] for float64\[3, 4\]"):
        shadowed(lambda x: narrow.bind(x) * 2, X.astype(np.float32))


def test_a_given_meaning_of_another_shape_is_a_refusal():
    with pytest.raises(CannotLift, match="nextafter"):
        shadowed(lambda x: jnp.nextafter(x, x), X.astype(np.float32), lift={"nextafter": lambda x, _y: x[0]})


@pytest.mark.turn  # 4 s
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
        Model(s.config, s.checkpoint.tensors.read_tensor),
        Sequences([tokens]),
        [FP64],
        wanted,
        lambda _i, at, p, x: found.update({(at, p): x}),
    )
    seen = np.tril(np.ones((n, n)))
    for (layer, point), r in found.items():
        x = np.asarray(logits if point == "logits" else taps[point] if layer is None else taps[point][layer])[0]
        keep = seen if point == "scores" else 1.0
        assert np.linalg.norm((x - r) * keep) <= 5e-8 * np.linalg.norm(r * keep), (layer, point)
