"""A program's run as its textbook sees it: the same records as a model's run, and mistakes named in the same way."""

from dataclasses import replace

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from exams.as_program import CACHES, MAP
from exams.mistakes import heads_interleaved, longer, rope_tables_in_bf16, scores_in_bf16
from precaudit import gate
from precaudit.diagnosis.programs import diagnose_program
from precaudit.errors import UserError
from precaudit.judging.rules import judge
from precaudit.models.jax_decoder import Parts
from precaudit.models.jax_decoder.parts import attend, cache_read
from precaudit.recording.programs.own import decode_of, prefill_call
from precaudit.recording.programs.tracing import ProgramTraceOptions
from precaudit.recording.programs.tracing import trace_program as trace_program
from precaudit.recording.runs.kinds import write_manifest
from precaudit.recording.runs.programs import open_program_run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.announced import NOT_MADE, NOT_SHOWN, announced_errors
from precaudit.references.comparison.programs import compare_program
from precaudit.references.mapped import textbook_of
from precaudit.references.names_map import Names, names_of
from precaudit.references.textbook.local import LocalEmulations, local_errors
from precaudit.references.viewed import view_case
from precaudit.reports.program import program_sentences
from precaudit.schema.graphs.decoder import POINTS, present
from precaudit.schema.limits import default_limits
from precaudit.schema.policies import load_policy, recorded_policy
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from tests.helpers.paths import FIXTURES

MODEL = FIXTURES / "llama-gqa"
IDS = np.random.default_rng(3).integers(0, 96, 20)


def names(folder, more=""):
    """Return the map of the shipped decoder's points, with the fixture's configuration."""
    path = folder / "map.toml"
    path.write_text(MAP.read_text() + more)
    return Names(path, MODEL / "config.json")


def subject(policy="bf16", **parts):
    return load(str(MODEL), policy, device="cpu", parts=Parts(**parts) if parts else None)


def test_a_program_has_the_records_that_a_model_s_run_has(tmp_path):
    """Prefill of the same tokens: the tensors have the same bits, and so has every number of their local records."""
    of = subject()
    program = prefill_call(of, {"a": IDS})
    opened = trace_program(program, tmp_path / "program")
    prompt = [Prompt(id="a", tokens=tuple(int(i) for i in IDS))]
    run = trace(of, tmp_path / "model", prompt, Selection.parse(points="all", phases="prefill"), TraceOptions())
    recorded = Recorded.of(run)
    book = textbook_of(names(tmp_path), program, opened)
    view = view_case(opened, book, "a")
    assert view.requested.points == tuple(p for p in present(False) if not POINTS[p].state)
    emulations = LocalEmulations(recorded_policy(run.record), ())
    compared = 0
    for _, place in view.places():
        theirs = recorded.tensor(*place)
        if place.point != "logits":  # a model's run has those of the last row alone
            assert theirs.tobytes() == view.tensor(*place).tobytes(), place
            each = [list(local_errors(x, book.model, True, emulations, place)) for x in (recorded, view)]
            assert [msgspec.structs.replace(e, candidate="") for e in each[0]] == [
                msgspec.structs.replace(e, candidate="") for e in each[1]
            ]
            compared += len(each[0])
    assert compared == 14 * of.config.layers + 1  # all but resid_in, which no operation makes; and the last norm


@pytest.mark.parametrize("of", [prefill_call, decode_of])
def test_an_honest_program_keeps_its_announced_policy(of, tmp_path):
    ids = np.stack([IDS, IDS[::-1]]) if of is prefill_call else IDS[:8]
    program = of(subject(), {"a": ids})
    opened = trace_program(program, tmp_path / "run")
    book = textbook_of(names(tmp_path, CACHES if of is decode_of else ""), program, opened)
    view = view_case(opened, book, "a")
    errors = list(announced_errors(view, book, "a", "call"))
    assert {e.kind for e in errors} == {"policy"}
    assert {judge(e, default_limits()).status for e in errors} == {"pass"}
    made = {(e.point, e.step) for e in errors}
    assert {("scores", 0), ("attn_out", 0), ("outputs.logits", 0)} <= made
    assert {step for _, step in made} == set(range(opened.record.calls))


@pytest.mark.turn  # 15 s
@pytest.mark.parametrize(
    ("policy", "scores", "point", "cause"),
    [
        ("bf16-fp32-scores", scores_in_bf16, "scores", "scores in bfloat16"),
        ("bf16", heads_interleaved, "scores", "heads interleaved"),
        ("bf16", longer, "scores", "scale 1/√(K+1)"),  # which attn_out's formula has, too
    ],
)
def test_a_program_s_mistake_is_named_at_its_part_of_attention(policy, scores, point, cause, tmp_path):
    program = prefill_call(subject(policy, scores=scores), {"a": IDS})
    opened = trace_program(program, tmp_path / "run")
    compare_program(opened, program, names(tmp_path))
    judged = gate(opened.folder)
    assert judged.exit_code == 1
    told = {(v.point, v.status) for v in judged.verdicts if v.kind == "policy" and v.point in ("scores", "attn_out")}
    assert told == {("scores", "fail"), ("attn_out", "input suspect")}
    found = diagnose_program(opened, program).findings
    assert {(f.point, f.cause) for f in found} == {(point, cause)}
    assert found[0].layers == (0, 1, 2)
    assert f"{point} of layer 0" in found[0].says


@pytest.mark.turn  # 16 s
@pytest.mark.parametrize(
    ("read", "kind", "cause", "says"),
    [
        (lambda x: x.at[:, 2].set(x[:, 1]), "state", "stale row", "row 2 holds row 1"),
        (lambda x: x.astype(jnp.float8_e4m3fn).astype(x.dtype), "format", "cache in float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_what_a_program_s_cache_holds_is_named_as_a_model_s(read, kind, cause, says, tmp_path):
    """And not blamed on attention, which reads it."""
    of = subject(cache_read=lambda cache, layer: read(cache_read(cache, layer)))
    program = decode_of(of, {"a": IDS[:5]})
    opened = trace_program(program, tmp_path / "run")
    compare_program(opened, program, names(tmp_path, CACHES))
    assert gate(opened.folder).exit_code == 1
    found = diagnose_program(opened, program).findings
    assert {(f.point, f.kind, f.cause) for f in found} == {(p, kind, cause) for p in ("k_cache", "v_cache")}
    assert all(f.layers == (0, 1, 2) and says in f.says for f in found)


@pytest.mark.turn  # 13 s
def test_a_format_that_no_policy_forbids_is_none_of_the_gate_s_business(tmp_path):
    """RoPE's tables in bfloat16 cost less than the formats that the program stores: without a policy it passes."""
    program = replace(prefill_call(subject(rope=rope_tables_in_bf16), {"a": IDS}), policy=None)
    opened = trace_program(program, tmp_path / "run")
    errors = compare_program(opened, program, names(tmp_path))
    assert not [e for e in errors if e.kind == "policy"]
    assert gate(opened.folder).exit_code == 0
    assert not diagnose_program(opened, program).findings


@pytest.mark.turn  # 12 s
def test_what_the_map_does_not_show_is_told_and_not_judged(tmp_path):
    """Norms read the stream as it was before it was rounded: without what made that, they are no fault."""
    program = prefill_call(subject(), {"a": IDS})
    opened = trace_program(program, tmp_path / "run")
    path = tmp_path / "map.toml"
    path.write_text(MAP.read_text().replace('resid_in = "resid_in"\n', ""))
    errors = compare_program(opened, program, Names(path, MODEL / "config.json"))
    left = {(e.point, e.skipped) for e in errors if e.kind == "policy" and e.skipped is not None}
    assert left == {("attn_norm", NOT_SHOWN), ("resid_mid", NOT_SHOWN), ("mlp_norm", NOT_MADE)}
    assert gate(opened.folder).exit_code == 0
    assert not diagnose_program(opened, program).findings
    (said,) = (s for s in program_sentences(opened, errors) if s.startswith("Policy"))
    assert said.startswith("Policy bf16: 35 operations follow it on the recorded inputs; 9 more are not judged")


@pytest.mark.parametrize("shown", ["v", "q"])  # of another size; of a size that would do, rows not before keys
def test_scores_of_another_shape_are_refused_with_their_axes(shown, tmp_path):
    program = prefill_call(subject(), {"a": IDS})
    opened = trace_program(program, tmp_path / "run")
    path = tmp_path / "map.toml"
    path.write_text(MAP.read_text().replace('scores = "scores"', f'scores = "{shown}"'))
    with pytest.raises(UserError, match=r"is not \[1, 6, 20\] and keys .* give its axes"):
        view_case(opened, textbook_of(Names(path, MODEL / "config.json"), program, opened), "a")


def test_a_map_that_is_not_there_is_told_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"gone\.toml: no such file; a names map says"):
        names_of(tmp_path / "gone.toml", None, None)


def test_a_policy_by_its_name_is_that_policy():
    program = prefill_call(subject("fp32-highest"), {"a": IDS})
    assert replace(program, policy="fp32-highest").policy == load_policy("fp32-highest")
    with pytest.raises(UserError, match=r"unknown policy 'bf61': no \.toml file of that name; did you mean 'bf16'\?$"):
        replace(program, policy="bf61")


@pytest.mark.parametrize(
    ("policy", "says"),
    [({"scores": "float7"}, "float7"), ({"nonsense": "bfloat16"}, "unknown policy key 'nonsense'"), ({}, None)],
)
def test_a_policy_that_was_altered_is_refused_where_the_run_is_opened(policy, says, tmp_path):
    opened = trace_program(prefill_call(subject(), {"a": IDS[:2]}), tmp_path / "run")
    altered = msgspec.structs.replace(opened.record, policy=policy)
    write_manifest(opened.folder, altered)
    if says is None:  # what is not said is as in the policy bf16
        assert open_program_run(opened.folder).record.policy == {}
        return
    with pytest.raises(UserError, match=f"run.json: policy: .*{says}.*; the run was altered"):
        open_program_run(opened.folder)


@pytest.mark.turn
def test_of_a_batch_the_sequence_that_is_off_is_told(tmp_path):
    """A fault in the second row alone is in the record of its place."""
    of = subject(attend=lambda p, v, a: attend(p, v, a).at[1:].multiply(1.1))
    opened = trace_program(program := prefill_call(of, {"a": np.stack([IDS, IDS])}), tmp_path / "run")
    book = textbook_of(names(tmp_path), program, opened)
    off = [
        e
        for e in announced_errors(view_case(opened, book, "a"), book, "a", "call")
        if judge(e, default_limits()).status == "fail"
    ]
    assert {e.point for e in off} == {"attn_out"}


@pytest.mark.turn  # 12 s
def test_parameters_that_are_not_the_checkpoint_s_are_told(tmp_path):
    """Two layers' values exchanged: believed without ``weights``, a finding with it."""
    of = subject()
    layers = of.parameters["layers"]
    of.__dict__["parameters"] = of.parameters | {"layers": layers | {"wv": layers["wv"][jnp.asarray([1, 0, 2])]}}
    honest = prefill_call(of, {"a": IDS})
    for weights, causes in ((str(MODEL), {"weights of layer 1", "weights of layer 0"}), (None, set())):
        program = replace(honest, weights=weights)
        opened = trace_program(program, tmp_path / "run", options=ProgramTraceOptions(force=True))
        compare_program(opened, program, names(tmp_path))
        assert {f.cause for f in diagnose_program(opened, program).findings} == causes


@pytest.mark.turn
def test_a_formula_stands_before_the_number_that_fits_what_its_constant_leaves(tmp_path):
    """1/√(K+1) in float32 leaves 3e-8; a scale of 0.942809 leaves less, and nobody wrote that."""
    program = replace(prefill_call(subject(scores=longer), {"a": IDS}), policy=None)
    opened = trace_program(program, tmp_path / "run")
    path = tmp_path / "map.toml"
    path.write_text(MAP.read_text().replace('scores = "scores"\nprobs = "probs"\n', ""))
    compare_program(opened, program, Names(path, MODEL / "config.json"))
    (found,) = diagnose_program(opened, program).findings
    assert (found.point, found.cause) == ("attn_out", "scale 1/√(K+1)")
