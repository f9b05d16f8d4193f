"""run.json: one manifest for every kind of run, and the manifests of earlier schemas."""

import json

import jax.numpy as jnp
import pytest

import precaudit
from precaudit.cli import run
from precaudit.errors import UserError
from precaudit.models.checkpoints import open_checkpoint
from precaudit.recording.dumps.of_model import write_as_run
from precaudit.recording.runs.kinds import kind_of, tag_of
from precaudit.recording.runs.programs import open_program_run
from precaudit.schema.records.manifests import Manifest
from tests.helpers.other_decoder import fixture_tokens, write_dump
from tests.helpers.paths import FIXTURES


def program():
    x = jnp.arange(8.0).reshape(2, 4)
    return precaudit.Program(lambda p, x: jnp.tanh(x @ p), jnp.ones((4, 3)), {"a": (x,), "b": (x + 1,)}, outputs="y")


def former(folder, name, **changes):
    """Make a manifest one of before: of another name, without ``kind`` and what such runs did not say."""
    held = json.loads((folder / "run.json").read_text())
    del held["kind"], held["xla_flags"], held["commit"]
    held["versions"] = {n: x for n, x in held["versions"].items() if n in ("jax", "jaxlib", "numpy")}
    (folder / "run.json").unlink()
    (folder / name).write_text(json.dumps(held | changes))


def test_every_manifest_says_what_the_numbers_depend_on(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    record = precaudit.trace(program(), tmp_path / "a").record
    assert isinstance(record, Manifest)
    held = json.loads((tmp_path / "a" / "run.json").read_text())
    assert (held["kind"], held["schema"]) == ("program", 3)
    assert held["xla_flags"] == "--xla_cpu_enable_fast_math=false"
    assert {"python", "precaudit", "jax", "jaxlib", "numpy"} <= held["versions"].keys()


def test_programs_of_before_are_read_and_go_on(tmp_path, monkeypatch):
    precaudit.trace(program(), tmp_path / "a")
    former(tmp_path / "a", "program.json", schema=2)
    assert kind_of(tmp_path / "a") == "program"
    precaudit.compare(tmp_path / "a", program=program())
    assert run(["gate", str(tmp_path / "a")]) == 0
    former_run = json.loads((tmp_path / "a" / "program.json").read_text())
    former_run |= {"finished": None, "schema": 3}
    (tmp_path / "a" / "program.json").write_text(json.dumps(former_run))
    with pytest.raises(UserError, match="was cut off"):
        open_program_run(tmp_path / "a")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")  # of which such a run says nothing
    again = precaudit.trace(program(), tmp_path / "a", resume=True)
    assert again.record.finished
    assert (tmp_path / "a" / "run.json").is_file()
    assert precaudit.open_run(tmp_path / "a").record == again.record


def test_a_run_goes_on_under_the_flags_it_was_begun_with(tmp_path, monkeypatch):
    opened = precaudit.trace(program(), tmp_path / "a")
    held = json.loads((opened.folder / "run.json").read_text())
    (opened.folder / "run.json").write_text(json.dumps(held | {"finished": None}))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    with pytest.raises(UserError, match="it differs in XLA_FLAGS"):
        precaudit.trace(program(), tmp_path / "a", resume=True)


def test_a_dump_whose_model_is_known_is_of_both_in_one_manifest(tmp_path):
    names = write_dump(tmp_path / "theirs", {"a": fixture_tokens()})
    dump = precaudit.import_dump(tmp_path / "theirs", tmp_path / "dump", names)
    assert (tag_of(dump.folder), kind_of(dump.folder)) == ("dump", "dump")
    with pytest.raises(UserError, match="is an imported dump, which is whole: choose another -o"):
        precaudit.trace(program(), dump.folder, resume=True)
    with pytest.raises(UserError, match="was imported; compare it with FP64 of a model"):
        precaudit.recording.runs.reader.open_run(dump.folder)
    precaudit.compare(dump.folder, model=str(FIXTURES / "llama-gqa"))
    assert (tag_of(dump.folder), kind_of(dump.folder)) == ("model", "dump")
    known = precaudit.open_run(dump.folder)
    assert known.record.imported == dump.record
    assert known.record.program == "dump"
    assert [p.name for p in dump.folder.glob("*.json")].count("dump.json") == 0


def test_a_dump_whose_comparison_is_cut_off_is_a_dump(tmp_path, monkeypatch):
    names = write_dump(tmp_path / "theirs", {"a": fixture_tokens()})
    dump = precaudit.import_dump(tmp_path / "theirs", tmp_path / "dump", names)
    precaudit.compare(dump.folder, model=str(FIXTURES / "llama-gqa"))

    def cut_off(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("precaudit.recording.dumps.of_model.write_lines", cut_off)
    with pytest.raises(KeyboardInterrupt):
        write_as_run(dump, open_checkpoint(str(FIXTURES / "llama-gqa")), "llama", None)
    assert (tag_of(dump.folder), kind_of(dump.folder)) == ("dump", "dump")


@pytest.mark.parametrize("kind", ["model", "program", "dump"])
def test_a_manifest_that_is_newer_says_so(kind, tmp_path, capsys):
    (tmp_path / "run.json").write_text(json.dumps({"kind": kind, "schema": 4}))
    for words in (["gate"], ["compare"], ["points"]):
        assert run([*words, str(tmp_path)]) == 2
        told = "schema 4 is newer than this precaudit reads (3): upgrade precaudit"
        assert capsys.readouterr().err == f"precaudit: {tmp_path / 'run.json'}: {told}\n", words


def test_dumps_of_before_are_read_and_compared(tmp_path):
    names = write_dump(tmp_path / "theirs", {"a": fixture_tokens()})
    dump = precaudit.import_dump(tmp_path / "theirs", tmp_path / "dump", names)
    former(dump.folder, "dump.json", schema=2)
    assert kind_of(dump.folder) == "dump"
    assert precaudit.recording.opening.open_any(dump.folder).index() == dump.index()
    precaudit.compare(dump.folder, model=str(FIXTURES / "llama-gqa"))
    held = json.loads((dump.folder / "run.json").read_text())
    del held["kind"], held["imported"]  # as it was written beside dump.json
    (dump.folder / "run.json").write_text(json.dumps(held | {"schema": 1}))
    assert (tag_of(dump.folder), kind_of(dump.folder)) == ("model", "dump")
    assert precaudit.recording.opening.open_any(dump.folder).index() == dump.index()
    assert precaudit.open_run(dump.folder).record.program == "dump"


@pytest.mark.parametrize("text", ['{"id": 3}', '{"kind": "program", "id": 3}', '{"kind": "dump"}'])
def test_what_another_tool_wrote_is_not_replaced(text, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "run.json").write_text(text)
    with pytest.raises(UserError, match="theirs is not a run of ours"):
        precaudit.trace(program(), tmp_path / "theirs", force=True)


@pytest.mark.parametrize("name", ["tokens-a", "tokens-4"])
def test_a_folder_of_runs_is_not_replaced_for_the_names_in_it(name, tmp_path):
    """Runs of models that are named as a model's sketches are."""
    (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / name / "run.json").write_text('{"kind": "model", "schema": 3}')
    with pytest.raises(UserError, match="exists and is not a run"):
        precaudit.trace(program(), tmp_path / "runs", force=True)
    assert (tmp_path / "runs" / name / "run.json").is_file()
