"""Comparing some layers, points and cases of a program's run: these alone are computed, and join what is there."""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

import precaudit
from precaudit.judging.gate import gate
from precaudit.judging.looks import look_at
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.compared_programs import marks_of
from precaudit.references.comparison.programs import compare_program
from precaudit.references.traced.local import Emulations
from precaudit.schema.places import Place

LAYERS = 3
SCAN = "value,value.in"  # the points of a layer


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
        return {"call": np.tanh(np.asarray(x, np.float64) @ np.asarray(weights[0], np.float64))}

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
