"""Two processes with cache folders of their own, which share nothing but a bucket: one run, read from a third place."""

import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from precaudit import mirrors as following
from precaudit.cli import run
from precaudit.recording.runs.arrays import Arrays
from precaudit.recording.runs.reader import open_run
from tests.helpers.bucket_servers import Amazon, Google, amazon_environment, google_environment, serve
from tests.helpers.paths import ROOT
from tests.recording.test_two_processes import PROGRAM, TINY, child_of, ends, free_port, hashes, on_one, start, tensors

KINDS = {"gs": (Google, google_environment), "s3": (Amazon, amazon_environment)}


@pytest.fixture
def bucket(request, tmp_path, monkeypatch):
    """Return the URL of a run, the folder of its objects, and the bucket's faults; this process is a third place."""
    kind, environment = KINDS[request.param]
    pytest.importorskip("gcsfs" if request.param == "gs" else "s3fs")
    root = tmp_path / "objects"
    root.mkdir()
    with serve(kind, root) as (url, faults):
        for name, value in environment(url).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PRECAUDIT_CACHE", str(tmp_path / "third"))
        monkeypatch.setattr(following, "_MIRRORS", {})
        monkeypatch.chdir(ROOT)
        yield f"{request.param}://bucket/runs/m", root / "runs" / "m", faults


def on_machines(tmp_path, *arguments, wait=60):
    """Start a trace on two processes, each with its own cache."""
    port = free_port()
    return [start(i, port, *arguments, wait=wait, PRECAUDIT_CACHE=str(tmp_path / f"cache{i}")) for i in (0, 1)]


def names(folder):
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


# One of two machines, which tell each other by files: it writes its half of each array, and the first reads.
MACHINE = """
import sys, time
from pathlib import Path
import numpy as np
from precaudit.mirrors import local_path
from precaudit.recording.runs.arrays import Part, WrittenArray
from precaudit.recording.runs.hosts import Hosts
from precaudit.recording.runs.shards import Shards, check_shared

class Client:
    def path(self, key):
        return Path(sys.argv[3], key.replace("/", "_"))

    def key_value_set(self, key, text):
        self.path(key).with_suffix(".part").write_text(text)
        self.path(key).with_suffix(".part").rename(self.path(key))

    def blocking_key_value_get(self, key, milliseconds):
        until = time.monotonic() + milliseconds / 1000
        while not self.path(key).is_file():
            assert time.monotonic() < until, "DEADLINE_EXCEEDED"
            time.sleep(0.01)
        return self.path(key).read_text()

url, index = sys.argv[1], int(sys.argv[2])
hosts, folder = Hosts(index, 2, Client(), 30), local_path(url)
if hosts.first:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
check_shared(folder / "run.json", hosts)
shards, x = Shards(folder, hosts), np.arange(32, dtype=np.float32).reshape(8, 4)
for i, of in enumerate("ab"):
    half = (Part((4 * index, 0), x[4 * index : 4 * index + 4] + i),)
    written = shards.arrays.write([WrittenArray(f"{of}.prefill.0/q", (8, 4), "float32", (4, 4), half)], hosts.first)
    shards.share(f"writing {of}", [of], written)
    if hosts.first:
        assert np.array_equal(shards.arrays.read(f"{of}.prefill.0/q"), x + i)
    hosts.share("read")
shards.finish()
"""


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_what_two_machines_write_is_one_database(bucket, tmp_path):
    """No two write the same object; a machine that does not read an array brings none of it."""
    url, objects, faults = bucket
    told = tmp_path / "told"
    told.mkdir()
    command, each = [sys.executable, "-c", MACHINE, url], []
    for i in "01":
        here = os.environ | {"PRECAUDIT_CACHE": str(tmp_path / i)}
        each.append(subprocess.Popen([*command, i, str(told)], env=here, cwd=ROOT))
    assert [machine.wait(timeout=60) for machine in each] == [0, 0]
    own = {name.rpartition("/d/")[0] for name in names(objects)}
    assert own == {"", "tensors", "tensors/process_1"}
    assert names(objects) > {"run.json", "tensors/manifest.ocdbt", "tensors/process_1/manifest.ocdbt"}
    assert not [name for name in names(objects) if "shards" in name]
    folder = following.local_path(url)
    asked = len(faults.asked)
    arrays = Arrays(folder / "tensors")
    assert len(faults.asked) > asked
    for i, of in enumerate("ab"):
        assert np.array_equal(arrays.read(f"{of}.prefill.0/q"), np.arange(32).reshape(8, 4) + i)
    [second] = (tmp_path / "1" / "buckets").glob("*/m/tensors")
    assert all(p.stat().st_blocks == 0 for p in second.glob("**/d/*"))


@pytest.mark.slow  # 60 s: two processes, four times
@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_a_machine_without_rights_leaves_a_run_that_goes_on(bucket, tmp_path, capsys):
    """One says why. What is missing is named from elsewhere; with the rights, the run becomes that of one process."""
    url, objects, faults = bucket
    program = (PROGRAM, "-o", url)

    def refused(where):
        found = ends(on_machines(tmp_path, *program, "--force"))
        assert [code for code, _ in found] == [2, 2]
        [line] = [line for _, lines in found for line in lines]
        assert line.startswith(f"precaudit: {where}: cannot be written with the rights that this user has")

    faults.after = 0
    refused(url)
    assert not objects.exists()
    faults.after, faults.closed = None, "process_1"
    refused(f"{url}/tensors/process_1")
    assert run(["compare", url]) == 2
    lost = "shards of process 1 (devices 2 to 3) are missing of a"
    assert capsys.readouterr().err.endswith(
        f"{url}: this run was cut off before it finished ({lost}); trace it with --resume\n"
    )
    faults.closed = ""
    assert ends(on_machines(tmp_path, *program, "--resume")) == [(0, []), (0, [])]
    on_one(PROGRAM, "-o", tmp_path / "one")
    assert tensors(following.local_path(url)) == tensors(tmp_path / "one")
    assert run(["compare", url, "--program", PROGRAM]) == 0
    assert run(["gate", url]) == 0


@pytest.mark.slow  # 80 s: a run that is killed and goes on
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_machine_that_dies_leaves_a_run_that_goes_on(bucket, tmp_path, capsys):
    """Another machine, whose cache is empty, takes its place."""
    url, objects, _ = bucket
    started = on_machines(tmp_path, *TINY, "-o", url, wait=10)
    while not ((objects / "batches.jsonl").is_file() and (objects / "batches.jsonl").read_bytes()):
        time.sleep(0.01)
        assert started[1].poll() is None
    os.kill(child_of(started[1]), signal.SIGKILL)
    assert [code for code, _ in ends(started)] == [2, 2]
    assert run(["compare", url]) == 2
    assert "cut off" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "cache1")
    assert ends(on_machines(tmp_path, *TINY, "-o", url, "--resume")) == [(0, []), (0, [])]
    on_one(*TINY, "-o", tmp_path / "one")
    folder = following.local_path(url)
    assert hashes(folder) == hashes(tmp_path / "one")
    assert list(open_run(folder).steps) == list(open_run(tmp_path / "one").steps)
    assert run(["compare", url]) == 0
