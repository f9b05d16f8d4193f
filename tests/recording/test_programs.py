"""Programs of others, unedited: recorded, compared with their own segments, gated; faults flagged where they are."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

import precaudit
from precaudit import Program, gate
from precaudit.cli import run as command
from precaudit.diagnosis.programs import diagnose_program
from precaudit.errors import UserError
from precaudit.judging.rules import judge
from precaudit.recording.programs.disturbance import outputs_apart
from precaudit.recording.programs.loading import is_reference, load_program
from precaudit.recording.programs.planning import points
from precaudit.recording.programs.preparing import prepare_program
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import write_manifest
from precaudit.recording.runs.programs import OWN_SUMS, file_name, open_program_run
from precaudit.references.comparison.between import compare_runs
from precaudit.references.comparison.programs import compare_program
from precaudit.references.traced.forward import Chains
from precaudit.reports.pages import as_markdown
from precaudit.reports.program import program_report
from precaudit.reports.terminal import print_report
from precaudit.schema.limits import default_limits
from precaudit.schema.records.lines import write_lines
from tests.helpers.paths import EXAMPLES
from tests.helpers.runs import altered
from tests.helpers.selected import few

OWN = f"{EXAMPLES / 'own_decoder.py'}:program"


@pytest.fixture(scope="module")
def own():
    return load_program(OWN)


@pytest.fixture(scope="module")
def recorded(own, tmp_path_factory):
    """The decoder's run, three calls of each case, compared."""
    program = replace(own, steps=2)
    opened = trace_program(program, tmp_path_factory.mktemp("own") / "run")
    return program, opened, compare_program(opened, program)


@pytest.mark.turn  # 23 s
def test_an_honest_program_passes_with_every_bfloat16_segment_bit_for_bit(recorded):
    _, opened, errors = recorded
    judged = gate(opened.folder)
    assert judged.exit_code == 0
    assert judged.counts == {"pass": len(errors)}
    segments = 2 * 3 * (16 * 3 + 2)
    assert Counter(e.kind for e in errors) == {"local": segments, "forward": segments + 2 * 3}
    narrow = [e for e in errors if e.dtype == "bfloat16" and e.kind == "local"]
    assert len(narrow) > 250
    assert {e.unexplained.rel_l2 for e in narrow} == {0.0}


@pytest.mark.turn  # 23 s
def test_what_reads_a_value_before_it_is_rounded_is_told(recorded):
    """XLA hands the last norm's product on unrounded to the output matrix; the recorded norm is rounded."""
    _, _, errors = recorded
    logits = [e for e in errors if e.point == "logits" and e.kind == "local"]
    assert all(float(e.rel_l2) > 2.0**-11 for e in logits)
    assert all("inputs" in e.elided["policy:equations"] for e in logits)


def test_decode_feeds_each_call_what_advance_made(recorded):
    program, opened, _ = recorded
    for call in range(2):
        taps, inputs = opened.tensors("a", call, "taps"), opened.tensors("a", call + 1, "inputs")
        assert inputs["0"] == np.argmax(taps["logits"])
        assert inputs["1"] == call + 1
        assert np.array_equal(inputs["2"], taps["keys"])
    assert np.array_equal(opened.tensors("a", 0, "inputs")["0"], program.cases["a"][0])


def faulty(own, name, function, monkeypatch):
    """Return the decoder with one of its functions exchanged, traced anew."""
    module = sys.modules["precaudit_program_own_decoder"]
    monkeypatch.setattr(module, name, function)
    return replace(own, call=lambda *a: module.step(*a), steps=1, cases={"a": own.cases["a"]})


def narrow_norm(x, weight):
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True, dtype=x.dtype) + jnp.asarray(1e-5, x.dtype))
    return x * scale * weight


def head_zeroed(x):
    x[:, 1] = 0
    return x


def row_stale(x):
    x[1, 0] = 0
    return x


FAULTS = {
    "scale 1.02": ("query", lambda x: (x.astype(np.float32) * 1.02).astype(x.dtype)),
    "one head zero": ("attended", head_zeroed),
    "a stale row of the cache": ("keys", row_stale),
    "NaN": ("act", lambda x: x * np.array(np.nan, x.dtype)),
}


@pytest.mark.parametrize("name", few(FAULTS, "scale 1.02"))  # 10 to 15 s each
def test_a_fault_fails_at_its_segment(name, recorded, tmp_path):
    program, opened, _ = recorded
    point, change = FAULTS[name]
    bad = altered(opened, tmp_path / "bad", point, change)
    compare_program(bad, program)
    judged = gate(bad.folder)
    assert judged.exit_code == 1
    assert point in {v.point for v in judged.verdicts if v.status in ("fail", "nonfinite")}


@pytest.mark.slow  # 10 s
def test_precision_lost_inside_a_segment_is_found_against_the_program_without(own, tmp_path, monkeypatch):
    """Statistics of the norm in bfloat16: its run, judged by the program as it should be."""
    program = replace(own, steps=1, cases={"a": own.cases["a"]})
    bad = faulty(own, "norm", narrow_norm, monkeypatch)
    opened = trace_program(bad, tmp_path / "bad")
    monkeypatch.undo()
    good = trace_program(program, tmp_path / "good")
    record = msgspec.structs.replace(opened.record, code=good.record.code, points=good.record.points)
    (opened.folder / "run.json").write_bytes(msgspec.json.encode(record))
    compare_program(open_program_run(opened.folder), program)
    failed = {v.point for v in gate(opened.folder).verdicts if v.status == "fail"}
    assert {"normed", "second", "final"} & failed


def test_the_commands_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PRECAUDIT_CACHE", str(tmp_path / "cache"))
    where = f"{EXAMPLES / 'training_step.py'}:program"
    assert command(["points", where]) == 0
    assert "dot_general" in capsys.readouterr().out
    assert command(["trace", where, "-o", str(tmp_path / "step")]) == 0
    assert "step: 18 automatic points, 1 case of 1 call, 62.2 kB. Next: precaudit compare" in capsys.readouterr().out
    assert command(["trace", where, "-o", str(tmp_path / "step")]) == 2
    assert "holds a program's run already" in capsys.readouterr().err
    assert command(["compare", str(tmp_path / "step")]) == 0
    assert "18 operations recomputed" in " ".join(capsys.readouterr().out.split())
    assert command(["gate", str(tmp_path / "step")]) == 0
    assert "verdicts: 36 pass" in capsys.readouterr().out


def test_a_run_of_someone_elses_runs_no_code(recorded, tmp_path, monkeypatch):
    _, opened, _ = recorded
    monkeypatch.setenv("PRECAUDIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "evil.py").write_text("raise SystemExit('this code ran')\n")
    shutil.copytree(opened.folder, tmp_path / "run")
    record = msgspec.structs.replace(opened.record, program=f"{tmp_path / 'evil.py'}:program")
    (tmp_path / "run" / "run.json").write_bytes(msgspec.json.encode(record))
    with pytest.raises(UserError, match="was not traced here as it stands"):
        compare_program(open_program_run(tmp_path / "run"))


def test_another_program_than_the_one_traced_is_refused(own, recorded):
    _, opened, _ = recorded
    other = replace(own, call=lambda p, *a: jax.tree.map(lambda x: x * 2, own.call(p, *a)), steps=2)
    with pytest.raises(UserError, match="is not the one that was traced"):
        compare_program(opened, other)


def test_other_parameters_than_those_traced_are_refused(own, recorded):
    _, opened, _ = recorded
    params = {**own.params, "norm": own.params["norm"] * jnp.asarray(1.02, jnp.bfloat16)}
    with pytest.raises(UserError, match="the parameters are not those that were traced"):
        compare_program(opened, replace(own, params=params, steps=2))


def compared(call, params, folder, *inputs):
    program = Program(call, params, {"a": inputs})
    return compare_program(trace_program(program, folder), program)


def test_a_result_that_a_call_or_a_loop_makes_is_a_point(tmp_path):
    """What no product follows is seen as well: softmax is a call, the sum is carried by a scan or a while."""
    w, x = jnp.eye(4, dtype=jnp.bfloat16) * 3, jnp.linspace(-1, 2, 20, dtype=jnp.bfloat16).reshape(5, 4)

    def call(w, x):
        probs = jax.nn.softmax(x @ w)
        total, _ = jax.lax.scan(lambda c, row: (c + row, None), x[0], x)
        halved = jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] / 2), (0, x))[1]
        return probs, total, halved

    errors = compared(call, w, tmp_path / "run", x)
    assert {"probs", "total", "halved"} <= {e.point.partition("~")[0] for e in errors}
    assert all(e.unexplained is not None for e in errors if e.kind == "local")


# Forward errors


def running(params, total, count):
    """A state that calls go on with, and an integer that the outputs decide."""
    total = total + params["w"] @ jnp.sin(total)
    return total, jnp.argmax(total).astype(jnp.int32) + count


def passed_on(_inputs, outputs):
    return outputs


def drawn_start():
    draw = np.random.default_rng(3)
    w = jnp.asarray(draw.standard_normal((6, 6)), jnp.bfloat16)
    return {"w": w}, {"a": (jnp.asarray(draw.standard_normal(6), jnp.bfloat16), jnp.int32(0))}


def statuses(errors, kind):
    return {(e.step, v.status) for e in errors if e.kind == kind and (v := judge(e, default_limits()))}


def test_forward_errors_are_of_the_whole_chain_in_fp64(tmp_path):
    """Three calls in plain NumPy FP64: the same state, and so the same errors."""
    params, cases = drawn_start()
    program = Program(running, params, cases, 2, passed_on, ("state", "count"))
    opened = trace_program(program, tmp_path / "run")
    errors = [e for e in compare_program(opened, program) if e.kind == "forward" and e.point == "outputs.state"]
    state, wide = np.asarray(cases["a"][0], np.float64), np.asarray(params["w"], np.float64)
    for call, e in enumerate(errors):
        state = state + wide @ np.sin(state)
        stored = np.asarray(opened.tensors("a", call, "outputs")["outputs.state"], np.float64)
        assert float(e.rel_l2) == pytest.approx(np.linalg.norm(stored - state) / np.linalg.norm(state), rel=1e-9)
        assert 0.1 < float(e.ratio) < 5
    assert len(errors) == 3
    assert gate(opened.folder).exit_code == 0


def test_a_state_that_is_handed_on_wrongly_fails_forward_alone(tmp_path):
    """Each call is right by itself; the next goes on with something else than was made."""

    def stale(_inputs, outputs):
        return outputs if outputs[0].dtype == np.float64 else (outputs[0] * 1.5, outputs[1])

    params, cases = drawn_start()
    program = Program(running, params, cases, 1, stale, ("state", "count"))
    errors = compare_program(trace_program(program, tmp_path / "run"), program)
    assert statuses(errors, "local") == {(0, "pass"), (1, "pass")}
    assert statuses(errors, "forward") == {(0, "pass"), (1, "fail")}


def test_forward_noise_is_of_eight_different_realisations():
    params, cases = drawn_start()
    program = Program(running, params, cases, 0, None, ("state", "count"))
    given = {str(i): np.asarray(x) for i, x in enumerate(cases["a"])}
    with jax.enable_x64(True):
        (truth,) = Chains(program, prepare_program(program)).calls([(given, {})])
    assert len({y["outputs.state"].tobytes() for y in (truth.exact, *truth.drawn)}) == 9


def test_integers_are_those_that_were_recorded(tmp_path):
    """A token that FP64 would choose otherwise is fed as the run chose it: errors are of one sequence."""

    def other(_inputs, outputs):
        return outputs[0], outputs[1] + (7 if outputs[0].dtype == np.float64 else 0)

    def call(params, total, token):
        total = params["w"] @ total + params["w"][token % 6]
        return total, jnp.argmax(total).astype(jnp.int32)

    params, cases = drawn_start()
    program = Program(call, params, cases, 2, other, ("state", "token"))
    errors = compare_program(trace_program(program, tmp_path / "run"), program)
    assert statuses(errors, "forward") == {(0, "pass"), (1, "pass"), (2, "pass")}


def test_an_advance_that_takes_no_fp64_leaves_forward_errors_unknown(tmp_path):
    def strict(_inputs, outputs):
        if outputs[0].dtype != jnp.bfloat16:
            raise TypeError("bfloat16 only\nsecond line")
        return outputs

    params, cases = drawn_start()
    program = Program(running, params, cases, 1, strict)
    errors = compare_program(trace_program(program, tmp_path / "run"), program)
    lost = {(e.kind, e.step, e.unknown) for e in errors if e.unknown is not None}
    assert lost == {("forward", 1, "advance, on FP64 outputs: TypeError: bfloat16 only")}
    assert gate(tmp_path / "run").exit_code == 3


@pytest.mark.parametrize("other", [lambda o: (*o, o[0]), lambda o: (o[0][:2], o[1])], ids=["one more", "shorter"])
def test_an_advance_that_gives_other_inputs_in_fp64_leaves_them_unknown(tmp_path, other):
    def advance(_inputs, outputs):
        return outputs if outputs[0].dtype == jnp.bfloat16 else other(outputs)

    params, cases = drawn_start()
    program = Program(running, params, cases, 1, advance)
    errors = compare_program(trace_program(program, tmp_path / "run"), program)
    lost = [e for e in errors if e.unknown is not None]
    assert {(e.kind, e.step) for e in lost} == {("forward", 1)}
    assert all(e.unknown.startswith("advance, on FP64 outputs: gave shapes") for e in lost)


def test_logits_that_are_nan_match_nothing(tmp_path, capsys):
    w = jnp.eye(4, dtype=jnp.bfloat16).at[1, 2].set(jnp.nan)
    program = Program(lambda w, x: x @ w, w, {"a": (jnp.ones((3, 4), jnp.bfloat16),)}, outputs="logits")
    opened = trace_program(program, tmp_path / "run")
    print_report(program_report(opened, compare_program(opened, program)), Console(width=150))
    told = " ".join(capsys.readouterr().out.split())
    assert "top-1 is FP64's in 0 of 3 rows; 3 have none: logits are NaN or infinite." in told
    assert command(["gate", str(opened.folder)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("✗ ")
    assert "NaN or infinite" in said[0]
    assert said[1] == f"  Next: precaudit diagnose {opened.folder}"


def test_logits_are_compared_as_distributions(recorded):
    _, _, errors = recorded
    first = next(e for e in errors if e.point == "outputs.logits")
    assert first.distribution.top1 == (1.0,)
    assert 0 < float(first.distribution.kl[0]) < 30 * float(first.distribution.kl_noise[0])


def test_a_gradient_that_is_added_up_in_bfloat16_is_told_and_passes(tmp_path, capsys):
    """The transpose of a broadcast sums 512 rows in their own format: many roundings, all of them emulated."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((8, 64, 8)) + 1, jnp.bfloat16)

    def call(bias, x):
        return jax.grad(lambda b: jnp.sum((x * b).astype(jnp.float32)))(bias)

    program = Program(call, jnp.ones(8, jnp.bfloat16), {"a": (x,)})
    opened = trace_program(program, tmp_path / "run")
    errors = compare_program(opened, program)
    made = [e for e in errors if e.kind == "local"][-1]
    assert OWN_SUMS in made.elided["policy:equations"]
    assert float(made.unexplained.rel_l2) == 0.0
    assert float(made.rel_l2) > 2.0**-8  # no single rounding makes that
    assert gate(opened.folder).exit_code == 0
    print_report(program_report(opened, errors), Console(width=120))
    assert "is summed term by term in bfloat16" in " ".join(capsys.readouterr().out.split())


WRAPPED = {
    "tapped_decoder": {"attended", "stream"},
    "linen_decoder": {"normed", "attended", "second", "gate", "up", "down"},
    "equinox_decoder": {"normed", "attended", "act"},
    "nnx_decoder": {"act"},
}


@pytest.mark.turn  # 20 s
@pytest.mark.parametrize("name", few(WRAPPED, "equinox_decoder"))  # 20 to 35 s each
def test_programs_of_other_libraries_pass_unedited(tmp_path, name):
    with jax.numpy_dtype_promotion("standard"):  # as their users have it
        passes_unedited(f"{EXAMPLES / name}.py:program", tmp_path, WRAPPED[name])


def passes_unedited(reference, tmp_path, names):
    program = load_program(reference)
    opened = trace_program(program, tmp_path / "run")
    errors = compare_program(opened, program)
    assert names <= {p.name for p in opened.record.points}
    judged = gate(opened.folder)
    assert judged.exit_code == 0, judged.verdicts
    narrow = [float(e.unexplained.rel_l2) for e in errors if e.kind == "local" and e.dtype == "bfloat16"]
    assert sum(x == 0.0 for x in narrow) > 0.9 * len(narrow)


def test_an_operation_without_fp64_meaning_is_unknown_and_not_passed(tmp_path):
    errors = compared(
        lambda w, x: jax.lax.approx_max_k(x @ w, 2)[0] @ w[:2], jnp.eye(4), tmp_path / "run", jnp.ones((3, 4))
    )
    product, *others = dict.fromkeys(e.point for e in errors)
    made, *_ = others
    assert {(e.kind, e.point) for e in errors if e.unknown is None} == {
        ("local", product), ("forward", product), *(("local", p) for p in others if p != made),
    }  # fmt: skip
    unknown = [e.unknown for e in errors if e.unknown is not None]
    assert all("approx_top_k" in why for why in unknown)
    assert not any("--lift" in why for why in unknown)  # which compare of a program does not take
    assert gate(tmp_path / "run").exit_code == 3


def quantised(x):
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    whole = jnp.round(x / scale)
    return whole.astype(jnp.int8), scale


@jax.jit
def counted(q, w):
    return jax.lax.dot_general(q, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)


def in_eight_bits(p, x):
    def layer(x, p):
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
        q, scale = quantised(normed)
        made = counted(q, p["w"]) + 1
        return x + (made.astype(jnp.float32) * scale * p["s"]).astype(x.dtype), None

    return jax.lax.scan(layer, x, p)[0]


def test_integer_products_have_the_points_of_float_ones(tmp_path):
    """What was quantised, as the integers it is; and what the sums become as floats, through jit and scan."""
    draw = np.random.default_rng(0)
    p = {
        "w": jnp.asarray(draw.integers(-127, 128, (2, 32, 32)), jnp.int8),
        "s": jnp.asarray(draw.uniform(0.001, 0.002, (2, 1, 32)), jnp.float32),
    }
    x = jnp.asarray(draw.standard_normal((4, 32)), jnp.bfloat16)
    program = Program(in_eight_bits, p, {"a": (x,)})
    opened = trace_program(program, tmp_path / "run")
    known = {point.name: point for point in opened.record.points}
    assert {"whole", "counted"} <= set(known)
    taps = opened.tensors("a", 0, "taps")
    assert (taps["whole"] == np.round(taps["whole"])).all()
    assert np.abs(taps["whole"]).max() == 127
    sums = np.einsum("ltk,lkn->ltn", taps["whole"].astype(int), np.asarray(p["w"], int)) + 1
    assert (taps["counted"] == sums).all()
    assert known["counted"].primitive == "dot_general"
    compare_program(opened, program)
    assert gate(opened.folder).exit_code == 0


def test_a_device_too_small_is_said_in_a_line(tmp_path, monkeypatch, capsys):
    def exhausted(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17592186044416 bytes.")

    monkeypatch.setattr("precaudit.recording.programs.tracing.capturing", lambda *_: exhausted)
    assert command(["trace", f"{EXAMPLES / 'own_decoder.py'}:program", "-o", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "precaudit: the device's memory is too small: it was asked for 17,592.2 GB at once; give smaller inputs, or "
        "another device"
    ]
    with pytest.raises(UserError, match="cut off before it finished"):
        open_program_run(tmp_path / "run")
    with pytest.raises(UserError, match="memory is too small"):
        trace_program(load_program(f"{EXAMPLES / 'own_decoder.py'}:program"), tmp_path / "again")


def branching(w, x):
    return jax.lax.cond(x[0, 0] > 0, lambda v: v @ w, lambda v: (v @ w) @ w, x)


def test_a_branch_that_no_case_takes_is_unknown_and_not_passed(tmp_path):
    errors = compared(branching, jnp.eye(4), tmp_path / "run", jnp.ones((3, 4)))
    untaken = [e for e in errors if e.skipped == "its branch was not taken"]
    assert untaken
    assert len(untaken) < len(errors)
    found = gate(tmp_path / "run")
    assert found.exit_code == 3
    assert found.counts["unknown"] == len(untaken)
    assert "in any case: give one that takes it" in found.verdicts[0].text
    assert diagnose_program(open_program_run(tmp_path / "run")).exit_code == 3


def test_a_branch_that_a_case_takes_is_not_run_in_the_others_and_passes(tmp_path):
    program = Program(branching, jnp.eye(4), {"a": (jnp.ones((3, 4)),), "b": (-jnp.ones((3, 4)),)})
    opened = trace_program(program, tmp_path / "run")
    errors = compare_program(opened, program)
    skipped = [e for e in errors if e.skipped]
    assert {e.prompt for e in skipped} == {"a", "b"}
    found = gate(opened.folder)
    assert found.counts == {"not run": len(skipped), "pass": len(errors) - len(skipped)}
    assert found.exit_code == 0
    assert diagnose_program(opened, program).exit_code == 0
    (tmp_path / "b.toml").write_text('[[budget]]\nwhy = "all"\npoints = "*"\nmetric = "rel_l2"\nlimit = 1.0\n')
    assert gate(opened.folder, tmp_path / "b.toml").counts == found.counts
    between = compare_runs(opened.folder, trace_program(program, tmp_path / "again").folder)
    assert sum(e.skipped is not None for e in between.errors) == len([e for e in skipped if e.kind == "local"])
    own = compare_program(opened, program, lambda *_: {p.name: np.zeros((3, 4)) for p in opened.record.points})
    formula = [e for e in own if e.kind == "formula"]
    assert [e.skipped for e in formula] == [e.skipped for e in errors if e.kind == "local"]


def test_the_line_of_a_file_below_a_folder_of_our_name_is_told(tmp_path):
    """A clone's folder has it."""
    (tmp_path / "precaudit").mkdir()
    mine = tmp_path / "precaudit" / "mine.py"
    mine.write_text("import precaudit\n\nprogram = 1 / 0\n")
    with pytest.raises(UserError, match=r"precaudit/mine\.py:3\)?"):
        load_program(f"{mine}:program")


def test_a_file_named_as_a_library_leaves_the_library(tmp_path):
    (tmp_path / "msgspec.py").write_text(
        "import jax.numpy as jnp\nfrom precaudit import Program\n"
        "program = Program(lambda w, x: x @ w, jnp.eye(2), {'a': (jnp.ones((2, 2)),)})\n"
    )
    assert points(load_program(f"{tmp_path / 'msgspec.py'}:program"))
    assert sys.modules["msgspec"] is msgspec
    # nor is it what a process finds that is started later
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import msgspec; print(msgspec.__file__)"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == msgspec.__file__


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import sys\n\nsys.path = sys.path[1:]\nprogram = 1\n", "is no precaudit.Program but int"),
        ("import sys\n\nraise OSError('broken')\n", r"OSError: broken \(.*mine.py:3\)"),
    ],
)
def test_a_file_that_changes_the_path_or_raises_leaves_its_folder_last(tmp_path, monkeypatch, text, says):
    before = [p for p in sys.path if p != str(tmp_path)]
    monkeypatch.setattr(sys, "path", list(before))
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=says):
        load_program(f"{tmp_path / 'mine.py'}:program")
    assert sys.path == [*before, str(tmp_path)]


def test_a_file_finds_its_neighbours_while_it_is_read_and_when_it_is_called(tmp_path):
    """Those named as something that is installed while it is read alone."""
    (tmp_path / "pytest.py").write_text("EYE = 2.0\n")
    (tmp_path / "only_here.py").write_text("import numpy as np\n\nROWS = np.ones((2, 2), np.float32)\n")
    (tmp_path / "mine.py").write_text(
        "import sys\ngiven = sys.modules.pop('pytest')\nimport pytest as beside\nsys.modules['pytest'] = given\n"
        "import jax.numpy as jnp\nfrom precaudit import Program\n\n\ndef call(w, x):\n    import only_here\n"
        "    return x @ w + only_here.ROWS\n\n\n"
        "program = Program(call, beside.EYE * jnp.eye(2), {'a': (jnp.ones((2, 2)),)})\n"
    )
    before = list(sys.path)
    for _ in range(2):
        program = load_program(f"{tmp_path / 'mine.py'}:program")
        assert np.asarray(program.params).tolist() == [[2.0, 0.0], [0.0, 2.0]]
        assert np.asarray(program.call(program.params, *program.cases["a"])).tolist() == [[3.0, 3.0]] * 2
    assert sys.path == [*before, str(tmp_path)]
    sys.path.remove(str(tmp_path))


def test_commands_that_do_not_take_such_a_run_say_so(recorded, capsys):
    _, opened, _ = recorded
    assert command(["trace", "tiny", "--tokens-from", str(opened.folder), "-o", "x"]) == 2
    assert "is of a program of one's own" in capsys.readouterr().err
    assert command(["compare", str(opened.folder), "--phases", "decode"]) == 2
    assert "no entry point 'decode'" in capsys.readouterr().err


@pytest.mark.parametrize("counted_by", ["NumPy", "JAX"])  # as on an accelerator, or where other processes have parts
def test_parameters_that_are_not_finite_are_told(tmp_path, monkeypatch, counted_by):
    monkeypatch.setattr("precaudit.recording.programs.tracing._lies_here", lambda _: counted_by == "NumPy")
    params = {"a": jnp.ones((4, 4)), "b": {"w": jnp.full((4, 4), jnp.nan).at[0].set(1.0)}}
    program = Program(lambda p, x: (x @ p["a"]) @ p["b"]["w"], params, {"a": (jnp.ones((2, 4)),)})
    assert trace_program(program, tmp_path / "run").record.warnings == (
        "parameters: b/w holds 12 that are NaN or infinite",
    )
    honest = replace(program, params={**params, "b": {"w": params["a"]}})
    assert trace_program(honest, tmp_path / "honest").record.warnings == ()
    scalar = replace(program, call=lambda p, x: x * p["s"], params={"s": np.float32("inf")})
    (said,) = trace_program(scalar, tmp_path / "scalar").record.warnings
    assert said == "parameters: s holds 1 that are NaN or infinite"


def test_altered_and_lost_files_are_said(recorded, tmp_path):
    program, opened, _ = recorded
    folder = tmp_path / "run"
    shutil.copytree(opened.folder, folder)
    path = folder / file_name(opened.record, "a", 1, "taps")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="was altered"):
        compare_program(open_program_run(folder), program)
    path.unlink()
    with pytest.raises(UserError, match="is missing"):
        compare_program(open_program_run(folder), program)
    lines = (folder / "errors.jsonl").read_text().splitlines(keepends=True)
    (folder / "errors.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(UserError, match="is not what compare wrote"):
        gate(folder)


def _points(change):
    return lambda record, _folder: msgspec.structs.replace(record, points=tuple(change(list(record.points))))


def _tensors(kind, change):
    """Return what changes a call's arrays, with the hash that the manifest has of them."""

    def alter(record, folder):
        name = file_name(record, "a", 1, kind)
        save_file(change(load_file(folder / name)), folder / name)
        return msgspec.structs.replace(record, hashes={**record.hashes, name: file_hash(folder / name)})

    return alter


def _exchanged(points):
    first = points[0]
    other = next(p for p in points if p.shape != first.shape)
    names = {first.name: other.name, other.name: first.name}
    return [msgspec.structs.replace(p, name=names.get(p.name, p.name)) for p in points]


def _flat(p):
    return msgspec.structs.replace(p, stacked=(), shape=(*p.stacked, *p.shape))


OTHERWISE = {
    "a point is left out": (_points(lambda points: points[1:]), "other points"),
    "two points are exchanged": (_points(_exchanged), "other points"),
    "stacked axes as its own": (_points(lambda points: [_flat(p) for p in points]), "other points"),
    "another format": (_points(lambda p: [msgspec.structs.replace(p[0], dtype="float16"), *p[1:]]), "other points"),
    "no outputs": (lambda record, _: msgspec.structs.replace(record, outputs=()), "other points"),
    "arrays transposed": (
        _tensors("taps", lambda t: t | {"normed": np.ascontiguousarray(t["normed"].T)}), "a, call 1 holds normed, ",
    ),
    "arrays in another format": (
        _tensors("taps", lambda t: t | {"normed": t["normed"].astype(np.float32)}), "a, call 1 holds normed, float32",
    ),
    "an array of no point": (_tensors("taps", lambda t: t | {"x": t["normed"]}), "a, call 1 holds x,"),
    "fewer inputs": (_tensors("inputs", lambda t: {k: t[k] for k in list(t)[1:]}), "other inputs"),
    "inputs in another format": (
        _tensors("inputs", lambda t: {k: x.astype("float32") for k, x in t.items()}), "other inputs",
    ),
    "inputs of another shape": (_tensors("inputs", lambda t: {k: x[None] for k, x in t.items()}), "other inputs"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERWISE)
def test_a_run_that_is_not_what_the_program_records_is_refused(recorded, tmp_path, what):
    """Hashes made again, so that the files are those of the manifest."""
    program, opened, _ = recorded
    change, says = OTHERWISE[what]
    folder = tmp_path / "run"
    shutil.copytree(opened.folder, folder)
    write_manifest(folder, change(opened.record, folder))
    with pytest.raises(UserError, match=says):
        compare_program(open_program_run(folder), program)


@pytest.mark.parametrize(("kind", "point"), [("local", "normed"), ("forward", "normed"), ("forward", "outputs.logits")])
def test_a_missing_record_is_missing(recorded, tmp_path, kind, point):
    _, opened, errors = recorded
    folder = tmp_path / "run"
    shutil.copytree(opened.folder, folder)
    lost = next(e for e in errors if (e.kind, e.point) == (kind, point))
    write_lines(folder / "errors.jsonl", [e for e in errors if e is not lost])
    marks = {"run": file_hash(folder / "run.json"), "errors": file_hash(folder / "errors.jsonl")}
    (folder / "compared.json").write_bytes(msgspec.json.encode(marks))
    judged = gate(folder)
    assert judged.exit_code == 3
    assert judged.counts == {"pass": len(errors) - 1, "missing": 1}
    assert [(v.kind, v.point) for v in judged.verdicts if v.status == "missing"] == [(kind, point)]


def double(p, x):
    return x @ p


BAD = {
    "cases is empty": lambda: Program(double, jnp.eye(2), {}),
    "no function": lambda: Program(3, jnp.eye(2), {"a": (jnp.ones(2),)}),
    "must be a name with a tuple": lambda: Program(double, jnp.eye(2), {"a": jnp.ones(2)}),
    "steps need advance": lambda: Program(double, jnp.eye(2), {"a": (jnp.ones(2),)}, steps=1),
    "outside 0 to": lambda: Program(double, jnp.eye(2), {"a": (jnp.ones(2),)}, steps=10**9),
    "other shapes": lambda: points(Program(double, jnp.eye(2), {"a": (jnp.ones(2),), "b": (jnp.ones((3, 2)),)})),
    "must be a name or several": lambda: Program(double, jnp.eye(2), {"a": (jnp.ones(2),)}, outputs=("a", "a")),
    "outputs names 2 results": lambda: points(Program(double, jnp.eye(2), {"a": (jnp.ones(2),)}, outputs=("a", "b"))),
    "named logits is no array": lambda: points(
        Program(lambda w, x: {"x": w @ x}, jnp.eye(2), {"a": (jnp.ones(2),)}, outputs="logits")
    ),
    "cannot be traced": lambda: points(Program(double, jnp.eye(3), {"a": (jnp.ones(2),)})),
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_program_is_said_in_a_line(message):
    with pytest.raises(UserError, match=message) as caught:
        BAD[message]()
    assert "\n" not in str(caught.value)


def test_advance_that_changes_shapes_is_said(tmp_path):
    program = Program(double, jnp.eye(2), {"a": (jnp.ones(2),)}, 1, lambda *_: (jnp.ones(3),))
    with pytest.raises(UserError, match="advance gave inputs of other shapes"):
        trace_program(program, tmp_path / "run")
    with pytest.raises(UserError, match="cut off"):
        open_program_run(tmp_path / "run")


def test_names_that_name_no_program(tmp_path):
    (tmp_path / "mine.py").write_text("from precaudit import Program\nother = 3\n")
    (tmp_path / "broken.py").write_text("x = 1\nraise ValueError('no')\n")
    (tmp_path / "has.py").write_text("from precaudit import Program\nother = 3\nright = Program(abs, 1, {'a': (1,)})\n")
    (tmp_path / "later.py").write_text("def __getattr__(name):\n    if name[0] != '_':\n        raise KeyError('no')\n")
    for name, message in (
        ("later.py:program", r"does not give 'program': KeyError: 'no' \(.*later.py:3\)"),
        ("mine.py:program", "has no 'program': it holds no Program"),
        ("mine.py:other", r"is no precaudit.Program but int; write one: program = precaudit.Program\(call=other, "),
        ("has.py:other", r"is no precaudit.Program but int; in that file are: .*has.py:right"),
        ("none.py:program", "no such file"), ("broken.py:program", r"ValueError: no \(.*broken.py:2\)"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            load_program(f"{tmp_path}/{name}")
    with pytest.raises(UserError, match="cannot be imported"):
        load_program("no_such_module_of_anyone:program")
    assert not is_reference("tiny")
    assert not is_reference("model.gguf")
    assert is_reference("package.module:program")


BUDGETS = {
    "a limit that holds": ('metric = "rel_l2"\nlimit = 0.1', 0, "pass"),
    "a limit that breaks": ('metric = "rel_l2"\nlimit = 1e-5', 1, "fail"),
    "an excess": ("unexplained = 0.0", 0, "pass"),
    "a forward limit": ('kind = "forward"\nmetric = "ratio"\nlimit = 1e-3', 1, "fail"),
    "layers": ('layers = "2"\nmetric = "rel_l2"\nlimit = 1e-5', 1, "fail"),
    "phase": ('phases = ["call"]\nmetric = "rel_l2"\nlimit = 0.1', 0, "pass"),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_budgets_name_points_of_the_program(recorded, name, tmp_path):
    text, code, status = BUDGETS[name]
    _, opened, errors = recorded
    path = tmp_path / "budgets.toml"
    path.write_text(f'[[budget]]\nwhy = "tried"\npoints = "query~*"\n{text}\n')
    judged = gate(opened.folder, path)
    assert judged.exit_code == code
    broken = [v for v in judged.verdicts if v.status == "fail"]
    assert {v.point for v in broken} == ({"query~1"} if code else set())
    assert {v.why for v in broken} <= {"tried"}
    assert {v.layer for v in broken} == (set() if not code else {2} if name == "layers" else {0, 1, 2})
    assert sum(judged.counts.values()) == len(errors)
    assert status in judged.counts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('points = "qeury*"\nmetric = "rel_l2"\nlimit = 1', "qeury"),
        ('points = "attn_out"\nmetric = "rel_l2"\nlimit = 1', "attn_out"),
        ('kind = "state"\nmetric = "mismatched"\nlimit = 1', "state"),
        ('phases = ["prefill"]\nmetric = "rel_l2"\nlimit = 1', "prefill"),
        ('layers = "7"\nmetric = "rel_l2"\nlimit = 1', "7"),
    ],
)
def test_budgets_that_name_nothing_of_the_program_are_refused(recorded, text, words, tmp_path):
    path = tmp_path / "budgets.toml"
    path.write_text(f'[[budget]]\nwhy = "tried"\n{text}\n')
    with pytest.raises(UserError, match=words):
        gate(recorded[1].folder, path)


@pytest.mark.turn  # 16 s
def test_a_baseline_of_a_program_holds_until_weights_or_inputs_change(recorded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, opened, errors = recorded
    assert command(["baseline", str(opened.folder), "-o", "b.jsonl"]) == 0
    assert gate(opened.folder, baseline=Path("b.jsonl")).counts == {"pass": len(errors)}
    worse = [
        msgspec.structs.replace(e, rel_l2=4 * float(e.rel_l2), ratio=4 * float(e.ratio))
        if e.point == "down" and e.kind == "local"
        else e
        for e in errors
    ]
    Path("budgets.toml").write_text('[[budget]]\nwhy = "no worse"\nmetric = "rel_l2"\nratchet = 1.5\npoints = "down"\n')
    assert gate(opened.folder, Path("budgets.toml"), Path("b.jsonl")).exit_code == 0
    own = opened.record
    write_lines(opened.folder / "errors.jsonl", worse)
    marks = (opened.folder / "compared.json").read_bytes()
    try:
        found = msgspec.json.decode(marks)
        found["errors"] = file_hash(opened.folder / "errors.jsonl")
        (opened.folder / "compared.json").write_bytes(msgspec.json.encode(found))
        judged = gate(opened.folder, Path("budgets.toml"), Path("b.jsonl"))
    finally:
        write_lines(opened.folder / "errors.jsonl", errors)
        (opened.folder / "compared.json").write_bytes(marks)
    assert {v.point for v in judged.verdicts if v.status == "fail"} == {"down"}
    assert judged.drift[0][0] == pytest.approx(4)
    other = replace(program, params=jax.tree.map(lambda x: x * 2, program.params), steps=0)
    compare_program(trace_program(other, tmp_path / "other"), other)
    judged = gate(tmp_path / "other", baseline=Path("b.jsonl"))
    assert judged.counts["stale"] == 1
    assert judged.counts["missing"] == 2 * len(errors) // 3  # two calls of three are not there
    assert own.calls == 3
    moved = replace(program, cases={"a": (jnp.int32(3), *program.cases["a"][1:]), "b": program.cases["b"]}, steps=2)
    compare_program(trace_program(moved, tmp_path / "moved"), moved)
    stale = [v.text for v in gate(tmp_path / "moved", baseline=Path("b.jsonl")).verdicts if v.status == "stale"]
    assert stale == ["token ids of prompt a"]


def test_reports_say_the_same_again_and_escape_names(recorded, capsys):
    _, opened, errors = recorded
    assert command(["report", str(opened.folder)]) == 0
    shown = capsys.readouterr().out
    assert "are equal bit for bit" in " ".join(shown.split())
    assert command(["report", str(opened.folder), "--markdown", "-"]) == 0
    told = capsys.readouterr().out
    rows = [line for line in told.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(opened.record.points) + len(opened.record.outputs)
    assert len({row.count(" | ") for row in rows}) == 1
    odd = msgspec.structs.replace(opened.record.points[0], name="<img>|x")
    bad = replace(opened, record=msgspec.structs.replace(opened.record, points=(odd,), outputs=()))
    assert "<img>" not in as_markdown(program_report(bad, errors), 1, None)
    assert not command(["report", str(opened.folder), "-v"])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_cache_in_eight_bits_is_recorded_and_compared(dtype, tmp_path):
    def call(w, x):
        return jax.ad_checkpoint.checkpoint_name((x @ w).astype(dtype), "held").astype(jnp.float32) @ w

    draw = np.random.default_rng(0)
    w, x = (jnp.asarray(draw.standard_normal((16, 16)) / 4, jnp.float32) for _ in range(2))
    opened = trace_program(Program(call, w, {"a": (x,)}), tmp_path / "run")
    assert {p.dtype for p in opened.record.points} >= {dtype}
    compare_program(opened, Program(call, w, {"a": (x,)}))
    assert gate(opened.folder).exit_code == 0


@pytest.mark.turn  # 13 s
def test_the_verbs_of_the_package_take_programs(own, tmp_path):
    program = replace(own, steps=0)
    opened = precaudit.trace(program, tmp_path / "run")
    errors = precaudit.compare(tmp_path / "run", program)
    assert len(errors) == len(precaudit.compare(opened, program))
    assert precaudit.gate(tmp_path / "run").exit_code == 0
    assert precaudit.diagnose(str(tmp_path / "run"), program).exit_code == 0


@pytest.mark.slow  # 40 s
def test_points_go_by_names_of_ones_own(own, tmp_path, capsys):
    names = {"q": "query~1", "query": "query", "weighted": "attended"}
    program = replace(own, steps=1, points=names)
    opened = trace_program(program, tmp_path / "run")
    assert {"q", "weighted"} <= {p.name for p in opened.record.points}
    assert not {"query~1", "attended"} & {p.name for p in opened.record.points}
    errors = compare_program(opened, program)
    assert errors == compare_program(opened, replace(program, points=None))  # the run says what they are called
    plain = compare_program(trace_program(replace(own, steps=1), tmp_path / "plain"), replace(own, steps=1))
    other = {"query~1": "q", "attended": "weighted"}
    same = [msgspec.structs.replace(e, point=other.get(e.point, e.point), candidate="run") for e in plain]
    assert errors == same
    assert gate(opened.folder).exit_code == 0
    (tmp_path / "names.toml").write_text('q = "query~1"\n')
    assert command(["points", OWN, "--rename", str(tmp_path / "names.toml"), "--json"]) == 0
    assert '"name":"q"' in capsys.readouterr().out
    out = str(tmp_path / "by-command")
    assert command(["trace", OWN, "--rename", str(tmp_path / "names.toml"), "-o", out]) == 0
    assert open_program_run(out).record.renamed == {"q": "query~1"}


def test_occurrences_go_by_the_new_name_too():
    def call(w, x):
        for _ in range(3):
            hidden = x @ w
            x = jnp.tanh(hidden)
        return x

    program = Program(call, jnp.eye(4), {"a": (jnp.ones((2, 4)),)}, points={"h": "hidden"})
    assert {"h", "h#1", "h#2"} <= {p.name for p in points(program)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('q = "qeury"', "did you mean"), ('scores = "query"', "another point of that name"),
        ('a = "query"\nb = "query"', "two names"), ("q = 3", "names by names"), ("q =", "not TOML"),
        ('"a b" = "query"', "is no name"),
    ],
)  # fmt: skip
def test_wrong_names_are_refused_in_a_line(text, words, tmp_path, capsys):
    (tmp_path / "names.toml").write_text(text)
    assert command(["points", OWN, "--rename", str(tmp_path / "names.toml")]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_taps_of_ones_own_are_not_renamed(tmp_path):
    tapped = replace(load_program(f"{EXAMPLES / 'tapped_decoder.py'}:program"), points={"q": "stream"})
    with pytest.raises(UserError, match="is the program's own"):
        points(tapped)
    assert command(["trace", "tiny", "--rename", "x.toml", "-o", str(tmp_path / "r")]) == 2


def test_a_callback_that_raises_is_the_users_error(tmp_path):
    def broken(x):
        raise ZeroDivisionError(f"of {x.shape}")

    def call(w, x):
        return jax.pure_callback(broken, jax.ShapeDtypeStruct(x.shape, x.dtype), x) @ w

    program = Program(call, jnp.eye(4), {"a": (jnp.ones((3, 4)),)}, outputs=None)
    with pytest.raises(UserError, match=r"^a, call 0: the program does not run: ZeroDivisionError: of \(3, 4\)$"):
        trace_program(program, tmp_path / "run")


def test_a_run_that_asks_no_more_leaves_out_the_program_without_taps(tmp_path):
    """It is compiled and run for what taps change, which ``same`` does not ask."""
    compiled = []

    def call(w, x):
        compiled.append(isinstance(x, jax.core.Tracer))
        return jnp.tanh(x @ w)

    w, x = np.ones((4, 4), np.float32), np.ones((2, 4), np.float32)
    counts = []
    for unchecked in (False, True):
        compiled.clear()
        program = Program(call, w, {"a": (x,)}, outputs="out")
        opened = trace_program(program, tmp_path / str(unchecked), options=ProgramTraceOptions(unchecked=unchecked))
        counts.append(len(compiled))
        assert opened.record.neutrality[0].case == "a"
    assert counts[1] == counts[0] - 1


def test_what_is_not_a_number_in_both_outputs_is_alike():
    x = np.array([1.0, np.nan, np.inf, -np.inf], np.float32)
    assert outputs_apart(x, x.copy()) is None
    assert outputs_apart(x, np.array([1.5, np.nan, np.inf, -np.inf], np.float32)) == 0.5
    assert np.isnan(outputs_apart(x, np.array([1.0, 0.0, np.inf, -np.inf], np.float32)))
    assert outputs_apart(x, np.array([1.0, np.nan, 0.0, -np.inf], np.float32)) == np.inf
    one = np.float32(1.0)
    assert np.isnan(outputs_apart((one, np.float32(np.nan)), (one + 1, one)))


class Result(NamedTuple):
    cache: jax.Array
    logits: jax.Array


@jax.tree_util.register_dataclass
@dataclass
class Fields:
    logits: jax.Array
    loss: jax.Array


RESULTS = {
    "a dict": lambda x: {"loss": x.sum(), "logits": x, "aux": {"n": x[0]}},
    "a named tuple": lambda x: Result(x[0], x),
    "a dataclass": lambda x: Fields(x, x.sum()),
}


@pytest.mark.parametrize("name", RESULTS)
def test_outputs_are_named_by_keys_and_fields(name, tmp_path):
    program = Program(lambda p, x: RESULTS[name](x @ p), jnp.eye(3), {"a": (jnp.ones((2, 3)),)}, outputs="logits")
    opened = trace_program(program, tmp_path / "run")
    assert [(p.name, p.shape) for p in opened.record.outputs] == [("outputs.logits", (2, 3))]


def test_outputs_that_are_no_keys_are_named_in_order(tmp_path):
    """What is no key names the whole result."""
    program = Program(lambda p, x: {"h": x @ p}, jnp.eye(3), {"a": (jnp.ones((2, 3)),)}, outputs="out")
    assert [p.name for p in trace_program(program, tmp_path / "run").record.outputs] == ["outputs.out.h"]
    with pytest.raises(UserError, match="names 2 results, call returns 1"):
        points(Program(program.call, program.params, program.cases, outputs=("h", "other")))


def test_named_trees_are_recorded_and_judged_by_their_arrays(tmp_path):
    """Beside logits: none is left out in silence. One that is wrong fails."""

    def step(p, x):
        h = x @ p
        return h, {"layers": [{"k": h * 2, "v": jnp.cumsum(h, 0)}], "length": jnp.int32(2)}, None

    given = (jnp.eye(3) / 3, {"a": (jnp.ones((2, 3)),)})
    program = Program(step, *given, outputs=("logits", "cache", "rest"))
    opened = trace_program(program, tmp_path / "run")
    names = ["outputs.logits", "outputs.cache.layers.0.k", "outputs.cache.layers.0.v"]  # in any order
    assert [p.name for p in opened.record.outputs] == sorted(names)
    assert opened.record.warnings == ("outputs without floats are no points: cache.length",)
    found = compare_program(opened, program)
    assert {e.point for e in found.errors if e.kind == "forward"} >= {*names}
    assert gate(found).exit_code == 0

    bad = altered(opened, tmp_path / "bad", names[2], lambda v: v * np.float32(1.01), "outputs")
    assert [v.point for v in gate(compare_program(bad, program)).verdicts if v.status != "pass"] == [names[2]]
