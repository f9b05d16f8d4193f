"""Programs with several entry points: state handed on, in the run and in FP64, filters, faults, mistakes of users."""

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import precaudit
from precaudit import Entry, Program
from precaudit.errors import UserError
from precaudit.judging.gate import gate, judge_found
from precaudit.judging.looks import look_at, selected
from precaudit.judging.programs import missing_program_records
from precaudit.recording.programs.loading import load_program
from precaudit.recording.programs.planning import ProgramSelection, points
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.compared_programs import recall_program
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import write_manifest
from precaudit.recording.runs.programs import open_program_run
from precaudit.references.comparison.programs import compare_program
from precaudit.references.names_map import Names
from precaudit.schema.records.base import value
from tests.helpers.paths import EXAMPLES

DRAW = np.random.default_rng(5)
W = jnp.asarray(DRAW.standard_normal((8, 8)) / 3, jnp.bfloat16)
CASES = {name: (jnp.asarray(DRAW.standard_normal((4, 8)), jnp.bfloat16),) for name in ("a", "b")}


def first(w, x):
    h = x @ w
    return h, h[-1]


def then(w, state):
    s = state @ w
    return (s,)


def program(call=then, **changes):
    entry = Entry(call, lambda _inputs, out: (out[1],), 2, lambda _inputs, out: out, outputs=("s",))
    return Program(first, W, CASES, outputs=("h", "last"), entry="prefill", then={"decode": replace(entry, **changes)})


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    made = program()
    opened = trace_program(made, tmp_path_factory.mktemp("runs") / "run")
    return opened, compare_program(opened, made)


def test_each_entry_point_is_a_run_of_its_own(compared):
    opened, _ = compared
    assert "calls: 1, then 3 of decode" in repr(program())
    prefill, decode = opened.entries
    assert (prefill.record.phase, prefill.record.calls) == ("prefill call", 1)
    assert (decode.record.phase, decode.record.calls) == ("decode call", 3)
    for case in CASES:
        last = prefill.tensors(case, 0, "outputs")["outputs.last"]
        assert (decode.tensors(case, 0, "inputs")["0"] == last).all()  # what prefill left
        assert (decode.tensors(case, 1, "inputs")["0"] == decode.tensors(case, 0, "outputs")["outputs.s"]).all()


def test_fp64_goes_on_from_one_to_the_next(compared):
    opened, errors = compared
    w = np.asarray(W, np.float64)
    for case, (x,) in CASES.items():
        state = np.asarray(x).astype(np.float64)[-1] @ w
        for step in range(3):
            state = state @ w
            (e,) = (
                e for e in errors
                if (e.prompt, e.phase, e.step, e.point, e.kind) == (case, "decode call", step, "outputs.s", "forward")
            )  # fmt: skip
            stored = opened.entries[1].tensors(case, step, "outputs")["outputs.s"].astype(np.float64)
            expected = np.linalg.norm(stored - state) / np.linalg.norm(state)
            assert value(e.rel_l2) == pytest.approx(expected, rel=1e-9)


def test_an_honest_one_passes_and_a_fault_is_told_in_its_entry_point(compared, tmp_path):
    found = gate(compared[0].folder)
    assert found.exit_code == 0
    assert {phase for _, phase in ((e.point, e.phase) for e in compared[1])} == {"prefill call", "decode call"}
    opened = compared[0]
    name = "tensors/0.2.taps.safetensors"  # the second call of decode
    folder = tmp_path / "run"
    shutil.copytree(opened.folder, folder)
    held = load_file(folder / name)
    held["s"] = (held["s"].astype(np.float32) * 1.1).astype(held["s"].dtype)
    save_file(held, folder / name)
    record = msgspec.structs.replace(opened.record, hashes={**opened.record.hashes, name: file_hash(folder / name)})
    write_manifest(folder, record)
    compare_program(folder, program())
    bad = [v for v in gate(folder).verdicts if v.status == "fail" and v.kind == "local"]
    assert {(v.phase, v.step, v.point) for v in bad} == {("decode call", 1, "s")}


def test_a_missing_record_of_a_later_entry_point_is_told(compared):
    opened, errors = compared
    keys = {(e.kind, e.prompt, e.phase, e.step, e.layer, e.point) for e in errors}
    assert not list(missing_program_records(opened, keys))
    gone = ("local", "a", "decode call", 2, None, "s")
    (lacks,) = missing_program_records(opened, keys - {gone})
    assert (lacks.status, lacks.phase, lacks.step, lacks.point) == ("missing", "decode call", 2, "s")


def test_some_phases_are_recorded(tmp_path):
    made = program()
    opened = trace_program(made, tmp_path / "run", ProgramSelection(phases=["decode"]))
    assert [one.record.entry for one in opened.entries] == ["decode"]
    assert "prefill was run and not recorded" in opened.record.warnings
    assert compare_program(opened, made)
    assert gate(opened.folder).exit_code == 0
    last = trace_program(made, tmp_path / "last", ProgramSelection(phases=["decode"], positions="last:1"))
    assert (last.record.calls, last.record.began) == (1, 2)
    assert gate(compare_program(last, made).run).exit_code == 0


def test_points_of_one_entry_point_leave_the_other_out(tmp_path):
    opened = trace_program(program(), tmp_path / "run", ProgramSelection(points=["h"]))
    assert [one.record.entry for one in opened.entries] == ["prefill"]
    assert {p.name for p in points(program(), entry="decode")} == {"s"}


def test_it_repeats_bit_for_bit(compared, tmp_path):
    again = precaudit.repeat(compared[0], tmp_path / "again", program())
    assert again.first is None
    assert again.tensors == len(CASES) * ((1 + 2) + 3 * (1 + 1))  # taps and outputs of prefill, and of decode's calls
    assert "bit" in repr(again)


def test_begin_may_read_values(tmp_path):
    def pick(_inputs, out):
        return (np.asarray(out[0])[int(np.argmax(np.asarray(out[0])[:, 0]))],)

    made = program(begin=pick)
    opened = trace_program(made, tmp_path / "run")
    assert compare_program(opened, made)
    assert gate(opened.folder).exit_code == 0


@pytest.mark.turn  # 4 s
def test_while_loops_in_a_later_entry_point(tmp_path):
    def looped(w, state):
        def more(held):
            return held[0] < 3

        def body(held):
            s = held[1] @ w
            return held[0] + 1, s

        return (jax.lax.while_loop(more, body, (0, state))[1],)

    made = program(looped)
    opened = trace_program(made, tmp_path / "run")
    assert [loop.iterations for loop in opened.entries[1].record.loops] == [3]
    compare_program(opened, made)
    assert gate(opened.folder).exit_code == 0


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (
            lambda folder: trace_program(program(begin=lambda _i, out: out[1]), folder),
            "begin of decode must return a tuple",
        ),
        (
            lambda folder: trace_program(program(begin=lambda _i, out: out["x"]), folder),
            "begin of decode raised TypeError",
        ),
        (
            lambda folder: trace_program(program(), folder, ProgramSelection(phases=["decod"])),
            "entry point of the program is named 'decod'",
        ),
        (
            lambda folder: trace_program(program(), folder, ProgramSelection(positions="0")),
            "--phases prefill or decode",
        ),
        (
            lambda folder: trace_program(program(), folder, ProgramSelection(points=["nope"])),
            "no point of the program is named 'nope'",
        ),
        (lambda _: Program(first, W, CASES, then={"a b": Entry(then, lambda _i, out: out)}), "'a b' is no name"),
        (lambda _: Program(first, W, CASES, then={"decode": then}), "then holds entry points"),
        (lambda _: program(advance=None), "steps need advance"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(mistake, says, tmp_path):
    with pytest.raises(UserError, match=says):
        mistake(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_whose_program_lost_an_entry_point_is_refused(compared):
    with pytest.raises(UserError, match="no entry point 'decode' any more"):
        compare_program(compared[0], replace(program(), then={}))


def test_an_altered_list_of_entry_points_is_refused(compared, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(compared[0].folder, folder)
    path = folder / "run.json"
    path.write_text(path.read_text().replace('"entry": "decode"', '"entry": "prefill"'))
    with pytest.raises(UserError, match="two cases, entry points or points have one name"):
        open_program_run(folder)


@pytest.mark.slow  # 14 s
def test_a_names_map_may_say_what_is_otherwise_in_an_entry_point(tmp_path):
    """The served example is the textbook's in all its entry points; a map that names an unknown one is refused."""
    served = load_program(str(EXAMPLES / "served_decoder.py") + ":program").some(["a"])
    opened = trace_program(served, tmp_path / "run")
    names = Names(EXAMPLES / "served_decoder.toml", EXAMPLES / "own_decoder.json")
    found = [e for e in compare_program(opened, served, names) if e.kind == "formula"]
    assert {e.phase for e in found} == {"prefill call", "decode call", "rescore call"}
    assert max(value(e.rel_l2) for e in found if e.rel_l2 is not None) < 1e-9
    assert {e.phase for e in found if e.point == "down"} == {"decode call"}
    other = tmp_path / "other.toml"
    other.write_text(names.map.read_text().replace("entries.decode.", "entries.decod."))
    with pytest.raises(UserError, match=r"entries.decod: no entry point of the program; did you mean"):
        compare_program(opened, served, Names(other, names.config))


def test_a_look_may_be_at_one_entry_point(compared):
    opened, errors = compared
    kept = look_at(opened, phases="decode").of(errors)
    assert {e.phase for e in kept} == {"decode call"}
    assert len(kept) == sum(e.phase == "decode call" for e in errors)
    judged = judge_found(selected(recall_program(opened), look_at(opened, phases="prefill")))
    assert judged.counts == {"pass": sum(e.phase == "prefill call" for e in errors)}
    with pytest.raises(UserError, match="no entry point 'decod'; did you mean 'decode'"):
        look_at(opened, phases="decod")
