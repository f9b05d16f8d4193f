"""Programs under a mesh of explicit axes: their types carry shardings, and they are judged as one device makes them."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What tests/helpers/audited_explicit.py gives on eight devices."""
    given = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-m", "tests.helpers.audited_explicit", str(tmp_path_factory.mktemp("explicit"))]
    out = subprocess.run(run, env=os.environ | given, cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["where", "block", "shards"])
def test_an_honest_program_passes_and_a_fault_in_a_product_is_flagged_there(found, name):
    told = found[name]
    assert set(told["honest"]) <= {"pass", "not run"}
    assert told["honest"]["pass"] >= 4
    assert told["findings"] == []
    assert told["point"] in told["failed"]
