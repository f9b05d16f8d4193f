"""The shipped decoder cut over a mesh of devices: recorded there, read and judged on one device."""

import json
import os
import re
import shutil
import subprocess
import sys

import msgspec
import pytest

from precaudit.cli import run
from precaudit.errors import UserError
from precaudit.judging.gate import gate
from precaudit.models.jax_decoder.sharding import check_mesh
from precaudit.recording.runs.reader import open_run
from precaudit.recording.tracing.subject import load
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.meshes import MeshShape
from precaudit.schema.records.devices import SplitSum
from precaudit.workflows.verbs import compare
from tests.helpers.paths import ROOT

SPLIT = [name for name, point in POINTS.items() if point.shares_terms]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What tests/helpers/meshed_runs.py records on eight devices."""
    folder = tmp_path_factory.mktemp("meshes")
    given = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-m", "tests.helpers.meshed_runs", str(folder)]
    subprocess.run(run, env=os.environ | given, cwd=ROOT, check=True)
    return folder


def hashes(folder):
    return {(p.prompt, p.phase, p.step, p.layer, p.point): p.hash for p in open_run(folder).points}


def judged(folder):
    compare(folder)
    return gate(folder)


def with_splits(folder, to, change, **changed):
    """Copy a run whose run.json says otherwise how products were made in parts."""
    shutil.copytree(folder, to)
    record = open_run(folder).record
    noted = tuple(msgspec.structs.replace(n, split=change(n.split)) for n in record.neutrality)
    (to / "run.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(record, neutrality=noted, **changed)))
    return to


def test_prompts_cut_over_devices_give_the_bits_of_one(runs):
    """Three prompts in batches of two: the last batch is filled up, and what fills it is not recorded."""
    assert hashes(runs / "data") == hashes(runs / "one")


def test_rollouts_are_scored_on_a_mesh_as_on_one_device(runs):
    """Prompts cut: the same bits. Heads cut: two sums a layer are rounded otherwise, in bfloat16 and in float32."""
    off = json.loads((runs / "scored.json").read_text())
    assert off["bf16 data"] == off["fp32-highest data"] == 0
    assert 0 < off["fp32-highest both"] < 1e-5  # nats
    assert 0 < off["bf16 both"] < 0.25


def test_the_rollouts_of_a_mesh_are_not_explained(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = {"prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": [-0.5]}
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    assert run(["rollout", "tiny", "--from", "x.jsonl", "--mesh", "data=2", "--explain", "1"]) == 2
    said = capsys.readouterr().err
    assert "leave out --mesh" in said
    assert "Traceback" not in said


def test_heads_cut_over_devices_give_the_bits_of_one_up_to_the_first_sum_of_parts(runs):
    one, cut = hashes(runs / "one"), hashes(runs / "both")
    assert one.keys() == cut.keys()
    before = [k for k in one if k[3] == 0 and list(POINTS).index(k[4].partition(".")[0]) < list(POINTS).index(SPLIT[0])]
    assert len({point for *_, point in before}) > 8
    assert [k for k in before if one[k] != cut[k]] == []
    assert one != cut


@pytest.mark.parametrize(("name", "parts"), [("both", 2), ("replicated", 4)])
def test_an_honest_run_on_a_mesh_passes_on_one_device(runs, name, parts):
    """Of ``replicated`` there are four devices and two key/value heads."""
    record = open_run(runs / name).record
    assert (record.device_count, record.mesh) == (4, {"data": 4 // parts, "model": parts})
    for n in record.neutrality:
        assert n.bitwise
        assert n.split == dict.fromkeys(SPLIT, (SplitSum(parts=parts, summed="float32"),))
    found = judged(runs / name)
    assert found.exit_code == 0, [v.text for v in found.verdicts][:3]
    assert found.counts["pass"] > 1000


@pytest.mark.turn  # 15 s
def test_a_shard_that_is_left_out_fails_where_it_is(runs):
    found = judged(runs / "faulty")
    assert found.exit_code == 1
    assert {v.point for v in found.verdicts if v.status == "fail" and v.kind == "local"} == {SPLIT[1]}


@pytest.mark.turn  # 24 s
def test_a_run_of_one_device_is_held_to_whole_products(runs, tmp_path):
    """What parts round is no excuse for a run that says none, and whole products none for one that says parts."""
    found = judged(with_splits(runs / "replicated", tmp_path / "whole", lambda _: {}))
    assert {v.point for v in found.verdicts if v.status == "fail" and v.kind == "local"} >= set(SPLIT)
    parts = dict.fromkeys(SPLIT, (SplitSum(parts=4, summed="float32"),))
    mesh = {"data": 1, "model": 4}
    found = judged(with_splits(runs / "one", tmp_path / "one", lambda _: parts, mesh=mesh))
    assert {v.point for v in found.verdicts if v.status == "fail" and v.kind == "local"} >= set(SPLIT)


@pytest.mark.turn  # 24 s
def test_products_in_parts_of_which_nothing_is_known_are_unknown(runs, tmp_path):
    both = (SplitSum(parts=1, summed=""), SplitSum(parts=4, summed="float32"))
    for name, change, why in (
        ("unread", lambda _: None, "the compiled program was not read"),
        ("several", lambda split: dict.fromkeys(split, both), "whole, 4 parts added in float32"),
        ("other", lambda split: split | {"q": both[1:]}, "4 parts added in float32"),
    ):
        found = judged(with_splits(runs / "replicated", tmp_path / name, change))
        unknown = [v for v in found.verdicts if v.status == "unknown"]
        assert {v.point for v in unknown} == ({"q"} if name == "other" else set(SPLIT))
        assert all(why in v.text for v in unknown)
        assert found.exit_code == 3


@pytest.mark.parametrize(
    ("mesh", "why"),
    [
        ("model", "write NAME=N"), ("=2", "write NAME=N"), ("tensor=2", "unknown axis 'tensor'; known: data, model"),
        ("modle=2", "did you mean 'model'"), ("model=2,model=2", "there twice"), ("model=0", "not '0'"),
        ("model=x", "not 'x'"), ("model=", "not ''"), ("model=3", "does not divide heads (4)"),
        ("data=4096", "is of 4096 devices, and there are"),
    ],
)  # fmt: skip
def test_a_mesh_that_cannot_be_is_told_in_one_line(mesh, why, tmp_path, capfd):
    assert run(["trace", "tiny", "--device", "cpu", "--mesh", mesh, "-o", str(tmp_path / "run")]) == 2
    said = capfd.readouterr().err
    assert why in said
    assert re.fullmatch(r"precaudit: .*\n", said)
    assert not (tmp_path / "run").exists()


def test_what_a_mesh_does_not_divide_is_told():
    config = load("tiny", device="cpu").config
    for shape, batch, why in (
        (MeshShape(model=3), None, "heads"), (MeshShape(data=2), 3, "--batch 3"),
        (MeshShape(model=4), None, ""), (MeshShape(data=2), 4, ""),
    ):  # fmt: skip
        if not why:
            check_mesh(shape, config, batch)
            continue
        with pytest.raises(UserError, match=why):
            check_mesh(shape, config, batch)
    for changed, why in (({"mlp_width": 30}, "width"), ({"kv_heads": 3, "heads": 12}, "key/value heads")):
        with pytest.raises(UserError, match=why):
            check_mesh(MeshShape(model=4), msgspec.structs.replace(config, **changed))
