"""Which unit makes a product and in what precision, and what is said where taps change that."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from precaudit.interpreters.jaxpr.products import label_in
from precaudit.interpreters.jaxpr.tag import capturing, tag_program
from precaudit.interpreters.tpu.grammar import parse_module
from precaudit.interpreters.tpu.units import (
    UnitProduct,
    count_products,
    other_precisions,
    products_of,
    ways_by_label,
    ways_by_place,
)
from precaudit.models.numpy_decoder.rounding import of_policy
from precaudit.recording.runs.compiled import ways_of
from precaudit.references.textbook.units import policy_at
from precaudit.schema.places import Place
from precaudit.schema.policies import load_policy, on_device
from precaudit.schema.predictions import prediction_notes
from precaudit.schema.records.runs import Prediction, Products
from tests.helpers.lint_programs import bf16, f32
from tests.helpers.tpus import needs_libtpu, text_for

NONE = {"passes1": 0, "passes3": 0, "passes6": 0, "vector": 0}


def made(call, *given):
    return products_of(parse_module(text_for(call, *given)))


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
    assert count_products([found]) == NONE | {unit: 1}


@needs_libtpu
def test_a_precision_that_is_another_is_told_by_its_line():
    def call(x, w):
        return x @ w

    one, many = (made(call, f32(n, 256), f32(256, 512)) for n in (1, 64))
    line = f"{__file__}:{call.__code__.co_firstlineno + 1}"
    assert other_precisions(many, one) == {line: ({"bfloat16"}, {"float32"})}
    assert other_precisions(many, many) == {}
    exact = [made(call, bf16(n, 256), bf16(256, 512)) for n in (1, 64)]
    assert count_products(exact[0]) != count_products(exact[1])
    assert other_precisions(*exact) == {}


def test_a_place_that_one_program_alone_names_is_not_moved():
    one, other = UnitProduct("q", "passes1", "bfloat16", "1 pass"), UnitProduct("k", "vector", "float32", "float32")
    assert other_precisions([one], [other]) == {}


def predicted(bare, captured, inside=0.0, moved=()):
    return Prediction(bare=Products(**NONE | bare), captured=Products(**NONE | captured), inside=inside, moved=moved)


def test_notes_say_counts_and_the_spread():
    same = predicted({"passes1": 9, "vector": 1}, {"passes1": 9, "vector": 1}, 0.004)
    assert list(prediction_notes([("prefill", same), ("prefill", same), ("decode", None)])) == [
        "the compiler has the same products without taps and with them (prefill: 9 in 1 pass, 1 on the vector unit)",
        "bfloat16 results inside fusions, rounded or not, change outputs (relative): prefill by 0.004; "
        "taken as rounded",
    ]
    (said,) = prediction_notes([("call", predicted({"passes6": 2}, {"passes6": 3}))])
    assert said.endswith("has other products without taps than with them (call: 2 in 6 passes, 3 in 6 passes)")
    assert list(prediction_notes([("call", None)])) == []


@needs_libtpu
def test_a_program_s_products_keep_their_numbers():
    """Through taps, a scan and a call; a product of one term is a multiplication on the vector unit."""

    def call(params, x):
        def step(x, w):
            return jax.jit(lambda x: jnp.tanh(x @ w))(x), None

        return lax.scan(step, x @ params["in"], params["each"])[0] @ params["out"] + x[:, :1] @ params["in"][:1]

    params = {"in": f32(256, 256), "each": f32(3, 256, 256), "out": f32(256, 256)}
    tapped = tag_program(call, params, f32(64, 256))
    found = ways_by_label(parse_module(text_for(capturing(tapped), params, f32(64, 256))))
    assert found == dict.fromkeys(("product.0", "product.1", "product.2"), ("1 pass",)) | {"product.3": ("float32",)}


@pytest.mark.parametrize(
    ("path", "label"),
    [("jit(f)/product.12/dot_general", "product.12"), ("product.1/while/product.2/x", "product.2"),
     ("jit(my_product.3)/x", ""), ("product.x/y", ""), ("", "")],
)  # fmt: skip
def test_the_innermost_label_of_a_path_counts(path, label):
    assert label_in(path) == label


@pytest.mark.parametrize(
    ("narrow", "way"),
    [(0, "float32"), (1, "float32, one operand bfloat16"), (2, "float32, both operands bfloat16")],
)
def test_the_vector_unit_s_operands_are_told(narrow, way):
    """Written by hand: a product and a sum of which none, one or both operands were rounded to bfloat16 before."""
    kinds = ["bf16" if i < narrow else "f32" for i in range(2)]
    text = f"""HloModule m
add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}
ENTRY e {{
  x = {kinds[0]}[8]{{0}} parameter(0)
  y = {kinds[1]}[8]{{0}} parameter(1)
  u = f32[8]{{0}} convert(x)
  v = f32[8]{{0}} convert(y)
  t = f32[8]{{0}} multiply(u, v)
  z = f32[] constant(0)
  ROOT r = f32[] reduce(t, z), dimensions={{0}}, to_apply=add, metadata={{op_name="jit(f)/q/dot_general"}}
}}
"""
    assert ways_by_place(products_of(parse_module(text))) == {"q": (way,)}


def test_a_short_prompt_is_told_by_the_program_that_it_shares():
    """Its own 64 slots are no program here: the next longer one of as many prompts ran it, not the longest."""

    def noted(shape, way):
        return SimpleNamespace(phase="prefill", shape=shape, made={"q": (way,)})

    requested = SimpleNamespace(prompts=("short", "long"), batch=1, phases=("prefill",), decode_steps=0)
    programs = [noted((1, 2304), "float32"), noted((1, 256), "1 pass"), noted((3, 256), "3 passes")]
    prompts = {"short": SimpleNamespace(tokens=(1,) * 9), "long": SimpleNamespace(tokens=(1,) * 2200)}
    record = SimpleNamespace(neutrality=programs, requested=requested)
    recorded = SimpleNamespace(run=SimpleNamespace(record=record, prompts=prompts))
    assert ways_of(recorded, "short", "prefill", "q") == {"1 pass"}
    assert ways_of(recorded, "long", "prefill", "q") == {"float32"}
    assert ways_of(recorded, "short", "prefill", "k") == set()


@pytest.mark.parametrize(
    ("way", "exact"), [("1 pass", False), ("3 passes", False), ("6 passes", True), ("float32", True)]
)
def test_compiled_products_that_keep_every_bit_of_float32_are_emulated_as_float32(way, exact):
    """Of operands of 24 bits, six passes in parts would differ in the last bit and leave half of the noise."""
    noted = SimpleNamespace(phase="prefill", shape=(1, 256), made={"q": (way,)})
    requested = SimpleNamespace(prompts=("a",), batch=1, phases=("prefill",), decode_steps=0)
    record = SimpleNamespace(neutrality=[noted], requested=requested, device="TPU v5 lite")
    recorded = SimpleNamespace(run=SimpleNamespace(record=record, prompts={"a": SimpleNamespace(tokens=(1,) * 9)}))
    asked = on_device(load_policy("fp32"), "tpu")
    found = of_policy(policy_at(recorded, asked, Place("a", "prefill", 0, 0, "q")), False)
    a, b = (np.random.default_rng(i).standard_normal((8, 8)).astype(np.float32).astype(np.float64) for i in (1, 2))
    assert np.array_equal(found.dot(a, b), a @ b) == exact
