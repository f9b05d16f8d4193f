"""A program's trace that was cut off goes on: the same bits as a whole one, and only what is the same."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import precaudit
from precaudit import Entry, Program
from precaudit.cli import run as command
from precaudit.errors import UserError
from precaudit.recording.programs import tracing
from precaudit.recording.programs.planning import ProgramSelection
from precaudit.recording.programs.resuming import cut_off
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.runs.programs import open_program_run

DRAW = np.random.default_rng(2)
W = jnp.asarray(DRAW.standard_normal((4, 4)), jnp.bfloat16)


def program(first=lambda w, x: (x @ w,), **changes):
    cases = {n: (jnp.asarray(DRAW.standard_normal((2, 4)) * 0 + i, jnp.bfloat16),) for i, n in enumerate("abc")}
    then = {"decode": Entry(lambda w, x: (x @ w,), lambda _inputs, out: out, 1, lambda _inputs, out: out, ("y",))}
    return replace(Program(first, W, cases, outputs=("y",), entry="prefill", then=then), **changes)


def cut_in(case, folder):
    """Trace the program until decode of a case, where it is cut off."""

    def stop(_done, _total, what):
        if what.startswith(f"{case}, decode"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trace_program(program(), folder, tell=stop)
    return folder


@pytest.fixture
def cut(tmp_path):
    """A run that was cut off in its second case."""
    return cut_in("b", tmp_path / "run")


def test_it_goes_on_with_the_cases_that_it_lacks(cut, tmp_path):
    assert cut_off(cut) == (1, 3)
    with pytest.raises(UserError, match="cut off"):
        open_program_run(cut)
    told = []
    opened = trace_program(program(), cut, options=ProgramTraceOptions(resume=True), tell=lambda *x: told.append(x[2]))
    assert {what[0] for what in told} == {"b", "c"}
    whole = trace_program(program(), tmp_path / "whole")
    assert opened.record.hashes == whole.record.hashes
    assert opened.record.bytes == whole.record.bytes
    assert [n.case for n in opened.record.neutrality] == ["a", "b", "c"]
    assert [n.case for n in opened.entries[1].record.neutrality] == ["a", "b", "c"]
    assert cut_off(cut) is None


def test_what_was_altered_is_run_again(cut, tmp_path):
    (cut / "tensors" / "0.1.taps.safetensors").write_bytes(b"other")
    told = []
    opened = trace_program(program(), cut, options=ProgramTraceOptions(resume=True), tell=lambda *x: told.append(x[2]))
    assert {what[0] for what in told} == {"a", "b", "c"}
    assert opened.record.hashes == trace_program(program(), tmp_path / "whole").record.hashes


@pytest.mark.parametrize(
    ("other", "how", "says"),
    [
        ({"call": lambda w, x: (2 * x @ w,)}, {}, "the program's operations"),
        ({"params": 2 * W}, {}, "the parameters"),
        ({"policy": "bf16"}, {}, "the policy"),
        ({}, {"select": ProgramSelection(taps="automatic")}, "--taps"),
        ({}, {"select": ProgramSelection(phases=["prefill"])}, "the entry points"),
        ({}, {"options": ProgramTraceOptions(strict=True, resume=True)}, "--strict"),
    ],
)
def test_what_asks_for_another_run_is_refused(other, how, says, cut):
    with pytest.raises(UserError, match=f"cannot go on, since it differs in .*{says}"):
        trace_program(replace(program(), **other), cut, **{"options": ProgramTraceOptions(resume=True), **how})
    assert cut_off(cut) == (1, 3)


def test_what_is_whole_of_it_is_opened_and_the_rest_is_missing(cut, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="cut off before it finished; open what is there with --partial, or trace it"):
        precaudit.compare(cut, program())
    found = precaudit.compare(cut, program(), partial=True)
    assert {e.prompt for e in found} == {"a"}
    judged = precaudit.gate(cut)
    assert {(v.prompt, v.status, v.text) for v in judged.verdicts if v.status != "pass"} == {
        (case, "missing", "the run was cut off before it was recorded") for case in "bc"
    }
    assert judged.exit_code == 3
    assert precaudit.gate(cut, prompt="a").exit_code == 0
    assert precaudit.diagnose(cut, program(), partial=True).exit_code == 3
    opened = trace_program(program(), cut, options=ProgramTraceOptions(resume=True))
    with pytest.raises(UserError, match="is not what compare wrote of this run"):
        precaudit.gate(opened)


def test_a_program_whose_trace_is_interrupted_is_compared_without_its_name(tmp_path, monkeypatch, capfd):
    """The command ran its code, and said to open what is there."""
    (tmp_path / "mine.py").write_text(
        "import jax.numpy as jnp, precaudit\n"
        "program = precaudit.Program(jnp.sin, {}, {n: (jnp.ones(3),) for n in 'ab'}, outputs='y')\n".replace(
            "jnp.sin, {}", "lambda _, x: jnp.sin(x), {}"
        )
    )
    monkeypatch.chdir(tmp_path)

    def stopped(_run, _writer, _each, case, *more, real=tracing._case):
        if case == "b":
            raise KeyboardInterrupt
        return real(_run, _writer, _each, case, *more)

    with monkeypatch.context() as patch:
        patch.setattr(tracing, "_case", stopped)
        assert command(["trace", "mine.py:program", "-o", "run"]) == 130
    assert "run holds 1 of 2 cases" in capfd.readouterr().err
    assert command(["gate", "run"]) == 2
    assert capfd.readouterr().err == "precaudit: run was not compared yet: precaudit compare run --partial\n"
    assert command(["compare", "run", "--partial"]) == 0
    assert "1 missing: prompt b: the run was cut off before it was recorded" in capfd.readouterr().out


def test_without_a_whole_case_there_is_nothing_to_open(tmp_path):
    folder = cut_in("a", tmp_path / "run")
    with pytest.raises(UserError, match="cut off before it finished; trace it with --resume"):
        open_program_run(folder, partial=True)


def test_where_no_run_is_there_is_none_to_go_on_with(tmp_path):
    with pytest.raises(UserError, match="no run here to go on with"):
        precaudit.trace(program(), tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()
