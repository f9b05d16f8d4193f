"""XLA's algebra in float16: what XLA:CPU computes, bit for bit, beside operations as they are written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from precaudit.interpreters.jaxpr.emulator import Emulator
from precaudit.interpreters.jaxpr.realisations import Realisation

HALF = np.float16(0.7)
FORMS = {
    "a root": lambda x, v, w: x / jnp.sqrt(v),
    "a root of a sum": lambda x, v, w: x / jnp.sqrt(v * w + HALF),
    "an inverse root": lambda x, v, w: x / lax.rsqrt(v),
    "an exponential": lambda x, v, w: x / jnp.exp(v),
    "exponentials": lambda x, v, w: jnp.exp(x) / jnp.exp(v),
    "a power": lambda x, v, w: x / jnp.power(v, HALF),
    "a quotient below": lambda x, v, w: x / (v / w),
    "a quotient above": lambda x, v, w: (x / v) / w,
    "quotients": lambda x, v, w: (x / v) / (w / x),
    "an inverse of an inverse": lambda x, v, w: 1 / (1 / v),
    "a product of exponentials": lambda x, v, w: jnp.exp(x) * jnp.exp(v),
    "a squared exponential": lambda x, v, w: jnp.exp(v) ** 2,
    "a power of an exponential": lambda x, v, w: jnp.power(jnp.exp(v), HALF),
    "constants in a product": lambda x, v, w: (x * np.float16(3)) * np.float16(1.3),
    "constants in a quotient": lambda x, v, w: (x / np.float16(3)) / np.float16(1.3),
    "constants in a sum": lambda x, v, w: (x + np.float16(3)) + np.float16(1.3),
    "a difference from a constant, and another": lambda x, v, w: (np.float16(3) - x) + np.float16(0.0013),
    "another less a constant, before it": lambda x, v, w: np.float16(0.0013) + (np.float16(3) - x * v),
    "a difference from a constant, less another": lambda x, v, w: (np.float16(3) - x) - np.float16(0.0013),
    "a constant less a difference from another": lambda x, v, w: np.float16(0.0013) - (np.float16(3) - x),
    "a logarithm of a root": lambda x, v, w: jnp.log(jnp.sqrt(v)),
    "a logarithm of a power": lambda x, v, w: jnp.log(jnp.power(v, HALF)),
    "a logarithm of an exponential": lambda x, v, w: jnp.log(jnp.exp(v)),
    "a constant and a factor": lambda x, v, w: x * np.float16(0.3) * v,
    "a constant, then a quotient": lambda x, v, w: x * np.float16(0.3) / v,
    "two quotients, one by a constant": lambda x, v, w: x / np.float16(0.3) / v,
    "a constant and a root": lambda x, v, w: x * np.float16(0.3) / jnp.sqrt(v),
    "a constant and an inverse square": lambda x, v, w: x * np.float16(0.3) * lax.integer_pow(v, -2),
    "a constant and two factors": lambda x, v, w: x * np.float16(0.3) * v * w,
    "constants of both": lambda x, v, w: (x * np.float16(0.3)) * (v * np.float16(1.7)),
    "a computed constant": lambda x, v, w: (jnp.float32(0.3) / jnp.full(x.shape, 3.0)).astype(x.dtype) * x / v,
    "a constant over a factor": lambda x, v, w: x / (np.float16(0.3) / v),
    "a cube": lambda x, v, w: jnp.power(v, np.float16(3)),
    "a power of two": lambda x, v, w: jnp.exp2(v),
    "a power of two, scaled": lambda x, v, w: jnp.exp2(v * np.float16(0.3)),
    "an exponential minus one": lambda x, v, w: jnp.expm1((v - 1) / 2),
    "a power that is a whole number": lambda x, v, w: x / lax.pow(v, lax.convert_element_type(x + x, np.int32)),
    "powers of whole numbers moved": lambda x, v, w: x / lax.pow(v[:, 0], jnp.arange(64) % 5)[:, None],
    "a denominator": lambda x, v, w: x / (1 + jnp.exp(-v)),
    "a denominator moved": lambda x, v, w: x / jnp.sqrt(v[:, 0] * w[:, 0])[:, None],
}


@pytest.fixture(scope="module")
def operands():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.uniform(*span, (64, 33)), jnp.float16) for span in ((0.5, 2), (0.3, 3), (0.5, 2))]


def emulated(form, operands, how):
    jaxpr = jax.make_jaxpr(form)(*operands)
    with jax.enable_x64(True):
        made = [np.asarray(x) for x in Emulator({}, (), how).run(jaxpr.jaxpr, jaxpr.consts, operands)]
    return made[0] if len(made) == 1 else made


@pytest.mark.parametrize("rows", [False, True], ids=["", "of rows"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_what_xla_computes(name, rows, operands):
    x, v, w = operands
    given = [x, v[:, :1], w[:, :1]] if rows else [x, v, w]
    wanted = np.asarray(jax.jit(FORMS[name])(*given)).astype(np.float64)
    made = emulated(FORMS[name], given, Realisation())
    contracted = emulated(FORMS[name], given, Realisation(contracted=True))
    assert max((x == wanted).mean() for x in (made, contracted)) == 1.0


BELOW = {
    "a root": lambda v, w: jnp.sqrt(v),
    "an inverse root": lambda v, w: lax.rsqrt(v),
    "an exponential": lambda v, w: jnp.exp(v),
    "a power": lambda v, w: jnp.power(v, HALF),
    "a quotient": lambda v, w: v / w,
    "a constant over a value": lambda v, w: HALF / v,
}


@pytest.mark.parametrize("rows", [False, True], ids=["", "of rows"])
@pytest.mark.parametrize("name", BELOW)
def test_what_several_divide_by_is_what_xla_computes(name, rows, operands):
    """A root that two operations read is not rewritten; an exponential is."""
    x, v, w = operands
    given = [x, v[:, :1], w[:, :1]] if rows else [x, v, w]

    def form(x, v, w):
        below = BELOW[name](v, w)
        return x / below, below * w

    def called(x, v, w):
        below = jax.jit(BELOW[name])(v, w)
        return jax.jit(jnp.divide)(x, below), below * w

    def returned(x, v, w):
        below = BELOW[name](v, w)
        return x / below, below

    for each in (form, called, returned):
        for made, right in zip(emulated(each, given, Realisation()), jax.jit(each)(*given), strict=True):
            assert (made == np.asarray(right).astype(np.float64)).all()


def test_powers_in_float32_are_nearer_as_they_are_made():
    """Of exponents to 48 ``exp2`` differs by several u where its product with ln 2 is not rounded."""
    x = jnp.asarray(np.random.default_rng(0).uniform(-24, 48, (64, 33)), jnp.float32)
    wanted = np.asarray(jax.jit(jnp.exp2)(x)).astype(np.float64)
    made, written = (emulated(jnp.exp2, [x], Realisation(expanded=expanded)) for expanded in (True, False))
    apart = [np.sqrt(np.mean((y / wanted - 1) ** 2)) / 2.0**-24 for y in (made, written)]
    assert apart[0] < 1 < 4 < apart[1]


def test_what_is_written_otherwise_is_another_result(operands):
    """The forms are seen: made as they are written, most of them differ."""
    x, v, w = operands
    apart = []
    for name, form in FORMS.items():
        wanted = np.asarray(jax.jit(form)(x, v, w)).astype(np.float64)
        apart += [name] * bool((emulated(form, operands, Realisation(expanded=False)) == wanted).mean() < 0.95)
    assert len(apart) >= 15
    wide = [a.astype(jnp.bfloat16) for a in operands]
    for form in (FORMS["a root"], FORMS["exponentials"], FORMS["quotients"]):
        wanted = np.asarray(jax.jit(form)(*wide)).astype(np.float64)
        assert (emulated(form, wide, Realisation()) == wanted).all()


def test_powers_of_two_are_made_so_in_bfloat16_too(operands):
    x = operands[1].astype(jnp.bfloat16)
    wanted = np.asarray(jax.jit(jnp.exp2)(x)).astype(np.float64)
    assert (emulated(jnp.exp2, [x], Realisation()) == wanted).all()
    assert (emulated(jnp.exp2, [x], Realisation(expanded=False)) == wanted).mean() < 0.95


def test_terms_of_a_narrow_sum_may_be_fused_too(operands):
    """Of two products the one that is added last is not rounded before."""
    x, v = (a[:, :2] for a in operands[:2])
    form = lambda x, v: lax.reduce(x * v, np.float16(0), lax.add, (1,))  # noqa: E731
    made = emulated(form, (x, v), Realisation(sums="own", contracted=True))
    p, q = (np.asarray(x, np.float64) * np.asarray(v, np.float64)).T
    either = [(a.astype(np.float16) + b).astype(np.float16) for a, b in ((p, q), (q, p))]
    assert any((made == x).all() for x in either)
    assert (made != emulated(form, (x, v), Realisation(sums="own"))).any()


@pytest.mark.parametrize("name", ["erfc", "erf_inv", "lgamma", "digamma", "sinh", "cosh"])
def test_functions_in_float32_read_what_is_not_rounded(name):
    """As XLA:CPU computes them of a bfloat16 product; what is rounded before gives other results."""
    rng = np.random.default_rng(1)
    x, v = (jnp.asarray(rng.uniform(*span, (64, 33)), jnp.bfloat16) for span in ((0.1, 0.9), (0.3, 0.99)))
    form = lambda x, v: getattr(lax, name)(x * v)  # noqa: E731
    wanted = np.asarray(jax.jit(form)(x, v)).astype(np.float64)
    assert (emulated(form, (x, v), Realisation("converted")) == wanted).mean() > 0.99
    assert (emulated(form, (x, v), Realisation()) == wanted).mean() < 0.98


def test_a_fused_multiply_add_rounds_once(operands):
    """As processors with float16 of their own make it; others round the product, too."""
    x, v, w = operands
    form = lambda x, v, w: x * w + v * w  # noqa: E731
    wanted = np.asarray(jax.jit(form)(x, v, w)).astype(np.float64)
    both = [emulated(form, operands, Realisation(contracted=c)) for c in (False, True)]
    assert any((made == wanted).all() for made in both)
    a, b, c = (np.asarray(y, np.float64) for y in operands)
    assert (both[1] == (a * c + (b * c).astype(np.float16)).astype(np.float16)).all()
