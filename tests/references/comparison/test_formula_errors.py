"""The formula in the verdict: the program's FP64 shadow in the batches that were recorded, judged like other errors."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import msgspec
import pytest

from exams.mistakes import in_batches
from precaudit.diagnosis.diagnose import diagnose
from precaudit.judging.baselines import freeze, read_run_baseline
from precaudit.judging.gate import gate
from precaudit.models.jax_decoder import Parts
from precaudit.models.jax_decoder.parts import project, rms_norm, rope
from precaudit.recording.runs.written import recall
from precaudit.recording.tracing import manifest, shadowed, subject
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.reports.summary import formula_sentence
from precaudit.schema.coverage import formula_keys
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.base import value
from precaudit.schema.selection import Selection
from precaudit.workflows.audit import audit
from tests.helpers.selected import few

MLP = 384  # tiny's
TEXTS = ("import os\n\n\ndef read(path):\n", "x = 1")


def smaller_epsilon(x, w, _eps, a):
    return rms_norm(x, w, 1e-6, a)


def last_query_larger(x, cos, sin, a):
    """Scale the last position's rotated rows of four heads (queries) by 1.005."""
    y = rope(x, cos, sin, a)
    if y.shape[1] == 1 or y.shape[2] != 4:
        return y
    last = jnp.arange(y.shape[1])[None, :, None, None] == len(TEXTS[0]) // 2
    return jnp.where(last, (y.astype(jnp.float32) * 1.005).astype(y.dtype), y)


def swelling(x, w, bias, a):
    """Multiply what the MLP adds, and with it the residual stream, by 1 + 2⁻⁹."""
    y = project(x, w, bias, a)
    return y if x.shape[-1] != MLP else (y.astype(jnp.float32) * (1 + 2.0**-9)).astype(y.dtype)


FAULTS = {
    "epsilon 1e-6": (replace(Parts(), norm=smaller_epsilon), "attn_norm"),
    "one query × 1.005": (replace(Parts(), rope=last_query_larger), "q"),
    "residual stream × (1 + 2⁻⁹)": (replace(Parts(), project=swelling), "mlp_out"),
}


def options(folder, formula=True):
    return CompareOptions(accum=(), cache=folder / "refs", formula=formula)


def traced(folder, parts=None, points="q,attn_norm,mlp_out,logits", phases="prefill", texts=TEXTS[:1], **how):
    given = [Prompt(id=name, prompt=text) for name, text in zip("ab", texts, strict=False)]
    select = Selection.parse(points=points, phases=phases)
    how = TraceOptions(**({"decode_steps": 2, "batch": len(given)} | how))
    return trace(load("tiny", "bf16", None, "cpu", parts), folder / "run", given, select, how)


@pytest.mark.parametrize("name", few(FAULTS, "epsilon 1e-6", "residual stream × (1 + 2⁻⁹)"))
def test_a_formula_that_rounding_hides_fails(tmp_path, name):
    parts, point = FAULTS[name]
    run = traced(tmp_path, parts)
    found = gate(compare(run, options=options(tmp_path), subject=load("tiny", "bf16", None, "cpu", parts)))
    failed = [v for v in found.verdicts if v.kind == "formula" and v.status == "fail"]
    assert found.exit_code == 1
    assert (failed[0].layer, failed[0].point, failed[0].limit) == (0, point, 1e-6)
    assert "in FP64 the program differs from the reference" in failed[0].text
    assert {v.depth for v in failed} == {failed[0].depth}  # what follows is suspect, not another failure
    assert any(v.status == "input suspect" for v in found.verdicts if v.kind == "formula")


@pytest.mark.parametrize("name", FAULTS)
def test_rounding_hides_it_from_everything_else(tmp_path, name):
    run = traced(tmp_path, FAULTS[name][0], points="attn_out,logits")
    assert gate(compare(run, options=options(tmp_path, False))).exit_code == 0


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("honest")
    run = traced(folder, points="attn_out,logits", phases="prefill,decode,rescore", texts=TEXTS, pad="left")
    return compare(run, options=options(folder))


@pytest.mark.turn  # 7 s
def test_an_honest_batch_is_the_reference_everywhere(honest):
    rows = [e for e in honest.errors if e.kind == "formula"]
    keys = list(formula_keys(honest.run.record.requested, load("tiny").config, ("prefill", "decode", "rescore")))
    assert {(e.prompt, e.phase, e.step, e.layer, e.point) for e in rows} == {(p, *k) for p in "ab" for k in keys}
    assert {e.point for e in rows if e.phase == "decode"} > {"k_cache", "v_cache", "attn_out", "logits"}
    assert all(value(e.rel_l2) <= 1e-7 and e.nonfinite == 0 and e.n for e in rows)
    assert gate(honest).exit_code == 0
    assert gate(honest.folder).counts == gate(honest).counts
    assert any(n.startswith("formula: FP64 of the program on 2 prompts took ") for n in honest.notes)


@pytest.mark.turn  # 17 s
def test_a_formula_record_that_is_not_there_is_missing(honest):
    at = next(i for i, e in enumerate(honest.errors) if e.kind == "formula" and e.point == "attn_out")
    found = gate(replace(honest, errors=honest.errors[:at] + honest.errors[at + 1 :]))
    assert [(v.status, v.kind, v.place) for v in found.verdicts] == [
        ("missing", "formula", (honest.errors[at].prompt, *_place(honest.errors[at])))
    ]
    assert found.exit_code == 3


def _place(e):
    return (e.phase, e.step, e.layer, e.point)


@pytest.mark.turn  # 3 s
def test_a_look_without_the_formula_forgets_no_request(honest, tmp_path):
    folder = Path(shutil.copytree(honest.folder, tmp_path / "run"))
    plain = compare(folder, options=CompareOptions(accum=("float16",), cache=honest.folder.parent / "refs"))
    assert {e.kind for e in plain.errors} >= {"local", "accum"}
    assert not [e for e in plain.errors if e.kind == "formula"]
    compare(folder, options=replace(options(honest.folder.parent, False), fresh=True))
    assert recall(folder).formula == ("a", "b")
    assert gate(folder).exit_code == 0


def test_diagnose_takes_the_records_of_compare(honest, monkeypatch):
    monkeypatch.setattr("precaudit.recording.tracing.shadowed.tap_distances", lambda *_: pytest.fail("computed again"))
    select = Selection.parse(points="attn_out,logits", phases="prefill")
    found = diagnose(honest.run, select, options(honest.folder.parent, False))
    assert (found.formula.unknown, found.formula.differs) == (None, ())
    assert 0 < value(found.formula.largest) <= 1e-7


def test_baselines_hold_the_formula(honest, tmp_path):
    freeze(honest, tmp_path / "b.jsonl")
    kept = read_run_baseline(tmp_path / "b.jsonl")
    rows = [e for e in honest.errors if e.kind == "formula"]
    assert len([p for p in kept.lines if p[0] == "formula"]) == len(rows)
    assert gate(honest, baseline=tmp_path / "b.jsonl").exit_code == 0
    without = replace(honest, errors=[e for e in honest.errors if e.kind != "formula"], formula=())
    missing = gate(without, baseline=tmp_path / "b.jsonl")
    assert (missing.counts["missing"], missing.exit_code) == (len(rows), 3)


def test_nan_in_a_shadow_never_passes(honest):
    at = next(i for i, e in enumerate(honest.errors) if e.kind == "formula")

    for fields, status in (
        ({"rel_l2": "nan"}, "nonfinite"),
        ({"nonfinite": 1}, "nonfinite"),
        ({"rel_l2": None}, "unknown"),
    ):
        errors = [*honest.errors]
        errors[at] = msgspec.structs.replace(errors[at], **fields)
        assert [v.status for v in gate(replace(honest, errors=errors)).verdicts] == [status]


def test_one_row_of_a_long_prompt_is_enough(honest):
    """A fault in one row of thousands hardly moves the norm of the tensor."""
    at = next(i for i, e in enumerate(honest.errors) if e.kind == "formula" and e.point == "attn_out")
    row = msgspec.structs.replace(honest.errors[at], rel_l2=1e-8, scopes={"token": {"rel_l2": (1e-3, 7)}})
    errors = [*honest.errors[:at], row, *honest.errors[at + 1 :]]
    failed = [v for v in gate(replace(honest, errors=errors)).verdicts if v.status == "fail"]
    assert [(v.kind, v.scope, v.index, v.value) for v in failed] == [("formula", "token", 7, 1e-3)]
    assert "1.0e-3" in formula_sentence(errors)


def test_another_program_is_unknown_until_it_is_given(tmp_path):
    parts = replace(Parts(), norm=lambda *a: rms_norm(*a))
    run = traced(tmp_path, parts, points="v")
    found = gate(compare(run, options=options(tmp_path)))
    assert {(v.status, v.kind) for v in found.verdicts} == {("unknown", "formula")}
    assert "compare(run, subject=…)" in found.verdicts[0].text
    assert found.exit_code == 3
    given = compare(
        run, options=replace(options(tmp_path), fresh=True), subject=load("tiny", "bf16", None, "cpu", parts)
    )
    assert gate(given).exit_code == 0


@pytest.mark.turn  # 7 s
def test_a_program_that_cannot_be_lifted_is_unknown(tmp_path):
    from tests.helpers.softmaxes import lifted_softmax, opaque_softmax

    own = load("tiny", "bf16", None, "cpu", replace(Parts(), softmax=opaque_softmax))
    run = traced(tmp_path, own.parts, points="v")
    found = gate(compare(run, options=options(tmp_path), subject=own))
    assert {v.status for v in found.verdicts} == {"unknown"}
    assert "--lift pure_callback=" in found.verdicts[0].text
    lifted = replace(own, lift={"pure_callback": lifted_softmax})
    assert gate(compare(run, options=replace(options(tmp_path), fresh=True), subject=lifted)).exit_code == 0


@pytest.mark.turn  # 8 s
def test_values_that_are_larger_in_batches_alone_are_semantics(tmp_path):
    """v × 1.02 where a batch holds more than one prompt: the shadow of one prompt alone sees nothing."""
    parts = replace(Parts(), attend=in_batches(1.02, Parts().attend))
    run = traced(tmp_path, parts, points="attn_out", texts=TEXTS)
    own = load("tiny", "bf16", None, "cpu", parts)
    found = diagnose(run, Selection.parse(points="attn_out", phases="prefill"), options(tmp_path, False), subject=own)
    first = found.findings[0]
    assert (first.kind, first.point, first.layer) == ("semantics", "attn_out", 0)
    assert value(first.shadow) == pytest.approx(0.02, rel=1e-2)
    alone = traced(tmp_path / "alone", parts, points="attn_out")
    assert gate(compare(alone, options=options(tmp_path), subject=own)).exit_code == 0


@pytest.mark.slow
def test_an_audit_asks_for_the_formula_unless_told_not_to(tmp_path, monkeypatch):
    faulty, _ = FAULTS["epsilon 1e-6"]
    for module in (subject, manifest):
        monkeypatch.setattr(module, "family_parts", lambda _: faulty)
    path = tmp_path / "precaudit.toml"
    base = 'subject = "tiny"\nprompt = ["s1_fact"]\nphases = "prefill"\npoints = "q,logits"\n'
    path.write_text(base)
    found = audit(path)
    assert found.judgement.exit_code == 1
    assert {v.kind for v in found.judgement.verdicts if v.status == "fail"} == {"formula"}
    assert any(n.startswith("formula: FP64 of the program on 1 prompt took ") for n in found.judgement.notes)
    path.write_text(base + "formula = false\n")
    assert audit(path).judgement.exit_code == 0


@pytest.mark.turn  # 4 s
def test_the_shadow_has_the_slots_that_ran(tmp_path, monkeypatch):
    """A short prompt beside a longer one ran in the longer one's 256."""
    ran, real = [], shadowed.tap_distances
    monkeypatch.setattr(
        shadowed, "tap_distances", lambda s, m, work: (ran.append(work.batch.length), real(s, m, work))[1]
    )
    run = traced(tmp_path, points="q", batch=1, texts=("x = 1", "def f(x):\n    return x + 1\n" * 6))
    assert {n.shape for n in run.record.neutrality} == {(1, 256)}
    compare(run, options=options(tmp_path))
    assert ran
    assert set(ran) == {256}
