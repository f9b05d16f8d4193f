"""One command on two processes (jax.distributed, gloo on loopback): one run, which one process reads."""

import os
import signal
import socket
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest

from precaudit.cli import run
from precaudit.errors import UserError
from precaudit.recording.runs.arrays import Part, WrittenArray, cell_of
from precaudit.recording.runs.programs import open_program_run
from precaudit.recording.runs.reader import open_run
from precaudit.recording.runs.shards import missing_shards, note_shard
from precaudit.recording.tracing.parts import Spread
from tests.helpers.paths import ROOT

PROGRAM = "tests/helpers/on_two_processes.py:program"
TINY = ("tiny", "--mesh", "data=2,model=2", "--points", "q,attn_out,mlp_out,logits", "--decode-steps", "1")
TINY = (*TINY, "--prompt", "s1_fact,p5_ba,s2_code", "--batch", "2")


def flags(devices):
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}


def free_port():
    with socket.socket() as held:
        held.bind(("localhost", 0))
        return held.getsockname()[1]


def start(number, port, *arguments, wait=60, of=2, cwd=ROOT, **more):
    """Start the trace of one of two processes, of two devices each."""
    own = ("--coordinator", f"localhost:{port}", "--processes", of, "--process", number, "--wait", wait)
    command = [sys.executable, "-m", "precaudit", "trace", *map(str, (*arguments, *own))]
    return subprocess.Popen(
        command, env=flags(2) | more, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def child_of(started):
    """Return the process that runs JAX."""
    return int(subprocess.run(["pgrep", "-P", str(started.pid)], capture_output=True, text=True, check=True).stdout)


def ends(started):
    """Return (exit code, lines that begin ``precaudit: ``) of each process."""
    told = [each.communicate(timeout=150)[1] for each in started]
    assert not any("Traceback" in x for x in told), told
    return [
        (each.returncode, [x for x in said.splitlines() if x.startswith("precaudit: ")])
        for each, said in zip(started, told, strict=True)
    ]


def on_two(*arguments, **more):
    port = free_port()
    return ends([start(number, port, *arguments, **more) for number in (0, 1)])


def on_one(*arguments):
    subprocess.run(
        [sys.executable, "-m", "precaudit", "trace", *map(str, arguments)], env=flags(4), cwd=ROOT, check=True
    )


def tensors(folder):
    """Return every array of a program's run, as bytes."""
    opened = open_program_run(folder)
    opened.verify()
    places = [(c, i, k) for c in opened.record.cases for i in range(opened.record.calls) for k in ("taps", "inputs")]
    held = {(*at, name): x for at in places for name, x in opened.tensors(*at).items()}
    return {at: (x.dtype, x.shape, x.tobytes()) for at, x in held.items()}


def hashes(folder):
    return {(p.prompt, p.phase, p.step, p.layer, p.point): (p.hash, p.stats) for p in open_run(folder).points}


@pytest.mark.turn  # 5 s
def test_a_program_of_two_processes_is_the_run_of_one(tmp_path, monkeypatch):
    """Bit for bit; and one process judges it. What is altered is told."""
    two, one = tmp_path / "two", tmp_path / "one"
    assert on_two(PROGRAM, "-o", two) == [(0, []), (0, [])]
    on_one(PROGRAM, "-o", one)
    assert tensors(two) == tensors(one)
    record = open_program_run(two).record
    assert record.processes == ((0, 1), (2, 3))
    assert (record.code, record.weights) == (open_program_run(one).record.code, open_program_run(one).record.weights)
    assert sorted(p.name for p in two.iterdir()) == ["points.jsonl", "run.json", "tensors"]
    lines, alone = (open_program_run(folder).points for folder in (two, one))
    assert lines == [msgspec.structs.replace(p, file=p.file.removesuffix(".safetensors")) for p in alone]
    monkeypatch.chdir(ROOT)
    assert run(["compare", str(two), "--program", PROGRAM]) == 0
    assert run(["gate", str(two)]) == 0
    for path in (two / "tensors" / "d").iterdir():
        path.write_bytes(path.read_bytes()[:-9] + b"\x01" * 9)
    with pytest.raises(UserError, match=r"cannot be read|altered"):
        open_program_run(two).verify()


def test_parts_of_a_tensor_lie_in_cells_of_their_own():
    """Of 8 rows on two processes, rows 1, 2, 5 and 6 are recorded."""
    places = (((0, 0), (4, 2)), ((4, 0), (4, 2)))
    spread = Spread((8, 2), np.dtype("float32"), places, ())
    made = spread.written("x", [[1, 2, 5, 6], range(2)])
    assert made == WrittenArray("x", (4, 2), "float32", (2, 2), ())
    assert cell_of((5, 3), [(0, 0), (3, 0)]) == (1, 3)
    assert Part((2, 0), None).start == (2, 0)


def test_a_disk_that_takes_no_more_is_told(tmp_path):
    """Nothing of that call is there then; a smaller one is."""
    code = """if True:
        import resource, sys
        from pathlib import Path
        import numpy as np
        from precaudit.recording.runs.arrays import Arrays, Part, WrittenArray
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, -1))
        arrays = Arrays(Path(sys.argv[1]))
        for name, rows in (("small", 4), ("large", 4096)):
            x = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)
            array = WrittenArray(name, x.shape, "float32", x.shape, (Part((0, 0), x),))
            try:
                arrays.write([array], metadata=True)
            except OSError as error:
                print(error.errno, error.strerror, name)
        assert arrays.read("small").shape == (4, 64)
        assert arrays.entry("large") is None
    """
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert (found.stdout, found.stderr[-300:]) == ("28 No space left on device large\n", "")


@pytest.mark.slow  # 25 s: two processes, and one, that compile
def test_a_model_of_two_processes_is_the_run_of_one(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    assert on_two(*TINY, "-o", two) == [(0, []), (0, [])]
    on_one(*TINY, "-o", one)
    assert hashes(two) == hashes(one)
    assert list(open_run(two).steps) == list(open_run(one).steps)
    assert run(["compare", str(two)]) == 0
    assert run(["gate", str(two)]) == 0


@pytest.mark.slow  # 60 s: a run that is killed and goes on
def test_a_process_that_dies_leaves_a_run_that_goes_on(tmp_path, capsys):
    two, one, port = tmp_path / "two", tmp_path / "one", free_port()
    started = [start(number, port, *TINY, "-o", two, wait=10) for number in (0, 1)]
    while not ((two / "batches.jsonl").is_file() and (two / "batches.jsonl").read_bytes()):
        time.sleep(0.01)
        assert started[1].poll() is None
    os.kill(child_of(started[1]), signal.SIGKILL)
    (first, said), (second, killed) = ends(started)
    assert (first, second) == (2, 2)
    assert len(said) == 1
    assert "process 1 of 2 was ended by signal 9" in killed[0]
    assert run(["compare", str(two)]) == 2
    assert "cut off" in capsys.readouterr().err
    assert on_two(*TINY, "-o", two, "--resume") == [(0, []), (0, [])]
    on_one(*TINY, "-o", one)
    assert hashes(two) == hashes(one)


def test_missing_shards_are_named(tmp_path):
    note_shard(tmp_path, 0, ["a"], 4)
    note_shard(tmp_path, 0, ["b", "c"], 4)
    note_shard(tmp_path, 1, ["a"], 4)
    assert missing_shards(tmp_path, ((0, 1), (2, 3))) == "shards of process 1 (devices 2 to 3) are missing of b, c"
    note_shard(tmp_path, 1, ["b", "c"], 4)
    assert missing_shards(tmp_path, ((0, 1), (2, 3))) == ""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--processes", "2"], "need --coordinator"),
        (["--coordinator", "here", "--processes", "2", "--process", "0"], "HOST:PORT"),
        (["--coordinator", "here:80"], "needs --processes"),
        (["--coordinator", "here:80", "--processes", "2", "--process", "2"], "numbered 0 to 1"),
        (["--coordinator", "auto", "--process", "1"], "leave out"),
        (["--coordinator", "here:80", "--processes", "2", "--process", "0", "--wait", "0"], "at least 1 second"),
    ],
)
def test_options_of_processes_that_make_no_sense(options, told, tmp_path, capsys):
    assert run(["trace", "tiny", "-o", str(tmp_path / "r"), *options]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow  # 60 s: eight pairs of processes
def test_what_processes_cannot_do_together_is_said_by_one(tmp_path):
    """Exit code 2 on both, one line on one."""
    given, there = ("tiny", "--prompt", "s1_fact", "-o", tmp_path / "r"), tmp_path / "there"
    there.mkdir()
    (there / "notes.txt").write_text("of somebody")

    def told(*each):
        port = free_port()
        found = ends([start(i, port, *given, *more, wait=20) for i, more in enumerate(each)])
        assert [code for code, _ in found] == [2, 2]
        lines = [line for _, lines in found for line in lines]
        assert len(lines) == 1, lines
        assert not (tmp_path / "r" / "points.jsonl").exists()
        return lines[0]

    mesh = ("--mesh", "data=2,model=2")
    assert "differ in --policy (bf16 and fp32)" in told(mesh, (*mesh, "--policy", "fp32"))
    assert "16 devices, and there are 4" in told(*[("--mesh", "data=8,model=2")] * 2)
    assert "give a mesh of all" in told(*[("--mesh", "data=2")] * 2)
    assert "give --mesh" in told((), ())
    assert "exists and is not a run" in told(*[(*mesh, "-o", there)] * 2)


@pytest.mark.slow  # 25 s: JAX gives a process ten seconds
def test_a_process_that_stops_is_waited_for_no_longer_than_said(tmp_path):
    folder, port = tmp_path / "r", free_port()
    given = (*TINY, "-o", folder)
    started = [start(number, port, *given, wait=10) for number in (0, 1)]
    while not (folder / "run.json").is_file():
        time.sleep(0.05)
    stopped = child_of(started[1])
    os.kill(stopped, signal.SIGSTOP)
    [(code, said)] = ends(started[:1])
    os.kill(stopped, signal.SIGCONT)
    assert code == 2
    assert len(said) == 1
    assert said[0].startswith("precaudit: process 0 of 2 lost another one, which ended or answers no more")
    assert ends(started[1:])[0][0] == 2


@pytest.mark.slow  # 10 s
def test_a_folder_that_hosts_do_not_share_is_told(tmp_path):
    port, each = free_port(), []
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
        given = (ROOT / PROGRAM, "-o", "r")
        each.append(start(number, port, *given, cwd=tmp_path / str(number), PYTHONPATH=str(ROOT)))
    (code, said), other = ends(each)
    assert {code, other[0]} == {2}
    assert "process 1 does not see r/run.json of process 0" in [*said, *other[1]][0]


@pytest.mark.slow  # 15 s
def test_a_process_alone_says_so(tmp_path):
    given, port = ("tiny", "--mesh", "data=2,model=2", "-o", tmp_path / "r"), free_port()
    [(code, said)] = ends([start(1, port, *given, wait=3)])
    assert (code, len(said)) == (2, 1)
    assert f"no coordinator answers at localhost:{port} within 3 s" in said[0]
    [(code, said)] = ends([start(0, port, *given, wait=3)])
    assert (code, len(said)) == (2, 1)
    assert "of 2 processes not all came" in said[0]


@pytest.mark.slow  # 10 s
def test_a_program_may_start_jax_itself(tmp_path):
    """Then the command has no options of processes."""
    port, each = str(free_port()), []
    for number in "01":
        command = [sys.executable, "-m", "precaudit", "trace", PROGRAM, "-o", str(tmp_path / "r")]
        each.append(subprocess.Popen(command, env=flags(2) | {"PORT": port, "NUMBER": number}, cwd=ROOT))
    assert [one.wait(timeout=100) for one in each] == [0, 0]
    assert open_program_run(tmp_path / "r").record.processes == ((0, 1), (2, 3))
