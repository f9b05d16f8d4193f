"""Runs recorded on a GPU (traces/gpu: an H100, JAX 0.11.2): what it rounds is named and passes, faults fail.

The command of every run stands in its run.json.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from precaudit.comparison.compare import Options, compare
from precaudit.judging.gate import gate
from precaudit.numpy_decoder.honest import ROUNDED_PRODUCTS
from precaudit.store import Run
from tests.conftest import FIXTURES

RECORDED = FIXTURES.parents[1] / "traces" / "gpu"


def compared(folder: Path, name, device=None):
    """Compare a copy of a recorded run."""
    run = folder / name
    shutil.copytree(RECORDED / name, run)
    if device is not None:
        raw = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(raw | {"device": device}))
    return compare(run, options=Options(accum=(), cache=folder / "refs"))


def failed(comparison):
    return {(v.phase, v.point) for v in gate(comparison).verdicts if v.status == "fail"}


@pytest.mark.parametrize("name", ["bf16", "fp32", "fp32-highest"])
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
