"""Targets: their names, what their compiler refuses, and programs compiled for a TPU that is not here."""

import subprocess
import sys
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from precaudit.errors import UserError
from precaudit.interpreters.tpu import environment, target
from precaudit.interpreters.tpu.target import REFUSED, TOPOLOGIES, TooLarge, check_policy, compile_for, parse_target
from precaudit.recording.tracing.subject import load
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.policies import PRESETS, Policy, load_policy, shipped_policies
from tests.helpers.selected import few
from tests.helpers.tpus import needs_libtpu

V5E = parse_target("v5e")
FORMATS = {"F16": jnp.float16, "BF16_BF16_BF16": jnp.bfloat16}


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def test_a_target_is_a_generation_and_its_chips():
    assert parse_target("v5e").name == "v5e:2x2"
    assert parse_target("v5p:2x2x2").name == "v5p:2x2x2"


@pytest.mark.parametrize(
    ("text", "words"), [("v5", "v5e"), ("v5e:two", "2x2"), ("", "known: v4, v5e, v5p, v6e, tpu7x$")]
)
def test_what_is_no_target_is_refused(text, words):
    with pytest.raises(UserError, match=words):
        parse_target(text)


def test_the_environment_says_that_there_is_no_tpu_and_keeps_what_was_said(monkeypatch):
    monkeypatch.setattr(environment, "chips", lambda: False)
    given = {"TPU_SKIP_MDS_QUERY": "0"}
    environment.allow_libtpu(given)
    assert given == {**environment.ABSENT, "TPU_SKIP_MDS_QUERY": "0"}
    monkeypatch.setattr(environment, "chips", lambda: True)
    untouched = {}
    environment.allow_libtpu(untouched)
    assert untouched == {}


def test_a_chip_is_seen_by_its_device_file(tmp_path):
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()  # there on machines without any
    assert not environment.chips(tmp_path)
    (tmp_path / "vfio" / "0").touch()
    assert environment.chips(tmp_path)


def test_without_libtpu_the_line_that_installs_it_is_said(monkeypatch):
    monkeypatch.setattr(target, "libtpu_version", lambda: None)
    with pytest.raises(UserError, match=r"pip install 'precaudit\[tpu\]'"):
        compile_for(V5E, lambda x: x, (shape(4),))


def test_another_libtpu_is_told():
    assert target.untested_version("0.0.42.1") is None
    assert "0.0.1 was not tried" in target.untested_version("0.0.1")


@needs_libtpu
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_the_presets_refused_are_those_that_do_not_compile(generation):
    for name in PRESETS:
        dtype = next((x for key, x in FORMATS.items() if name.startswith(key)), jnp.float32)
        preset = getattr(lax.DotAlgorithmPreset, name)

        def product(x, y, preset=preset):
            return lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=preset)

        given = (shape(128, 256, dtype=dtype), shape(256, 128, dtype=dtype))
        refused = (
            pytest.raises(UserError, match="the compiler refuses the program") if name in REFUSED else nullcontext()
        )
        with refused:
            compile_for(parse_target(generation), product, given)


def test_a_policy_that_does_not_compile_is_refused():
    check_policy(load_policy("fp32-highest"), V5E)
    with pytest.raises(UserError, match="BF16_BF16_F32_X9 does not compile for v5e"):
        check_policy(Policy(matmul="BF16_BF16_F32_X9"), V5E)


@needs_libtpu
def test_a_program_too_large_for_the_chip_says_what_it_takes():
    with pytest.raises(TooLarge, match=r"take \d+\.\d+GiB of the chip's 15\.75GiB of HBM"):
        compile_for(V5E, lambda x: jnp.tanh(x @ x) @ x, (shape(1 << 16, 1 << 16),))


@needs_libtpu
def test_an_unknown_topology_is_refused():
    with pytest.raises(UserError, match="libtpu has no such topology"):
        compile_for(parse_target("v5e:3x3"), lambda x: x, (shape(4),))


@needs_libtpu
def test_memory_is_of_every_argument_and_what_is_donated_is_aliased():
    n = 1 << 16
    made = compile_for(V5E, lambda x, _unused: x + 1, (shape(n), shape(n)), donated=(0,))
    assert made.arguments == 2 * 4 * n
    assert made.aliased == made.outputs == 4 * n
    assert made.flops > 0
    assert made.text.startswith("HloModule")


@needs_libtpu
def test_programs_are_compiled_side_by_side_and_the_cache_stays_on():
    code = (
        "from precaudit.interpreters.tpu.target import *\nimport jax, jax.numpy as jnp\n"
        "x = jax.ShapeDtypeStruct((256, 256), jnp.float32)\n"
        "print(jax.jit(lambda x: x @ x)(jnp.ones((8, 8))).sum())\n"
        "print(compile_for(parse_target('v6e'), lambda x: x @ x, (x,)).text[:9])\n"
        "assert jax.config.jax_enable_compilation_cache\n"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.split() == ["512.0", "HloModule"]
        assert err == ""  # libtpu, told that there is no TPU, has nothing to say


def lowered(subject, phase, target, length=64):
    """Return a phase of a subject compiled for a target."""
    shaped = jax.tree.map(lambda x: shape(*x.shape, dtype=x.dtype), subject.parameters)
    tables = jax.tree.map(lambda x: shape(*np.shape(x), dtype=x.dtype), subject.tables(length))
    cache = jax.eval_shape(lambda: subject.decoder.init_cache(1, length))
    rows = shape(1, dtype=jnp.int32)
    given = (
        (shape(1, length, dtype=jnp.int32), rows, shape(1, 1, dtype=jnp.int32)) if phase == "prefill" else (rows,) * 3
    )
    return compile_for(target, getattr(subject.decoder, phase), (shaped, tables, *given, cache), donated=(5,))


@needs_libtpu
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_instructions_name_the_points_they_make(phase):
    text = lowered(load("tiny", "fp32-highest", None, "cpu"), phase, V5E).text
    read = {"k_cache", "v_cache"}
    absent = {"router", "experts", "resid_in"}  # of mixtures of experts; a copy alone
    for point in POINTS.keys() - absent - (read if phase == "prefill" else set()):
        assert f"/{point}/" in text, point


@needs_libtpu
@pytest.mark.parametrize("generation", few(["v5e", "v6e"], "v5e"))
@pytest.mark.parametrize("name", shipped_policies())
def test_every_policy_shipped_compiles(name, generation):
    policy = load_policy(name)
    target = parse_target(generation)
    check_policy(policy, target)
    for phase in ("prefill", "decode"):
        assert lowered(load("tiny", policy, None, "cpu"), phase, target).text
