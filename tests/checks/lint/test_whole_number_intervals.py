"""Intervals of whole numbers that lint finds in a program's text: what the program computes lies within."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from precaudit.checks.lint.building import build
from precaudit.checks.lint.intervals import ANY, WholeRange
from precaudit.checks.lint.whole import whole_numbers

GIVEN = np.random.default_rng(0).integers(-(2**20), 2**20, 64, dtype=np.int32)
F32, BF16 = jnp.float32, jnp.bfloat16


def found(call, *given):
    graph = build(jax.jit(call).trace(*given).jaxpr)
    whole = whole_numbers(graph)
    return [whole.get(v) for v in graph.results]


@pytest.mark.parametrize(
    ("call", "low", "high"),
    [
        (lambda: jnp.arange(300), 0, 299),
        (lambda: jnp.arange(1, 300, dtype=BF16), 1, 299),
        (lambda: jnp.cumsum(jnp.ones((2, 300), BF16), 1) - 1, 0, 299),
        (lambda: jnp.arange(200)[:, None] - jnp.arange(200), -199, 199),
        (lambda: jnp.arange(1000) % 200, 0, 199),
        (lambda: jnp.tile(jnp.clip(jnp.arange(900), 10, 99), 3), 10, 99),
        (lambda: jnp.maximum(-jnp.arange(5), -2) * 3, -6, 0),
        (lambda: lax.fori_loop(0, 100, lambda _i, n: n + 2, 5), 7, 205),
        (lambda: lax.while_loop(lambda s: s[0] < 50, lambda s: (s[0] + 1, s[1]), (0, 7))[0], 0, 50),
        (lambda: lax.scan(lambda c, _: (c - 1, c), 3, None, length=9)[1], -5, 3),
        (lambda: lax.cond(jnp.arange(3).sum() > 1, lambda: 3, lambda: 7), 3, 7),
        (lambda: (jnp.arange(40) > 20).sum(), 0, 40),
        (lambda: jnp.stack([jnp.arange(4), jnp.arange(4) + 9])[0].astype(jnp.int8), 0, 12),
    ],
)
def test_an_interval_is_as_narrow_as_the_text_says(call, low, high):
    (r,) = found(call)
    assert (r.low, r.high) == (low, high)


def of_given(x):
    """Whole numbers made of integers that are not known: what each is made by."""
    near = jnp.clip(x, -40, 300)
    return {
        "remainder": lax.rem(x, jnp.int32(77)), "modulo": x % 77, "bits": x & 127, "clipped": near,
        "quotient": lax.div(near, jnp.int32(7)), "floor": near // 7, "square": near**2, "less": near - x % 9,
        "signs": jnp.sign(x), "sizes": jnp.abs(near), "chosen": jnp.where(x > 0, near, 5), "sorted": jnp.sort(near),
        "largest": near.max(), "total": near.sum(), "running": jnp.cumsum(near), "eight": near.astype(jnp.int8),
        "halves": near.astype(F32) * 2, "true": x > 3, "padded": jnp.pad(near, 3), "put": near.at[3].set(900),
        "counted": lax.scan(lambda c, v: (c + v % 3, c), 0, x)[1],
        "twice": lax.scan(lambda c, _: (2 * c, c), 1, None, length=12)[1],
        "nested": lax.fori_loop(0, 20, lambda _, n: lax.fori_loop(0, 20, lambda _, m: m + 1, n), 0),
        "later": lax.fori_loop(0, 20, lambda i, n: jnp.where(i < 10, n, n + 100), 0),
        "swapped": lax.fori_loop(0, 9, lambda _i, ab: (ab[1], ab[0] + 1), (0, 500))[0],
    }  # fmt: skip


def test_what_a_program_computes_lies_within():
    values = {name: np.asarray(x) for name, x in jax.jit(of_given)(GIVEN).items()}
    ranges = dict(zip(sorted(values), found(of_given, GIVEN), strict=True))
    for name, x in values.items():
        r = ranges[name]
        assert r is not None, name
        assert r.low <= x.min(), name
        assert x.max() <= r.high, name
        assert not np.any(x.astype(np.float64) % r.step), name
    assert ranges["nested"].high == 400
    assert {name for name, r in ranges.items() if r.high == ANY} == {"swapped", "twice"}


def test_what_is_no_count_has_no_interval():
    def call(x, i):
        product = lax.dot(i[None].astype(jnp.int8), i[:, None].astype(jnp.int8), preferred_element_type=jnp.int32)
        return x, jnp.arange(8) / 3, jnp.sin(i.astype(F32)), product.astype(BF16), jnp.floor(x), x.sum()

    assert found(call, jnp.ones(64), GIVEN) == [None] * 6


@pytest.mark.parametrize(
    ("call", "held"),
    [
        (lambda: jnp.arange(257, dtype=BF16), True),
        (lambda: jnp.arange(258, dtype=BF16), False),
        (lambda: 4 * jnp.arange(257, dtype=BF16), True),
        (lambda: jnp.arange(2049, dtype=jnp.float16), True),
        (lambda: jnp.arange(2050, dtype=jnp.float16), False),
    ],
)
def test_a_format_holds_each_up_to_two_to_its_bits(call, held):
    """The formats themselves say so: NumPy's conversions of every integer of the interval."""
    (r,) = found(call)
    dtype = jax.eval_shape(call).dtype
    every = np.arange(r.low, r.high + r.step, r.step)
    assert (every.astype(dtype).astype(np.float64) == every).all() == held
    assert r.exceeds(dtype.name) != held


def test_a_key_is_no_number():
    key = jax.random.key(3)
    assert found(lambda: jax.random.key_data(key)) == [WholeRange(0, ANY)]
