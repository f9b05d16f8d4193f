"""Tokens sampled on a mesh: those of one device, bit for bit where the arithmetic is the same; sweeps there, too."""

import json
import os
import subprocess
import sys

import pytest

from precaudit.cli import run
from precaudit.recording.runs.reader import open_run
from tests.helpers.paths import ROOT


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What tests/helpers/meshed_samples.py gives on eight devices, and its folder."""
    folder = tmp_path_factory.mktemp("samples")
    given = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-m", "tests.helpers.meshed_samples", str(folder)]
    out = subprocess.run(run, env=os.environ | given, cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1]), folder


def farthest(a, b):
    assert [tokens for tokens, _ in a] == [tokens for tokens, _ in b]
    return max(abs(x - y) for (_, p), (_, q) in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))


@pytest.mark.slow  # compiles two programs for each way and policy
def test_the_samples_of_a_mesh_are_those_of_one_device(found):
    samples = found[0]["samples"]
    assert samples["bf16 each"] == samples["bf16 alone"]
    assert farthest(samples["bf16 filled"], samples["bf16 both"]) < 0.25
    for policy, off in (("bf16", 0.25), ("fp32-highest", 1e-5)):  # nats
        assert samples[f"{policy} pairs"] == samples[f"{policy} one"]
        assert 0 < farthest(samples[f"{policy} both"], samples[f"{policy} one"]) < off


@pytest.mark.slow
def test_a_sweep_traces_and_samples_on_a_mesh(found):
    told, folder = found
    assert told["code"] == 0
    for policy in ("bf16", "fp32"):
        assert open_run(folder / "sweep" / policy).record.mesh == {"data": 2, "model": 2}
    asked, *timings = [json.loads(x) for x in (folder / "sweep" / "drawn.jsonl").read_text().splitlines()]
    assert asked["how"].endswith(" on data=2,model=2")
    assert {t["device"] for t in timings if t["kind"] == "timing"} == {"cpu, data=2,model=2"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("rollout", "tiny", "--mesh", "data=2"), "--mesh data=2,model=1 is of 2 devices, and there are 1"),
        (("warmup", "tiny", "--mesh", "data=2", "--lengths", "3"), "is of 2 devices, and there are 1"),
        (("rollout", "tiny", "--mesh", "data=2", "--explain", "1"), "leave out --mesh"),
        (("sweep", "tiny", "--mesh", "data=3"), "--mesh data=3,model=1: data=3 does not divide --batch 8"),
        (
            ("sweep", "tiny", "--mesh", "data=3", "--batch", "6"),
            "data=3 does not divide the 8 sequences scored together",
        ),
        (("sweep", "tiny", "--mesh", "model=4", "--tpu", "v5e:1x1"), "v5e:1x1"),
    ],
)
def test_what_a_mesh_cannot_sample_is_a_line(command, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(list(command)) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
