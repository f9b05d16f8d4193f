"""In how many parts several devices make a product, read of compiled text, and how each part rounds."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precaudit.interpreters.jaxpr.emulate import emulate_segments
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.interpreters.jaxpr.tag import tag_program
from precaudit.interpreters.mesh.groups import group_size
from precaudit.interpreters.mesh.sums import split_sums
from precaudit.interpreters.tpu.grammar import parse_module
from precaudit.references.traced.units import units_of
from precaudit.schema.records.devices import SplitSum
from tests.helpers.paths import ROOT


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ({"replica_groups": "{{0,1,2,3},{4,5,6,7}}"}, 4),
        ({"replica_groups": "{}"}, 1),
        ({"replica_groups": "[2,4]<=[8]"}, 4),
        ({"replica_groups": "[4,2]<=[2,4]T(1,0)"}, 2),
        ({"replica_groups": "mesh['axis_0'=4,'axis_1'=1,'axis_2'=2]", "device_ids": "([2,4]T(1,0)) {'axis_0'}"}, 4),
        ({"replica_groups": "mesh['x'=4,'y'=2] {'x','y'}"}, 8),
        ({"replica_groups": "mesh[] {'x'}"}, 1),
        ({}, 1),
    ],
)
def test_over_how_many_devices_a_collective_goes(attributes, size):
    assert group_size(SimpleNamespace(attributes=attributes)) == size


TEXT = """HloModule m

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}}

%rounded (p: f32[2,4]) -> f32[2,4] {{
  %p = f32[2,4]{{1,0}} parameter(0)
  %n = {inside}[2,4]{{1,0}} convert(%p)
  ROOT %w = f32[2,4]{{1,0}} convert(%n)
}}

ENTRY %main (a: f32[2,4]) -> f32[2,4] {{
  %a = f32[2,4]{{1,0}} parameter(0)
  %f = f32[2,4]{{1,0}} fusion(%a), kind=kLoop, calls=%rounded, metadata={{op_name="jit(f)/product.3/dot_general"}}
  ROOT %r = f32[2,4]{{1,0}} all-reduce(%f), replica_groups={{{{0,1}}}}, to_apply=%add, metadata={{op_name="{name}"}}
}}
"""


@pytest.mark.parametrize(
    ("inside", "name", "found"),
    [
        ("bf16", "jit(f)/product.3/dot_general", {"product.3": SplitSum(parts=2, summed="float32")}),
        ("bf16", "jit(f)/(product.1/dot_general:product.3/dot_general)",
         {"product.3": SplitSum(parts=2, summed="float32")}),
        ("bf16", "jit(f)/(product.2/dot_general:transpose(jvp(product.3))/dot_general)",  # a gradient's
         {"product.3": SplitSum(parts=2, summed="float32")}),
        ("f32", "jit(f)/product.3/dot_general", {}),  # parts that nothing rounds
        ("bf16", "jit(f)/shard_map/psum", {}),  # of the program's own, which names its parts
    ],
)  # fmt: skip
def test_products_in_rounded_parts_are_read_of_the_text(inside, name, found):
    assert split_sums(parse_module(TEXT.format(inside=inside, name=name))) == found


WITHIN = """HloModule m

%rounding (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  %s = f32[] add(%x, %y)
  %n = bf16[] convert(%s)
  ROOT %w = f32[] convert(%n)
}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%reduced (p: f32[2,4], z: f32[]) -> f32[4] {
  %p = f32[2,4]{1,0} parameter(0)
  %z = f32[] parameter(1)
  ROOT %r = f32[4]{0} reduce(%p, %z), dimensions={0}, to_apply=%rounding, metadata={op_name="jit(f)/sum.0/reduce_sum"}
}

ENTRY %main (a: f32[2,4], z: f32[]) -> f32[4] {
  %a = f32[2,4]{1,0} parameter(0)
  %z = f32[] parameter(1)
  %f = f32[4]{0} fusion(%a, %z), kind=kLoop, calls=%reduced, metadata={op_name="jit(f)/sum.0/reduce_sum"}
  ROOT %r = f32[4]{0} all-reduce(%f), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(f)/sum.0/x"}
}
"""


def test_a_sum_that_rounds_after_every_term_rounds_its_parts():
    """In the computation of a reduction inside of a fusion; not where that adds in float32 alone."""
    assert split_sums(parse_module(WITHIN)) == {"sum.0": SplitSum(parts=2, summed="float32")}
    assert split_sums(parse_module(WITHIN.replace("to_apply=%rounding", "to_apply=%add"))) == {}


TOGETHER = """HloModule m

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

ENTRY %main (a: bf16[2], b: bf16[2]) -> (bf16[2], bf16[2]) {
  %a = bf16[2]{0} parameter(0), metadata={op_name="jit(f)/product.1/dot_general"}
  %b = bf16[2]{0} parameter(1), metadata={op_name="jit(f)/product.2/dot_general"}
  %r = (bf16[2], bf16[2]) all-reduce(%a, %b), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(f)/product.1/dot_general"}
  %m = bf16[2]{0} get-tuple-element(%r), index=0, metadata={op_name="jit(f)/product.1/dot_general"}
  %n = bf16[2]{0} get-tuple-element(%r), index=1, metadata={op_name="jit(f)/product.2/dot_general"}
  ROOT %t = (bf16[2], bf16[2]) tuple(%m, %n)
}
"""  # noqa: E501


def test_sums_that_a_compiler_puts_together_are_each_read():
    assert split_sums(parse_module(TOGETHER)) == dict.fromkeys(
        ("product.1", "product.2"), SplitSum(parts=2, summed="bfloat16")
    )


def product(dtype, summed="float32", parts=4):
    """Return a product of bfloat16 operands made in parts by an emulation, and by NumPy with ml_dtypes."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((8, 64), (64, 16)))
    x, w = (np.asarray(jnp.asarray(a, dtype)) for a in (x, w))
    made = tag_program(lambda w, x: x @ w, w, x)
    how = Realisation(split={"product.0": SplitSum(parts=parts, summed=summed)})
    with jax.enable_x64(True):
        ((rounded, _),) = emulate_segments(made.call, how)({"value": (x @ w).astype(dtype)}, w, x).values()
        rounded = np.asarray(rounded)
    size = 64 // parts
    each = [
        np.asarray(a.astype(np.float64) @ b.astype(np.float64)).astype(dtype)
        for a, b in ((x[:, i : i + size], w[i : i + size]) for i in range(0, 64, size))
    ]
    total = each[0].astype(np.float64)
    for part in each[1:]:
        total = total + part.astype(np.float64)
        if summed != "float32":
            total = total.astype(dtype).astype(np.float64)
    return rounded, total.astype(dtype).astype(np.float64)


@pytest.mark.parametrize("summed", ["float32", "bfloat16"])
@pytest.mark.parametrize("parts", [2, 4])
def test_each_part_is_rounded_before_parts_are_added(summed, parts):
    made, expected = product(jnp.bfloat16, summed, parts)
    assert np.array_equal(made, expected)


def test_a_number_of_parts_that_does_not_divide_the_terms_leaves_a_product_whole():
    made, _ = product(jnp.bfloat16, parts=3)
    whole, _ = product(jnp.bfloat16, parts=1)
    assert np.array_equal(made, whole)


def test_a_product_cut_over_devices_is_judged_in_its_parts(tmp_path):
    given = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-m", "tests.helpers.split_products", str(tmp_path)]
    out = subprocess.run(run, env=os.environ | given, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(out.stdout.splitlines()[-1])
    assert found["split"] == {"product.0": {"parts": 4, "summed": "float32"}}
    assert found["code"] == 0
    assert found["without"] == ["value"]


def test_parts_that_differ_between_cases_are_not_believed():
    one, other = ({"product.0": SplitSum(parts=n, summed="float32")} for n in (2, 4))
    for splits, known in (([one, one], one), ([one, other], {}), ([], {})):
        run = SimpleNamespace(device="cpu:0", neutrality=[SimpleNamespace(split=x) for x in splits])
        assert units_of(run).split == known


def test_sums_over_devices_in_their_own_format_are_those_of_the_machine():
    """``psum`` and ``psum_scatter`` in float16: the sum after every rank's term is rounded, bit for bit."""
    given = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-m", "tests.helpers.device_sums"]
    out = subprocess.run(run, env=os.environ | given, cwd=ROOT, capture_output=True, text=True, check=True)
    for name, found in json.loads(out.stdout.splitlines()[-1]).items():
        assert found["own"] == 0, name
        assert found["exact"] > found["of"] // 8, name
