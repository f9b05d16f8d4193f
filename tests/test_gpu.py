"""Runs recorded on a GPU (traces/gpu: an H100, JAX 0.11.2): what it rounds is named and passes, faults fail.

The command of every run stands in its run.json.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from precaudit.checkpoints import open_checkpoint
from precaudit.comparison.alternatives import inputs_summed_again
from precaudit.comparison.compare import Options, compare
from precaudit.comparison.operations import parts, prepare
from precaudit.comparison.recorded import Recorded
from precaudit.comparison.rows import Place
from precaudit.judging.gate import gate
from precaudit.numpy_decoder.honest import ROUNDED_PRODUCTS, single_row_forms
from precaudit.numpy_decoder.model import Model
from precaudit.numpy_decoder.passes import products, summed
from precaudit.store import Run, open_run
from tests.conftest import FIXTURES

RECORDED = FIXTURES.parents[1] / "traces" / "gpu"


def compared(folder: Path, name, device=None):
    """Compare a copy of a recorded run."""
    run = folder / name
    shutil.copytree(RECORDED / name, run)
    if device is not None:
        raw = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(raw | {"device": device}))
    model = str(FIXTURES / "qwen3-moe-gqa") if name == "moe" else None
    return compare(run, options=Options(accum=(), model=model, cache=folder / "refs", fresh=True))


def failed(comparison):
    return {(v.phase, v.point) for v in gate(comparison).verdicts if v.status == "fail"}


@pytest.mark.parametrize("name", ["bf16", "fp32", "fp32-highest", "moe"])
def test_a_run_on_a_gpu_passes(tmp_path, name):
    found = compared(tmp_path, name)
    assert not failed(found)
    assert {v.point for v in gate(found).verdicts} <= {"final_norm"}  # the last layer of two runs was not recorded


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
    assert not [e for e in found.errors if e.phase == "prefill" and ROUNDED_PRODUCTS in str(e.elided)]


def test_a_router_read_before_it_was_rounded_is_made_of_rounded_products(tmp_path):
    """XLA sums, exponentiates and divides in one fusion: the router's logits are read as they were before."""
    found = compared(tmp_path, "moe").errors
    chosen = [e for e in found if (e.kind, e.phase, e.point) == ("local", "decode", "experts") and e.elided]
    assert {e.elided["policy:bf16"] for e in chosen} == {("router", ROUNDED_PRODUCTS)}
    assert len(chosen) > 4


def test_a_residual_may_be_off_by_its_summands_last_places(tmp_path):
    """By u (|a| + |b|), and u |A||B| of the projection that is one of them."""
    recorded = Recorded.of(open_run(RECORDED / "fp32-highest"))
    tiny = open_checkpoint("tiny")
    model = Model(tiny.config, tiny.tensors.read)
    place = Place("p5_ba", "prefill", 0, 0, "mlp_norm")
    operation = prepare(recorded, model, place, parts(recorded, place)[0])
    ((_, (moved,)),) = inputs_summed_again(recorded, model, operation)

    def values(name):
        return recorded.rows("p5_ba", "prefill", 0, name).values.astype(np.float64)

    weight = tiny.tensors.read("model.layers.0.self_attn.o_proj.weight").astype(np.float64)
    projected = np.abs(values("attn_out").reshape(-1, 128)) @ np.abs(weight).T
    want = 2.0**-24 * (np.abs(values("resid_in")) + np.abs(values("attn_proj")) + projected)
    np.testing.assert_allclose(np.abs(moved - operation.inputs[0]), want, rtol=1e-5)


def test_noise_of_narrow_products_is_of_their_parts():
    """Another order of the sums keeps what the operands are rounded to."""
    a, b = (np.random.default_rng(i).normal(size=(8, 8)) for i in (1, 2))
    for setting in ("TF32_TF32_F32", "BF16_BF16_F32_X3"):
        made = products(setting)
        np.testing.assert_array_equal(summed(made, np.matmul)(a, b), made(a, b))


def test_only_single_rows_have_rounded_products():
    assert list(single_row_forms("v", "bfloat16", "gpu", True))
    for given in (("v", "bfloat16", "gpu", False), ("v", "float32", "gpu", True), ("v", "bfloat16", "tpu", True),
                  ("resid_mid", "bfloat16", "gpu", True)):  # fmt: skip
        assert not list(single_row_forms(*given))


def test_the_same_on_a_cpu_fails(tmp_path):
    """A CPU sums exact products: nothing excuses them there."""
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
