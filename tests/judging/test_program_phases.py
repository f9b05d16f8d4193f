"""What precedes what in a program of several entry points: phases in order, then calls."""

from precaudit.judging.programs import suspect
from precaudit.judging.rules import judge
from precaudit.schema.limits import default_limits
from precaudit.schema.records.errors import KINDS

PREFILL, DECODE = "prefill call", "decode call"


def record(kind, phase, step, point, layer=None, reference="fp64", **numbers):
    return KINDS[kind](
        prompt="a", phase=phase, step=step, layer=layer, point=point, candidate="run", reference=reference,
        dtype="float32", n=4, **numbers,
    )  # fmt: skip


def statuses(errors):
    verdicts = [judge(e, default_limits()) for e in errors]
    return {(v.phase, v.step, v.point): v.status for v in suspect(verdicts, errors) if v.status != "pass"}


def test_nan_of_a_later_call_of_prefill_comes_before_the_first_of_decode():
    errors = [record("local", PREFILL, 2, "h", nonfinite=1), record("local", DECODE, 0, "h", nonfinite=1)]
    assert statuses(errors) == {(PREFILL, 2, "h"): "nonfinite", (DECODE, 0, "h"): "input suspect"}
    assert statuses(errors[1:]) == {(DECODE, 0, "h"): "nonfinite"}


def test_a_formula_inherits_from_its_own_call_alone():
    off = {"rel_l2": 0.5, "max_diff": 1.0}
    q = record("formula", PREFILL, 0, "query", 0, "llama:0.q", **off)
    mixed = record("formula", DECODE, 0, "mix", 0, "llama:0.attn_out", **off)
    assert statuses([q, mixed]) == {(PREFILL, 0, "query"): "fail", (DECODE, 0, "mix"): "fail"}
    same = record("formula", PREFILL, 0, "mix", 0, "llama:0.attn_out", **off)
    assert statuses([q, same]) == {(PREFILL, 0, "query"): "fail", (PREFILL, 0, "mix"): "input suspect"}
