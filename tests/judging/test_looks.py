"""Filters of a program's compared run: what is shown, judged and diagnosed of it."""

import json
from dataclasses import replace

import msgspec
import pytest

import precaudit
from precaudit.cli import run as command
from precaudit.errors import UserError
from precaudit.judging.gate import judge_found
from precaudit.judging.looks import Look, look_at, selected
from precaudit.recording.programs.loading import load_program
from precaudit.recording.runs.compared_programs import program_errors, recall_program
from tests.helpers.paths import EXAMPLES

OWN = f"{EXAMPLES / 'own_decoder.py'}:program"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("looks") / "run"
    program = replace(load_program(OWN), steps=0)
    run = precaudit.trace(program, folder, points="query,scores,logits")
    precaudit.compare(run, program)
    return program, run


@pytest.mark.turn  # 14 s
def test_a_look_holds_what_it_names(compared):
    _, run = compared
    look = look_at(run, 1, "query", None, ["a"])
    assert look == Look(frozenset({1}), ("query",), None, ("a",))
    every = program_errors(run)
    kept = look.of(every)
    assert {(e.prompt, e.layer, e.point) for e in kept} == {("a", 1, "query")}
    assert {e.kind for e in kept} == {"local", "forward", "accum"}
    assert judge_found(selected(recall_program(run), look)).counts == {"pass": 2}
    assert look_at(run) is None
    assert len(look_at(run, points="all").of(every)) == len(every)


@pytest.mark.parametrize(
    ("filters", "says"),
    [
        ({"points": "querz"}, "the run holds no point 'querz'; did you mean 'query'"),
        ({"prompt": "z"}, "the run holds no case 'z'"),
        ({"layers": "7"}, "layer 7 is out of range"),
        ({"points": ","}, "no point is named"),
    ],
)
def test_what_the_run_does_not_hold_is_refused(compared, filters, says):
    with pytest.raises(UserError, match=says):
        look_at(compared[1], **filters)


def test_compare_shows_a_part_and_keeps_the_records_of_all(compared, capsys):
    _, run = compared
    before = (run.folder / "errors.jsonl").read_bytes()
    assert command(["compare", str(run.folder), "--layers", "1", "--points", "query", "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(e["layer"], e["point"]) for e in shown} == {(1, "query")}
    assert command(["compare", str(run.folder), "--layers", "1"]) == 0
    assert "in what was selected" in capsys.readouterr().out
    assert (run.folder / "errors.jsonl").read_bytes() == before


@pytest.mark.turn  # 7 s
def test_python_takes_the_same_filters(compared):
    program, run = compared
    found = precaudit.compare(run, program, points=["scores"], prompt="b")
    assert {(e.prompt, e.point) for e in found} == {("b", "scores")}
    assert precaudit.gate(run).counts["pass"] > len(found)
    assert precaudit.diagnose(run, program=program, points="query").explained == 2 * 2 * 3  # kinds, cases, layers


def test_what_fails_elsewhere_is_not_in_the_look(compared):
    _, run = compared
    far = {"unexplained": None}
    every = [
        msgspec.structs.replace(e, **far) if (e.kind, e.layer, e.point) == ("local", 2, "query") else e
        for e in program_errors(run)
    ]
    found = replace(recall_program(run), errors=every)
    assert judge_found(selected(found, look_at(run, layers="2"))).exit_code == 3
    assert judge_found(selected(found, look_at(run, layers="0,1"))).exit_code == 0
