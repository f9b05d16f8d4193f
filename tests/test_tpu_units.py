"""Which unit makes a product and in what precision, and what is said where taps change that."""

import jax.numpy as jnp
import pytest

from precaudit.judging.predictions import notes
from precaudit.records import Prediction, Products
from precaudit.tpu.hlo import parse
from precaudit.tpu.units import Product, counted, moved, products
from tests.lint_programs import bf16, f32
from tests.tpus import needs_libtpu, text_for

NONE = {"passes1": 0, "passes3": 0, "passes6": 0, "vector": 0}


def made(call, *given):
    return products(parse(text_for(call, *given)))


@needs_libtpu
@pytest.mark.parametrize(
    ("precision", "rows", "kind", "unit", "expected"),
    [
        (None, 64, f32, "passes1", "bfloat16"), ("high", 64, f32, "passes3", "3 passes"),
        ("highest", 64, f32, "passes6", "float32"), ("highest", 64, bf16, "passes6", "bfloat16"),
        (None, 1, f32, "vector", "float32"), (None, 1, bf16, "vector", "bfloat16"),
    ],
)  # fmt: skip
def test_a_product_has_a_unit_and_a_precision(precision, rows, kind, unit, expected):
    """Products of bfloat16 values are exact in one pass: six, or the vector unit, make no other precision of them."""

    def call(x, w):
        return jnp.matmul(x, w, precision=precision)

    (found,) = made(call, kind(rows, 256), kind(256, 512))
    assert (found.unit, found.precision) == (unit, expected)
    assert found.place == f"{__file__}:{call.__code__.co_firstlineno + 1}"
    assert counted([found]) == NONE | {unit: 1}


@needs_libtpu
def test_a_precision_that_is_another_is_told_by_its_line():
    def call(x, w):
        return x @ w

    one, many = (made(call, f32(n, 256), f32(256, 512)) for n in (1, 64))
    line = f"{__file__}:{call.__code__.co_firstlineno + 1}"
    assert moved(many, one) == {line: ({"bfloat16"}, {"float32"})}
    assert moved(many, many) == {}
    exact = [made(call, bf16(n, 256), bf16(256, 512)) for n in (1, 64)]
    assert counted(exact[0]) != counted(exact[1])
    assert moved(*exact) == {}


def test_a_place_that_one_program_alone_names_is_not_moved():
    one, other = Product("q", "passes1", "bfloat16", "1 pass"), Product("k", "vector", "float32", "float32")
    assert moved([one], [other]) == {}


def predicted(bare, captured, inside=0.0, moved=()):
    return Prediction(bare=Products(**NONE | bare), captured=Products(**NONE | captured), inside=inside, moved=moved)


def test_notes_say_counts_and_the_spread():
    same = predicted({"passes1": 9, "vector": 1}, {"passes1": 9, "vector": 1}, 0.004)
    assert list(notes([("prefill", same), ("prefill", same), ("decode", None)])) == [
        "the compiler makes the same products without taps and with them (prefill: 9 in 1 pass, 1 on the vector unit)",
        "bfloat16 results inside fusions, rounded or not, change outputs (relative): prefill by 0.004; "
        "taken as rounded",
    ]
    (said,) = notes([("call", predicted({"passes6": 2}, {"passes6": 3}))])
    assert said.endswith("makes other products without taps than with them (call: 2 in 6 passes, 3 in 6 passes)")
    assert list(notes([("call", None)])) == []
