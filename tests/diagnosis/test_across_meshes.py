"""What diagnosis says of a model on a mesh: what its sums cost, and whether meshes change more than rounding."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from precaudit.cli import run as cli
from precaudit.diagnosis.evidence.mesh_costs import mesh_costs
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.numpy_decoder.model import Model
from precaudit.recording.runs.reader import open_run
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.comparison.compare import compare
from precaudit.reports.mesh import cost_text
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.records.base import value
from precaudit.schema.records.devices import SplitSum
from precaudit.schema.selection import Selection
from tests.helpers.paths import ROOT

SPLIT = [name for name, point in POINTS.items() if point.shares_terms]
EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What tests/helpers/meshed_runs.py records on eight devices."""
    folder = tmp_path_factory.mktemp("across")
    run = [sys.executable, "-m", "tests.helpers.meshed_runs", str(folder), "one", "replicated"]
    subprocess.run(run, env=os.environ | EIGHT, cwd=ROOT, check=True)
    return folder


def local_size(folder, point):
    """The relative local error of a point, pooled over a run's records by their elements."""
    found = compare(folder, select=Selection.parse(points=",".join(SPLIT)))
    some = [e for e in found.errors if (e.kind, e.point) == ("local", point)]
    return np.sqrt(np.average([value(e.rel_l2) ** 2 for e in some], weights=[e.n for e in some]))


def noting(folder, change):
    """A run, with what its run.json says of products in parts changed; and its model."""
    run = open_run(folder)
    noted = tuple(msgspec.structs.replace(n, split=change(n)) for n in run.record.neutrality)
    recorded = Recorded.of(replace(run, record=msgspec.structs.replace(run.record, neutrality=noted)))
    opened = open_checkpoint("tiny")
    return recorded, Model(opened.config, opened.tensors.read_tensor)


@pytest.mark.turn
def test_what_sums_of_parts_cost_is_what_two_runs_measure(runs):
    found = {c.point: c for c in mesh_costs(*noting(runs / "replicated", lambda n: n.split))}
    assert list(found) == SPLIT
    for point, cost in found.items():
        assert cost.split == SplitSum(parts=4, summed="float32")
        measured = local_size(runs / "replicated", point) / local_size(runs / "one", point)
        assert measured > 1.2
        assert cost.times == pytest.approx(measured, rel=0.05)
        assert cost.wide == pytest.approx(1, rel=1e-6)
        assert "in 4 parts, each rounded to bfloat16, and added in float32: 1." in cost_text(cost)


def test_parts_that_are_added_in_bfloat16_cost_more_and_half_the_bytes_of_float32(runs):
    wide = {c.point: c for c in mesh_costs(*noting(runs / "replicated", lambda n: n.split))}
    parts = dict.fromkeys(SPLIT, (SplitSum(parts=4, summed="bfloat16"),))
    for cost in mesh_costs(*noting(runs / "replicated", lambda _: parts)):
        assert (wide[cost.point].bytes, cost.bytes) == (1, 2)
        assert cost.times > 1.1 * wide[cost.point].times
        assert cost_text(cost).endswith("float32 partial sums: 1.00 ×, 2 × the bytes exchanged")


def test_what_was_not_read_or_is_made_in_several_ways_is_unknown(runs):
    assert mesh_costs(*noting(runs / "one", lambda n: n.split)) == ()
    for change, said in (
        (lambda _: None, "unknown what it costs: the compiled program was not read"),
        (lambda n: n.split if n.phase == "rescore" else {}, "prefill: unknown what it costs: its programs compute it"),
        (lambda n: n.split if n.phase == "decode" else {}, "in prefill and rescore: no part of it is rounded"),
    ):
        texts = [cost_text(c) for c in mesh_costs(*noting(runs / "replicated", change))]
        assert any(said in text for text in texts), texts


@pytest.fixture(scope="module")
def across(tmp_path_factory):
    """What tests/helpers/across_runs.py finds on eight devices, and what it prints."""
    folder = tmp_path_factory.mktemp("across")
    run = [sys.executable, "-m", "tests.helpers.across_runs", str(folder)]
    said = subprocess.run(run, env=os.environ | EIGHT, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads((folder / "found.json").read_text()), said.stdout, said.stderr


def test_prompts_cut_over_devices_are_the_same_bits(across):
    found = across[0]["data"]
    assert (found["status"], found["mark"]) == ("bits equal", "✓")
    assert {status for status, _ in found["points"].values()} == {"bits equal"}


def test_heads_cut_over_devices_are_rounding_whose_sum_is_named(across):
    found = across[0]["model"]
    assert (found["status"], found["mark"]) == ("rounding", "✓")
    assert all(0 < noises < 3 for status, noises in found["points"].values() if status == "rounding")
    assert found["lines"] == [
        "Sharding: model=4 against the run's one device: rounding, first at attn_proj of layer 0 in prefill: the sum "
        "over model=4 at attn_proj is computed in 4 parts, each rounded to bfloat16, and added in float32"
    ]


def test_a_shard_that_is_left_out_on_a_mesh_is_broken(across):
    found = across[0]["faulty"]
    assert (found["status"], found["mark"]) == ("broken", "✗")
    assert found["points"]["mlp_out"][0] == "broken"
    assert found["points"]["attn_out"][0] != "bits equal"
    status, noises = found["points"]["resid_out"]  # no fault of its own: too far off for rounding
    assert (status, noises > 10) == ("broken", True)
    assert found["lines"][0].endswith(
        "broken, first beyond rounding at mlp_out of layer 0 in prefill, whose own error fails on only one of the two"
    )


def test_diagnose_holds_a_run_against_meshes_of_the_command_line(across):
    found, out, err = across
    assert found["codes"] == [0, 2, 2]
    assert "on every mesh the run's tokens give its bits" in out
    assert "the run is of one device; give --mesh, such as --mesh data=2,model=2" in err
    assert "model=16 does not divide heads" in err


def test_same_names_the_sum_over_devices_that_one_of_two_programs_makes(across):
    beside, itself = across[0]["same"]
    assert beside[0].startswith("✓ the first and the second are one formula")
    told = "adds a product up over devices at row_parallel.py:25: it is computed in 4 parts, each rounded to bfloat16"
    assert [line for line in beside if "over devices" in line] == [f"the second {told}, and added in float32."]
    assert not [line for line in itself if "over devices" in line]


def test_invariance_may_stand_alone_before_the_run(tmp_path, capfd):
    """What follows is its word only where it is one."""
    assert cli(["diagnose", "--invariance", str(tmp_path / "none")]) == 2
    assert "none" in capfd.readouterr().err
    assert cli(["diagnose", str(tmp_path), "--invariance=shards"]) == 2
    assert "sharding" in capfd.readouterr().err


def test_too_few_devices_are_told_of_the_largest_mesh_before_anything_runs(runs, capfd):
    assert cli(["diagnose", str(runs / "one"), "--invariance", "sharding", "--mesh", "data=512,model=4"]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("precaudit: --mesh data=512,model=4 is of 2048 devices, and there are ")
