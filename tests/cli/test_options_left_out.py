"""Options that are of no use for what RUN is: told in one line, before anything is read."""

import json

import pytest

from precaudit.cli import run
from precaudit.cli.compare import LEFT_OUT, command


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """A folder of each kind, of which nothing but the kind is there."""
    monkeypatch.chdir(tmp_path)
    kinds = {"program": "program", "dump": "dump", "model": "model", "several/bf16": "model"}
    for folder, kind in kinds.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "run.json").write_text(json.dumps({"kind": kind}))


def test_the_table_is_of_options_of_the_command():
    known = {p.name for p in command.params}
    assert {name for _, names in LEFT_OUT.values() for name in names} <= known


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "several --policy bf16 --layers 0",
            "several is a folder of runs, compared whole; leave out --layers, --policy",
        ),
        ("several --rerun", "several is a folder of runs, compared whole; leave out --rerun"),
        ("program model --formula", "program and model are compared whole; leave out --formula"),
        ("dump model --model x --family y", "dump and model are compared whole; leave out --model, --family"),
        ("model --policy bf16", "model was not imported, and says its policy itself; leave out --policy"),
        ("program --formula", "program is of a program; leave out --formula"),
        ("program --rerun --map x", "--rerun runs the command of program again; leave out --map"),
        ("program --model x --config y", "--model says what it is compared with; leave out --config"),
        ("model --family x --rerun", "model is no run of a program; leave out --family, --rerun"),
        ("mine.py:p", "mine.py:p: no run here (no run.json); make one with: precaudit trace mine.py:p -o runs/a"),
        ("gone --policy bf16", "gone: no run here (no run.json); make one with: precaudit trace SUBJECT -o gone"),
    ],
)
def test_what_compare_cannot_use_is_named(words, told, capfd):
    assert run(["compare", *words.split()]) == 2
    assert capfd.readouterr() == ("", f"precaudit: {told}\n")


def test_what_diagnose_and_trace_cannot_use_is_named(capfd):
    for words, told in (
        ("diagnose program --mesh x --lift y", "program is of a program; leave out --lift, --mesh"),
        ("diagnose model --rerun", "model is no run of a program; leave out --rerun"),
        ("trace tiny --repeat model --batch 2", "--repeat records what RUN says; leave out SUBJECT, --batch"),
        ("trace x.py:y --mesh x --batch 2", "a program says itself what it runs on; leave out --batch, --mesh"),
    ):
        assert run(words.split()) == 2
        assert capfd.readouterr().err == f"precaudit: {told}\n"


def test_a_prompt_or_text_given_to_rollout_is_told_of_its_file(capfd):
    for option in ("--text", "--prompt"):
        assert run(["rollout", "tiny", option, "def main("]) == 2
        assert f"No such option '{option}'; here it is --prompts FILE, with lines such as" in capfd.readouterr().err
