"""Forward errors of many records together: what is the same everywhere fails, what one record has does not."""

from unittest import mock

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import precaudit
from exams import mistakes
from precaudit.judging.gate import judge_records
from precaudit.judging.pooled import GAIN, RATIO, PairPool, pooled_verdicts
from precaudit.judging.rules import judge
from precaudit.judging.verdicts import inheriting
from precaudit.models.jax_decoder.arithmetic import Arithmetic
from precaudit.reports.headline import headline
from precaudit.schema.limits import default_limits
from precaudit.schema.places import Place
from precaudit.schema.records.errors import ForwardError, LocalError

DRAW = np.random.default_rng(0)


def records(prompts=6, calls=4, ratio=1.0, gain=0.0, n=512, layer=2, point="q"):
    """Return forward records of noise 1e-2, whose ratios and gains scatter as those of honest runs do."""
    made = []
    for i in range(prompts):
        for step in range(calls):
            r = ratio * float(DRAW.lognormal(0.0, 0.15))
            g = 1e-2 * (gain + float(DRAW.normal(0.0, 0.1)))
            place = Place(f"p{i}", "decode", step, layer, point)
            made.append(
                place.record(ForwardError, "run", "fp64", n=n, rel_l2=1e-2 * r, ratio=r, noise=1e-2, gain=g, mae=0.0)
            )
    return made


def found(errors):
    return [(v.layer, v.point, v.metric) for v in pooled_verdicts(errors, default_limits())]


def test_what_is_the_same_in_all_records_fails_far_below_the_limit_of_one():
    assert found(records()) == []
    assert found(records(ratio=3.0)) == [(2, "q", RATIO)]
    assert found(records(gain=-1.2)) == [(2, "q", GAIN)]
    honest = records()
    honest[5] = records(1, 1, ratio=7.0)[0]
    assert found(honest) == []


def test_two_runs_are_judged_by_medians_over_prompts():
    """One prompt may be far off; all of them together may not; float32 has the limit of its ratios."""

    def beyond(ratios, wide=False):
        pool = PairPool()
        for i, ratio in enumerate(ratios):
            for e in records(prompts=1, calls=2):
                pool.add(msgspec.structs.replace(e, prompt=f"p{i}"), ratio, wide)
        return [(m.layer, m.point, m.prompts) for m in pool.medians(default_limits()) if m.ratio > m.limit]

    assert beyond([1.0] * 6) == beyond([1.0] * 5 + [7.0]) == beyond([2.5] * 6, wide=True) == []
    assert beyond([2.0] * 6) == [(2, "q", 6)]
    assert beyond([7.0] * 6, wide=True) == [(2, "q", 6)]
    assert beyond([9.0] * 3) == []  # of fewer than eight records each has the limit of one


def test_ratios_in_float32_have_a_limit_of_their_own():
    """Honest probabilities of a nearly flat softmax reach 2.9 there (exams/calibrate.py); in bfloat16 that fails."""

    def in_format(dtype, ratio):
        return [msgspec.structs.replace(e, dtype=dtype) for e in records(prompts=4, ratio=ratio)]

    assert found(in_format("float32", 2.92)) == []
    assert found(in_format("bfloat16", 2.92)) == [(2, "q", RATIO)]
    assert found(in_format("float32", 6.0)) == [(2, "q", RATIO)]


def test_one_prompt_or_a_few_records_need_more_and_small_ones_tell_nothing():
    assert found(records(prompts=1, calls=12, ratio=2.5)) == []
    assert found(records(prompts=1, calls=12, ratio=5.0)) == [(2, "q", RATIO)]
    assert found(records(prompts=1, calls=7, ratio=5.0)) == []
    assert found(records(n=1, ratio=5.0)) == []


def test_a_prompt_that_is_there_many_times_does_not_fail_for_that():
    """What the largest of one honest prompt is, as if it were a thousand."""
    assert found(records(prompts=1000, ratio=1.42)) == []
    assert found(records(prompts=1000, gain=0.54)) == []


def test_the_sentence_says_of_how_many_and_which_way():
    judged = judge_records("run", records(gain=-1.2), ())
    assert judged.exit_code == 1
    sentence = headline(judged, "run").text
    assert "24 records of 6 prompts" in sentence
    assert sentence.rstrip(".").endswith("% too small")


def test_it_inherits_from_a_fault_before_it():
    (after,) = pooled_verdicts(records(ratio=3.0), default_limits())
    broken = Place("p0", "prefill", 0, 1, "attn_out").record(LocalError, "run", "fp64", n=4, nonfinite=1)
    verdict = judge(broken, default_limits())
    statuses = {v.point: v.status for v in inheriting([verdict, after])}
    assert statuses == {"attn_out": "nonfinite", "q": "input suspect"}


def at(point, change):
    def tap(x, name):
        if name == point and mistakes._WHERE:
            x = jnp.where(mistakes._WHERE[-1][0] == 2, change(x), x)
        return checkpoint_name(x, name)

    return tap


def over_fewer(x):
    """A norm whose mean of squares is over D - 1: smaller by √((D - 1)/D)."""
    return (x.astype(jnp.float32) * ((x.shape[-1] - 1) / x.shape[-1]) ** 0.5).astype(x.dtype)


FAULTS = {
    "float8 stream": ("resid_out", lambda x: x.astype(jnp.float8_e4m3fn).astype(x.dtype), 3, RATIO),
    "mean over D - 1": ("attn_norm", over_fewer, 2, GAIN),
}


@pytest.mark.slow  # 60 s each
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_between_default_points_is_flagged_where_the_next_of_them_reads_it(name, tmp_path):
    point, change, layer, metric = FAULTS[name]
    subject = precaudit.load("tiny", "bf16", device="cpu")
    kind = type(name, (mistakes.TwiceRounded,), {})
    subject.__dict__["decoder"] = kind(subject.config, Arithmetic.of(subject.policy), subject.parts)
    with mock.patch.object(mistakes, "twice_rounded", at(point, change)), mistakes.placed():
        run = precaudit.trace(subject, tmp_path / "run")
    precaudit.compare(run)
    judged = precaudit.gate(run)
    first = min((v for v in judged.verdicts if v.status == "fail"), key=lambda v: v.depth)
    assert (first.layer, first.metric) == (layer, metric)
    assert precaudit.diagnose(run).exit_code == 1
