"""Programs inside shard_map: every shard's values recorded, planted, emulated and judged."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """What tests/helpers/audited_shards.py gives on four devices."""
    given = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-m", "tests.helpers.audited_shards", str(tmp_path_factory.mktemp("shards"))]
    out = subprocess.run(run, env=os.environ | given, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


def test_every_shard_is_recorded_in_the_order_of_the_mesh(four):
    stacked = four["audited"]["stacked"]
    assert stacked["part"] == [4]
    assert stacked["call"] == []
    assert 0 < four["audited"]["off"] < 2.0**-8  # NumPy's product of each shard in FP64


def test_a_fault_on_one_shard_is_flagged_there_and_the_honest_case_passes(four):
    found = four["audited"]
    assert ["b", 2, "part"] in found["failed"]
    assert {case for case, _, _ in found["failed"]} == {"b"}
    assert found["statuses"] == ["fail"]
    assert found["passed"] > 20


def test_what_is_planted_on_a_shard_is_an_error_there(four):
    """x = 0, 1, 2, 3 on four shards: Σ 2x of rows times 1 and 3; 0.5 more on the last shard is 1.5 more."""
    before, after, errors, slopes = four["planted"]
    assert (before, after) == (2 * 1 + 3 * 2 * 5, 2 * 1 + 3 * 2 * 5 + 1.5)
    assert errors == [0, 0, 0, 0.5]
    assert slopes == [1, 1, 3, 3]


def test_layers_of_shards_are_refused(four):
    assert four["layers"].startswith("--layers: points of this program lie inside shard_map")
