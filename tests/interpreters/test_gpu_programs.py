"""Programs on a GPU: how it makes their products is read from the compiled text, emulated, told and judged.

Runs: ``traces/gpu/programs`` (an H100, JAX 0.11.2; ``python -m tests.helpers.gpu_programs``).
"""

import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import precaudit
from precaudit import Program
from precaudit.checks.gradients import case, sides
from precaudit.checks.gradients.check import gradcheck
from precaudit.interpreters.gpu.units import ways_by_label
from precaudit.interpreters.jaxpr import multiplying
from precaudit.interpreters.jaxpr.emulate import emulate_segments
from precaudit.interpreters.jaxpr.expanded import EXPANDED
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.interpreters.jaxpr.rounding import round_once
from precaudit.interpreters.tpu.grammar import parse_module
from precaudit.judging.programs import notes
from precaudit.models.numpy_decoder import passes
from precaudit.models.numpy_decoder.accumulation import rounding_products
from precaudit.recording.programs.preparing import code_hash, prepare_program
from precaudit.recording.runs.arrays import write_tensors
from precaudit.recording.runs.kinds import manifest_of
from precaudit.recording.runs.programs import file_name, open_program_run
from precaudit.references.traced.forward import Chains
from precaudit.references.traced.units import Units
from tests.helpers.gpu_programs import PROGRAMS
from tests.helpers.paths import ROOT
from tests.helpers.selected import few

RUNS = ROOT / "traces" / "gpu" / "programs"
ONCE = 2.0**-24  # results are in float32
RANDOM = np.random.default_rng(23)
START = RANDOM.bit_generator.state


@pytest.fixture(autouse=True)
def _the_same_numbers():
    """Give every test the same numbers, whatever ran before it."""
    RANDOM.bit_generator.state = START


def text(instruction, form="f32"):
    return f"""HloModule m

ENTRY %main (a: {form}[8,16], b: {form}[16,4]) -> f32[8,4] {{
  %a = {form}[8,16]{{1,0}} parameter(0)
  %b = {form}[16,4]{{1,0}} parameter(1)
  ROOT %out = {instruction}, metadata={{op_name="jit(f)/product.3/dot_general"}}
}}
"""


DOT = "f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
LIBRARY = 'f32[8,4]{1,0} custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"x":{'
LIBRARY += '"precision_config":{"algorithm":"ALG_UNSET","operand_precision":["DEFAULT","DEFAULT"]}}}'
CONVOLUTION = 'f32[8,4]{1,0} custom-call(%a, %b), custom_call_target="__cudnn$convForward"'


@pytest.mark.parametrize(("instruction", "form", "ways"), [
    (DOT, "f32", ("1 TF32 pass",)), (DOT + ", operand_precision={high,high}", "f32", ("1 TF32 pass",)),
    (DOT + ", operand_precision={highest,highest}", "f32", ("float32",)), (DOT, "bf16", ("float32",)),
    (DOT + ", algorithm=dot_bf16_bf16_f32_x3", "f32", ("3 passes",)),
    (DOT + ", algorithm=dot_bf16_bf16_f32_x9", "f32", ("1 TF32 pass",)),
    (LIBRARY, "f32", ("1 TF32 pass",)), (LIBRARY.replace("DEFAULT", "HIGHEST"), "f32", ("float32",)),
    (CONVOLUTION, "f32", ("1 TF32 pass", "float32")), (CONVOLUTION, "f16", ("float32",)),
    ("f32[8,16]{1,0} multiply(%a, %a)", "f32", ("float32",)),
    ("bf16[8,16]{1,0} multiply(%a, %a)", "bf16", ("rounded products",)),
])  # fmt: skip
def test_a_text_says_how_products_are_made(instruction, form, ways):
    assert ways_by_label(parse_module(text(instruction, form))) == {"product.3": ways}


def test_a_dot_in_a_loop_s_fusion_is_made_in_float32():
    fused = text(DOT).replace("HloModule m\n\nENTRY %main", "HloModule m\n\n%inside")
    fused += """
ENTRY %main (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {
  %x = f32[8,16]{1,0} parameter(0)
  %y = f32[16,4]{1,0} parameter(1)
  ROOT %made = f32[8,4]{1,0} fusion(%x, %y), kind=kLoop, calls=%inside
}
"""
    assert ways_by_label(parse_module(fused)) == {"product.3": ("float32",)}
    assert ways_by_label(parse_module(fused.replace("kLoop", "kCustom"))) == {"product.3": ("1 TF32 pass",)}


@pytest.mark.turn  # 6 s
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=8, max_size=8), st.integers(-12, 12))
@settings(max_examples=60)
def test_operands_are_rounded_to_tf32_as_the_device_does(values, ulps):
    """Also those some ulps off a tie, of which ``near_tie`` says what the other way makes of them."""
    given = np.asarray(values, np.float32)
    kept = given.view(np.uint32) & np.uint32(0xFFFFE000)
    near = (kept + np.uint32(4096 + ulps)).view(np.float32)
    for x in (given, near[np.isfinite(near)]):
        with np.errstate(over="ignore", invalid="ignore"):
            wide, want = x.astype(np.float64), passes.to_tf32(x)
            above = ((x.view(np.uint32) & np.uint32(0xFFFFE000)) + np.uint32(0x2000)).view(np.float32)
            gap = np.abs(above.astype(np.float64) - (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32))
        with jax.enable_x64(True):
            made, step = np.asarray(multiplying.round_to_tf32(wide)), np.asarray(multiplying.near_tie(wide, 8))
        np.testing.assert_array_equal(made, want)
        off = np.abs((x.view(np.uint32) & np.uint32(0x1FFF)).astype(int) - 4096)
        known = (off <= 8) & np.isfinite(x) & np.isfinite(above) & (np.abs(wide) >= 2.0**-126)
        np.testing.assert_array_equal(step, np.where(known, gap, 0.0))


def test_convolutions_round_ties_to_even():
    one = np.float32(1 + 2.0**-11)  # halfway between 1 and the next TF32 number
    with jax.enable_x64(True):
        assert multiplying.to_even(np.float64(one)) == 1.0
        assert multiplying.round_to_tf32(jnp.float64(one)) == 1 + 2.0**-10


def segment(call, how, *args):
    """Return what a realisation makes of a program of one product."""

    def tapped(*given):
        return checkpoint_name(call(*given), "y")

    out = jax.eval_shape(tapped, *args)
    with jax.enable_x64(True):
        made = emulate_segments(tapped, how)({"y": np.zeros(out.shape, out.dtype)}, *args)
    return np.asarray(made["y"][1])


def normal(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("precision", "said", "setting"), [
    (None, "1 TF32 pass", "TF32_TF32_F32"), (None, "float32", "highest"), ("highest", "1 TF32 pass", "highest"),
    ("TF32_TF32_F32_X3", "3 TF32 passes", "TF32_TF32_F32_X3"), ("TF32_TF32_F32_X3", "1 TF32 pass", "TF32_TF32_F32_X3"),
    ("BF16_BF16_F32_X3", "3 passes", "BF16_BF16_F32_X3"), ("BF16_BF16_F32", "1 pass", "BF16_BF16_F32"),
    (None, "rounded products", "TF32_TF32_F32"), ("high", "1 pass", "TF32_TF32_F32"),
])  # fmt: skip
def test_a_float32_product_is_made_as_the_text_says_and_not_coarser_than_it_declares(precision, said, setting):
    a, b = normal(5, 64), normal(64, 7)
    how = Realisation(unit="gpu", made={"": said})
    made = segment(lambda x, y: jnp.dot(x, y, precision=precision), how, a, b)
    np.testing.assert_allclose(
        made, passes.matmul_products(setting)(a.astype(np.float64), b.astype(np.float64)), rtol=ONCE
    )


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("form", ["bfloat16", "float16"])
def test_terms_of_one_row_are_rounded_where_the_text_says(monkeypatch, form, few):
    if not few:
        monkeypatch.setattr(multiplying, "MOST_TERMS", 0)
    a, b = (x.astype(form) for x in (normal(3, 1, 32), normal(32, 9)))
    made = segment(lambda x, y: x @ y, Realisation(unit="gpu", made={"": "rounded products"}), a, b)
    want = rounding_products(form)(np.asarray(a.reshape(3, 32), np.float64), np.asarray(b, np.float64))
    np.testing.assert_allclose(made.reshape(3, 9), want, rtol=ONCE)
    wide = segment(
        lambda x, y: jnp.dot(x, y, preferred_element_type=jnp.float32),
        Realisation(unit="gpu", made={"": "rounded products"}), a, b,
    )  # fmt: skip
    np.testing.assert_allclose(
        wide.reshape(3, 9), np.asarray(a.reshape(3, 32), float) @ np.asarray(b, float), rtol=ONCE
    )


@pytest.mark.parametrize("preset", ["F32_F32_F32", "TF32_TF32_F32_X3"])
def test_rounded_terms_are_no_way_of_a_preset(preset):
    a, b = (x.astype("bfloat16") for x in (normal(1, 32), normal(32, 9)))
    how = Realisation(unit="gpu", made={"": "rounded products"})
    made = segment(lambda x, y: jnp.dot(x, y, precision=preset), how, a, b)
    np.testing.assert_allclose(made, np.asarray(a, np.float64) @ np.asarray(b, np.float64), rtol=ONCE)


def test_what_the_text_leaves_open_is_no_number():
    a, b = normal(4, 8), normal(8, 4)
    assert np.isnan(segment(jnp.matmul, Realisation(unit="gpu", made={}), a, b)).all()
    known = segment(jnp.matmul, Realisation(unit="gpu", made={}, otherwise="float32"), a, b)
    np.testing.assert_allclose(known, a.astype(np.float64) @ b.astype(np.float64), rtol=ONCE)


def test_convolutions_are_made_of_such_operands():
    picture, kernel = normal(2, 6, 5, 3), normal(3, 2, 3, 4)
    picture[:, 2, 2] = 1 + 2.0**-11  # at a tie

    def convolve(x, w):
        return lax.conv_general_dilated(x, w, (2, 1), ((1, 1), (0, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC"))

    even = [rounded_to_even(x) for x in (picture, kernel)]
    padded = np.pad(even[0], ((0, 0), (1, 1), (0, 1), (0, 0)))
    places = [padded[:, i : i + 3, j : j + 2].reshape(2, -1) for i in (0, 2, 4) for j in range(5)]
    want = np.stack(places, 1) @ even[1].reshape(-1, 4)
    made = segment(convolve, Realisation(unit="gpu", made={"": "1 TF32 pass"}), picture, kernel)
    np.testing.assert_allclose(made.reshape(2, 15, 4), want, rtol=ONCE)


def rounded_to_even(x):
    bits = x.view(np.uint32)
    half = np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    return ((bits + half) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


@pytest.mark.turn  # 4 s
def test_ties_add_what_operands_near_one_may_make():
    a, b = normal(4, 32), normal(32, 4)
    a[1, 5] = np.float32(1 + 2.0**-11 + 2.0**-22)  # two ulps above a tie
    plain = Realisation(unit="gpu", made={"": "1 TF32 pass"})
    how = Realisation(unit="gpu", made={"": "1 TF32 pass"}, ties=True)
    added = segment(jnp.matmul, how, a, b) - segment(jnp.matmul, plain, a, b)
    near = [np.abs((x.view(np.uint32) & np.uint32(0x1FFF)).astype(int) - 4096) <= 8 for x in (a, b)]
    step = [np.where(n, 2.0 ** (np.floor(np.log2(np.abs(x))) - 10), 0.0) for n, x in zip(near, (a, b), strict=True)]
    want = step[0] @ np.abs(b.astype(np.float64)) + np.abs(a.astype(np.float64)) @ step[1]
    np.testing.assert_allclose(added, want, rtol=1e-9, atol=4e-6)
    assert want[1].min() >= 2.0**-10 * np.abs(b[5]).min()


def test_two_readers_may_have_made_a_value_apart():
    """A softmax of one key is 1, but where its sum is of another exponential than its numerator."""
    scores = np.zeros((1, 1), np.float32)

    def tapped(x):
        s = checkpoint_name(x, "s")
        e = jnp.exp(s)
        return checkpoint_name(e / e.sum(-1, keepdims=True), "p")

    both = {"s": np.stack([scores, scores + np.float32(2.0**-15)]), "p": np.ones((2, 1, 1), np.float32)}
    with jax.enable_x64(True):
        first, second = emulate_segments(tapped, Realisation(unit="gpu", made={}, apart=True))(both, scores)["p"]
    assert abs(float(first[0, 0]) - 1) > 2e-5
    assert abs(float(second[0, 0]) - 1) > 2e-5
    with jax.enable_x64(True):
        alone = emulate_segments(tapped, Realisation())({"s": scores, "p": scores}, scores)["p"][0]
    assert float(alone[0, 0]) == 1.0


def test_a_quotient_by_a_constant_is_a_product_with_its_inverse_in_bfloat16_too():
    x = normal(64).astype(jnp.bfloat16)
    made = segment(lambda x: x / jnp.bfloat16(0.9), Realisation(unit="gpu", made={}), x)
    inverse = np.float64(jnp.bfloat16(1 / np.float64(jnp.bfloat16(0.9))))
    np.testing.assert_array_equal(made, x.astype(np.float64) * inverse)
    plain = segment(lambda x: x / jnp.bfloat16(0.9), Realisation(), x)
    np.testing.assert_allclose(plain, x.astype(np.float64) / np.float64(jnp.bfloat16(0.9)), rtol=1e-15)


def test_one_minus_a_square_is_a_product_of_sums():
    stored = partial(round_once, dtype=jnp.bfloat16)
    with jax.enable_x64(True):
        x = stored(jnp.asarray(normal(99).astype(np.float64)))
        made = np.asarray(EXPANDED["one_minus_square"](x, {}, stored))
        np.testing.assert_array_equal(made, np.asarray(stored(1 - x) * stored(1 + x)))
        np.testing.assert_allclose(made, np.asarray(1 - x**2), rtol=2.0**-6)


def scattered(x, w):
    return jnp.zeros((4, 8), jnp.bfloat16).at[w].add(x)


@pytest.mark.turn  # 5 s
def test_threads_add_in_any_order_in_a_narrow_format(tmp_path):
    """Not twice, and on a CPU in one order."""
    x, w = normal(400, 8).astype(jnp.bfloat16), RANDOM.integers(0, 4, 400)
    program = Program(lambda _, x, w: scattered(x, w), None, {"a": (x, w)}, outputs="y")
    precaudit.trace(program, tmp_path / "run")
    name = open_program_run(tmp_path / "run").record.points[-1].name
    order = RANDOM.permutation(400)
    other = np.asarray(scattered(x[order], w[order]))
    twice = np.asarray(scattered(jnp.concatenate([x, x[:40]]), jnp.concatenate([w, w[:40]])))
    for taps, device, fails in ((other, "cuda:0", False), (other, "cpu:0", True), (twice, "cuda:0", True)):
        altered(tmp_path / "run", {name: taps}, device=device)
        assert (name in failing(tmp_path / "run", program)) == fails


def attending(w, q):
    scores = jnp.einsum("d,td->t", q, w["k"])
    return jax.nn.softmax(scores) @ w["v"]


@pytest.mark.turn  # 15 s
def test_a_softmax_whose_sum_was_made_apart_passes_and_one_farther_off_fails(tmp_path):
    """Scores of 900 have an ulp of 6e-5, and so has what is left of a probability of one."""
    keys, q = normal(9, 64), normal(64)
    keys[2] = 900 * q / (q @ q)
    program = Program(attending, {"k": keys, "v": normal(9, 16)}, {"a": (q,)}, outputs="y")
    precaudit.trace(program, tmp_path / "run")
    held = open_program_run(tmp_path / "run").tensors("a", 0, "taps")
    (probs,) = (n for n, x in held.items() if x.shape == (9,) and abs(x.sum() - 1) < 1e-3)
    for off, device, passes_there in ((6e-5, "cuda:0", True), (6e-5, "cpu:0", False), (1e-2, "cuda:0", False)):
        altered(tmp_path / "run", {probs: held[probs] * np.float32(1 - off)}, device=device)
        bad = {(v.kind, v.point) for v in judged(tmp_path / "run", program).verdicts if v.status == "fail"}
        assert (not bad & {("local", probs), ("forward", probs)}) == passes_there


def test_draws_of_a_gpu_add_in_orders_of_their_own():
    program = Program(lambda w, x: x @ w, normal(256, 8), {"a": (normal(4, 256),)})
    made = prepare_program(program)
    given = {"0": np.asarray(program.cases["a"][0])}
    with jax.enable_x64(True):
        (on_gpu,) = Chains(program, made, Units({"product.0": "float32"}, False, True)).calls([(given, {})])
        (on_cpu,) = Chains(program, made).calls([(given, {})])
    (name,) = on_gpu.exact
    distinct = [len({x[name].tobytes() for x in values.drawn}) for values in (on_gpu, on_cpu)]
    assert distinct == [8, 8]
    spread = [np.std([x[name] for x in values.drawn], axis=0).mean() for values in (on_gpu, on_cpu)]
    assert spread[0] > 2 * spread[1]


def test_tracing_on_a_gpu_keeps_how_products_are_made(tmp_path, monkeypatch):
    program = Program(lambda w, x: jnp.tanh(x @ w) @ w, normal(64, 64), {"a": (normal(32, 64),)})
    precaudit.trace(program, tmp_path / "cpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    precaudit.trace(program, tmp_path / "gpu")
    made = [open_program_run(tmp_path / name).record.neutrality[0].made for name in ("cpu", "gpu")]
    assert made == [{}, {"product.0": ("1 TF32 pass",), "product.1": ("1 TF32 pass",)}]


def test_what_tf32_explains_of_a_kernel_is_told(monkeypatch):
    def reference(x, y):
        return jnp.dot(x, y, precision="highest")

    def inputs(_seed):
        return normal(8, 64), normal(64, 8)

    run = sides.Sides._run

    def on_gpu(self, key, side, both, cotangents, given):
        if side != case.KERNEL:
            return run(self, key, side, both, cotangents, given)
        return [passes.matmul_products("TF32_TF32_F32")(*(np.asarray(x, np.float64) for x in given)).astype(np.float32)]

    monkeypatch.setattr(sides.Sides, "_run", on_gpu)
    found = gradcheck(jnp.matmul, reference, inputs, argnums=(), seeds=1, hostile=False)
    assert "no format narrower than float32 explains it" in " ".join(found.conclusions)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = gradcheck(jnp.matmul, reference, inputs, argnums=(), seeds=1, hostile=False)
    assert found.exit_code == 1
    assert "TF32 explains it" in " ".join(found.conclusions)


def altered(run, taps, **changes):
    """Replace recorded values of a run's first call."""
    opened = open_program_run(run)
    file = file_name(opened.record, "a", 0, "taps")
    digest, _ = write_tensors(run, file, opened.tensors("a", 0, "taps") | taps)
    changed = json.loads(manifest_of(run).read_text()) | changes
    changed["hashes"][file] = digest
    manifest_of(run).write_text(json.dumps(changed))


def recorded(folder, name, program=None, **changes):
    """Return a copy of a run on a GPU as one of ``program`` (its own), whatever JAX writes of it here."""
    run = folder / name
    shutil.copytree(RUNS / name, run)
    record = json.loads(manifest_of(run).read_text())
    record |= {"code": code_hash(prepare_program(program or PROGRAMS[name]))} | changes
    manifest_of(run).write_text(json.dumps(record))
    return run


def judged(run, program):
    return precaudit.gate(precaudit.compare(run, program=program))


def failing(run, program):
    return {v.point for v in judged(run, program).verdicts if v.status == "fail" and v.kind == "local"}


QUICK = (
    "batched-bf16", "chained-tf32x3", "convolved-f32", "decoded-bf16", "rows1-bf16", "rows1-f32", "rows2-f32",
    "trained-f32",
)  # fmt: skip


@pytest.mark.turn  # 8 s
@pytest.mark.parametrize("name", few(sorted(PROGRAMS), *QUICK))
def test_an_honest_program_on_a_gpu_passes(tmp_path, name):
    found = judged(recorded(tmp_path, name), PROGRAMS[name])
    assert found.exit_code == 0
    assert found.counts.keys() == {"pass"}
    assert found.counts["pass"] > 2


@pytest.mark.turn  # 4 s
def test_tf32_is_no_honest_way_of_the_highest_precision(tmp_path):
    """Nor of a CPU."""
    run = recorded(tmp_path / "a", "chained-default", PROGRAMS["chained-highest"])
    assert failing(run, PROGRAMS["chained-highest"]) == {"value"}  # the other product is of the default precision
    run = recorded(tmp_path / "b", "chained-default", device="cpu:0")
    assert failing(run, PROGRAMS["chained-default"]) == {"value", "value~2"}


def test_a_row_of_rounded_terms_is_none_of_a_cpu(tmp_path):
    run = recorded(tmp_path, "rows1-bf16", device="cpu:0")
    assert failing(run, PROGRAMS["rows1-bf16"])


@pytest.mark.turn  # 9 s
@pytest.mark.parametrize(("name", "tap", "fault"), [
    pytest.param("chained-default", "value", lambda x: x * np.float32(1.0003), marks=pytest.mark.slow),
    ("chained-default", "value~2", lambda x: rounded_through_bfloat16(x)),
    ("rows2-f32", "value~2", lambda x: x + np.where(np.arange(len(x))[:, None] == 1, 1e-4, 0).astype(np.float32)),
    pytest.param("convolved-f32", "call", lambda x: np.roll(x, 1, 0), marks=pytest.mark.slow),
    ("rows1-bf16", "value", lambda x: (x.astype(np.float32) * 1.02).astype(x.dtype)),
    ("decoded-bf16", "probs", lambda x: np.roll(x, 1, -1)),
])  # fmt: skip
def test_a_fault_on_a_gpu_fails_there(tmp_path, name, tap, fault):
    run = recorded(tmp_path, name)
    held = open_program_run(run).tensors("a", 0, "taps")[tap]
    altered(run, {tap: np.ascontiguousarray(fault(held))})
    assert tap in failing(run, PROGRAMS[name])


def rounded_through_bfloat16(x):
    with jax.enable_x64(True):
        return np.asarray(round_once(x.astype(np.float64), jnp.bfloat16)).astype(np.float32)


def test_notes_say_what_the_compiler_made_of_products(tmp_path):
    told = notes(open_program_run(recorded(tmp_path, "chained-default")))
    assert any("2 products of float32 operands in TF32" in n and 'precision="highest"' in n for n in told)
    told = notes(open_program_run(recorded(tmp_path, "rows1-bf16")))
    assert any("2 products with each term rounded" in n for n in told)
    assert not any("this GPU" in n for n in notes(open_program_run(recorded(tmp_path, "rows2-bf16"))))
