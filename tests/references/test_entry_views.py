"""Positions of a program that two entry points see: prefill or rescore, and decode."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from precaudit import Entry, Program
from precaudit.diagnosis.programs import diagnose_program
from precaudit.diagnosis.sameness.observed import order_in_call
from precaudit.errors import UserError
from precaudit.judging.gate import gate
from precaudit.judging.looks import look_at, selected
from precaudit.judging.programs import notes
from precaudit.recording.programs.planning import ProgramSelection
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import write_manifest
from precaudit.recording.runs.programs import ProgramPoint, file_name, open_program_run
from precaudit.references.comparison.entry_views import Fed, Row, _starts, pairs_of_rows
from precaudit.references.comparison.programs import compare_program
from precaudit.schema.records.base import value
from tests.helpers.paths import ROOT

DRAW = np.random.default_rng(11)
VOCAB, WIDTH, LENGTH, STEPS = 12, 16, 5, 3
PARAMS = {
    "embed": jnp.asarray(DRAW.standard_normal((VOCAB, WIDTH)), jnp.bfloat16),
    "out": jnp.asarray(DRAW.standard_normal((WIDTH, VOCAB)), jnp.bfloat16),
}
PROMPTS = {"a": [3, 7, 1, 1, 9], "b": [0, 2, 11, 4, 4]}


def prefill(params, tokens):
    """Logits [..., T, V] by the running sum of the tokens' rows: attention with one weight for all."""
    held = jnp.cumsum(params["embed"][tokens].astype(jnp.float32), axis=-2)
    state = jnp.tanh(held).astype(jnp.bfloat16)
    return state @ params["out"], held[..., -1, :]


def decode(params, token, held, tokens, slot):
    held = held + params["embed"][token].astype(jnp.float32)
    state = jnp.tanh(held).astype(jnp.bfloat16)
    tokens = jax.lax.dynamic_update_slice(tokens, token[..., None], (0,) * (tokens.ndim - 1) + (slot,))
    return state @ params["out"], held, tokens


def served(decode=decode, batch=False, again=True, tokens=0):
    cases = {n: jnp.asarray(t, jnp.int32) for n, t in PROMPTS.items()}
    if batch:
        cases = {"both": jnp.stack(list(cases.values()))}

    def begin(inputs, outputs):
        whole = jnp.zeros((*inputs[0].shape[:-1], LENGTH + STEPS + 1), jnp.int32).at[..., :LENGTH].set(inputs[0])
        return jnp.argmax(outputs[0][..., -1, :], -1).astype(jnp.int32), outputs[1], whole, jnp.int32(LENGTH)

    def advance(inputs, outputs):
        return jnp.argmax(outputs[0], -1).astype(jnp.int32), outputs[1], outputs[2], inputs[3] + 1

    def column(inputs, outputs):
        token, *rest = begin(inputs, outputs)
        return token[:, None], *rest

    def next_column(inputs, outputs):
        token, *rest = advance(inputs, outputs)
        return token[:, None], *rest

    call, first, then = decode, begin, advance
    if batch:
        call, first, then = lambda p, t, *rest: decode(p, t[:, 0], *rest), column, next_column
    entries = {"decode": Entry(call, first, STEPS, then, ("logits", "held", "tokens"), tokens=tokens)}
    if again:
        entries["rescore"] = Entry(
            prefill, lambda _inputs, out: (out[2],), outputs=("logits", "held"), tokens=None if tokens is None else 0
        )
    return Program(
        prefill, PARAMS, {n: (x,) for n, x in cases.items()}, outputs=("logits", "held"), tokens=tokens,
        entry="prefill", then=entries,
    )  # fmt: skip


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    program = served()
    opened = trace_program(program, tmp_path_factory.mktemp("runs") / "run")
    return opened, compare_program(opened, program)


@pytest.mark.turn  # 3 s
def test_every_position_that_decode_saw_is_seen_by_rescore(honest):
    opened, errors = honest
    found = {(p.prompt, p.step): p for p in errors.prefill_decode if p.view == "decode"}
    assert found.keys() == {(case, step) for case in PROMPTS for step in range(STEPS + 1)}
    embed, out = (np.asarray(PARAMS[name]).astype(np.float64) for name in ("embed", "out"))
    for case in PROMPTS:
        whole = opened.entries[2].tensors(case, 0, "inputs")["0"]
        exact = np.tanh(np.cumsum(embed[whole], axis=0)) @ out
        for step in range(STEPS + 1):
            p = found[case, step]
            assert (p.against, p.view, p.position, p.f64_apart) == ("rescore", "decode", LENGTH + step, None)
            assert p.f64_top1 == int(np.argmax(exact[LENGTH + step]))
            best = np.sort(exact[LENGTH + step])[::-1]
            assert value(p.f64_gap) == pytest.approx(best[0] - best[1], rel=1e-9)
            a, b = (
                one.tensors(case, call, "outputs")["outputs.logits"].astype(np.float64).reshape(-1, VOCAB)[row]
                for one, call, row in ((opened.entries[2], 0, LENGTH + step), (opened.entries[1], step, 0))
            )
            assert (p.prefill_top1, p.decode_top1) == (np.argmax(a), np.argmax(b))
            assert value(p.max_diff) == np.abs(a - b).max()
    assert gate(opened.folder).exit_code == 0


@pytest.mark.turn  # 3 s
def test_a_decode_that_is_another_function_fails(tmp_path):
    def other(params, token, held, tokens, slot):
        return decode(params, token, 1.01 * held, tokens, slot)

    program = served(other)
    opened = trace_program(program, tmp_path / "run")
    found = [p for p in compare_program(opened, program).prefill_decode if p.view == "decode"]
    bad = [v for v in gate(opened.folder).verdicts if v.status == "fail" and v.kind == "rescore/decode"]
    assert len(bad) == len(found) == len(PROMPTS) * (STEPS + 1)
    assert "they are not one function" in bad[0].text
    assert min(value(p.f64_apart) for p in found) > 1e-4
    assert {v.kind for v in gate(opened.folder).verdicts if v.status == "fail"} == {"rescore/decode"}


@pytest.mark.turn  # 4 s
def test_a_cache_in_int8_is_no_other_function(tmp_path):
    def quantised(params, token, held, tokens, slot):
        scale = jnp.max(jnp.abs(held)) / 127
        stored = jnp.round(held / scale).astype(jnp.int8)
        return decode(params, token, stored.astype(jnp.float32) * scale, tokens, slot)

    program = served(quantised)
    opened = trace_program(program, tmp_path / "run")
    assert {p.f64_apart for p in compare_program(opened, program).prefill_decode} == {None}
    assert not [v for v in gate(opened.folder).verdicts if v.status == "fail"]


@pytest.mark.turn  # 3 s
def test_rows_of_a_batch_are_told_apart(tmp_path):
    program = served(batch=True)
    opened = trace_program(program, tmp_path / "run")
    found = compare_program(opened, program).prefill_decode
    assert {p.prompt for p in found} == {"both, row 0", "both, row 1"}
    assert all(p.match and p.f64_match for p in found)
    assert gate(opened.folder).exit_code == 0


@pytest.mark.turn  # 4 s
def test_what_nothing_sees_twice_is_said(tmp_path):
    for how in ({"again": False}, {"tokens": None}):
        program = served(**how)
        opened = trace_program(program, tmp_path / "run", options=ProgramTraceOptions(force=True))
        assert not compare_program(opened, program).prefill_decode
        assert any("two entry points share no position" in note for note in notes(opened))


def test_a_token_that_is_fed_again_is_held_against_prefill(tmp_path):
    """Decode begins with the prompt's last token, at its position, on a state without it."""
    program = served()
    embed = PARAMS["embed"].astype(jnp.float32)

    def begin(inputs, outputs):
        whole = jnp.zeros(LENGTH + STEPS + 1, jnp.int32).at[:LENGTH].set(inputs[0])
        last = inputs[0][-1]
        return last, outputs[1] - embed[last].astype(outputs[1].dtype), whole, jnp.int32(LENGTH - 1)

    then = {"decode": Entry(decode, begin, 0, None, ("logits", "held", "tokens"), tokens=0, start=3)}
    program = Program(prefill, PARAMS, program.cases, outputs=("logits", "held"), tokens=0, entry="prefill", then=then)
    opened = trace_program(program, tmp_path / "run")
    found = compare_program(opened, program).prefill_decode
    assert [(p.against, p.position, p.prefill_last_top1 == p.decode0_top1) for p in found] == [
        ("prefill", LENGTH - 1, True)
    ] * len(PROMPTS)
    assert gate(opened.folder).exit_code == 0


@pytest.mark.turn  # 4 s
def test_diagnose_says_where_another_function_begins(tmp_path):
    def other(params, token, held, tokens, slot):
        return decode(params, token, 1.01 * held, tokens, slot)

    program = served(other)
    opened = trace_program(program, tmp_path / "run")
    compare_program(opened, program)
    found = diagnose_program(opened, program)
    (finding,) = found.findings
    assert (finding.kind, finding.cause, finding.phases) == ("semantics", "decode is not rescore", ("decode call",))
    assert finding.point == "held"  # the state, before tanh and the product
    assert "first held" in finding.says
    assert (found.exit_code, gate(opened.folder).exit_code) == (1, 1)


def test_diagnose_finds_nothing_where_entry_points_agree(honest):
    opened, _ = honest
    found = diagnose_program(opened, served())
    assert (found.findings, found.exit_code) == ((), 0)
    assert found.explained == gate(opened.folder).counts["pass"]


@pytest.mark.turn  # 7 s
def test_a_position_that_decode_skips_is_seen(tmp_path):
    """Positions turn the state here, as RoPE does: decode begins one too far on, or one too early."""

    def turned(state, position):
        return state * jnp.cos(0.3 * position)[..., None].astype(state.dtype)

    def whole(params, tokens):
        state = turned(params["embed"][tokens], jnp.arange(len(tokens), dtype=jnp.float32))
        return state @ params["out"]

    def step(params, token, position, tokens):
        state = turned(params["embed"][token], position.astype(jnp.float32))
        return state @ params["out"], jax.lax.dynamic_update_slice(tokens, token[None], (jnp.int32(LENGTH),))

    def served_from(position):
        def begin(inputs, outputs):
            tokens = jnp.zeros(LENGTH + 1, jnp.int32).at[:LENGTH].set(inputs[0])
            return jnp.argmax(outputs[-1]).astype(jnp.int32), jnp.int32(position), tokens

        then = {
            "decode": Entry(step, begin, outputs=("logits", "tokens"), tokens=0, start=1),
            "rescore": Entry(whole, lambda _inputs, out: (out[1],), outputs="logits", tokens=0),
        }
        cases = {"a": (jnp.asarray(PROMPTS["a"], jnp.int32),)}
        return Program(whole, PARAMS, cases, outputs="logits", tokens=0, entry="prefill", then=then)

    for position, code in ((LENGTH, 0), (LENGTH - 1, 1), (LENGTH + 1, 1)):
        program = served_from(position)
        opened = trace_program(program, tmp_path / "run", options=ProgramTraceOptions(force=True))
        (pair,) = (p for p in compare_program(opened, program).prefill_decode if p.view == "decode")
        assert (pair.against, pair.position) == ("rescore", LENGTH)
        assert (gate(opened.folder).exit_code, diagnose_program(opened, program).exit_code) == (code, code)
    assert "first state" in diagnose_program(opened, program).findings[0].says


@pytest.mark.turn  # 3 s
def test_a_token_that_is_neither_fp64s_nor_a_near_tie_fails(honest, tmp_path):
    """Another token by far in the recorded logits of decode's first call."""
    opened, folder = honest[0], tmp_path / "run"
    shutil.copytree(opened.folder, folder)
    name = file_name(opened.entries[1].record, "a", 0, "outputs")
    held = load_file(folder / name)
    logits = held["outputs.logits"].astype(np.float32)
    logits[int(logits.argmin())] = logits.max() + 8
    save_file({**held, "outputs.logits": logits.astype(held["outputs.logits"].dtype)}, folder / name)
    hashes = {**opened.record.hashes, name: file_hash(folder / name)}
    write_manifest(folder, msgspec.structs.replace(opened.record, hashes=hashes))
    compare_program(folder, served())
    bad = {(v.prompt, v.step) for v in gate(folder).verdicts if v.status == "fail" and v.kind == "rescore/decode"}
    assert bad == {("a", 0)}
    assert diagnose_program(open_program_run(folder), served()).exit_code == 1


def test_an_entry_point_after_one_that_was_not_recorded_begins_with_its_recorded_inputs(tmp_path):
    program = served()
    opened = trace_program(program, tmp_path / "run", ProgramSelection(phases=["prefill", "rescore"]))
    assert [one.record.entry for one in opened.entries] == ["prefill", "rescore"]
    compare_program(opened, program)
    assert gate(opened.folder).exit_code == 0


def test_an_entry_point_that_begins_where_no_token_leads_is_unknown(tmp_path):
    """Decode says position 7 after 5 tokens, and what it hands rescore is no sequence that it saw."""
    program = served().some(["a"])

    def begin(inputs, outputs):
        token, held, whole, _ = program.then["decode"].begin(inputs, outputs)
        return token, held, whole, jnp.int32(LENGTH + 2)

    then = {**program.then, "decode": replace(program.then["decode"], begin=begin, start=3, steps=0)}
    opened = trace_program(replace(program, then=then), tmp_path / "run")
    assert {p.view for p in compare_program(opened, replace(program, then=then)).prefill_decode} == {"rescore"}
    (one,) = (v for v in gate(opened.folder).verdicts if v.kind == "coverage")
    assert (one.status, one.phase, one.prompt) == ("unknown", "decode call", "a")
    assert one.text.startswith("it begins at position 7, and 5 tokens came before")
    found = diagnose_program(opened, replace(program, then=then))
    assert (gate(opened.folder).exit_code, found.exit_code) == (3, 3)


def test_which_rows_of_one_position_are_held_against_each_other():
    """Decode to every view of several rows, other views to the first, at the same place of the batch if it is there."""

    def row(entry, batch=0, alone=False):
        return Row(entry, 0, batch, 0, 4, alone, (2, 1, 8))

    first, same, decoded, again = [row(0, 0), row(0, 1)], [row(1, 1), row(1, 0)], row(2, 1, alone=True), row(3, 1)
    every = [*first, *same, decoded, again]
    pairs = {(b.entry, b.batch): [(a.entry, a.batch) for a, x in pairs_of_rows(every) if x is b] for b in every}
    assert pairs == {
        (0, 0): [],
        (0, 1): [],
        (1, 0): [(0, 0)],
        (1, 1): [(0, 1)],
        (2, 1): [(0, 1), (1, 1), (3, 1)],
        (3, 1): [(0, 1)],
    }
    alone = [row(0, alone=True), row(1, alone=True)]
    assert list(pairs_of_rows(alone)) == [(alone[0], alone[1])]


BATCHED = jnp.asarray(list(PROMPTS.values()), jnp.int32)


def in_chunks(params, tokens, _start, held):
    state = jnp.cumsum(params["embed"][tokens].astype(jnp.float32), axis=-2) + held[:, None]
    return jnp.tanh(state).astype(jnp.bfloat16) @ params["out"], state[:, -1]


def alone(params, tokens, _start):
    return prefill(params, tokens)


def viewed(alone=alone, in_chunks=in_chunks):
    """A batch of two, prefilled at once; its second sequence alone; the batch in a longer bucket; and in two chunks."""

    def bucket(params, tokens, _lengths):
        return prefill(params, tokens)

    padded, lengths = jnp.pad(BATCHED, ((0, 0), (0, 3))), jnp.full(2, LENGTH, jnp.int32)
    first = BATCHED[:, :3], jnp.int32(0), jnp.zeros((2, WIDTH), jnp.float32)
    named = {"outputs": ("logits", "held"), "tokens": 0}
    then = {
        "alone": Entry(alone, lambda *_: (BATCHED[1:], jnp.int32(0)), start=1, **named),
        "bucket": Entry(bucket, lambda *_: (padded, lengths), lengths=1, **named),
        "chunk": Entry(in_chunks, lambda *_: first, start=1, **named),
        "next_chunk": Entry(in_chunks, lambda _, out: (BATCHED[:, 3:], jnp.int32(3), out[1]), start=1, **named),
    }
    return Program(prefill, PARAMS, {"both": (BATCHED,)}, entry="prefill", then=then, **named)


def test_a_batch_alone_padded_and_in_chunks_is_one_function(tmp_path):
    program = viewed()
    opened = trace_program(program, tmp_path / "run")
    found = compare_program(opened, program).prefill_decode
    again = compare_program(opened, program, holds=lambda _: True)
    assert again.prefill_decode == found
    assert len(selected(again, look_at(opened, prompt="both")).prefill_decode) == len(found)
    seen = {view: {(p.prompt, p.position) for p in found if p.view == view} for view in program.then}
    every = {(f"both, row {b}", t) for b in range(2) for t in range(LENGTH)}
    assert seen == {
        "alone": {at for at in every if at[0] == "both, row 1"},
        "bucket": every,
        "chunk": {at for at in every if at[1] < 3},
        "next_chunk": {at for at in every if at[1] >= 3},
    }
    assert {(p.against, p.match, p.f64_match, p.f64_apart) for p in found} == {("prefill", True, True, None)}
    assert gate(opened.folder).exit_code == 0


@pytest.mark.turn  # 3 s
def test_nan_in_one_view_alone_fails_there_and_is_told(tmp_path, recwarn):
    """Chains of many draws, which decide whether an infinity is rounding's, go on from the entry point before, too."""

    def holes(params, tokens):
        logits, held = prefill(params, tokens)
        return jnp.where(tokens[..., None] > 5, jnp.nan, logits), held

    view = Entry(holes, lambda inputs, _: inputs, outputs=("logits", "held"), tokens=0)
    program = replace(served().some(["a"]), then={"view": view})
    opened = trace_program(program, tmp_path / "run")
    found = compare_program(opened, program).prefill_decode
    assert [p.finite for p in found] == [token <= 5 for token in PROMPTS["a"]]
    failed = [v for v in gate(opened.folder).verdicts if v.status == "fail"]
    assert {(v.kind, v.text) for v in failed} == {("prefill/view", "logits are NaN or infinite: there is no top-1")}
    assert {v.phase for v in gate(opened.folder).verdicts if v.status == "nonfinite"} == {"view call"}
    assert "no operation was found that makes it" in diagnose_program(opened, program).findings[0].says
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


@pytest.mark.turn
def test_a_view_on_several_devices_is_one_function(tmp_path):
    given = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-m", "tests.helpers.sharded_views", str(tmp_path)]
    out = subprocess.run(run, env=os.environ | given, cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    told = json.loads(out.stdout.splitlines()[-1])
    assert told["honest"] == {"failed": [], "views": [["prefill", "sharded", t, None] for t in range(4)]}
    assert told["wrong"]["failed"] == ["prefill/sharded"]
    assert all(apart > 1e-3 for *_, apart in told["wrong"]["views"])


@pytest.mark.turn  # 10 s
def test_a_view_that_is_another_function_fails_by_its_name(tmp_path):
    def mixed(params, tokens, _start):
        logits, held = prefill(params, tokens)
        return logits * jnp.bfloat16(1.01), held

    def late(params, tokens, start, held):
        return in_chunks(params, tokens, start, 0.99 * held)

    for changed, view, positions in (({"alone": mixed}, "alone", 5), ({"in_chunks": late}, "next_chunk", 2 * 2)):
        program = viewed(**changed)
        opened = trace_program(program, tmp_path / view)
        compare_program(opened, program)
        bad = [v for v in gate(opened.folder).verdicts if v.status == "fail"]
        assert {v.kind for v in bad} == {f"prefill/{view}"}
        assert len(bad) == positions
        (finding,) = diagnose_program(opened, program).findings
        assert (finding.cause, finding.phases) == (f"{view} is not prefill", (f"{view} call",))


def test_where_it_begins_is_told_in_the_order_of_the_program():
    """What lies after all layers comes after them, though it is in no layer."""
    points = tuple(
        ProgramPoint(name, (4,), stacked, "float32", "", "", "mul")
        for name, stacked in (("embed", ()), ("q", (3,)), ("mix", (3,)), ("final", ()))
    )
    embed, q, mix, final = points
    places = [(final, ()), (mix, (0,)), (q, (1,)), (embed, ())]
    order = sorted(places, key=lambda at: order_in_call(at[0], at[1], points))
    assert [(p.name, step) for p, step in order] == [("embed", ()), ("mix", (0,)), ("q", (1,)), ("final", ())]


def with_positions(shape):
    """Return prefill and decode that take the position of every token, as Gemma's do."""
    tokens = jnp.asarray(list(PROMPTS.values()), jnp.int32)

    def step(params, ids, positions, held):
        x = params["embed"][ids].astype(jnp.float32) * (1 + positions.reshape(-1, ids.shape[1])[..., None] / 16)
        held = held[:, None] + jnp.cumsum(x, axis=1)
        return jnp.tanh(held).astype(jnp.bfloat16) @ params["out"], held[:, -1]

    def follow(inputs, out):
        return jnp.argmax(out[0][:, -1:], -1).astype(jnp.int32), inputs[1][:, -1:] + 1, out[1]

    positions = jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH)).reshape(shape)
    then = {"decode": Entry(step, follow, STEPS - 1, follow, ("logits", "held"), tokens=0, start=1)}
    first = {"both": (tokens, positions, jnp.zeros((2, WIDTH)))}
    return Program(step, PARAMS, first, outputs=("logits", "held"), entry="prefill", tokens=0, start=1, then=then)


def test_a_start_may_be_the_position_of_every_token(tmp_path):
    program = with_positions((2, LENGTH))
    compare_program(trace_program(program, tmp_path / "run"), program)
    assert set(gate(tmp_path / "run").counts) == {"pass"}
    other = with_positions((2 * LENGTH, 1))
    opened = trace_program(replace(other, then={}), tmp_path / "other")
    with pytest.raises(UserError, match=r"start = 1: that input is \[10, 1\], and the token ids \[2, 5\]; it says the"):
        compare_program(opened, replace(other, then={}))


def test_of_a_padded_sequence_the_position_of_its_first_token_counts():
    """Padding on the left has a position, too, which is nobody's."""
    given = {"1": np.array([[9, 9, 3], [4, 5, 6]])}
    fed = [[Fed(1, 1)] * 3, [Fed(1, 1)] * 4]
    assert _starts(given, 1, fed, np.array([[0, 0, 8], [8, 8, 8]]), np.array([2, 0])) == ([3, 4], [3, 4])
