"""The exam in short (``make exam`` asks it all), and decoders that are broken in ways people have broken them."""

from dataclasses import replace
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from exams.absences import ABSENCES, against_baseline, between_runs
from exams.absences import judged as judged_altered
from exams.faults import FAULTS
from exams.injection import COUNTS, OPERATIONS, into_files, into_program
from exams.injection import record as record_exam
from exams.mistakes import MISTAKES, TEXT, other_base, placed
from exams.rewrites import REWRITES
from precaudit.judging.baselines import freeze
from precaudit.judging.gate import gate
from precaudit.models.jax_decoder import Parts
from precaudit.models.jax_decoder.parts import cache_write, rms_norm
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from precaudit.workflows.starter import init
from tests.helpers.runs import record
from tests.helpers.selected import few


@pytest.fixture(scope="module", params=["bf16", pytest.param("fp32-highest", marks=pytest.mark.slow)])
def honest(request, tmp_path_factory):
    select = Selection.parse(points="all,logits:all", phases="prefill")
    return record_exam(tmp_path_factory.mktemp("exam") / "run", "tiny", request.param, select)


@pytest.mark.slow  # a minute
def test_every_counted_fault_in_a_tensor_is_flagged_there(honest):
    cells = list(into_files("tiny", honest, 1, product(OPERATIONS, FAULTS)))
    assert len(cells) > 100
    assert not [c for c in cells if c.size >= COUNTS and not c.flagged]
    assert sum(c.size < 2 for c in cells) <= 0.1 * len(cells)
    assert {c.status for c in cells if "NaN" in c.fault or "inf" in c.fault} == {"nonfinite"}


@pytest.mark.slow
def test_every_counted_fault_in_the_program_is_flagged_there(tmp_path, honest):
    asked = product(("attn_out",), FAULTS)
    cells = list(into_program(tmp_path, "tiny", honest.record.policy["name"], honest, 1, asked))
    assert not [c for c in cells if c.size >= COUNTS and not c.flagged]


def rope_in_bfloat16(x, cos, sin, a):
    first, second = jnp.split(x.astype(jnp.bfloat16), 2, axis=-1)
    c, s = (lax.reduce_precision(t, 8, 7).astype(jnp.bfloat16)[:, :, None] for t in (cos, sin))
    return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1).astype(a.activations)


def epsilon_outside_the_root(x, w, eps, a):
    y = x.astype(jnp.float32)
    y = y / (jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True)) + jnp.float32(eps * 1e3))
    return (y.astype(a.activations) * w).astype(a.activations)


def softmax_without_maximum(scores, mask, a):
    e = lax.reduce_precision(jnp.exp(scores.astype(jnp.float32)), 5, 10)  # float16 ends at e^11
    e = jnp.where(mask, e, 0.0)
    return (e / jnp.sum(e, axis=-1, keepdims=True)).astype(a.probs)


def cache_off_by_one(cache, layer, rows, slots):
    return cache_write(cache, layer, rows, None if slots is None else slots + 1)


BROKEN = {
    "RoPE in bfloat16": (replace(Parts(), rope=rope_in_bfloat16), {"q", "k"}),
    "epsilon outside the root": (replace(Parts(), norm=epsilon_outside_the_root), {"attn_norm", "mlp_norm"}),
    "float16 softmax without the maximum": (replace(Parts(), softmax=softmax_without_maximum), {"probs", "attn_out"}),
    "cache off by one": (replace(Parts(), cache_write=cache_off_by_one), {"k_cache", "v_cache"}),
}


def judged(folder, parts, baseline=None):
    record(folder / "run", parts=parts, select=Selection.parse(points="all", phases="prefill,decode"))
    return gate(compare(folder / "run", options=CompareOptions(accum=(), cache=folder / "refs")), baseline=baseline)


@pytest.mark.turn  # 5 s
@pytest.mark.parametrize("name", few(BROKEN, "epsilon outside the root", "cache off by one"))  # 5 s each
def test_a_broken_decoder_fails_where_it_is_broken(tmp_path, name):
    parts, points = BROKEN[name]
    found = judged(tmp_path, parts)
    assert found.exit_code == 1
    assert {v.point for v in found.verdicts if v.status in ("fail", "nonfinite") and v.kind != "forward"} & points


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    record(folder / "run", prompts=["def f(x):\n", "import os"], select=Selection.parse(points="all"))
    return compare(folder / "run", options=CompareOptions(accum=(), cache=folder / "refs"))


@pytest.mark.turn  # 6 s
@pytest.mark.parametrize("absence", ABSENCES, ids=lambda a: a.name)
def test_what_is_taken_away_is_said(whole, tmp_path, absence):
    said, right = judged_altered(whole.folder, absence, tmp_path / "altered")
    assert right, said


def test_what_the_other_side_lacks_is_said(whole, tmp_path):
    assert against_baseline(whole, tmp_path) == ("missing", True)
    assert between_runs(whole.folder, tmp_path / "altered") == ("missing", True)


@pytest.mark.turn  # 11 s
@pytest.mark.parametrize("name", few(["sums in halves", "blocked attention"], "sums in halves"))  # 6 s each
def test_an_honest_rewrite_passes(tmp_path, name):
    assert judged(tmp_path, REWRITES[name]).exit_code == 0


def test_an_honest_decoder_passes_and_keeps_its_baseline(tmp_path):
    first = judged(tmp_path, None)
    assert (first.exit_code, set(first.counts)) == (0, {"pass"})
    found = compare(tmp_path / "run", options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    freeze(found, tmp_path / "baseline.jsonl")
    assert gate(found, baseline=tmp_path / "baseline.jsonl").exit_code == 0


@pytest.mark.turn  # 10 s
def test_a_norm_that_is_only_written_apart_passes(tmp_path):
    def twice(x, w, eps, a):
        return rms_norm(jnp.stack([x, x])[1], w, eps, a)

    assert judged(tmp_path, replace(Parts(), norm=twice)).exit_code == 0


def test_init_writes_once(tmp_path):
    assert {p.name for p in init("tiny", tmp_path)} == {"precaudit.toml", "budgets.toml", "precaudit.yml", ".gitignore"}
    with pytest.raises(Exception, match="nothing was written"):
        init("tiny", tmp_path)


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("name", ["sums in fp16", "logits in bf16"])
def test_an_input_read_unrounded_excuses_no_other_fault(tmp_path, name):
    """Noise is wider for an input that was handed on unrounded, where that explains the error: not beside a fault."""
    mistake = next(m for m in MISTAKES if m.name == name)
    select = Selection.parse(points="all", phases="prefill")
    subject = mistake.subject(None if mistake.whole else 2)
    with placed():
        run = trace(subject, tmp_path / "run", [Prompt(id="a", prompt=TEXT)], select, TraceOptions(0))
    found = gate(compare(run, options=CompareOptions(accum=(), cache=tmp_path / "refs")))
    assert mistake.point in {v.point for v in found.verdicts if v.status == "fail" and v.kind == "local"}


def test_tables_of_another_base_turn_by_it():
    subject = other_base(load("tiny", "fp32-highest", None, "cpu"))
    (cos,), (sin,) = subject.tables(9, np.arange(1, 10)[None])
    half = subject.config.head_dim // 2
    angles = np.arange(9.0)[:, None] * 500000.0 ** (-np.arange(half) / half)
    np.testing.assert_allclose(np.asarray(cos) + 1j * np.asarray(sin), np.exp(1j * angles), atol=2.0**-23)


def truncating(x, w, _bias, a):
    """A projection whose float32 sums are cut to bfloat16 instead of rounded: half the elements off by one ulp."""
    wide = jnp.einsum("...i,oi->...o", x, w, preferred_element_type=jnp.float32)
    bits = lax.bitcast_convert_type(wide, jnp.uint32) & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(bits, jnp.float32).astype(a.activations)


@pytest.mark.turn  # 4 s
def test_one_ulp_away_from_ties_is_no_tie(tmp_path):
    """Elements are left out of excess where float32 sums may cross a tie, not wherever they are one ulp off."""
    subject = load("tiny", "bf16", None, "cpu", replace(Parts(), project=truncating))
    select = Selection.parse(points="v,attn_proj,mlp_out", layers="2", phases="prefill")
    run = trace(subject, tmp_path / "run", [Prompt(id="a", prompt=TEXT)], select, TraceOptions(0))
    found = gate(compare(run, options=CompareOptions(accum=(), cache=tmp_path / "refs")))
    failed = {v.point for v in found.verdicts if v.status == "fail" and v.kind == "local"}
    assert failed == {"v", "attn_proj", "mlp_out"}
