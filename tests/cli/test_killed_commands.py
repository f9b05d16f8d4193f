"""Commands killed at every file operation: what is there opens or is refused, and the same command then works.

A process that dies does nothing more to the disk: from the operation on, every one raises.
"""

import builtins
import io
import json
import os
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.numpy

from precaudit.cli import _interrupt_again, run
from precaudit.errors import UserError
from precaudit.recording.runs.reader import open_run
from tests.helpers.paths import FIXTURES

WRITES = ("replace", "rename", "mkdir", "unlink", "remove", "rmdir", "fsync", "truncate")
MODEL = str(FIXTURES / "llama-gqa")


class Killed(BaseException):
    """The process is gone."""


class Disk:
    """Counts operations that change a folder, and ends the process at one of them. ``at``: 0 never.

    What finalizers and threads of other tests, or numba's cache, do elsewhere is not counted.
    """

    def __init__(self, folder, at=0):
        self.folder, self.at, self.done = str(folder), at, 0

    def inside(self, file, dir_fd):
        """Progress whether a path, or an open file by its number, lies in the folder."""
        if isinstance(file, int) or dir_fd is not None:
            opened = os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else dir_fd}")
            file = opened if isinstance(file, int) else os.path.join(opened, file)
        return os.path.abspath(file).startswith(self.folder)

    def operation(self):
        self.done += 1
        if self.at and self.done >= self.at:
            raise Killed

    def before(self, function, when=lambda *_, **__: True, file=lambda *a: a[0]):
        def counted(*args, **kwargs):
            if when(*args, **kwargs) and self.inside(file(*args), kwargs.get("dir_fd")):
                self.operation()
            return function(*args, **kwargs)

        return counted


@contextmanager
def disk(folder, at=0):
    """Count, or kill at operation ``at``: files opened for writing, saved, renamed, deleted, folders, fsync."""
    found = Disk(folder, at)

    def writes(_file, mode="r", *_, **__):
        return any(c in mode for c in "wxa+")

    with pytest.MonkeyPatch.context() as patch:
        for name in WRITES:
            patch.setattr(os, name, found.before(getattr(os, name)))
        patch.setattr(io, "open", found.before(io.open, writes))
        patch.setattr(builtins, "open", found.before(builtins.open, writes))
        saved = found.before(safetensors.numpy.save_file, file=lambda _tensors, path, *_: path)
        patch.setattr(safetensors.numpy, "save_file", saved)
        yield found


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A compared run of two short prompts, and a folder with what audit needs."""
    folder = tmp_path_factory.mktemp("sound")
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"id": "a", "tokens": [1, 2, 3, 4, 5]}\n{"id": "b", "tokens": [7, 8]}\n')
    settings = {"subject": MODEL, "prompts": "prompts.jsonl", "output": "audited", "phases": "prefill"}
    text = "".join(f"{key} = {value!r}\n" for key, value in settings.items())
    (folder / "precaudit.toml").write_text(text + 'points = "v,logits"\ndecode_steps = 0\nformula = false\n')
    assert run([*trace(folder), "-o", str(folder / "run")]) == 0
    assert run(["compare", str(folder / "run")]) == 0
    return folder


def trace(folder):
    return ["trace", MODEL, "--prompts", str(folder / "prompts.jsonl"), "--phases", "prefill", "--points", "v,logits"]


def commands(sound, folder):
    """Return {name: (arguments, whether a run that is there is replaced)}."""
    return {
        "trace": [*trace(sound), "-o", str(folder / "new"), "--force"],
        "trace over a run": [*trace(sound), "-o", str(folder / "run"), "--force"],
        "compare": ["compare", str(folder / "run"), "--accum", "bfloat16"],
        "diagnose": ["diagnose", str(folder / "run"), "--layers", "1"],
        "report": ["report", str(folder / "run"), "--markdown", "-"],
        "baseline": ["baseline", str(folder / "run"), "-o", str(folder / "b.jsonl"), "--accept", "--why", "a test"],
        "gate": ["gate", str(folder / "run"), "--junit", str(folder / "out" / "junit.xml")],
        "audit": ["audit", "--config", str(folder / "precaudit.toml")],
    }


def openable(folder):
    """Open a run and read it whole; a message where there is none."""
    try:
        opened = open_run(folder)
    except UserError:
        return False
    for point in opened.points:
        opened.tensor(point)
    return True


# Two threads that make the same folder of the cache at once do an operation or two more than in turn: a run may
# end before an operation that the first one had, but only near the end.
RACED = 0.9

NAMES = ("trace", "trace over a run", "compare", "diagnose", "report", "baseline", "gate")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files the dead left open
@pytest.mark.parametrize("name", [*NAMES, pytest.param("audit", marks=pytest.mark.slow)])
def test_a_command_killed_at_any_file_operation_can_be_given_again(sound, tmp_path, monkeypatch, name):
    """At every operation: runs open whole or not at all, and the command then ends as it does undisturbed."""

    def fresh(n):
        folder = tmp_path / str(n)
        shutil.copytree(sound, folder)
        monkeypatch.setenv("PRECAUDIT_CACHE", str(tmp_path / f"cache{n}"))
        return folder, commands(sound, folder)[name]

    folder, args = fresh("whole")
    with disk(tmp_path) as counted:
        assert run(args) == 0
    want = kept(folder)
    assert counted.done > 0 or name == "report"
    for n in range(1, counted.done + 1):
        folder, args = fresh(n)
        with disk(tmp_path, n):
            ended = ends(args)
        assert not ended or n > RACED * counted.done, f"not killed at {n} of {counted.done}"
        held = openable(folder / "run")
        assert held or name == "trace over a run", f"killed at {n}: the run is gone"
        for made in (folder / "new", folder / "audited"):
            openable(made)
        if held:
            assert run(["gate", str(folder / "run")]) in (0, 2)
        assert run(args) == 0, f"killed at {n} of {counted.done}"
        assert kept(folder) == want, f"killed at {n} of {counted.done}"
        shutil.rmtree(folder)
        shutil.rmtree(tmp_path / f"cache{n}", ignore_errors=True)


def ends(args):
    """Run a command that may be killed; tell whether it ended by itself, which it must do well."""
    try:
        code = run(args)
    except Killed:
        return False
    assert code == 0
    return True


def kept(folder):
    """Return what a command leaves: names, and the lines that depend on nothing but its input.

    A file that was being written keeps its temporary name; a folder that was being replaced must be gone.
    """
    found = (p for p in folder.rglob("*") if p.is_file() and not p.name.endswith(".part"))
    names = sorted(str(p.relative_to(folder)) for p in found)
    same = ("errors.jsonl", "prefill_decode.jsonl", "steps.jsonl", "prompts.jsonl", "findings.jsonl")
    lines = {n: (folder / n).read_text().splitlines() for n in names if Path(n).name in same}
    return names, {n: [rounded(json.loads(x)) for x in found] for n, found in lines.items()}


def rounded(x):
    """FP64 sums in another order: a reference that was kept is not computed again with the others."""
    if isinstance(x, dict):
        return {k: rounded(v) for k, v in x.items()}
    if isinstance(x, list):
        return [rounded(v) for v in x]
    return float(f"{x:.9g}") if isinstance(x, float) and abs(x) > 1e-12 else 0.0 if isinstance(x, float) else x


def test_ctrl_c_in_a_callback_that_python_passes_over_comes_again(monkeypatch):
    """JAX's callback of the garbage collector is one: what it raises is printed and forgotten."""

    class Odd:
        def __del__(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "unraisablehook", _interrupt_again)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of pytest-xdist ignore it
    try:
        Odd()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(10)
    finally:
        signal.signal(signal.SIGINT, before)
