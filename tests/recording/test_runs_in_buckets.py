"""Runs, models, prompts and baselines in a bucket: gs:// by a server of the tests' own, one that fails among them."""

import shutil

import fsspec
import pytest

import precaudit
from precaudit import mirrors as following
from precaudit.cli import run
from precaudit.errors import UserError
from precaudit.models.checkpoints import recorded_source
from precaudit.recording.runs.reader import open_run
from precaudit.references.cache import References
from tests.helpers.bucket_servers import Amazon, Google, amazon_environment, google_environment, serve
from tests.helpers.paths import FIXTURES

SMALL = ("--layers", "1", "--points", "v,attn_out", "--phases", "prefill", "--device", "cpu")
PROMPTS = [f'{{"id": "{name}", "tokens": [{i}, 5, 9, 2]}}' for i, name in enumerate("abc")]


@pytest.fixture
def google(tmp_path, monkeypatch):
    """Return the folder of a bucket's objects, and its faults."""
    root = tmp_path / "objects"
    root.mkdir()
    with serve(Google, root) as (url, faults):
        for name, value in google_environment(url).items():
            monkeypatch.setenv(name, value)
        another_machine(tmp_path, monkeypatch)
        kind = fsspec.get_filesystem_class("gs")
        kind.clear_instance_cache()
        yield root, faults
        kind.clear_instance_cache()


def another_machine(tmp_path, monkeypatch):
    """Go on with a cache folder that is empty."""
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    monkeypatch.setenv("PRECAUDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(following, "_MIRRORS", {})


def refused(capsys, *words):
    """Return the line that a command ends with, of exit code 2."""
    capsys.readouterr()
    assert run(list(words)) == 2
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("precaudit: ")]
    assert len(lines) == 1
    assert "Traceback" not in said
    return lines[0]


def hashes(folder):
    return {(p.prompt, p.phase, p.step, p.layer, p.point): p.hash for p in open_run(folder).points}


@pytest.mark.turn  # 4 s
def test_a_run_lives_in_a_bucket(google, tmp_path, monkeypatch, capsys):
    """Model, prompts, run and baseline: traced from and to a bucket, compared and gated from elsewhere."""
    root, faults = google
    shutil.copytree(FIXTURES / "llama-gqa", root / "models" / "llama")
    (root / "prompts.jsonl").write_text(PROMPTS[0])
    where, model = "gs://bucket/runs/m", "gs://bucket/models/llama"
    trace = ["trace", model, "--prompts", "gs://bucket/prompts.jsonl", "-o", where, *SMALL]
    assert run(trace) == 0
    assert f"{where}: 11 tensors" in capsys.readouterr().out
    another_machine(tmp_path, monkeypatch)
    assert run(["compare", where, "--accum", "none", "--model", model]) == 0
    said = capsys.readouterr().out
    assert f"Records: {where}/errors.jsonl" in said
    assert str(tmp_path) not in said
    ranges = [asked for _, key, asked in faults.asked if key == "models/llama/model.safetensors" and asked]
    assert len(ranges) == 2  # once on each machine
    assert run(["baseline", where, "-o", "gs://bucket/baseline.jsonl"]) == 0
    assert run(["gate", where, "--baseline", "gs://bucket/baseline.jsonl"]) == 0
    assert {p.name for p in (root / "runs" / "m").iterdir()} >= {"run.json", "errors.jsonl", "compare.json"}


def test_a_bucket_that_fails_half_way_loses_nothing_that_was_written(google, tmp_path, monkeypatch, capsys):
    """Every write after the n-th is refused: no run is believed, and another machine goes on with the whole batches."""
    root, faults = google
    (tmp_path / "p.jsonl").write_text("\n".join(PROMPTS))
    model, prompts = str(FIXTURES / "llama-gqa"), str(tmp_path / "p.jsonl")
    assert run(["trace", model, "--prompts", prompts, "-o", str(tmp_path / "whole"), *SMALL]) == 0
    where = "gs://bucket/runs/m"
    trace = ["trace", model, "--prompts", prompts, "-o", where, *SMALL]
    last, begin = 0, ()
    for after in (1, 8, 6):
        faults.after, faults.writes = after, 0
        said = refused(capsys, *trace, *begin)
        assert said.startswith(f"precaudit: {where}: cannot be written with the rights that this user has")
        faults.after = None
        another_machine(tmp_path, monkeypatch)
        there = refused(capsys, "compare", where)
        assert "no run here" in there if after == 1 else "was cut off before it finished" in there
        journal = root / "runs" / "m" / "batches.jsonl"
        whole = len(journal.read_text().splitlines()) if journal.is_file() else 0
        assert whole >= last
        last, begin = whole, ("--resume",) if whole else ("--force",)
        another_machine(tmp_path, monkeypatch)
    assert last > 0
    faults.after = None
    assert run([*trace, "--resume"]) == 0
    another_machine(tmp_path, monkeypatch)
    assert run(["compare", where, "--accum", "none"]) == 0
    assert hashes(following.local_path(where)) == hashes(tmp_path / "whole")
    assert not (root / "runs" / "m" / "batches.jsonl").exists()


def test_what_a_run_names_is_not_fetched_from_a_bucket_that_was_not_given_here(google):
    with pytest.raises(UserError, match="what a run names is not fetched, and gs://bucket/m was not given here yet"):
        recorded_source("gs://bucket/m")
    google[0].joinpath("m").mkdir()
    google[0].joinpath("m", "config.json").write_text("{}")
    folder = following.local_path("gs://bucket/m")
    assert recorded_source("gs://bucket/m") == str(folder)


def test_a_bucket_that_may_not_be_read_or_is_not_there_is_said_in_a_line(google, tmp_path, capsys):
    _, faults = google
    model = str(FIXTURES / "llama-gqa")
    (tmp_path / "p.jsonl").write_text(PROMPTS[0])
    assert "gs://none/m: no run here (no run.json)" in refused(capsys, "gate", "gs://none/m")
    trace = ["trace", model, "--prompts", str(tmp_path / "p.jsonl"), *SMALL]
    said = refused(capsys, *trace, "-o", "gs://none/m")
    assert said.startswith("precaudit: gs://none/m: cannot be written: no such bucket or file")
    faults.reads_refused = True
    for words in (["gate", "gs://bucket/m"], ["trace", "gs://bucket/m"], [*trace, "-o", "gs://bucket/m"]):
        said = refused(capsys, *words)
        assert said.startswith("precaudit: gs://bucket/m: cannot be read with the rights that this user has")


PROGRAM = """
import jax.numpy as jnp
import numpy as np
from precaudit import Program

def call(w, x):
    return jnp.tanh(x @ w)

w, x = (np.linspace(-1, 1, n * 16, dtype=np.float32).reshape(n, 16) for n in (16, 4))
program = Program(call, w, {"a": (x,), "b": (x + 1,), "c": (x - 1,)})
"""


@pytest.mark.slow  # 7 s
def test_a_program_s_run_goes_on_in_a_bucket_case_by_case(google, tmp_path, monkeypatch, capsys):
    root, faults = google
    (tmp_path / "own.py").write_text(PROGRAM)
    program, where = f"{tmp_path}/own.py:program", "gs://bucket/p"
    faults.after = 7
    said = refused(capsys, "trace", program, "-o", where)
    assert said.startswith(f"precaudit: {where}: cannot be written with the rights that this user has")
    faults.after = None
    another_machine(tmp_path, monkeypatch)
    there = {p.name: p.stat().st_mtime_ns for p in (root / "p" / "tensors").iterdir()}
    assert there
    assert run(["trace", program, "-o", where, "--resume"]) == 0
    kept = {p.name: p.stat().st_mtime_ns for p in (root / "p" / "tensors").iterdir()}
    assert len([name for name, time in there.items() if kept[name] == time]) >= 3  # a case: its points, inputs, outputs
    another_machine(tmp_path, monkeypatch)
    assert run(["compare", where, "--program", program]) == 0
    assert run(["gate", where]) == 0
    assert f"{where}" in capsys.readouterr().out


def test_a_run_that_is_replaced_is_gone_before_the_new_one_is_there(google, tmp_path, monkeypatch, capsys):
    root, faults = google
    (tmp_path / "p.jsonl").write_text(PROMPTS[0])
    trace = ["trace", str(FIXTURES / "llama-gqa"), "--prompts", str(tmp_path / "p.jsonl"), *SMALL]
    assert run([*trace, "-o", "gs://bucket/m"]) == 0
    before = {p.name: p.read_bytes() for p in (root / "m").rglob("*") if p.is_file()}
    assert "holds a run already" in refused(capsys, *trace, "-o", "gs://bucket/m")
    faults.after, faults.writes = 0, 0
    refused(capsys, *trace, "-o", "gs://bucket/m", "--force")
    assert {p.name: p.read_bytes() for p in (root / "m").rglob("*") if p.is_file()} == before
    another_machine(tmp_path, monkeypatch)
    faults.after, faults.writes = len(before), 0  # all that was there is deleted, nothing is written
    refused(capsys, *trace, "-o", "gs://bucket/m", "--force")
    deleted = [key for method, key, _ in faults.asked if method == "DELETE"]
    assert deleted.index("m/run.json") < deleted.index("m/points.jsonl")
    assert not [p for p in (root / "m").rglob("*") if p.is_file()]


@pytest.mark.slow  # 5 s, and s3fs is an extra
def test_a_run_lives_in_a_bucket_of_s3(tmp_path, monkeypatch, capsys):
    pytest.importorskip("s3fs")
    root = tmp_path / "objects"
    root.mkdir()
    (root / "prompts.jsonl").write_text("\n".join(PROMPTS[:2]))
    shutil.copytree(FIXTURES / "llama-gqa", root / "models" / "llama")
    with serve(Amazon, root) as (url, faults):
        for name, value in amazon_environment(url).items():
            monkeypatch.setenv(name, value)
        another_machine(tmp_path, monkeypatch)
        where, model = "s3://bucket/runs/m", "s3://bucket/models/llama"
        trace = ["trace", model, "--prompts", "s3://bucket/prompts.jsonl", "-o", where, *SMALL]
        faults.after = 8
        said = refused(capsys, *trace)
        assert said.startswith(f"precaudit: {where}: cannot be written with the rights that this user has")
        faults.after = None
        another_machine(tmp_path, monkeypatch)
        assert "was cut off before it finished" in refused(capsys, "compare", where)
        assert run([*trace, "--resume"]) == 0
        another_machine(tmp_path, monkeypatch)
        assert run(["compare", where, "--accum", "none", "--model", model]) == 0
        assert run(["gate", where]) == 0
        ranges = [asked for _, key, asked in faults.asked if key == "models/llama/model.safetensors" and asked]
        assert ranges
        said = refused(capsys, "trace", str(FIXTURES / "llama-gqa"), *trace[2:4], "-o", "s3://none/m", *SMALL)
        assert said.startswith("precaudit: s3://none/m: cannot be written: no such bucket or file")
        faults.reads_refused = True
        said = refused(capsys, "gate", where)
        assert said.startswith(f"precaudit: {where}: cannot be read with the rights that this user has")


def test_references_of_one_machine_are_read_by_another(google, tmp_path, monkeypatch):
    """The Python API takes URLs, too."""
    root, _ = google
    where, model = "gs://bucket/m", str(FIXTURES / "llama-gqa")
    (tmp_path / "p.jsonl").write_text(PROMPTS[0])
    asked = {"layers": "1", "points": "v,attn_out", "phases": "prefill", "device": "cpu"}
    made = precaudit.trace(model, where, prompts=tmp_path / "p.jsonl", **asked)
    assert made.record.finished is not None
    monkeypatch.setenv("PRECAUDIT_REFERENCES", "gs://bucket/references")
    first = precaudit.compare(following.local_path(where), accum=())
    kept = list((root / "references").rglob("*.fp64"))
    assert kept
    another_machine(tmp_path, monkeypatch)
    monkeypatch.setattr(References, "save", None)  # nothing is left to compute
    assert precaudit.compare(where, accum=(), fresh=True).errors == first.errors
    assert precaudit.gate(where).exit_code == 0
    monkeypatch.setenv("PRECAUDIT_REFERENCES", "a/folder")
    with pytest.raises(UserError, match="PRECAUDIT_REFERENCES=a/folder is no URL of a bucket"):
        precaudit.compare(where, accum=(), fresh=True)


@pytest.mark.slow  # 8 s: gcsfs waits before it asks again
def test_a_bucket_that_fails_for_the_moment_is_asked_again(google, tmp_path):
    root, faults = google
    (tmp_path / "p.jsonl").write_text(PROMPTS[0])
    faults.after, faults.code, faults.times = 1, 503, 3
    trace = ["trace", str(FIXTURES / "llama-gqa"), "--prompts", str(tmp_path / "p.jsonl"), *SMALL]
    assert run([*trace, "-o", "gs://bucket/m"]) == 0
    assert faults.times == 0
    assert open_run(root / "m").record.finished is not None
