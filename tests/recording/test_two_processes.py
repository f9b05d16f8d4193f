"""Programs of two processes: what lies with both cannot be read by either, and that is said."""

import os
import socket
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT


def traced(name, folder):
    """Return (exit code, what is said) of tracing a program of helpers/on_two_processes.py in each of two processes."""
    with socket.socket() as held:
        held.bind(("localhost", 0))
        port = held.getsockname()[1]
    command = [sys.executable, "-m", "precaudit", "trace", f"tests/helpers/on_two_processes.py:{name}", "-o"]
    each = []
    for number in "01":
        given = {"PORT": str(port), "NUMBER": number, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        run = [*command, str(folder / number)]
        each.append(subprocess.Popen(run, env=os.environ | given, cwd=ROOT, stderr=subprocess.PIPE, text=True))
    told = [run.communicate(timeout=120)[1] for run in each]
    return [(run.returncode, said.splitlines()[-1] if said else "") for run, said in zip(each, told, strict=True)]


@pytest.mark.parametrize(("name", "what"), [("inputs", "a[0] [4, 8]"), ("points", "product [4, 3]")])
def test_what_lies_with_other_processes_is_named(name, what, tmp_path):
    for code, said in traced(name, tmp_path):
        assert code == 3
        assert said.startswith(f"precaudit: {what} lies with 2 processes")
        assert "run the program in one process" in said


def test_what_every_process_holds_is_recorded_by_each(tmp_path):
    assert [code for code, _ in traced("whole", tmp_path)] == [0, 0]
