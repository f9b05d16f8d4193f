"""Sums of rows place, at default points, what no recorded tensor shows; honest programs stay well within limits."""

import re
from dataclasses import replace
from itertools import product
from unittest import mock

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from precaudit.diagnosis.diagnose import diagnose
from precaudit.judging.gate import gate
from precaudit.models.jax_decoder import Parts
from precaudit.models.jax_decoder.decoder import Decoder
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import Rounding
from precaudit.numbers.arrays import as_format
from precaudit.numbers.row_sums import grid_factors, hashes_of, signs, sums_of
from precaudit.recording.runs.reader import open_run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
from precaudit.references.comparison.compare import compare
from precaudit.reports.headline import headline
from precaudit.schema.coverage import judged_by_sums, points_with_sums
from precaudit.schema.graphs.decoder import DEFAULT_POINTS, support
from precaudit.schema.limits import default_limits
from precaudit.schema.places import Place
from precaudit.schema.policies import recorded_policy
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.base import value
from precaudit.schema.selection import Selection
from tests.helpers.selected import few

pytestmark = pytest.mark.usefixtures("neutral", "own_programs")
TEXTS = ("def read(path):\n    return open(path).read()", "The sum of two odd numbers is")
PROMPTS = [Prompt(id=f"p{i}", prompt=text) for i, text in enumerate(TEXTS)]
FAULTY = 2


def recorded(folder, points=None, parts=None, policy="bf16", batch=2, phases="prefill,decode", layers=None):
    select = Selection.parse(points=points, phases=phases, layers=layers)
    options = TraceOptions(2, force=True, batch=batch, pad="left")
    return trace(load("tiny", policy, None, "cpu", parts), folder / "run", PROMPTS, select, options)


def compared(folder, run, **how):
    return compare(run, options=CompareOptions(accum=(), cache=folder / "refs"), **how)


def failing(found):
    return {(v.kind, v.layer, v.point) for v in gate(found).verdicts if v.status in ("fail", "nonfinite")}


def in_stream(change, name="resid_mid"):
    """A decoder whose stream is changed where it is made, in layer FAULTY."""
    from precaudit.models.jax_decoder import decoder

    honest, where = decoder.tap, []

    def tap(x, point):
        if point != name:
            return honest(x, point)
        return honest(jnp.where(where[-1] == FAULTY, change(x.astype(jnp.float32)).astype(x.dtype), x), point)

    original = Decoder._layer

    def layer(self, x, cache, w, index, step):
        where.append(index)
        return original(self, x, cache, w, index, step)

    return mock.patch.multiple(decoder, tap=tap), mock.patch.object(Decoder, "_layer", layer)


def integers(x):
    """int8 of every row with a scale of its own."""
    scale = jnp.abs(x).max(axis=-1, keepdims=True) / 127
    return jnp.round(x / scale) * scale


@pytest.mark.turn  # 3 s
def test_a_programs_words_are_those_of_the_rows_that_it_records_whole(tmp_path):
    few, every = recorded(tmp_path / "few"), recorded(tmp_path / "all", "all")
    a, b = Recorded.of(few), Recorded.of(every)
    assert a.requested.row_sums == ("scores", "attn_proj", "resid_mid", "mlp_out", "resid_out")
    assert b.requested.row_sums == ()
    for prompt in ("p0", "p1"):
        for phase in ("prefill", "decode"):
            for point in a.requested.row_sums[1:]:
                found, whole = (x.row_sums(prompt, phase, 3, point) for x in (a, b))
                assert (found.hashes == (whole.hashes if point == "resid_out" else 0)).all()
                np.testing.assert_allclose(found.sums, whole.sums, rtol=0, atol=1e-5 * whole.sizes.max())
                np.testing.assert_allclose(found.sizes, whole.sizes, rtol=1e-6)
    whole = b.tensor("p1", "prefill", 0, 3, "scores").astype(np.float64).transpose(1, 0, 2)
    seen = np.where(np.tril(np.ones(whole.shape[::2]))[:, None] > 0, whole, 0)
    assert a.start_of("p1") > 0  # its keys count from its own first
    found = a.row_sums("p1", "prefill", 3, "scores").sums
    np.testing.assert_allclose(
        found, sums_of(seen, np.arange(len(seen))), rtol=0, atol=1e-5 * np.abs(seen).sum(axis=(1, 2)).max()
    )


def test_a_sum_errs_as_much_as_its_row():
    """E (Σ ± e)² = ‖e‖², whatever e is: here a rounding to bfloat16, and one number for all elements."""
    draw = np.random.default_rng(3)
    x, at = draw.standard_normal((4000, 96)), np.arange(4000)
    rounding = as_format(x, "bfloat16").astype(np.float64) - x
    for e in (rounding, np.full_like(x, 0.25), np.tile(rounding[:1], (4000, 1))):
        units = sums_of(e, at) / np.sqrt((e**2).sum(axis=1))[:, None]
        assert abs(np.sqrt((units**2).mean()) - 1) < 0.05
    bound = 2.0**-8 * np.sqrt((x**2).sum(axis=1)) / np.sqrt(3)
    assert np.sqrt(((sums_of(rounding, at) / bound[:, None]) ** 2).mean()) < 1


def test_signs_are_balanced_and_lanes_independent():
    first, second = signs(grid_factors(1, 4096))[:, 0]
    assert abs(first.sum()) < 4 * 64
    assert abs(second.sum()) < 4 * 64
    assert abs((first * second).sum()) < 4 * 64


def test_one_element_that_differs_changes_both_words_of_a_hash():
    rows = as_format(np.random.default_rng(0).standard_normal((50, 96)), "bfloat16")
    other = rows.copy()
    other[np.arange(50), np.arange(50)] *= -1
    assert (hashes_of(rows) != hashes_of(other)).all()


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("policy", ["bf16", "fp32-highest", "kv-int8", "w8a8", "fused"])
def test_honest_sums_are_within_two_thirds_of_their_limits(tmp_path, policy):
    found = compared(tmp_path, recorded(tmp_path, policy=policy))
    assert failing(found) == set()
    sums = [e for e in found.errors if e.kind == "sums"]
    asked = found.run.record.requested
    assert {e.point for e in sums} == set(judged_by_sums(asked.points, asked.support, sparse=False))
    assert {e.point for e in sums} >= {"attn_norm", "mlp_out", "final_norm"}
    limits = default_limits()
    for e in sums:
        n = e.slices["token"]
        assert value(e.ratio) <= 0.67 * limits.sums.at(n), e
        assert value(e.scopes["token"]["ratio"][0]) <= 0.67 * limits.token_sums.at(n), e
    handed = [e for e in found.errors if e.kind == "state" and e.point == "resid_in"]
    assert {e.layer for e in handed} == set(range(5))
    assert all(e.mismatched == 0 for e in handed)


STREAM = {
    "0.78 % too large": lambda x: x * 1.0078125,
    "int8": integers,
    "float8": lambda x: as_float8(x),
    "a token zeroed": lambda x: x.at[:, 3].set(0) if x.shape[1] > 3 else x,
}


def as_float8(x):
    return x.astype(jnp.float8_e4m3fn).astype(jnp.float32)


BOTH = ("resid_mid", "resid_out")


@pytest.mark.turn  # 20 s
@pytest.mark.parametrize("case", few(list(product(STREAM, BOTH)), next(zip(STREAM, BOTH, strict=False))))  # 14 s each
def test_a_stream_that_is_not_its_summands_fails_in_its_layer(tmp_path, case):
    fault, point = case
    taps, layers = in_stream(STREAM[fault], point)
    with taps, layers:
        found = compared(tmp_path, recorded(tmp_path))
    assert {f for f in failing(found) if f[0] != "forward"} == {("sums", FAULTY, point)}
    (finding,) = diagnose(found.run, options=CompareOptions(accum=(), cache=tmp_path / "refs")).findings
    assert (finding.layer, finding.point, finding.kind) == (FAULTY, point, "unknown")
    assert "--points all" in finding.says
    assert bool(re.search(r"its values are 0\.(78|79|8) % too large", finding.says)) == (fault == "0.78 % too large")


@pytest.mark.turn  # 4 s
def test_one_score_times_12_fails_in_its_layer(tmp_path):
    honest = Parts()

    def scores(q, k, scale, a):
        y = honest.scores(q, k, scale, a)
        if y.shape[2] == 1:
            return y
        return y.at[:, 1, 20, 5].multiply(1.2)

    found = compared(tmp_path, recorded(tmp_path, parts=replace(honest, scores=scores), batch=1, phases="prefill"))
    assert {(f[0], f[2]) for f in failing(found)} >= {("sums", "scores")}
    worst = [v for v in gate(found).verdicts if v.kind == "sums" and v.status == "fail"]
    assert {v.index for v in worst if v.scope == "token"} == {20}


@pytest.mark.turn  # 4 s
def test_a_projection_that_is_off_fails_in_its_layer(tmp_path):
    honest, calls = Parts(), []

    def project(x, w, b, a):
        calls.append(w.shape)
        y = honest.project(x, w, b, a)
        return (y.astype(jnp.float32) * 1.01).astype(y.dtype) if x.shape[-1] == y.shape[-1] == 128 else y

    found = compared(tmp_path, recorded(tmp_path, parts=replace(honest, project=project), phases="prefill"))
    assert ("sums", 0, "attn_proj") in failing(found)


def off(part, change):
    """A part of the decoder whose results are changed, as they are stored."""
    return lambda *given: change(part(*given).astype(jnp.float32)).astype(given[0].dtype)


IN_THE_MLP = {
    "2 % too large": (("bf16", lambda x: x * 1.02), ("fp32-highest", lambda x: x * 1.0001)),
    "int8": (("bf16", integers), ("fp32-highest", integers)),
    "float8": (("bf16", as_float8), ("fp32-highest", as_float8)),
    "a token zeroed": (("bf16", STREAM["a token zeroed"]), ("fp32-highest", STREAM["a token zeroed"])),
}


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("case", [(name, *pair) for name, pairs in IN_THE_MLP.items() for pair in pairs])
def test_what_is_wrong_inside_the_mlp_fails_at_its_output_in_every_layer(tmp_path, case):
    _, policy, change = case
    parts = replace(Parts(), activate=off(Parts().activate, change))
    found = compared(tmp_path, recorded(tmp_path, parts=parts, policy=policy, batch=1, phases="prefill"))
    placed = {f for f in failing(found) if f[0] not in ("forward",)}
    assert placed == {("sums", layer, "mlp_out") for layer in range(5)}


def test_a_nan_inside_the_mlp_is_told_at_its_output(tmp_path):
    parts = replace(Parts(), activate=off(Parts().activate, lambda x: x.at[:, 2, 3].set(jnp.nan)))
    run = recorded(tmp_path, parts=parts, batch=1, phases="prefill", layers="0")
    judged = gate(compared(tmp_path, run))
    assert {(v.kind, v.layer, v.point) for v in judged.verdicts if v.status == "nonfinite" and v.kind != "forward"} == {
        ("sums", 0, "mlp_out")
    }
    assert "1 row has NaN or infinite values" in str(headline(judged, "run"))
    found = diagnose(run, options=CompareOptions(accum=(), cache=tmp_path / "refs")).findings
    (finding,) = (f for f in found if f.point == "mlp_out")
    assert (finding.cause, finding.layer) == ("not finite", 0)
    assert finding.says.startswith("1 of its rows have NaN")


def test_a_finding_says_from_where_operations_were_made_again(tmp_path):
    parts = replace(Parts(), activate=off(Parts().activate, lambda x: x * 1.05))
    run = recorded(tmp_path, parts=parts, batch=1, phases="prefill", layers="0")
    compared(tmp_path, run)
    (finding,) = diagnose(run, options=CompareOptions(accum=(), cache=tmp_path / "refs")).findings
    assert (finding.layer, finding.point) == (0, "mlp_out")
    assert "are not those that every operation from attn_proj to it gives; its values are" in finding.says


def test_rows_that_are_far_off_have_more_draws(tmp_path):
    """What two draws make small by chance is no fault: noise of such rows is the largest of eight."""
    from precaudit.references.textbook import sums

    asked = []

    def once(recorded, model, policy, place, positions, seeds):
        asked.append((place.point, len(positions), tuple(seeds)))
        made = sums_made(recorded, model, policy, place, positions, seeds)
        if tuple(seeds) == sums.DRAWS:  # as if both draws had been lucky at one row
            draws = [y.copy() for y in made.draws]
            for y in draws:
                y[3] = made.rows[3] + 1e-6 * (y[3] - made.rows[3])
            made = made._replace(draws=tuple(draws))
        return made

    sums_made = sums.made_through
    run = recorded(tmp_path, batch=1, phases="prefill", layers="0")
    with mock.patch.object(sums, "made_through", once), mock.patch.object(sums.np, "median", return_value=0.0):
        found = compared(tmp_path, run)
    assert {rows for point, rows, seeds in asked if point == "mlp_out" and seeds == sums.MORE_DRAWS}
    assert failing(found) == set()


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("policy", ["bf16", "fp32-highest"])
def test_norms_that_are_off_fail_at_each(tmp_path, policy):
    """Whether what they read was recorded (bf16, where a compiler may fuse) or is known by its lengths and sums."""
    parts = replace(Parts(), norm=off(Parts().norm, lambda x: x * 1.02))
    found = compared(tmp_path, recorded(tmp_path, parts=parts, policy=policy, batch=1, phases="prefill"))
    assert failing(found) >= {("sums", layer, "attn_norm") for layer in range(5)}
    assert ("sums", None, "final_norm") in failing(found) or policy == "bf16"  # one row of two sums: 1 % there is less


@pytest.mark.turn  # 4 s
def test_the_last_norm_is_judged_where_what_it_reads_is_recorded(tmp_path):
    found = compared(tmp_path, recorded(tmp_path, "attn_out,resid_out,logits", batch=1, phases="prefill"))
    assert gate(found).exit_code == 0
    assert {e.layer for e in found.errors if e.kind == "sums" and e.point == "final_norm"} == {None}
    parts = replace(Parts(), norm=off(Parts().norm, lambda x: x * 1.1))
    run = recorded(tmp_path / "off", "attn_out,resid_out,logits", parts, "fp32-highest", 1, "prefill")
    assert ("sums", None, "final_norm") in failing(compared(tmp_path, run))


@pytest.mark.turn  # 4 s
def test_norms_that_read_a_stream_before_it_was_rounded_are_honest(tmp_path):
    """As compilers fuse them: what was recorded is half a unit in the last place off what was read."""
    honest = Parts()

    def norm(x, weight, eps, a):
        wide = x.astype(jnp.float32)
        draw = jax.random.uniform(jax.random.key(x.shape[1]), x.shape, minval=-1.0, maxval=1.0)
        return honest.norm(wide * (1 + 2.0**-9 * draw), weight, eps, a).astype(x.dtype)

    text = Prompt(id="long", tokens=tuple(int(x) for x in np.random.default_rng(0).integers(1, 200, 400)))
    select = Selection.parse(phases="prefill")
    subject = load("tiny", "bf16", None, "cpu", replace(honest, norm=norm))
    found = compared(tmp_path, trace(subject, tmp_path / "run", [text], select, TraceOptions(0)))
    limits = default_limits()
    sums = [e for e in found.errors if e.kind == "sums"]
    assert {e.point for e in sums} >= {"attn_norm", "mlp_out"}
    for e in sums:
        assert value(e.ratio) <= 0.75 * limits.sums.at(e.slices["token"]), (e.point, e.layer)


def test_a_norm_with_weights_of_zero_tells_what_it_can(tmp_path):
    """What such a weight hides has the size that the others lack of the row's length."""
    from precaudit.references.textbook.unrecorded import before_norm

    run = recorded(tmp_path, policy="fp32-highest", batch=1, phases="prefill")
    found = Recorded.of(run)
    entering = found.row_sums("p0", "prefill", 2, "resid_in")
    rows = found.rows("p0", "prefill", 2, "attn_norm")
    model = Model(found.config, load("tiny", "fp32-highest", None, "cpu").checkpoint.tensors.read_tensor)
    place, policy = Place("p0", "prefill", 0, 2, "attn_norm"), recorded_policy(run.record)
    whole = before_norm(found, model, policy, place, rows.positions)
    np.testing.assert_allclose(np.linalg.norm(whole.rows, axis=1), entering.sizes, rtol=1e-5)
    hidden = [3, 50]
    model.context(2, rows.positions, Rounding()).tensor("input_layernorm.weight")[hidden] = 0
    part = before_norm(found, model, policy, place, rows.positions)
    np.testing.assert_array_equal(np.delete(part.rows, hidden, 1), np.delete(whole.rows, hidden, 1))
    lost = np.sqrt((part.spread[:, hidden] ** 2).sum(axis=1) / 3)  # of a uniform error
    np.testing.assert_allclose(lost, np.linalg.norm(whole.rows[:, hidden], axis=1), rtol=1e-2)


@pytest.mark.turn
def test_a_stream_that_is_changed_between_layers_is_found_by_its_hashes(tmp_path):
    original = Decoder._layer

    def layer(self, x, cache, w, index, step):
        return original(self, jnp.where(index == FAULTY, (x * 0.98).astype(x.dtype), x), cache, w, index, step)

    with mock.patch.object(Decoder, "_layer", layer):
        found = compared(tmp_path, recorded(tmp_path, policy="fp32-highest"))
    assert {f for f in failing(found) if f[0] != "forward"} == {("state", FAULTY, "resid_in")}
    (finding,) = diagnose(found.run, options=CompareOptions(accum=(), cache=tmp_path / "refs")).findings
    assert finding.cause == "stream changed"
    assert "are not what the layer before handed on" in finding.says


@pytest.mark.turn  # 6 s
def test_sums_that_are_not_there_are_missing(tmp_path):
    run = recorded(tmp_path)
    lines = (run.folder / "points.jsonl").read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'"mlp_out.sums"' not in line]
    assert len(kept) < len(lines)
    bare = replace(run, points=[p for p in run.points if p.point != "mlp_out.sums"])
    verdicts = gate(compared(tmp_path, bare)).verdicts
    assert {(v.status, v.point) for v in verdicts} >= {("missing", "mlp_out.sums")}
    assert gate(compared(tmp_path, bare)).exit_code == 3


@pytest.mark.turn  # 4 s
def test_an_operation_that_cannot_be_emulated_is_unknown(tmp_path):
    run = recorded(tmp_path)
    with mock.patch("precaudit.references.textbook.sums.not_emulated", return_value="such products"):
        found = compared(tmp_path, run)
    unknown = {(e.point, e.unknown) for e in found.errors if e.kind == "sums" and e.unknown}
    points = ("attn_norm", "scores", "attn_proj", "mlp_out", "final_norm")
    assert unknown == {(point, "no emulation of such products") for point in points}
    assert gate(found).exit_code == 3


@pytest.mark.turn  # 4 s
def test_a_run_without_sums_is_judged_as_before(tmp_path):
    run = recorded(tmp_path)
    requested = msgspec.structs.replace(run.record.requested, row_sums=())
    record = msgspec.structs.replace(run.record, requested=requested)
    old = replace(run, record=record, points=[p for p in run.points if not p.point.endswith(".sums")])
    found = compared(tmp_path, old)
    assert not [e for e in found.errors if e.kind == "sums"]
    assert gate(found).exit_code == 0


@pytest.mark.turn  # 4 s
def test_some_points_alone_are_compared_without_sums(tmp_path):
    run = recorded(tmp_path)
    compared(tmp_path, run)
    some = compared(tmp_path, open_run(run.folder), select=Selection.parse(points="q"))
    assert {e.kind for e in some.errors} >= {"local", "forward"}
    assert not [e for e in some.errors if e.kind == "sums"]


@pytest.mark.turn  # 3 s
def test_layers_that_were_not_recorded_hand_nothing_on(tmp_path):
    found = compared(tmp_path, recorded(tmp_path, layers="0,3,4"))
    assert failing(found) == set()
    assert gate(found).exit_code == 0
    handed = {e.layer for e in found.errors if e.kind == "state" and e.point == "resid_in"}
    assert handed == {0, 4}


def test_what_is_recorded_whole_has_no_sums():
    held = support(DEFAULT_POINTS, ("prefill", "decode"))
    judged = ("attn_norm", "scores", "attn_proj", "resid_mid", "mlp_out", "resid_out", "final_norm")
    assert judged_by_sums(DEFAULT_POINTS, held, sparse=False) == judged
    routed = tuple("router" if p == "mlp_out" else p for p in judged)  # what experts make is not known
    assert judged_by_sums(DEFAULT_POINTS, held, sparse=True) == routed
    assert "attn_out" not in points_with_sums(DEFAULT_POINTS, held, sparse=False)
    assert judged_by_sums(("logits",), ("final_norm",), sparse=False) == ("resid_mid", "resid_out", "final_norm")


@pytest.mark.turn  # 3 s
def test_scores_in_decode_need_the_caches_that_they_read(tmp_path):
    """Queries and keys alone: sums of scores are judged in prefill, and in decode there is nothing to judge them by."""
    found = compared(tmp_path, recorded(tmp_path, points="q,k", layers="0"))
    assert {e.phase for e in found.errors if e.kind == "sums" and e.point == "scores"} == {"prefill"}
    assert gate(found).counts.keys() == {"pass"}
