"""Comparing some layers, points and cases of a program's run: these alone are computed, and join what is there."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

import precaudit
from precaudit.cli import run as run_cli
from precaudit.errors import UserError
from precaudit.judging.gate import gate
from precaudit.judging.looks import look_at
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.compared_programs import Unpaired, marks_of, recall_program, write_compared
from precaudit.recording.runs.positioned import calls_of_tokens
from precaudit.references.comparison.programs import compare_program
from precaudit.references.traced.local import Emulations
from precaudit.references.traced.reference import Traced
from precaudit.schema.places import Place
from precaudit.schema.records.runs import Prediction, Products

LAYERS = 3
SCAN = "call,call.in"  # the points of a layer


@pytest.fixture
def run(tmp_path):
    """A run of three layers of two operations in a scan, of two cases, and its program."""
    draw = np.random.default_rng(5)

    def call(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    def sample(*shape):
        return jnp.asarray(draw.standard_normal(shape), jnp.bfloat16)

    program = Program(call, sample(LAYERS, 32, 32) / 4, {"a": (sample(5, 32),), "b": (sample(5, 32),)}, outputs="out")
    return trace_program(program, tmp_path / "run"), program


@pytest.fixture
def recomputed(monkeypatch):
    """The places whose operations are recomputed from here on."""
    asked, records = [], Emulations.records

    def noted(self, opened, case, call, *given):
        found = records(self, opened, case, call, *given)
        asked.extend(Place.of(e) for e in found)
        return found

    monkeypatch.setattr(Emulations, "records", noted)
    return asked


def lines(opened):
    return (opened.folder / "errors.jsonl").read_bytes().splitlines()


def test_one_layer_is_computed_alone_and_is_that_of_the_whole(run, recomputed):
    opened, program = run
    look = look_at(opened, layers="1", points=SCAN, prompt="b")
    some = [e for e in compare_program(opened, program, holds=look.holds) if e.kind == "local"]
    assert {(p.prompt, p.layer) for p in recomputed} == {("b", 1)}
    assert {(e.prompt, e.layer) for e in some} == {("b", 1)}
    every = compare_program(opened, program)
    assert some == [e for e in every if e.kind == "local" and look.holds(e)]


def test_what_is_added_joins_what_is_there(run, recomputed):
    opened, program = run
    whole = compare_program(opened, program) and lines(opened)
    (opened.folder / "compared.json").unlink()
    for filters in ({"layers": "2"}, {"layers": "0:2", "prompt": "b"}, {}):
        recomputed.clear()
        look = look_at(opened, **filters) if filters else look_at(opened, points="all")
        compare_program(opened, program, holds=look.holds)
        assert recomputed
    assert {(p.prompt, p.layer) for p in recomputed} == {("a", 0), ("a", 1)}
    assert lines(opened) == whole
    recomputed.clear()
    compare_program(opened, program, holds=look.holds)
    assert not recomputed
    assert lines(opened) == whole
    assert gate(opened).exit_code == 0


def test_the_whole_program_is_not_run_again_for_a_part(run, monkeypatch):
    opened, program = run
    compare_program(opened, program, holds=look_at(opened, layers="1").holds)
    monkeypatch.setattr(Traced, "forward", lambda *_: pytest.fail("it is there"))
    compare_program(opened, program, holds=look_at(opened, layers="1:3").holds)


def test_layers_that_a_run_does_not_hold_are_refused(run, tmp_path):
    _, program = run
    some = precaudit.trace(program, tmp_path / "some", layers="1")
    with pytest.raises(UserError, match="some holds layer 1 alone"):
        look_at(some, layers="0")
    assert look_at(some, layers="0:2").layers == {0, 1}  # a part of it is there


def test_what_was_said_of_other_cases_stays(run):
    """Notes on a reference, and what could not be paired: cases that are not computed again keep theirs."""
    opened, program = run
    compare_program(opened, program)
    marks = msgspec.structs.replace(marks_of(opened), told=("of the first",), unpaired=(Unpaired("a", "call", "why"),))
    (opened.folder / "compared.json").write_bytes(msgspec.json.encode(marks))
    again = compare_program(opened, program, holds=look_at(opened, prompt="b").holds)
    assert marks_of(opened).told == again.notes == ("of the first",)
    assert marks_of(opened).unpaired == marks.unpaired


def test_what_follows_a_nan_is_suspect_on_every_screen(run, capsys):
    """Of compare and of gate with filters, too: what comes before is judged though it is not shown."""
    opened, program = run
    found = compare_program(opened, program)
    first = next(e for e in found if (e.kind, e.layer) == ("local", 0))
    later = next(e for e in found if (e.kind, e.layer, e.point) == ("forward", 2, first.point))
    bad = [msgspec.structs.replace(e, nonfinite=1) if e in (first, later) else e for e in found]
    write_compared(opened, bad, [], marks_of(opened))
    for filters in ({}, {"layers": "2", "points": SCAN}):
        judged = gate(opened, **filters)
        assert judged.counts["input suspect"] == 1
    assert run_cli(["compare", str(opened.folder), "--layers", "2", "--points", SCAN, "--accum", "none"]) == 0
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line.startswith("? 1 input suspect: call.in of layer 2, case a: an operation before it fails, which ")
    assert run_cli(["gate", str(opened.folder), "--layers", "2", "--points", SCAN]) == 3
    assert capsys.readouterr().out.splitlines()[0] == first_line


def test_taps_that_change_products_of_predicted_chips_are_unknown(run):
    opened, program = run
    compare_program(opened, program)
    p = Prediction(Products(0, 0, 0, 1), Products(1, 0, 0, 0), moved=("mine.py:3 in bfloat16",))
    noted = tuple(msgspec.structs.replace(n, predicted=p) for n in opened.record.neutrality)
    found = recall_program(replace(opened, record=msgspec.structs.replace(opened.record, neutrality=noted)))
    assert [(v.kind, v.status, v.prompt) for v in gate(found).verdicts] == [
        ("neutrality", "unknown", "a"), ("neutrality", "unknown", "b"),
    ]  # fmt: skip
    assert gate(found).exit_code == 3


@pytest.mark.parametrize(
    ("positions", "calls"),
    [
        ("0", {("p", "prefill", 0)}),
        ("2", {("p", "prefill", 0), ("p", "decode", 0), ("p", "rescore", 0)}),
        ("4", {("p", "decode", 2), ("p", "rescore", 0)}),
        ("-1", {("p", "decode", 2), ("p", "rescore", 0)}),
    ],
)
def test_calls_hold_positions_of_the_prompt_and_of_what_is_decoded(positions, calls):
    """Three tokens, and two decoded after them: decode 0 reads the prompt's last."""
    every = [("prefill", 0), ("rescore", 0), *(("decode", i) for i in range(3))]
    assert calls_of_tokens([("p", *call, 3, 2) for call in every], positions) == calls


def test_what_was_not_compared_is_missing_and_a_part_passes(run):
    opened, program = run
    found = precaudit.compare(opened, program, layers="1", points=SCAN)
    assert isinstance(found, precaudit.Comparison)
    said, whole = gate(found).counts, gate(opened).counts
    assert said["pass"] == sum(e.kind != "accum" for e in found)  # and all else is missing
    assert sum(said.values()) == sum(whole.values())
    assert gate(opened).counts["missing"] > 0
    assert gate(opened, layers="1", points=SCAN).exit_code == 0
    assert gate(opened, layers="2", points=SCAN).counts.keys() == {"missing", "pass"}  # forward errors are there


def test_sums_in_another_format_are_computed_where_they_are_asked_for(run, recomputed):
    opened, program = run
    compare_program(opened, program, accum=("float16",))
    recomputed.clear()
    look = look_at(opened, layers="1", points=SCAN, prompt="a")
    compare_program(opened, program, holds=look.holds)
    assert not recomputed
    found = compare_program(opened, program, accum=("float16", "float32"), holds=look.holds)
    assert {(p.prompt, p.layer) for p in recomputed} == {("a", 1)}
    sums = {(e.prompt, e.layer) for e in found if e.kind == "accum" and "float32" in e.candidate}
    assert sums == {("a", 1)}
    assert marks_of(opened).accum == ("float16",)


@pytest.mark.parametrize("change", ["code", "errors"])
def test_records_of_other_code_or_altered_ones_are_not_kept(run, recomputed, change):
    opened, program = run
    whole = compare_program(opened, program)
    marks = opened.folder / "compared.json"
    marks.write_bytes(msgspec.json.encode(msgspec.structs.replace(marks_of(opened), **{change: "other"})))
    recomputed.clear()
    found = compare_program(opened, program, holds=look_at(opened, layers="1", points=SCAN).holds)
    assert {p.layer for p in recomputed} == {1}
    assert {e.layer for e in found if e.kind == "local"} == {1} < {e.layer for e in whole if e.kind == "local"}


def test_another_reference_takes_the_place_of_what_it_was_held_against(run):
    opened, program = run

    def reference(weights, x):
        return {"call~1": np.tanh(np.asarray(x, np.float64) @ np.asarray(weights[0], np.float64))}

    compare_program(opened, program, reference)
    look = look_at(opened, prompt="a")
    found = compare_program(opened, program, holds=look.holds)
    assert not [e for e in found if e.kind == "formula"]
    assert gate(opened, prompt="a").exit_code == 0


def test_a_diagnosis_of_some_layers_compares_these_and_one_of_all_the_rest(run, recomputed):
    opened, program = run
    part = precaudit.diagnose(opened, program, layers="2", points=SCAN)
    assert {p.layer for p in recomputed} == {2}
    recomputed.clear()
    whole = precaudit.diagnose(opened, program)
    assert {p.layer for p in recomputed} == {0, 1, 2, None}
    assert part.exit_code == whole.exit_code == 0
    assert part.explained < whole.explained
