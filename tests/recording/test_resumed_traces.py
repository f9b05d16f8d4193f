"""A trace that is cut off and resumed equals one that was not, file by file; another request is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from unittest.mock import patch

import pytest
import safetensors.numpy

from precaudit.cli import run
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.unfinished import finished_prompts
from precaudit.recording.runs.writer import Lines
from precaudit.recording.tracing import trace as tracing
from precaudit.schema.records.runs import PromptRecord
from tests.helpers.paths import FIXTURES

MODEL = str(FIXTURES / "llama-gqa")
PROMPTS = [("a", [1, 2, 3, 4, 5]), ("b", [7, 8]), ("c", [3, 1, 4, 1]), ("d", [9]), ("e", [2, 2, 2])]
FILES = 4 * len(PROMPTS)  # of tensors: prefill, two decode steps, rescore


class Killed(BaseException):
    """The process is gone."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    lines = [json.dumps({"id": name, "tokens": tokens}) for name, tokens in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def asked(folder, output, *more):
    given = {"--prompts": folder / "prompts.jsonl", "--batch": 2, "--decode-steps": 1, "--points": "k,v,logits"}
    return ["trace", MODEL, *(str(x) for pair in given.items() for x in pair), "-o", str(output), *more]


@pytest.fixture(scope="module")
def whole(folder):
    """The run that nothing disturbed."""
    assert run(asked(folder, folder / "whole")) == 0
    assert len(list((folder / "whole" / "tensors").iterdir())) == FILES
    return folder / "whole"


@pytest.fixture(scope="module")
def cut(folder):
    """A run that was killed in the second of three batches."""
    return killed(folder, folder / "cut", 11)


def killed(folder, output, at, *more):
    """Trace, and have the process die as it writes its ``at``-th file of tensors."""
    done, save = [], safetensors.numpy.save_file

    def saved(tensors, path, *rest):
        done.append(path)
        if len(done) == at:
            path.write_bytes(b"half a file")
            raise Killed
        save(tensors, path, *rest)

    with patch("safetensors.numpy.save_file", saved), pytest.raises(Killed):
        run(asked(folder, output, *more))
    assert len(done) == at
    return output


def contents(run):
    """Every file's bytes; of run.json what is not of the day: a process checks the programs that it compiles."""
    found = {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}
    record = json.loads(found.pop("run.json"))
    assert record["finished"]
    for name in ("id", "started", "finished", "command", "neutrality"):
        record.pop(name)
    return found, record


def checked(run):
    """The calls whose neutrality is noted."""
    return {(n["phase"], n["step"]) for n in json.loads((run / "run.json").read_text())["neutrality"]}


@pytest.mark.parametrize(("at", "there"), [(1, 0), (8, 0), (9, 2), (16, 2), (17, 4), (20, 4)])
def test_a_resumed_run_is_the_run_that_was_not_cut_off(folder, whole, tmp_path, capfd, at, there):
    """``there``: prompts whose batch was written; the batch that was not whole runs again."""
    out = killed(folder, tmp_path / "run", at)
    assert finished_prompts(out) == (there, 5)
    mine = {p: p.stat().st_mtime_ns for p in (out / "tensors").iterdir() if p.suffix == ".safetensors"}
    capfd.readouterr()
    assert run(asked(folder, out, "--resume")) == 0
    said = capfd.readouterr().err
    assert (f"{there} of 5 prompts are there" in said) == (there > 0)
    assert contents(out) == contents(whole)
    assert checked(out) >= checked(whole)
    kept = [p for p, changed in mine.items() if p.stat().st_mtime_ns == changed]
    assert len(kept) == 4 * there, "what is whole is not written again, what is not whole is"


@pytest.mark.turn  # 3 s
def test_a_resumed_run_is_compared_and_passes(folder, cut, tmp_path):
    out = shutil.copytree(cut, tmp_path / "run")
    assert run(["gate", str(out)]) == 2
    assert run(asked(folder, out, "--resume")) == 0
    assert run(["compare", str(out)]) == 0
    assert run(["gate", str(out)]) == 0


@pytest.mark.parametrize("part", ["tensors", "steps.jsonl"])
def test_nothing_is_deleted_or_cut_behind_a_link(folder, cut, tmp_path, capfd, part):
    out = shutil.copytree(cut, tmp_path / "run")
    held = (out / part).rename(tmp_path / "elsewhere")
    (out / part).symlink_to(held)
    before = sorted((p, p.stat().st_size) for p in (held, *held.glob("*")))
    assert run(asked(folder, out, "--resume")) == 2
    assert f"{out / part} is a link" in capfd.readouterr().err
    assert sorted((p, p.stat().st_size) for p in (held, *held.glob("*"))) == before


def test_killed_again_while_it_resumes(folder, whole, cut, tmp_path):
    out = shutil.copytree(cut, tmp_path / "run")
    killed(folder, out, 10, "--resume")
    assert finished_prompts(out) == (4, 5)
    assert run(asked(folder, out, "--resume")) == 0
    assert contents(out) == contents(whole)


def test_a_finished_run_is_left_as_it_is(folder, whole, capfd):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*")}
    assert run(asked(folder, whole, "--resume")) == 0
    assert "finished already" in capfd.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*")} == before
    assert run(asked(folder, whole, "--points", "q", "--resume")) == 2
    assert "points" in capfd.readouterr().err


def damaged(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("what", "there"),
    [
        (lambda run: damaged(run / "tensors" / "a.prefill.0.safetensors"), None),
        (lambda run: (run / "tensors" / "b.decode.1.safetensors").unlink(), None),
        (lambda run: (run / "steps.jsonl").write_text((run / "steps.jsonl").read_text().replace("1", "2", 1)), None),
        (lambda run: (run / "batches.jsonl").write_text("{"), None),
        (lambda run: (run / "batches.jsonl").unlink(), None),
        (lambda run: (run / "tensors" / ".x.1234.part").write_bytes(b""), 2),
    ],
    ids=["tensor", "missing", "line", "torn", "no batches", "leftover"],
)
def test_what_was_altered_is_made_again(folder, whole, cut, tmp_path, capfd, what, there):
    out = shutil.copytree(cut, tmp_path / "run")
    what(out)
    assert run(asked(folder, out, "--resume")) == 0
    assert ("prompts are there" in capfd.readouterr().err) == (there is not None)
    assert contents(out) == contents(whole)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--policy", "fp32"], ["policy activations (bfloat16, now float32)"]),
        (["--points", "q,logits"], ["points"]),
        (["--layers", "0"], ["layers"]),
        (["--phases", "prefill"], ["phases"]),
        (["--batch", "3"], ["batch (2, now 3)"]),
        (["--decode-steps", "2"], ["decode_steps (1, now 2)"]),
        (["--pad", "left"], ["pad (right, now left)"]),
        (["--prompt", "a"], ["prompts"]),
        (["--force"], ["--resume or --force, not both"]),
    ],
)
def test_another_request_is_refused_by_name(folder, cut, capfd, more, words):
    before = {p: p.read_bytes() for p in cut.rglob("*") if p.is_file()}
    capfd.readouterr()
    assert run(asked(folder, cut, *more, "--resume")) == 2
    said = capfd.readouterr().err
    assert not [w for w in words if w not in said], said
    assert {p: p.read_bytes() for p in cut.rglob("*") if p.is_file()} == before


def test_other_prompts_weights_versions_and_source_are_refused(folder, cut, tmp_path, capfd, monkeypatch):
    def refused(*words):
        capfd.readouterr()
        assert run(asked(folder, cut, "--resume")) == 2
        said = capfd.readouterr().err
        assert not [w for w in words if w not in said], said

    with monkeypatch.context() as patched:
        patched.setattr(tracing, "computed_by", lambda _: "another")
        refused("precaudit's own source")
    with monkeypatch.context() as patched:
        patched.setattr("precaudit.recording.tracing.conditions.number_versions", lambda: {"jax": "0.1"})
        refused("the version of jax (", "now 0.1)", "the version of numpy")
    with monkeypatch.context() as patched:
        patched.setenv("XLA_FLAGS", "--xla_dump_to=x")
        refused("xla_flags")
    text = (folder / "prompts.jsonl").read_text()
    try:
        (folder / "prompts.jsonl").write_text(text.replace("[7, 8]", "[7, 9]"))
        refused("the prompts")
    finally:
        (folder / "prompts.jsonl").write_text(text)
    raw = json.loads((cut / "run.json").read_text())
    other = shutil.copytree(cut, tmp_path / "other")
    raw["model"]["sha256"] = "0" * 64
    (other / "run.json").write_text(json.dumps(raw))
    assert run(asked(folder, other, "--resume")) == 2
    assert "the weights" in capfd.readouterr().err


def test_other_tokens_are_refused(folder, whole, tmp_path, capfd):
    """The run that tokens were taken of is another now: what is there was fed otherwise."""
    source = shutil.copytree(whole, tmp_path / "source")
    out = killed(folder, tmp_path / "run", 10, "--tokens-from", str(source))
    (source / "steps.jsonl").write_text(_other_tokens(source / "steps.jsonl"))
    raw = json.loads((source / "run.json").read_text())
    raw["hashes"]["steps.jsonl"] = file_hash(source / "steps.jsonl")
    (source / "run.json").write_text(json.dumps(raw))
    assert run(asked(folder, out, "--tokens-from", str(source), "--resume")) == 2
    assert "the tokens that --tokens-from gives" in capfd.readouterr().err


def _other_tokens(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return "".join(json.dumps(x | {"token": 1 + x["token"] % 2 if x["step"] else x["token"]}) + "\n" for x in lines)


@pytest.mark.parametrize("there", [False, True])
def test_nothing_to_go_on_with(folder, tmp_path, capfd, there):
    if there:
        (tmp_path / "run" / "tensors").mkdir(parents=True)
    assert run(asked(folder, tmp_path / "run", "--resume")) == 2
    assert "no run here to go on with" in capfd.readouterr().err
    assert (tmp_path / "run").exists() == there


def test_a_program_that_is_not_there_is_not_resumed(tmp_path, capfd):
    assert run(["trace", f"{tmp_path / 'x.py'}:program", "-o", str(tmp_path / "run"), "--resume"]) == 2
    assert "no such file" in capfd.readouterr().err


def test_a_run_of_other_parts_is_not_resumed(folder, cut, tmp_path, capfd):
    """Parts of one's own have no hash by which a second program could be told from the first."""
    out = shutil.copytree(cut, tmp_path / "run")
    (out / "run.json").write_text((out / "run.json").read_text().replace('"shipped"', '"other"'))
    assert run(asked(folder, out, "--resume")) == 2
    assert "not the shipped decoder" in capfd.readouterr().err


def test_cut_off_when_all_is_written(folder, whole, tmp_path):
    with patch("precaudit.recording.runs.writer.sync", side_effect=Killed), pytest.raises(Killed):
        run(asked(folder, tmp_path / "run"))
    assert finished_prompts(tmp_path / "run") == (5, 5)
    assert run(asked(folder, tmp_path / "run", "--resume")) == 0
    assert contents(tmp_path / "run") == contents(whole)
    assert checked(tmp_path / "run") == checked(whole)


def test_a_disk_that_takes_a_part_of_a_line_is_full(tmp_path):
    class Full:
        name = "steps.jsonl"

        def write(self, data):
            return len(data) - 1

    lines = Lines(tmp_path / "steps.jsonl")
    lines.close()
    lines._file = Full()
    with pytest.raises(OSError, match="No space left"):
        lines.add([PromptRecord(id="a", text="", tokens=())])


@pytest.mark.slow  # two processes, 15 s
def test_ctrl_c_says_what_is_there_and_the_command_it_gives_finishes_the_run(folder, whole, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "precaudit"]
    process = subprocess.Popen([*command, *asked(folder, out)], stderr=subprocess.PIPE, text=True)
    while not (out / "batches.jsonl").is_file() or not (out / "batches.jsonl").read_bytes():
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    if process.returncode == 0:
        pytest.skip("finished before it was interrupted")
    assert process.returncode == 130
    assert f"precaudit: interrupted; {out} holds " in said
    assert "of 5 prompts. Next: precaudit trace" in said
    assert "Traceback" not in said
    again = said.rstrip().rpartition("Next: precaudit ")[2].split()
    assert again[-1] == "--resume"
    subprocess.run([*command, *again], check=True, env=os.environ)
    assert contents(out) == contents(whole)
