"""Commands on long runs hold an aggregate and a record at a time: memory grows by far less than the records."""

import jax
import jax.numpy as jnp
import pytest

import precaudit
from benchmarks.copies import copy, failing, peak
from precaudit.judging.gate import gate
from tests.helpers.runs import everything, record

RECORDS = 50_000


def looped(params, x):
    """A scan of 12 layers, each with a product, a softmax and a norm."""

    def step(x, w):
        x = x + jax.nn.softmax(x @ w)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5), None

    return jax.lax.scan(step, x, params)[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return {kind: (a compared run, one of 50,000 records made of it, how many these are)}."""
    folder = tmp_path_factory.mktemp("memory")
    record(folder / "model", select=everything(layers="0"), decode_steps=1)
    precaudit.compare(folder / "model", accum=(), cache=folder / "refs")
    params = jax.random.normal(jax.random.key(0), (12, 8, 8), jnp.bfloat16)
    program = precaudit.Program(call=looped, params=params, cases={"a": (jnp.ones((4, 8), jnp.bfloat16),)})
    precaudit.compare(precaudit.trace(program, folder / "program"), program)
    return {
        kind: (folder / kind, folder / f"{kind}s", copy(folder / kind, folder / f"{kind}s", RECORDS))
        for kind in ("model", "program")
    }


@pytest.fixture(scope="module")
def failed(runs, tmp_path_factory):
    """Return the same of a model whose records all fail."""
    folder = tmp_path_factory.mktemp("failed")
    failing(runs["model"][0], folder / "changed")
    copy(folder / "changed", folder / "short", 1)
    return folder / "short", folder / "long", copy(folder / "changed", folder / "long", RECORDS)


@pytest.mark.turn  # 6 s
def test_the_gate_of_many_failures(failed):
    """Verdicts stay in a file, and groups of them are folded: 50,000 are 50 MB."""
    short, long, count = failed
    grown, said = growth("gate", short / "errors.jsonl", long / "errors.jsonl")
    assert grown < 40, grown
    counts = gate(short / "errors.jsonl").counts
    times = count // len((short / "errors.jsonl").read_bytes().splitlines())
    assert counts["fail"] > 0
    assert "pass" not in counts
    for status in counts.keys() - {"input suspect"}:  # pooled errors of many records are among those
        assert f"{times * counts[status]:,} {status}" in said


@pytest.mark.slow
def test_the_page_of_many_failures(failed, tmp_path):
    """Cells and charts fold as records stream by: 50,000 in memory are 230 MB."""
    pytest.importorskip("vl_convert")
    short, long, _ = failed
    grown, _ = growth("report", short, long, "--html", str(tmp_path / "page.html"))
    assert grown < 40, grown


def growth(command, short, long, *more):
    """Return by how many MB the peak of a command grows from a short run to a long one, and what it printed."""
    before = peak(command, str(short), *more)
    after = peak(command, str(long), *more)
    # one prompt many times is no sample of prompts: pooled medians may fail
    assert {before[2], after[2]} <= {0, 1, 3}, (before[3], after[3])
    return after[0] - before[0], after[3]


@pytest.mark.turn  # 13 s
@pytest.mark.parametrize("kind", ["model", "program"])
def test_the_gate_of_many_records(kind, runs):
    short, long, count = runs[kind]
    grown, said = growth("gate", short, long)
    assert grown < 40, grown  # 50,000 records are 230 MB
    times = count // len((short / "errors.jsonl").read_bytes().splitlines())
    for status, n in gate(short).counts.items():
        assert f"{times * n:,} {status}" in said


@pytest.mark.slow
def test_two_runs_of_many_tensors_against_each_other(runs):
    """Runs are read a prompt at a time, and records stay in their file: 20,000 in memory are 300 MB."""
    short, long, count = runs["model"]
    if not (long / "tensors").exists():
        (long / "tensors").symlink_to(short / "tensors")
    before, after = (peak("compare", str(run), str(run)) for run in (short, long))
    assert (before[2], after[2]) == (0, 0), after[3]
    lines = [next(run.glob("against/*/errors.jsonl")).read_bytes().count(b"\n") for run in (short, long)]
    assert lines[1] == lines[0] * (count // len((short / "errors.jsonl").read_bytes().splitlines()))
    assert lines[1] > 10_000
    assert after[0] - before[0] < 40, after[0] - before[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "program"])
def test_the_table_of_many_records(kind, runs, tmp_path):
    short, long, count = runs[kind]
    pytest.importorskip("pandas")
    grown, said = growth("export", short, long, "--csv", str(tmp_path / "e.csv"))
    assert grown < 80, grown
    assert f"{count:,} records" in said
    with (tmp_path / "e.csv").open() as f:
        assert sum(1 for _ in f) == count + 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "program"])
def test_the_report_of_many_records(kind, runs):
    short, long, _ = runs[kind]
    grown, _ = growth("report", short, long)
    assert grown < 40, grown


@pytest.mark.turn  # 14 s
def test_the_gate_of_a_file_of_many_records(runs):
    short, long, _ = runs["model"]
    grown, said = growth("gate", short / "errors.jsonl", long / "errors.jsonl")
    assert grown < 40, grown
    assert " pass" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "program"])
def test_a_baseline_of_many_records(kind, runs, tmp_path):
    """Lines are written as records are read, and found in their file: 50,000 in memory are 50 MB."""
    short, long, count = runs[kind]
    grown, _ = growth("baseline", short, long, "-o", str(tmp_path / "b"), "--accept", "--why", "longer")
    assert grown < 40, grown
    assert len((tmp_path / "b").read_bytes().splitlines()) == count + 1
    alone, held = peak("gate", str(long)), peak("gate", str(long), "--baseline", str(tmp_path / "b"))
    assert held[0] - alone[0] < 20, (held[0], alone[0])
    assert (held[2], held[3].splitlines()[-1]) == (alone[2], alone[3].splitlines()[-1])
