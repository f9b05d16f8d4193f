"""Runs recorded on a GPU (traces/gpu: an H100, JAX 0.11.2): what it rounds is named and passes, faults fail.

The command of every run stands in its run.json.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from exams.traits import TRAITS
from precaudit.judging.gate import gate
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.jax_decoder.parts import attend, attention_scores, project
from precaudit.models.numpy_decoder.honest import ROUNDED_PRODUCTS, RowExecution, on_single_rows
from precaudit.models.numpy_decoder.model import Model, attention
from precaudit.models.numpy_decoder.operators import AttentionRule
from precaudit.models.numpy_decoder.passes import matmul_products as float32_products
from precaudit.models.numpy_decoder.passes import with_sums
from precaudit.models.numpy_decoder.rounding import FP64, of_policy
from precaudit.numbers.arrays import as_format, rounder
from precaudit.numbers.integers import InRows
from precaudit.numbers.row_hashes import row_hashes
from precaudit.recording.runs.reader import Run, open_run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.comparison.cache_state import at_ties
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.references.textbook.alternatives import inputs_summed_again, rounded_again
from precaudit.references.textbook.operations import parts, prepare
from precaudit.schema.filed import of_kinds
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.places import Place
from precaudit.schema.policies import recorded_policy
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.errors import LocalError
from precaudit.schema.selection import Selection
from tests.helpers.gpu_runs import unpacked
from tests.helpers.paths import FIXTURES
from tests.helpers.selected import few

MODELS = {"moe": FIXTURES / "qwen3-moe-gqa", "one-row-heads": FIXTURES / "llama-mha"}


def compared(folder: Path, name, device=None):
    """Compare a copy of a recorded run."""
    run = unpacked(name, folder / name)
    if device is not None:
        raw = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(raw | {"device": device}))
    model = MODELS.get(name)
    if name == "float32-weights":
        model = next(t for t in TRAITS if t.name == "float32 weights").make(folder / "model")
    options = CompareOptions(accum=(), model=None if model is None else str(model), cache=folder / "refs", fresh=True)
    return compare(run, options=options)


def failed(comparison):
    return {(v.phase, v.point) for v in gate(comparison).verdicts if v.status == "fail"}


PASSING = ["bf16", "fp32", "fp32-highest", "moe", "one-row-heads", "float32-weights"]
QUANTISED = ["kv-fp8", "kv-int8", "w8a8"]


@pytest.mark.parametrize("name", PASSING + QUANTISED)
def test_a_run_on_a_gpu_passes(tmp_path, name):
    """Also where a head has one query, weights in float32 multiply narrow rows, or what is quantised is at a tie."""
    found = compared(tmp_path, name)
    assert not failed(found)
    assert {v.point for v in gate(found).verdicts} <= {"final_norm"}  # the last layer of some runs was not recorded


def test_products_of_one_row_are_reproduced_bit_for_bit_and_told(tmp_path):
    found = compared(tmp_path, "bf16")
    single = [e for e in found.errors if e.kind == "local" and e.phase == "decode" and e.point in ("v", "attn_proj")]
    assert len(single) == 8  # two points, layers and steps
    for e in single:
        assert e.elided == {"policy:bf16": (ROUNDED_PRODUCTS,)}
        assert e.explained == {"policy:bf16": 1.0}
        assert e.rel_l2 > 1e-3
    note = next(n for n in found.notes if "rounded each product" in n)
    assert "preferred_element_type" in note
    assert not [
        e for e in of_kinds(found.errors, LocalError) if e.phase == "prefill" and ROUNDED_PRODUCTS in str(e.elided)
    ]


@pytest.mark.turn  # 4 s
def test_a_router_read_before_it_was_rounded_is_made_of_rounded_products(tmp_path):
    """XLA sums, exponentiates and divides in one fusion: the router's logits are read as they were before."""
    found = compared(tmp_path, "moe").errors
    chosen = [e for e in found if (e.kind, e.phase, e.point) == ("local", "decode", "experts") and e.elided]
    assert {e.elided["policy:bf16"] for e in chosen} == {("router", ROUNDED_PRODUCTS)}
    assert len(chosen) > 4


def test_a_residual_may_be_off_by_its_summands_last_places(tmp_path):
    """By u (|a| + |b|), and u |A||B| of the projection that is one of them."""
    recorded = Recorded.of(open_run(unpacked("fp32-highest", tmp_path / "run")))
    tiny = open_checkpoint("tiny")
    model = Model(tiny.config, tiny.tensors.read_tensor)
    place = Place("p5_ba", "prefill", 0, 0, "mlp_norm")
    operation = prepare(recorded, model, place, parts(recorded, place)[0])
    ((_, (moved,)),) = inputs_summed_again(recorded, model, operation)

    def values(name):
        return recorded.rows("p5_ba", "prefill", 0, name).values.astype(np.float64)

    weight = tiny.tensors.read_tensor("model.layers.0.self_attn.o_proj.weight").astype(np.float64)
    projected = np.abs(values("attn_out").reshape(-1, 128)) @ np.abs(weight).T
    want = 2.0**-24 * (np.abs(values("resid_in")) + np.abs(values("attn_proj")) + projected)
    np.testing.assert_allclose(np.abs(moved - operation.inputs[0]), want, rtol=1e-5)


def test_noise_of_narrow_products_is_of_their_parts():
    """Another order of the sums keeps what the operands are rounded to."""
    a, b = (np.random.default_rng(i).normal(size=(8, 8)) for i in (1, 2))
    for setting in ("TF32_TF32_F32", "BF16_BF16_F32_X3"):
        made = float32_products(setting)
        np.testing.assert_array_equal(with_sums(made, np.matmul)(a, b), made(a, b))


def test_only_single_rows_have_rounded_products():
    def ways(point, dtype, scores, *executed):
        return set(on_single_rows(FP64, POINTS[point], dtype, scores, RowExecution(*executed)))

    assert ways("v", "bfloat16", "bfloat16", "gpu", True) == {(), (ROUNDED_PRODUCTS,)}
    for point, dtype, device, decode in (
        ("v", "bfloat16", "gpu", False), ("v", "float32", "gpu", True), ("v", "bfloat16", "cpu", True),
        ("resid_mid", "bfloat16", "gpu", True),
    ):  # fmt: skip
        assert ways(point, dtype, "bfloat16", device, decode) == {()}


def test_scores_in_float32_are_no_rounded_products():
    """Attention with one row a head: q · k is exact where scores are float32, products P · v are narrow."""
    q, k, v = (
        as_format(np.random.default_rng(i).normal(size=(n, 1, 8)), "bfloat16") for i, n in ((1, 1), (2, 5), (3, 5))
    )
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    for scores in ("float32", "bfloat16"):
        r = on_single_rows(FP64, POINTS["attn_out"], "bfloat16", scores, RowExecution("gpu", True))[ROUNDED_PRODUCTS,]
        made = attention(q, k, v, np.asarray([4]), AttentionRule(1.0, None, None), r)[0, 0]
        s = (k[:, 0] @ q[0, 0]) if scores == "float32" else rounder("bfloat16")(k[:, 0] * q[0, 0]).sum(axis=1)
        p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
        np.testing.assert_allclose(made, rounder("bfloat16")(p[:, None] * v[:, 0]).sum(axis=0), rtol=1e-6)


@pytest.mark.turn  # 3 s
def test_a_product_made_twice_may_round_both_ways(tmp_path):
    """One element of 17,024 was added one unit in the last place of the summand off what was recorded, at a tie."""
    found = compared(tmp_path, "rounded-again")
    rows = [e for e in found.errors if (e.kind, e.phase, e.point) == ("local", "prefill", "resid_out")]
    assert [e.elided for e in rows] == [{"policy:fp32-cast-decode": ("mlp_out rounded again",)}]
    assert not failed(found)
    assert ("prefill", "resid_out") in failed(compared(tmp_path / "again", "rounded-again", "cpu"))


def test_only_ties_may_round_both_ways(tmp_path):
    """Those that float32 sums cross: the one that was seen, and few of the 17,024."""
    recorded = Recorded.of(open_run(unpacked("rounded-again", tmp_path / "run")))
    tiny = open_checkpoint("tiny")
    place = Place("c0", "prefill", 0, 4, "resid_out")
    operation = prepare(recorded, Model(tiny.config, tiny.tensors.read_tensor), place, parts(recorded, place)[0])
    policy = recorded_policy(recorded.run.record)
    model = Model(tiny.config, tiny.tensors.read_tensor)
    read, other = rounded_again(recorded, model, operation, of_policy(policy))
    moved = np.argwhere(read != other)
    assert [19, 41] in moved.tolist()
    assert len(moved) < 100
    changed = read != other
    assert np.all(np.abs(read - other)[changed] <= 2.0**-7 * np.abs(read)[changed])  # one unit in the last place


@pytest.mark.parametrize("name", ["kv-fp8", "kv-int8"])
def test_a_tie_of_a_narrow_cache_falls_one_way_on_a_cpu(tmp_path, name):
    assert {point for _, point in failed(compared(tmp_path, name, device="cpu"))} & {"k_cache", "v_cache"}


def test_what_is_quantised_near_a_tie_alone_may_fall_the_other_way():
    rows = np.array([[127.0, 0.5, 1.5 + 2.0**-22, 1.4, -2.5, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]], np.float32)
    other, near = InRows().otherwise(rows)
    assert near.tolist() == [[False, True, True, False, True, False], [False] * 6]
    scale = 127 * float(np.float32(1 / 127))
    np.testing.assert_allclose(other[0], np.array([127, 1, 1, 1, -3, 3]) * scale, rtol=1e-6)
    np.testing.assert_allclose(InRows()(rows)[0], np.array([127, 0, 2, 1, -2, 3]) * scale, rtol=1e-6)


def test_the_hash_of_a_row_with_a_tie_the_other_way_is_known():
    written = np.arange(12, dtype=np.float32).reshape(3, 4)
    other, near = written + 1, np.zeros((3, 4), bool)
    near[1, 2] = near[2, 0] = True
    row = written.copy()
    row[1, 2] += 1
    found = row_hashes(row[None])[0]
    assert at_ties(found, written, other, near)
    row[0, 0] += 1  # at no tie
    assert not at_ties(row_hashes(row[None])[0], written, other, near)


def test_a_tie_that_the_last_step_has_was_read_before(tmp_path):
    """Of rows written since the cache was recorded, what is at no tie, or was changed there, is as it was written."""
    unpacked("kv-int8", tmp_path / "run")
    recorded = Recorded.of(open_run(tmp_path / "run"))
    made = np.array([[[127.0, 0.5, 1.5, 1.4]], [[127.0, 3.5, 2.5, 1.4]]], np.float32).astype(recorded.tensor(
        "s1_fact", "prefill", 0, 0, "k").dtype)  # fmt: skip
    other, near = recorded.other_cache(made, "float32")
    written = InRows(stored="float32")(made.astype(np.float64)).astype(np.float32)
    read = np.concatenate([written[:1] + 9, written])
    final = np.concatenate([written[:1], np.where(near, other, written), written])
    final[2, 0, 1] = 77  # neither
    kept = recorded._as_kept(read.copy(), final, [made[:1], made[1:]])
    want = np.concatenate([read[:1], np.where(near, other, written)])
    want[2, 0, 1] = written[1, 0, 1]
    np.testing.assert_array_equal(kept, want)
    assert near.sum() == 4


@pytest.mark.turn  # 5 s
def test_the_same_on_a_cpu_fails(tmp_path):
    """A CPU sums exact products: nothing excuses them there."""
    assert {("decode", p) for p in ("attn_out", "v")} <= failed(compared(tmp_path, "one-row-heads", "cpu"))
    assert {("decode", p) for p in ("v", "attn_proj", "mlp_out")} <= failed(compared(tmp_path, "bf16", "cpu"))
    shutil.rmtree(tmp_path / "fp32-highest", ignore_errors=True)
    assert ("prefill", "mlp_norm") in failed(compared(tmp_path, "fp32-highest", "cpu"))


def scaled(x):
    return (x.astype(np.float32) * np.float32(1.02)).astype(x.dtype)


def flipped(x):
    """One element off by a hundredth of the largest."""
    y = x.copy()
    y.reshape(-1)[7] += np.abs(x).max() / 100
    return y


@pytest.mark.parametrize(
    ("name", "file", "tensor", "function", "where"),
    [
        ("bf16", "s1_fact.decode.1.safetensors", "0.mlp_out", scaled, ("decode", "mlp_out")),
        ("bf16", "s1_fact.decode.1.safetensors", "4.attn_proj", flipped, ("decode", "attn_proj")),
        ("bf16", "s1_fact.prefill.0.safetensors", "0.mlp_out", scaled, ("prefill", "mlp_out")),
        ("one-row-heads", "c0-random.decode.1.safetensors", "1.attn_out", scaled, ("decode", "attn_out")),
        ("rounded-again", "c0.prefill.0.safetensors", "4.resid_out", flipped, ("prefill", "resid_out")),
        ("fp32", "s1_fact.prefill.0.safetensors", "0.mlp_out", scaled, ("prefill", "mlp_out")),
        ("fp32-highest", "p5_ba.prefill.0.safetensors", "0.mlp_norm", flipped, ("prefill", "mlp_norm")),
        ("fp32-highest", "p5_ba.prefill.0.safetensors", "0.v", flipped, ("prefill", "v")),
    ],
)
def test_faults_on_a_gpu_fail(tmp_path, monkeypatch, name, file, tensor, function, where):
    read = Run.tensor

    def altered(self, record):
        values = read(self, record)
        return function(values) if (record.file, record.key) == (f"tensors/{file}", tensor) else values

    monkeypatch.setattr(Run, "tensor", altered)
    assert where in failed(compared(tmp_path, name))


def products(a, b):
    """Multiply bfloat16 numbers and round, which XLA does not take away."""
    x, y = (lax.reduce_precision(z.astype(jnp.float32), 8, 7) for z in (a, b))
    return lax.reduce_precision(x * y, 8, 7)


def single_project(x, w, bias, a):
    """A projection whose products are rounded where there is one row."""
    if x.shape[-2] != 1:
        return project(x, w, bias, a)
    y = products(x, w).sum(-1)[:, None].astype(a.activations)
    return y if bias is None else (y.astype(bias.dtype) + bias).astype(a.activations)


def single_scores(q, k, scale, a):
    if q.shape[1] != 1 or q.shape[2] != k.shape[2]:
        return attention_scores(q, k, scale, a)
    s = products(q, k).sum(-1).astype(a.scores)  # [1, S, H]
    return (s.astype(jnp.float32) * jnp.float32(scale)).astype(a.scores).transpose(0, 2, 1)[:, :, None]


def single_attend(p, v, a):
    if p.shape[2] != 1 or p.shape[1] != v.shape[2]:
        return attend(p, v, a)
    weights = p[:, :, 0].transpose(0, 2, 1)[..., None]  # [1, S, H, 1]
    return products(weights, v).sum(1)[:, None].astype(a.attn_out)


ONE_ROW = ("llama-mha", "gemma3-untied-bias", "phi3-mha", "olmo2-mha", "granite-bias")


@pytest.mark.turn  # 8 s
@pytest.mark.parametrize("name", few(ONE_ROW, "gemma3-untied-bias"))  # 5 to 10 s each
def test_single_rows_of_other_models_pass(tmp_path, name):
    """The products written out, on a CPU, in models with one head a group, biases, norms inside and out."""
    usual = load(str(FIXTURES / name), "bf16", None, "cpu").parts
    parts = replace(usual, project=single_project, scores=single_scores, attend=single_attend)
    subject = load(str(FIXTURES / name), "bf16", None, "cpu", parts)
    prompt = Prompt(id="a", tokens=tuple(range(1, 20)))
    run = trace(subject, tmp_path / "run", [prompt], Selection.parse(points="all"), TraceOptions(decode_steps=3))
    raw = json.loads((run.folder / "run.json").read_text())
    for device, passes in (("NVIDIA H100 80GB HBM3", True), ("cpu", False)):
        (run.folder / "run.json").write_text(json.dumps(raw | {"device": device}))
        found = compare(run.folder, options=CompareOptions(accum=(), cache=tmp_path / "refs", fresh=True))
        wrong = [(v.kind, v.phase, v.layer, v.point, v.metric, v.value, v.limit) for v in gate(found).verdicts]
        assert bool(wrong) != passes, (device, wrong[:3])
