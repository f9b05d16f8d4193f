"""A program's run of some points, layers and cases: what it holds is judged as in the whole run."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import precaudit
from precaudit import Program
from precaudit.cli import run as command
from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.tag import TapChoice
from precaudit.recording.programs.loading import load_program
from precaudit.recording.programs.preparing import prepare_program, support_of
from precaudit.recording.runs.programs import open_program_run
from tests.helpers.paths import EXAMPLES
from tests.helpers.selected import few

OWN = f"{EXAMPLES / 'own_decoder.py'}:program"


def numbers(errors):
    """Records by place, without the run's own name."""
    return {(e.kind, e.prompt, e.step, e.layer, e.point): msgspec.structs.replace(e, candidate="") for e in errors}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    program = replace(load_program(OWN), steps=2)
    folder = tmp_path_factory.mktemp("whole")
    return program, precaudit.compare(precaudit.trace(program, folder / "run"), program)


@pytest.mark.turn  # 19 s
@pytest.mark.parametrize("asked", few(["scores", "query~1,mixed", "gate,logits", "keys"], "scores"))
def test_some_points_are_judged_as_in_the_whole_run(whole, tmp_path, asked):
    """Local and forward errors of some points are those of the run of all, to the last bit."""
    program, every = whole
    run = precaudit.trace(program, tmp_path / "run", points=asked)
    names = {p.name for p in run.record.judged_points}
    assert names == set(asked.split(","))
    assert {p.name for p in run.record.points} < {p.name for p in every.run.record.points}
    found = numbers(precaudit.compare(run, program))
    outputs = {f"outputs.{name}" for name in names}
    expected = {at: e for at, e in numbers(every).items() if at[4] in names | outputs}
    assert found == expected
    assert precaudit.gate(run.folder).exit_code == 0


@pytest.mark.slow  # 9 s
def test_the_last_calls_are_judged_as_in_the_whole_run(whole, tmp_path):
    """Each operation of calls 1 and 2 as there; errors of the whole begin where the run does, with its caches."""
    program, every = whole
    run = precaudit.trace(program, tmp_path / "run", positions="last:2", prompt="a")
    assert (run.record.began, run.record.calls) == (1, 2)
    assert run.record.warnings[0] == "call 0 was run and not recorded: call 0 here is the program's call 1"
    found = numbers(precaudit.compare(run, program))
    known = {at: e for at, e in numbers(every).items() if at[1] == "a" and at[2] > 0}
    assert {(at[0], at[1], at[2] + 1, *at[3:]) for at in found} == known.keys()
    for (kind, case, call, *at), e in found.items():
        assert kind == "forward" or msgspec.structs.replace(e, step=call + 1) == known[kind, case, call + 1, *at]
    assert precaudit.gate(run.folder).exit_code == 0
    assert not precaudit.diagnose(run, program=program).findings


@pytest.mark.parametrize(
    ("positions", "says"),
    [("0,-1", "one after another, such as last:4"), ("9:", "name none of the program's 3 calls"), ("x", "is not a")],
)
def test_calls_that_cannot_be_recorded_are_told(whole, tmp_path, positions, says):
    program, _ = whole
    with pytest.raises(UserError, match=says):
        precaudit.trace(program, tmp_path / "run", positions=positions)
    assert not (tmp_path / "run").exists()


@pytest.mark.turn  # 4 s
def test_diagnose_compares_a_program_s_run_first(tmp_path):
    run = precaudit.trace(replace(load_program(OWN), steps=0), tmp_path / "run", points="query", prompt="a")
    found = precaudit.diagnose(run, program=replace(load_program(OWN), steps=0))
    assert found.exit_code == 0
    assert precaudit.gate(run.folder).counts == {"pass": found.explained}


@pytest.mark.turn  # 8 s
def test_layers_points_and_cases_go_together(whole, tmp_path):
    program, every = whole
    run = precaudit.trace(program, tmp_path / "run", points=["query"], layers="1", prompt="b")
    found = numbers(precaudit.compare(run, program))
    assert {(at[1], at[3], at[4]) for at in found} == {("b", 1, "query")}
    local = {at: e for at, e in numbers(every).items() if at in found and at[0] == "local"}
    assert {at: e for at, e in found.items() if at[0] == "local"} == local
    assert not precaudit.diagnose(run, program=program).findings


@pytest.mark.turn  # 10 s
def test_a_fault_fails_at_the_point_that_was_asked_for(tmp_path):
    """At any other point that was, too, nothing is said of it but what it makes of the whole program."""
    program = replace(load_program(OWN), steps=0)
    run = precaudit.trace(program, tmp_path / "run", points="gate,scores")
    taps = run.tensors("a", 0, "taps")
    path = run.folder / "tensors" / "0.0.taps.safetensors"
    from safetensors.numpy import save_file

    from precaudit.recording.runs.hashes import file_hash
    from precaudit.recording.runs.kinds import write_manifest

    changed = {n: x * 1.02 if n == "gate" else x for n, x in taps.items()}
    save_file({n: x.astype(taps[n].dtype) for n, x in changed.items()}, path)
    hashes = run.record.hashes | {"tensors/0.0.taps.safetensors": file_hash(path)}
    write_manifest(run.folder, msgspec.structs.replace(run.record, hashes=hashes))
    errors = precaudit.compare(open_program_run(run.folder), program)
    judged = precaudit.gate(run.folder)
    assert {(v.point, v.prompt) for v in judged.verdicts if v.kind == "local" and v.status == "fail"} == {("gate", "a")}
    assert errors


def test_support_is_what_a_point_reads_and_what_narrow_values_are_made_of():
    def call(w, x):
        a = checkpoint_name(x @ w, "a")
        b = checkpoint_name(jnp.tanh(a) @ w, "b")
        c = checkpoint_name((b * 2) @ w, "c")
        return c + a

    for dtype, expected in ((jnp.bfloat16, {"a", "b"}), (jnp.float32, {"b"})):
        program = Program(call, jnp.ones((4, 4), dtype), {"x": (jnp.ones((2, 4), dtype),)})
        assert support_of(program, prepare_program(program, TapChoice("own")), ["c"]) == expected


def test_own_taps_that_were_not_asked_for_are_left_out(tmp_path):
    def call(w, x):
        a = checkpoint_name(x @ w, "a")
        b = checkpoint_name(jnp.tanh(a) @ w, "b")
        return checkpoint_name(b @ w, "c")

    program = Program(call, jnp.ones((4, 4)) / 5, {"x": (jnp.ones((2, 4)),)})
    run = precaudit.trace(program, tmp_path / "run", points="b", taps="own")
    assert {p.name: p.support for p in run.record.points} == {"a": True, "b": False}
    assert {e.point for e in precaudit.compare(run, program)} == {"b"}


@pytest.mark.slow  # 20 s
def test_what_a_step_of_a_scan_begins_with_is_recorded_with_its_points(whole, tmp_path):
    """The first operation of a layer reads what the layer before left: bit for bit as where all points are recorded."""
    program = replace(whole[0], steps=0)
    found = [
        numbers(precaudit.compare(precaudit.trace(program, tmp_path / name, layers="1", points=asked), program))
        for name, asked in (("some", "normed"), ("all", None))
    ]
    some, every = ({at: e for at, e in x.items() if at[0] == "local" and at[4] == "normed"} for x in found)
    assert some
    assert some == every


def test_a_loop_without_points_that_were_asked_for_is_run_as_it_is(tmp_path):
    """Loops that hold none are not bounded; what is made after them is judged."""

    def call(w, x):
        _, y = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))
        return y @ w

    program = Program(call, jax.random.normal(jax.random.key(0), (8, 8)) / 3, {"x": (jnp.ones((2, 8)),)}, outputs="y")
    names = [p.name for p in precaudit.trace(program, tmp_path / "all").record.points]
    run = precaudit.trace(program, tmp_path / "run", points=[names[-1]])
    assert precaudit.gate(precaudit.compare(run, program)).exit_code == 0


def test_what_is_asked_for_wrongly_is_told(tmp_path, capsys):
    program = load_program(OWN)
    with pytest.raises(UserError, match="no point of the program is named 'scors'; did you mean 'scores'"):
        precaudit.trace(program, tmp_path / "run", points="scors")
    with pytest.raises(UserError, match="no case of the program is named 'c'"):
        precaudit.trace(program, tmp_path / "run", prompt="c")
    assert command(["trace", OWN, "--points", " ", "-o", str(tmp_path / "run")]) == 2
    assert "no point is named" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow  # 15 s
def test_the_report_shows_what_was_asked_for(tmp_path, capsys):
    assert command(["trace", OWN, "--points", "query,key", "--layers", "1", "-o", str(tmp_path / "run")]) == 0
    assert "2 automatic points" in capsys.readouterr().out
    assert command(["compare", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "query" in text
    assert "normed" not in text
    assert command(["diagnose", str(tmp_path / "run")]) == 0
