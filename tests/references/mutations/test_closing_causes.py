"""A cause is named only if it closes, numbers are fitted, parts are told by index, and the rest is described."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from exams.mistakes import MISTAKES, placed
from precaudit.diagnosis.advice import widening_options
from precaudit.diagnosis.diagnose import diagnose
from precaudit.diagnosis.evidence.positions import by_position, describe_positions, shape, spans
from precaudit.diagnosis.evidence.record import describe_unrecognised, worst_inside
from precaudit.diagnosis.evidence.records import Finding
from precaudit.judging.rules import judge
from precaudit.judging.verdicts import Verdict
from precaudit.models.numpy_decoder.rounding import of_policy
from precaudit.numbers.arrays import rounder
from precaudit.references.comparison.compare import CompareOptions
from precaudit.references.mutations.attention import seeing
from precaudit.references.mutations.exponentials import POLYNOMIALS, by_bits, by_polynomial, replace_exponential
from precaudit.references.mutations.forms import constant, evaluate_form, on_result, usual_form
from precaudit.references.mutations.keys import unseen_key, valueless
from precaudit.references.mutations.minimising import minimise, shortest
from precaudit.references.mutations.normalisation import without_weight
from precaudit.references.mutations.replay import operands_of, replay
from precaudit.references.mutations.rotation import shift_positions
from precaudit.reports.diagnosis import details
from precaudit.reports.judgement import verdict_message
from precaudit.schema.limits import default_limits
from precaudit.schema.metrics._residue_kernel import left_over
from precaudit.schema.records.errors import LocalError, Signed, Unexplained, Worst
from precaudit.schema.records.runs import Requested
from precaudit.schema.selection import Selection
from tests.helpers.recorded_operations import holding
from tests.helpers.runs import record


def made_by(operation, form, point, name="llama-gqa", policy="fp32-highest", layer=1, places=None):
    """Return the answer for a tensor that a form made."""
    o, model, rules = operation(name, point, policy, layer)
    r = of_policy(rules)
    return replay(
        holding(o, evaluate_form(form, operands_of(o, model), r if places is None else replace(r, **places))),
        model,
        rules,
    )


FITTED = {
    "scale × √K 0.98": (lambda c: constant(query_scale=0.98 * c.score_scale), "scores"),
    "scale × √K 1.3": (lambda c: constant(query_scale=1.3 * c.score_scale), "attn_out"),
    "score cap 20": (lambda _: constant(score_cap=20.0), "attn_out"),
    "epsilon 0.0001": (lambda _: constant(norm_eps=1e-4), "attn_norm"),
    "epsilon 3e-5": (lambda _: constant(norm_eps=3e-5), "final_norm"),
    "RoPE base 20000": (lambda _: constant(rope_theta=20000.0), "q"),
    "RoPE base 7300": (lambda _: constant(rope_theta=7300.0), "k"),
    "offset of positions 3": (lambda _: shift_positions(3), "q"),
    "offset of positions -17": (lambda _: shift_positions(-17), "k"),
    "number of keys past the row's own 2": (lambda _: seeing(2), "probs"),
    "window 11": (lambda _: constant(window=11), "attn_out"),
    "logit scale 1.01": (lambda _: constant(logit_scale=1.01), "logits"),
    "logit cap 30": (lambda _: constant(logit_cap=30.0), "logits"),
}  # fmt: skip


@pytest.mark.parametrize("cause", FITTED)
@pytest.mark.parametrize("policy", [pytest.param("fp32-highest", marks=pytest.mark.slow), "bf16"])  # 5 s each
def test_a_free_number_is_fitted_and_said(operation, cause, policy):
    form, point = FITTED[cause]
    _, model, _ = operation("llama-gqa", point, policy, 1)
    found = made_by(operation, form(model.config), point, policy=policy)
    if policy == "bf16" and (cause.startswith("epsilon") or "cap" in cause):
        assert found.announced.closes or found.named.closes  # what bfloat16 hides is not told
        return
    assert found.named is not None, found.tried[:3]
    assert found.named.variant.name == cause
    assert found.named.badness <= 1


def test_what_a_number_is_nearest_to_is_said(operation):
    found = made_by(operation, constant(norm_eps=1e-4), "attn_norm")
    assert found.named.variant.says == "epsilon is 0.0001, the configuration says 1e-6"
    _, model, _ = operation("llama-gqa", "scores", "fp32-highest", 1)
    found = made_by(operation, constant(query_scale=0.98 * model.config.score_scale), "scores")
    assert found.named.variant.says == "scale × √K is 0.98, it should be 1; nearest known: none"


def zeroed(axis, index):
    def change(out):
        out = out.copy()
        out[(slice(None),) * axis + (index,)] = 0.0
        return out

    return on_result(change)


def times(factor, axis, index):
    def change(out):
        out = out.copy()
        out[(slice(None),) * axis + (index,)] *= factor
        return out

    return on_result(change)


PARTS = {
    "head 3 zeroed": (zeroed(1, 3), "attn_out"),
    "token 7 zeroed": (zeroed(0, 7), "mlp_out"),
    "tokens 4 to 9 × 0.5": (times(0.5, 0, slice(4, 10)), "attn_proj"),
    "channel 5 × 1.5": (times(1.5, 1, 5), "attn_norm"),
    "channels 3 to 6 zeroed": (zeroed(1, slice(3, 7)), "mlp_act"),
    "× 1.1": (on_result(lambda out: out * 1.1), "v"),
    "key 0 omitted": (unseen_key(0), "attn_out"),
    "key 2 omitted": (unseen_key(2), "probs"),
    "key 1 value dropped": (valueless(1), "attn_out"),
}  # fmt: skip


@pytest.mark.parametrize("cause", PARTS)
@pytest.mark.parametrize("policy", ["fp32-highest", "bf16"])
def test_parts_that_are_zero_or_scaled_are_told_by_index_and_factor(operation, cause, policy):
    form, point = PARTS[cause]
    found = made_by(operation, form, point, policy=policy)
    assert found.named is not None, found.tried[:3]
    assert found.named.variant.name == cause


@pytest.mark.turn  # 4 s
def test_none_is_named_that_does_not_close(operation):
    """These were called sums in float32, softmax in float16 and the weights of another layer."""
    wobble = on_result(lambda out: out + 0.05 * np.sin(40 * out))
    for point in ("mlp_out", "attn_out", "attn_norm", "scores", "q", "logits"):
        for policy in ("fp32-highest", "bf16"):
            found = made_by(operation, wobble, point, policy=policy)
            assert found.named is None, (point, policy, found.named)
            assert not any(t.closes for t in found.tried)


def test_a_weight_left_out_is_named(operation):
    found = made_by(operation, without_weight("post_attention_layernorm"), "mlp_norm")
    assert found.named.variant.name == "weight omitted"


@pytest.mark.parametrize("policy", ["fp32-highest"])
def test_an_approximate_exponential_is_named(operation, policy):
    narrow = made_by(operation, usual_form, "attn_out", policy=policy, places={"exponential": rounder("bfloat16")})
    assert narrow.named.variant.name == "exponentials in bfloat16"


def test_approximations_of_exp_are_as_good_as_they_say():
    x = np.linspace(-20, 0, 4001)
    for name, coefficients in POLYNOMIALS.items():
        error = np.abs(by_polynomial(coefficients)(x) / np.exp(x) - 1).max()
        assert error < {"a minimax polynomial of degree 3": 1e-4}.get(name, 0.06), name
    assert np.abs(by_bits(0)(x) / np.exp(x) - 1).max() == pytest.approx(0.0615, abs=1e-3)  # Schraudolph 1999, §3
    e = np.exp(np.append(x, -np.inf))
    assert replace_exponential(np.exp)(e) == pytest.approx(e)


def test_numbers_are_found_and_shortened():
    loss = lambda x: (np.log(x) - np.log(3.1)) ** 2 + 1e-3  # noqa: E731
    assert minimise(loss, np.geomspace(0.01, 100, 9), whole=False) == pytest.approx(3.1)
    assert minimise(lambda x: abs(x - 137), [1.0, 10.0, 100.0, 1000.0], whole=True) == 137
    assert shortest(0.98003, lambda x: 1 + (x - 0.98003) ** 2, 1000) == 1.0
    assert shortest(0.98003, lambda x: 1 + 1e6 * (x - 0.98003) ** 2, 1000) == 0.98


def test_an_operation_nobody_recognises_is_described(operation):
    found = made_by(operation, half_wobbled, "attn_out")
    said = describe_unrecognised(found, "THK", np.arange(len(found.left)))
    assert found.named is None
    assert "none of the variants tried reproduces it within the limits" in said
    assert "is in head 2" in said
    assert "100 %" not in said


half_wobbled = on_result(
    lambda out: np.where(np.arange(out.shape[1])[:, None] == 2, out + 0.3 * np.abs(np.sin(40 * out)), out)
)  # fmt: skip


def test_descriptions_tell_place_sign_and_size():
    rng = np.random.default_rng(0)
    made_ = rng.normal(size=(64, 1, 16))
    at = np.arange(64) + 100
    left = np.zeros_like(made_)
    left[7] = 0.1 * made_[7]
    assert describe_positions(left, made_, "TD", at).startswith(
        "90 % of it is in token 107; values come out too large in size"
    )
    assert "it grows with the value" in describe_positions(0.1 * made_, made_, "TD", at)
    assert "does not depend" in describe_positions(rng.normal(size=made_.shape), made_, "TD", at)
    assert describe_positions(np.zeros_like(made_), made_, "TD", at) == ""


# What is said of a finding comes from that finding (reports).


def test_no_position_is_told_without_its_number():
    at = np.arange(64)
    assert shape(np.zeros(64), at) == ""
    assert by_position(np.zeros((64, 1, 4)), np.ones((64, 1, 4)), at) == ""
    assert spans((1, 2, 3, 5)) == "1 to 3, 5"


def test_the_worst_element_is_one_of_the_part_that_fails(operation):
    o, model, rules = operation("llama-gqa", "attn_out", "fp32-highest", 1)
    values = evaluate_form(usual_form, operands_of(o, model), of_policy(rules)).copy()
    values[20, 0, 0] += 5.0
    values[11, 2, 3] += 1.0
    found = replay(holding(o, values), model, rules)
    at, rows = np.arange(len(values)), np.arange(len(values))

    def inside(**part):
        v = Verdict(status="fail", kind="local", **part)
        return worst_inside(found, "THK", at, rows, v).index

    assert inside() == (20, 0, 0)
    assert inside(scope="head", index=2) == (11, 2, 3)
    assert inside(scope="token", index=11) == (11, 2, 3)
    assert inside(scope="channel", index=2 * values.shape[2] + 3) == (11, 2, 3)
    assert inside(scope="element", index=(11, 2, 3)) == (11, 2, 3)


def judged(worst, scopes):
    signed = Signed(value=0.0, noise=1.0)
    e = LocalError(
        prompt="a", phase="prefill", step=0, layer=1, point="v", candidate="run", reference="fp64",
        n=64, nonfinite=0, mae=0.1, max_diff=1.0, rel_l2=0.1, dtype="float32", worst=worst,
        unexplained=Unexplained(
            rel_l2=0.1, u=1.0, excess=1.0, gain=signed, mean=signed, componentwise=(1.0, (0, 0, 0))
        ),
        scopes=scopes,
    )  # fmt: skip
    return judge(e, default_limits())


def test_a_gate_shows_no_element_of_another_channel():
    base = {"token": {"excess": (1.0, 0)}, "head": {"excess": (1.0, 0)}}
    worst = Worst(index=(4, 0, 2), candidate=2.0, reference=1.0)
    other = judged(worst, base | {"channel": {"excess": (1e4, 5), "max_diff": (1.0, 2)}})
    own = judged(worst, base | {"channel": {"excess": (1e4, 2), "max_diff": (1.0, 2)}})
    assert (other.scope, other.index) == ("channel", 5)
    assert "worst element" not in verdict_message(other)
    assert "worst element [4, 0, 2]" in verdict_message(own)


def test_nothing_is_said_to_reproduce_what_none_does():
    lines = details(
        Finding(
            kind="unknown",
            cause="none reproduces it",
            says="none",
            layer=1,
            point="v",
            layers=(1,),
            phases=("prefill",),
            prompts=("a",),
            records=1,
            rel_l2=0.1,
            explained=0.99,
            equal=0.5,
            second=("x", 0.1),
            worst=None,
        )
    )
    assert any(line.startswith("the nearest reproduces 99 %") for line in lines)
    assert not any(line.startswith("it reproduces") for line in lines)


def test_advice_is_for_what_was_not_requested():
    requested = Requested(
        prompts=("a",), layers=(3,), points=("v",), support=("attn_norm",), phases=("prefill", "decode"),
        positions=None, every_logit=False, decode_steps=1, batch=1, pad="right", tokens_from=None,
    )  # fmt: skip
    assert widening_options(requested, 5, False) == "record more with --points all, --layers :"
    from precaudit.schema.graphs.decoder import POINTS

    every = msgspec.structs.replace(requested, points=tuple(POINTS))
    assert widening_options(every, 5, False) == "record more with --layers :"
    assert widening_options(msgspec.structs.replace(every, layers=(0, 1, 2, 3, 4)), 5, False) == (
        "every point of every layer was recorded already"
    )


@pytest.mark.turn  # 4 s
def test_numbers_fitted_in_prefill_hold_in_decode(tmp_path):
    """One mistake is one finding, though decode alone could not tell the factor."""
    parts = next(m for m in MISTAKES if m.name == "one channel × 1.5").parts(2)
    with placed():
        record(tmp_path / "run", parts=parts, select=Selection.parse(points="attn_norm"))
        found = diagnose(tmp_path / "run", options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    assert [(f.cause, f.point, f.layers) for f in found.findings] == [("channel 5 × 1.5", "attn_norm", (2,))]
    assert "the limit" in found.findings[0].fails


def test_neighbours_about_a_tie_are_no_difference_where_sums_may_cross_it():
    """Of bfloat16 at 1, an ulp being 2⁻⁷: FP64 at the middle, off it by more than sums may be, two ulp apart, NaN."""
    ulp, off = 2.0**-7, 1e-6
    candidate = np.array([1 + ulp, 1 + ulp, 1 + ulp, 1 + 2 * ulp, 1.0, np.nan, 1 + ulp])
    emulated = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, np.inf])
    reference = np.array([1 + ulp / 2, 1 + ulp / 2 + 0.9 * off, 1 + ulp / 2 + 1.1 * off, 1 + ulp, 1.0, 1.0, 1.0])
    out = np.empty(7)
    left_over(candidate, emulated, reference, np.full(7, off), 2.0**-126, 2.0**-8, out)
    assert out[:5].tolist() == [0.0, 0.0, ulp, 2 * ulp, 0.0]
    assert np.isnan(out[5])
    assert out[6] == ulp  # an emulation that is not finite: from FP64
