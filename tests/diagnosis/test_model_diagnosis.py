"""Diagnosis places and names mistakes (``make exam-diagnose`` makes them all), and accuses no honest program."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from exams.exam_diagnose import MIDDLE, cell, traced
from exams.mistakes import MISTAKES, altered, placed, zeros_read
from exams.rewrites import REWRITES
from precaudit.cli import run
from precaudit.diagnosis.diagnose import diagnose, lift_subject
from precaudit.diagnosis.evidence.caches import explain
from precaudit.diagnosis.evidence.closure import closure
from precaudit.diagnosis.evidence.flips import Flip, LogitsRows, exchanged_tokens, flips, flips_sentence
from precaudit.diagnosis.evidence.invariance import invariance
from precaudit.diagnosis.evidence.positions import shape
from precaudit.diagnosis.evidence.records import Finding
from precaudit.diagnosis.evidence.remedies import _raise_part, remedies
from precaudit.diagnosis.evidence.shares import PLANTED, shares
from precaudit.diagnosis.evidence.views import _relative, partings, summary
from precaudit.interpreters.jaxpr import plant
from precaudit.models.jax_decoder import Parts
from precaudit.models.jax_decoder.parts import project
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import widen
from precaudit.numbers.formats import FORMATS
from precaudit.recording.runs.bits import compare_bits
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.repeat import repeat
from precaudit.recording.tracing.shadowed import exact_tables
from precaudit.recording.tracing.subject import load
from precaudit.references.cache import References
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.references.mutations.flash import Flash
from precaudit.references.mutations.forms import Inputs, quantiser, usual_form
from precaudit.reports.diagnosis import diagnosis_report, growth_lines, jumps, spans
from precaudit.schema.graphs.decoder import present
from precaudit.schema.records.errors import ERROR_KINDS
from precaudit.schema.records.lines import read_lines
from precaudit.schema.selection import Selection
from tests.helpers.runs import everything, record
from tests.helpers.selected import few
from tests.helpers.softmaxes import lifted_softmax, opaque_softmax

pytestmark = pytest.mark.usefixtures("neutral")

QUICK = ("scale twice in decode", "softmax in bf16", "stale KV entry", "columns scaled")
KEPT = ("softmax in bf16", "stale KV entry")  # 8 s each


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("name", few(QUICK, *KEPT))
def test_a_mistake_in_one_layer_is_placed_and_named(tmp_path, name):
    mistake = next(m for m in MISTAKES if m.name == name)
    c = cell(tmp_path, mistake, "middle")
    assert (c.layer, c.found) == (MIDDLE, c.wanted)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name)
def test_a_mistake_in_all_layers_is_placed_and_named(tmp_path, mistake):
    c = cell(tmp_path, mistake, "own" if mistake.whole else "all")
    assert c.right, c


@pytest.mark.turn  # 4 s
def test_a_harmless_rewrite_is_not_accused(tmp_path):
    found = traced(tmp_path, load("tiny", "bf16", None, "cpu", REWRITES["fused projections"]))
    assert (found.exit_code, found.findings, found.unknown) == (0, (), ())
    assert not found.formula.differs
    assert diagnosis_report(found).lines[0].startswith("✓ rounding explains all")


@pytest.mark.slow
def test_decode_that_does_not_depend_on_the_prompt(tmp_path):
    """Local errors of decode attention larger than float16 accumulation makes, and the cause is the cache."""
    parts = replace(Parts(), cache_read=zeros_read)
    prompts = ["def f(x): return", "class Abc: return"]
    select = Selection.parse(points="q,k,v,attn_out,logits", phases="prefill,decode")
    with placed():
        record(tmp_path / "run", prompts=prompts, parts=parts, select=select)
        options = CompareOptions(accum=("float16",), cache=tmp_path / "refs")
        compared = compare(tmp_path / "run", options=options)
        found = diagnose(tmp_path / "run", options=options, subject=load("tiny", "bf16", None, "cpu", parts))
    assert any("decode does not depend on the prompt" in n for n in compared.notes)
    far = [e for e in compared.errors if e.kind == "state" and e.mismatched]
    assert far
    first = found.findings[0]
    assert (first.kind, first.cause, first.point, first.layer) == ("state", "rows not written", "k_cache", 0)
    assert "rows 0 to" in first.says
    assert found.exit_code == 1


def test_a_program_that_is_not_at_hand_is_said(tmp_path, capsys):
    parts = next(m for m in MISTAKES if m.name == "columns scaled").parts(None)
    with placed():
        record(tmp_path / "run", parts=parts, select=Selection.parse(points="v", phases="prefill"))
    assert run(["diagnose", str(tmp_path / "run")]) == 1
    out = capsys.readouterr().out
    assert "none reproduces it — v of layer 0" in out
    assert "every channel has a factor of its own" in out
    assert "Formula: unknown: the program is not the shipped decoder" in out
    kept = read_lines(tmp_path / "run" / "findings.jsonl", Finding)
    assert [(f.kind, f.point, f.layers) for f in kept] == [("unknown", "v", (0, 1, 2, 3, 4))]


@pytest.mark.slow
def test_an_honest_run_needs_no_program_twice(tmp_path, monkeypatch):
    record(tmp_path / "run", select=Selection.parse(points="q,logits", phases="prefill"))
    options = CompareOptions(accum=(), cache=tmp_path / "refs")
    first = diagnose(tmp_path / "run", options=options)
    assert (first.exit_code, first.formula.differs, first.formula.unknown) == (0, (), None)
    monkeypatch.setattr("precaudit.recording.tracing.shadowed.tap_distances", lambda *_: pytest.fail("computed again"))
    again = diagnose(tmp_path / "run", Selection.parse(layers="2", points="q", phases="prefill"), options)
    assert again.formula == first.formula
    assert again.judged == 2


@pytest.mark.turn  # 4 s
def test_what_buys_is_unknown_without_the_device_and_nothing_is_said_where_nothing_buys(tmp_path, monkeypatch):
    record(tmp_path / "run", select=Selection.parse(points="q", phases="prefill"), decode_steps=0)
    found = diagnose(
        tmp_path / "run",
        Selection.parse(layers="2", points="q"),
        options=CompareOptions(accum=(), cache=tmp_path / "refs"),
    )
    monkeypatch.setattr("precaudit.reports.diagnosis.device_kind", lambda _: "gpu")
    assert "To change: unknown: needs gpu" in diagnosis_report(replace(found, remedies=None)).lines
    assert not [line for line in diagnosis_report(replace(found, remedies=())).lines if line.startswith("To change")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run = record(folder / "run", prompts=["def f(x):\n    return x + 1"], select=Selection.parse(points="all"))
    compare(run, options=CompareOptions(accum=(), cache=folder / "refs"))
    return Recorded.of(run), load("tiny", "bf16", None, "cpu")


@pytest.mark.turn  # 20 s
@pytest.mark.parametrize("objective", ["margin", "logprob", "logprob:7", "kl"])
def test_shares_add_up_to_the_change(whole, objective):
    found = shares(*whole, "p0", objective)
    assert found.unknown is None
    assert float(found.change) != 0
    assert found.remainder <= 0.005
    assert float(found.absolute) >= abs(float(found.explained))
    assert len(found.shares) == 5 * 11 + 2


@pytest.mark.parametrize("objective", ["foo", "margin:1", "logprob:x", "logprob:256000"])
def test_an_objective_that_is_none_is_refused(whole, objective, capsys):
    recorded, _ = whole
    assert run(["diagnose", str(recorded.run.folder), "--objective", objective]) == 2
    assert f"objective {objective!r}" in capsys.readouterr().err


@pytest.mark.turn  # 4 s
def test_planted_errors_are_the_local_errors(whole):
    """Forcing every tap to what was recorded gives each operation's own error, as NumPy computes it apart."""
    recorded, subject = whole
    n = len(recorded.run.prompts["p0"].tokens)
    tokens = np.asarray([recorded.run.prompts["p0"].tokens], np.int32)
    points = [p for p in PLANTED if p != "final_norm" and p in present(False)]
    values = {p: np.stack([widen(recorded.rows("p0", "prefill", i, p).values)[None] for i in range(5)]) for p in points}
    rows = np.asarray([[n - 1]], np.int32)
    with jax.enable_x64(True):
        call = plant(lambda p, t, x, b, r: subject.decoder.prefill(p, t, x, b, r, None)[0], "force")
        _, errors = call(values, subject.parameters, exact_tables(subject, n), tokens, np.zeros(1, np.int32), rows)
    kept = read_lines(recorded.run.folder / "errors.jsonl", ERROR_KINDS)
    local = {(e.layer, e.point): e for e in kept if (e.kind, e.phase) == ("local", "prefill")}
    for point in points:
        for layer in range(5):
            e = np.asarray(errors[point][layer])
            size = np.linalg.norm(e) / np.linalg.norm(values[point][layer] - e)
            assert size == pytest.approx(float(local[layer, point].rel_l2), rel=1e-4), (layer, point)


def test_two_views_part_where_attention_sums_another_shape(whole):
    recorded, _ = whole
    found = list(partings(recorded))
    assert {p.against for p in found} == {"prefill", "rescore"} & set(recorded.requested.phases)
    assert {p.point for p in found if p.layer is None} == {"logits"}
    same = summary(recorded, decode_found=False, state_found=False)
    assert "agree bit for bit" in same or "rounding of another shape" in same
    cut = replace(recorded, index={k: v for k, v in recorded.index.items() if k[1] != "decode"})
    assert summary(cut, decode_found=False, state_found=False) is None


@pytest.mark.slow
def test_the_same_text_another_way(whole):
    recorded, subject = whole
    kept = read_lines(recorded.run.folder / "errors.jsonl", ERROR_KINDS)
    found = {w.way: w for w in invariance(recorded, subject, kept)}
    assert found["the same again"].status == "bit-identical"
    assert {w.status for w in found.values()} <= {"bit-identical", "rounding"}

    def worse_in_batches(x, w, bias, a):
        y = project(x, w, bias, a)
        return y * jnp.asarray(1.5 if x.shape[0] > 1 else 1.0, y.dtype)

    wrong = replace(subject, parts=replace(subject.parts, project=worse_in_batches))
    found = {w.way: w for w in invariance(recorded, wrong, kept)}
    assert found["the same again"].status == "bit-identical"
    assert found["a longer neighbour: another bucket and cache"].status == "broken"
    assert found["batch 3, padded right"].status == found["batch 3, padded left"].status == "broken"

    def nan_in_batches(x, w, bias, a):
        y = project(x, w, bias, a)
        return y * jnp.asarray(jnp.nan if x.shape[0] > 1 else 1.0, y.dtype)

    wrong = replace(subject, parts=replace(subject.parts, project=nan_in_batches))
    found = {w.way: w for w in invariance(recorded, wrong, kept)}
    assert found["batch 3, padded left"].status == "broken"
    assert found["layers unrolled"].status in ("bit-identical", "rounding")


@pytest.mark.slow  # 40 s
def test_what_raising_the_policy_buys(whole):
    recorded, subject = whole
    model = Model(subject.config, subject.checkpoint.tensors.read_tensor)
    tokens = np.asarray(recorded.run.prompts["p0"].tokens, np.int32)
    found = {r.part: r for r in remedies(subject, model, "run", [tokens], lambda *_: None, layer=3)}
    parts = {"scores", "probs", "attn_out", "residual", "activations", "mlp"}
    assert set(found) == {*parts, "attention", "layer 3", "all"}
    assert float(found["all"].gain) > 0.99
    assert found["all"].command == "--policy fp32-highest"
    assert found["scores"].command == "--set scores=float32"
    assert (found["attention"].command, found["attention"].point) == ("--set attention=sdpa", "attn_out")
    assert float(found["attention"].local[1]) < float(found["attention"].local[0])
    assert len({r.kl[0] for r in found.values()}) == 1
    assert float(found["all"].kl[1]) < 1e-9
    assert float(found["all"].margin[1]) < 1e-4 < float(found["all"].margin[0])
    assert float(found["residual"].local[1]) < 1e-6 < 1e-4 < float(found["residual"].local[0])
    assert 1e-9 < float(found["layer 3"].kl[1]) != float(found["layer 3"].kl[0])  # the other layers stay as they are


@pytest.mark.turn  # 6 s
def test_a_layer_raised_alone_computes_as_a_wider_policy_does(whole):
    """All layers of a model of one layer in float32 are that layer: the two ways to raise it give the same bits."""
    _, subject = whole
    wide = load("tiny", "fp32-highest", None, "cpu")
    tokens = np.arange(9, dtype=np.int32)[None]
    args = (np.zeros(1, np.int32), np.asarray([[8]], np.int32), None)

    def logits(s):
        return np.asarray(s.decoder.prefill(s.parameters, s.tables(9), tokens, *args)[0], np.float64)

    usual = logits(subject)
    none = logits(replace(subject, raised=((9,), wide.policy)))
    one = logits(replace(subject, raised=((2,), wide.policy)))
    np.testing.assert_array_equal(none, usual)
    assert np.abs(one - usual).max() > 0
    exact = logits(wide)
    assert np.linalg.norm(one - exact) < 1.5 * np.linalg.norm(usual - exact)


def test_what_flips_is_told_with_its_distance():
    exact = np.array([5.0, 4.0, 3.9, 1.0, 0.5, 0.4, -3.0])
    close = np.array([5.0, 4.0, 3.9, 1.0, 0.3, 0.6, -3.0])
    wrong = np.array([5.0, 4.0, 3.9, 1.0, 0.5, 0.4, 9.0])
    assert [(k, came, fell) for k, came, fell, _ in exchanged_tokens(close, exact)] == [(5, (5,), (4,))]
    assert next(exchanged_tokens(close, exact))[3] == pytest.approx(0.1)
    assert [(k, came, fell, apart) for k, came, fell, apart in exchanged_tokens(wrong, exact)] == [
        (1, (6,), (0,), 8.0), (5, (6,), (4,), 3.5),
    ]  # fmt: skip
    near = Flip("a", "decode", 2, 7, 1, (1,), (0,), 0.1, True)
    assert "a at step 2 (near tie, 0.1 apart)" in flips_sentence(LogitsRows(4, (near,)), 3)
    assert "top-1 is not FP64's in 1 of 4 rows, 1 of them near ties" in flips_sentence(LogitsRows(4, (near,)), 3)
    assert "stay FP64's for 3 steps" in flips_sentence(LogitsRows(4, (), 0, 3), 3)
    assert "stay" not in flips_sentence(LogitsRows(4, (), 0, 2), 3)
    assert flips_sentence(LogitsRows(0, ()), 3) is None


def test_flips_of_a_run_are_near_where_sigma_says(whole, tmp_path):
    """Against an FP64 reference with two top tokens exchanged: a near tie under a wide σ, none under a narrow one."""
    recorded, subject = whole
    record, tokens = recorded.run.record, recorded.fed_tokens("p0")
    rows = recorded.logit_rows("p0")
    weights = f"{record.model.sha256}:{record.policy['weights']}"
    exact = np.concatenate([widen(recorded.tensor("p0", "rescore", 0, None, "logits"))])
    assert len(exact) == len(rows)
    best = int(exact[0].argmax())
    other = (best + 1) % len(exact[0])
    exact[0, other] = exact[0, best] + 0.5
    References.of(tmp_path, weights, subject.config, tokens).save(None, "logits", rows, exact)

    def found(sigma):
        return [f for f in flips(recorded, subject.config, weights, tmp_path, sigma).flips if f.k == 1]

    assert {(f.phase, f.step, f.came, f.fell) for f in found(1.0)} >= {("prefill", 0, (best,), (other,))}
    assert all(f.near for f in found(1.0))
    assert next(f.apart for f in found(0.1)) == pytest.approx(0.5)
    assert not any(f.near for f in found(0.1) if f.position == rows[0])
    assert flips(recorded, subject.config, weights, tmp_path / "nothing", 1.0).rows == 0


def test_growth_says_where_it_jumps(whole):
    recorded, _ = whole
    kept = read_lines(recorded.run.folder / "errors.jsonl", ERROR_KINDS)
    assert "without a jump" in jumps(kept)
    risen = [
        msgspec.structs.replace(e, rel_l2=float(e.rel_l2) * 10)
        if (e.kind, e.point) == ("forward", "resid_out") and e.layer >= 3
        else e
        for e in kept
    ]
    assert "with a jump at layer 3 (× " in jumps(risen)
    assert next(line for line in growth_lines(risen) if "jumps" in line).split()[0] == "3"
    assert jumps([e for e in kept if e.layer == 0]) == ""


@pytest.mark.slow  # 20 s; test_nonfinite_weights diagnoses one, too
def test_a_weight_that_is_nan_is_the_finding_and_nothing_after_it(tmp_path, capsys):
    record(tmp_path / "run", subject=nan_model(), select=everything())
    assert run(["diagnose", str(tmp_path / "run")]) == 1
    out = capsys.readouterr().out
    assert out.startswith("✗ mlp_out of layer 2, prefill and decode and rescore: weights: ")
    assert "\n1. semantics: weights not finite — mlp_out of layer 2" in out
    assert "'model.layers.2.mlp.down_proj.weight': 1 value is NaN or infinite" in out
    assert "rows are not finite" in out
    assert "not finite from layer 2 on" in out
    assert "Logits: unknown" in out


def test_the_distance_of_two_views():
    a, b = np.array([3.0, 4.0], np.float32), np.array([3.0, 4.5], np.float32)
    assert _relative(b, a) == pytest.approx(0.1)
    assert _relative(a, a.copy()) == 0
    broken = np.array([3.0, np.nan], np.float32)
    assert _relative(a, broken) == np.inf
    assert _relative(broken, broken) is None


def nan_model():
    folder = altered()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][5, 7] = np.nan
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@pytest.mark.turn  # 3 s
def test_nan_in_caches_alone_is_no_rounding(tmp_path, capsys, monkeypatch):
    """Nothing was recorded that would say where it comes from: the cache itself is the finding.

    FP64's logits are NaN, too: no policy that mends them is looked for.
    """
    select = Selection.parse(points="k_cache,v_cache", phases="decode")
    record(tmp_path / "run", subject=nan_model(), select=select)
    monkeypatch.setattr("precaudit.diagnosis.evidence.remedies._measure", lambda *_: pytest.fail("a policy was tried"))
    assert run(["diagnose", str(tmp_path / "run")]) == 1
    out = capsys.readouterr().out
    assert "state: not finite — k_cache of layer 3, decode" in out
    assert "To change" not in out


@pytest.mark.turn  # 4 s
def test_nan_that_came_in_is_not_blamed_on_the_operation(tmp_path, capsys):
    record(tmp_path / "run", subject=nan_model(), select=Selection.parse(points="all", layers="3", phases="prefill"))
    assert run(["diagnose", str(tmp_path / "run")]) == 1
    out = capsys.readouterr().out
    assert "semantics: weights not finite — attn_norm of layer 3" in out
    assert "'model.layers.2.mlp.down_proj.weight': 1 value is NaN or infinite; FP64 of the model is NaN from " in out
    assert "rounding beyond the policy" not in out


@pytest.mark.slow  # 20 s
def test_a_rescore_alone_says_nothing_of_the_formula(tmp_path):
    record(tmp_path / "run", select=Selection.parse(points="v", phases="rescore"))
    found = diagnose(tmp_path / "run", options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    assert "neither prefill nor decode" in found.formula.unknown


def test_views_of_a_short_prompt_part_where_they_do(tmp_path):
    """Rescore records the rows decode made, from the last prompt position on: its first row is not position 0."""
    run_ = record(tmp_path / "run", prompts=["abcd"], select=Selection.parse(points="all"))
    assert all(p.distance < 0.1 for p in partings(Recorded.of(run_)))


def test_shares_need_every_operation(tmp_path):
    run_ = record(tmp_path / "run", select=Selection.parse(points="v,logits", phases="prefill"))
    found = shares(Recorded.of(run_), load("tiny", "bf16", None, "cpu"), "p0")
    assert "shares need every operation of prefill" in found.unknown


def test_nothing_judged_is_said(tmp_path, capsys):
    record(tmp_path / "run", select=Selection.parse(points="v", phases="prefill"))
    assert run(["diagnose", str(tmp_path / "run"), "--points", "router"]) == 2
    assert "none of router is a point of tiny" in capsys.readouterr().err


def test_how_errors_depend_on_position():
    at = np.arange(64)
    assert shape(np.where(at == 17, 1.0, 1e-9), at) == "only at position 17"
    assert shape(np.where(at < 20, 1e-9, 1.0), at) == "from position 20 on, and nowhere before"
    assert shape(1.0 + at, at).startswith("grows with position")
    assert shape(np.ones(64), at) == "at every position alike"
    assert shape(np.where(at == 5, np.nan, 1.0), at) == "not finite at 1 of 64 positions, first 5"


def test_closure_tells_what_excess_precision_keeps(whole):
    recorded, subject = whole
    kept = read_lines(recorded.run.folder / "errors.jsonl", ERROR_KINDS)
    found = {
        c.format: c for c in closure(recorded, Model(subject.config, subject.checkpoint.tensors.read_tensor), kept)
    }
    bf16 = found["bfloat16"]
    assert bf16.kept > 0
    assert bf16.off[0] > bf16.on[1]
    assert found["float32"].off is None


@pytest.mark.turn  # 9 s
def test_a_run_is_repeated_bit_for_bit(tmp_path, capsys):
    record(tmp_path / "run", select=Selection.parse(points="v,logits"), batch=1)
    assert run(["trace", "--repeat", str(tmp_path / "run"), "-o", str(tmp_path / "again")]) == 0
    assert "tensors are bit-identical" in capsys.readouterr().out
    wrong = next(m for m in MISTAKES if m.name == "columns scaled").parts(2)
    with placed():
        found = repeat(tmp_path / "run", tmp_path / "other", load("tiny", "bf16", None, "cpu", wrong))
    assert (found.first.layer, found.first.point, found.first.phase) == (2, "v", "prefill")
    found = compare_bits(found.run, replace(found.run, points=found.run.points[:-1]))
    assert found.differing == 1
    assert found.first is not None
    assert run(["trace", "tiny", "--repeat", str(tmp_path / "run")]) == 2
    assert run(["trace"]) == 2


@pytest.mark.slow  # 40 s
def test_a_program_that_cannot_be_lifted_is_unknown_until_its_meaning_is_given(tmp_path):
    subject = load("tiny", "bf16", None, "cpu", replace(Parts(), softmax=opaque_softmax))
    record(tmp_path / "run", parts=subject.parts, select=Selection.parse(points="all", phases="prefill"))
    options = CompareOptions(accum=(), cache=tmp_path / "refs")
    found = diagnose(tmp_path / "run", options=options, subject=subject)
    assert "--lift pure_callback=" in found.formula.unknown
    assert found.shares[0].unknown is not None
    lifted = lift_subject(tmp_path / "run", subject, options, {"pure_callback": lifted_softmax})
    found = diagnose(tmp_path / "run", options=options, subject=lifted)
    assert (found.formula.unknown, found.formula.differs, found.exit_code) == (None, (), 0)
    assert found.shares[0].remainder <= 0.005


def test_a_meaning_that_is_not_there_is_refused(tmp_path, capsys):
    record(tmp_path / "run", select=Selection.parse(points="v", phases="prefill", layers="1"))
    assert run(["diagnose", str(tmp_path / "run"), "--lift", "x=no.such:thing"]) == 2
    assert "NAME=MODULE:FUNCTION" in capsys.readouterr().err


CACHE = np.random.default_rng(5).normal(size=(6, 2, 4)).astype(np.float32).astype(FORMATS["bfloat16"].dtype)


def test_caches_are_explained():
    def said(found):
        return explain(found, CACHE)[:2]

    stale = CACHE.copy()
    stale[3] = stale[1]
    zero = CACHE.copy()
    zero[2:4] = 0
    shifted = np.concatenate([CACHE[:1], CACHE[:-1]])
    foreign = CACHE.copy()
    foreign[4] = 9
    narrow = CACHE.astype(np.float32).astype(FORMATS["float8_e4m3fn"].dtype).astype(CACHE.dtype)
    assert said(stale) == ("stale row", "state")
    assert said(zero) == ("rows not written", "state")
    assert said(shifted) == ("rows shifted", "state")
    assert said(foreign) == ("foreign rows", "state")
    assert said(narrow) == ("cache in float8_e4m3fn", "format")
    assert said(quantiser(8)(widen(CACHE)).astype(CACHE.dtype)) == ("cache in int8", "format")
    assert said(quantiser(4)(widen(CACHE)).astype(CACHE.dtype)) == ("cache in int4", "format")
    assert explain(stale, CACHE).says == "row 3 holds row 1; 1 rows differ"


def test_integers_are_within_half_a_step():
    x = np.random.default_rng(2).normal(size=(5, 3, 8))
    step = np.abs(x).max(axis=-1, keepdims=True) / 127
    assert (np.abs(quantiser(8)(x) - x) <= step / 2 * (1 + 1e-12)).all()
    assert len(np.unique(np.round(quantiser(4)(x)[0, 0] / (np.abs(x[0, 0]).max() / 7)))) <= 8
    assert not quantiser(8)(np.zeros((1, 1, 4))).any()


@pytest.mark.parametrize("block", [2, 7, 64])
def test_flash_attention_is_attention(block):
    rng = np.random.default_rng(3)
    q, k, v = rng.normal(size=(9, 4, 8)), rng.normal(size=(9, 2, 8)), rng.normal(size=(9, 2, 8))
    o = Inputs(Model(load("tiny", device="cpu").config, None), 0, "attn_out", np.arange(9), (q, k, v))
    np.testing.assert_allclose(Flash(block=block)(o, FP64), usual_form(o, FP64), rtol=1e-13, atol=1e-14)


def test_layers_are_told_in_runs():
    assert spans((1, 2, 3, 5, 7, 8)) == "1 to 3, 5, 7, 8"


def test_remedies_share_weights_of_one_format():
    """A second copy of weights in float32 would be four times a bfloat16 model."""
    subject = load("tiny", "bf16", None, "cpu")
    held = {"bfloat16": subject}
    first = _raise_part(held, subject, "activations", {"activations": "float32"}, None)
    second = _raise_part(held, subject, "all", {"activations": "float32", "residual": "float32"}, None)
    third = _raise_part(held, subject, "residual", {"residual": "float32"}, None)
    assert second.parameters["embed"] is first.parameters["embed"]
    assert third.parameters["embed"] is subject.parameters["embed"]
    assert first.parameters["embed"].dtype == np.float32
