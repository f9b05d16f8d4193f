"""Comparing on a cluster: the records of one process, whoever dies, and a line where there is no such cluster."""

import os
import signal

import pytest

from precaudit.cli import run as run_cli
from precaudit.errors import UserError
from precaudit.numbers import cluster, processes, threads
from precaudit.numbers.executors import executor
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.references.comparison.shares import LocalPiece
from precaudit.references.textbook.pooled import MemberPiece
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from tests.helpers import pieces
from tests.helpers.clusters import running_cluster

PROMPTS = [Prompt(f"p{i}", tokens=tuple(range(7 * i, 7 * i + 140 + i))) for i in range(4)]
SELECTED = Selection.parse("4", "q,attn_out,logits", "prefill,decode")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clustered") / "run"
    trace("tiny", folder, PROMPTS, SELECTED, TraceOptions(decode_steps=1))
    return folder


@pytest.fixture(scope="module", autouse=True)
def _one_core():
    """Have rows of one prompt go through a matrix together, so that each is a piece."""
    patch = pytest.MonkeyPatch()
    patch.setattr(threads, "WORKERS", 1)
    yield
    patch.undo()


@pytest.fixture
def compared(folder, tmp_path):
    """Return what compares anew, with references of its own, and returns the bytes of the records."""

    def compare_by(name, tell=lambda *_: None, **options):
        compare(folder, options=CompareOptions(fresh=True, cache=tmp_path / name, **options), tell=tell)
        return (folder / "errors.jsonl").read_bytes()

    return compare_by


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """Return the records as one process writes them."""
    compare(folder, options=CompareOptions(fresh=True, cache=tmp_path_factory.mktemp("alone")))
    return (folder / "errors.jsonl").read_bytes()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Return (address, scheduler, workers) of a cluster of two workers."""
    pytest.importorskip("distributed", reason="dask.distributed is not installed: pip install -e '.[cluster]'")
    with running_cluster(2, tmp_path_factory.mktemp("workers")) as made:
        yield made


def once(word, act):
    """Return a tell that acts when it is first told of a word."""
    done = []

    def tell(_done, _total, what):
        if word in what and not done:
            done.append(act())

    return tell


@pytest.mark.turn  # 4 s
def test_two_processes_write_the_records_of_one(compared, alone, monkeypatch):
    given, make = [], processes.Process.make
    monkeypatch.setattr(processes.Process, "make", lambda self, *what: given.append(what[-1]) or make(self, *what))
    assert compared("processes", jobs=2) == alone
    ranges = [x for x in given if isinstance(x, range)]
    assert sorted(ranges, key=lambda x: x.start) == [range(2), range(2, 4)]  # FP64
    assert {x.some for x in given if isinstance(x, MemberPiece)} == set(ranges)  # members of the ensemble
    assert {(x.groups, x.prompts) for x in given if isinstance(x, LocalPiece)} == {
        (range(group, group + 1), prompts) for group in range(2) for prompts in (("p0", "p3"), ("p1",), ("p2",))
    }


def test_a_cluster_writes_the_records_of_one_process_though_a_worker_dies(compared, alone, two):
    address, _, workers = two
    with executor(scheduler=address) as made:
        made.client.wait_for_workers(2, timeout=60)
        assert made.map(pieces.square, 0, range(9)) == [i * i for i in range(9)]
        with pytest.raises(UserError, match=r"^4 is not there$"):
            made.map(pieces.fail_user, None, [4])
        with pytest.raises(RuntimeError, match=r"on a worker of the cluster:\n(.*\n)*KeyError: 4"):
            made.map(pieces.fail, None, [4])
    assert compared("cluster", scheduler=address) == alone
    dying = once("local errors", lambda: os.kill(workers[0].pid, signal.SIGKILL))
    assert compared("one dies", dying, scheduler=address) == alone


def test_a_cluster_of_another_precaudit_computes_nothing(folder, alone, two, monkeypatch, capsys):
    own = cluster.own_code()
    for changed, said in (
        (own._replace(version="0.0.9"), r"has precaudit .*, and 0\.0\.9 asks"),
        (own._replace(numerics=("2.0.0", "other kernels")), r"has NumPy .*, and 2\.0\.0, other kernels asks"),
        (own._replace(source="another"), "has another source of precaudit"),
    ):
        monkeypatch.setattr(cluster, "own_code", lambda code=changed: code)
        with executor(scheduler=two[0]) as made, pytest.raises(UserError, match=said):
            made.map(pieces.square, 0, [1])
    assert run_cli(["compare", str(folder), "--scheduler", two[0], "--no-cache", "--accum", "float16/32"]) == 2
    assert capsys.readouterr().err.strip().endswith("another source of precaudit, or other versions of its libraries")
    assert (folder / "errors.jsonl").read_bytes() == alone


def test_a_lost_scheduler_is_a_line_and_leaves_the_records_as_they_were(folder, compared, alone, two):
    address, scheduler, _ = two  # its last test
    with pytest.raises(UserError, match=f"^{address}: the scheduler was lost"):
        compared("lost", once("local errors", scheduler.kill), scheduler=address)
    assert (folder / "errors.jsonl").read_bytes() == alone


def test_no_scheduler_or_no_address_is_a_line(folder, monkeypatch, capsys):
    pytest.importorskip("distributed", reason="dask.distributed is not installed: pip install -e '.[cluster]'")
    monkeypatch.setattr(cluster, "ANSWERS", 0.5)
    for address, said in (("tcp://127.0.0.1:1", "no scheduler answers"), ("nonsense", "missing port")):
        given = ["compare", str(folder), "--scheduler", address, "--layers", "4", "--accum", "float16/64"]
        assert run_cli(given) == 2
        text = capsys.readouterr().err.strip()
        assert said in text
        assert "\n" not in text
