"""What makes a drawn token's log-probability differ between rollout and trainer: shares that add up, and a verdict."""

from dataclasses import replace as changed

import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from precaudit.checks.rollouts.causes import TokenCause, WorstToken, causes, worst_of
from precaudit.checks.rollouts.parity import Checks, score_parity
from precaudit.checks.rollouts.reading import Rollout
from precaudit.cli._explaining import exit_code_with_causes
from precaudit.models.jax_decoder.family import family_parts as family_parts
from precaudit.recording.tracing.subject import load
from precaudit.reports.causes import cause_sentences

PROMPT, DRAWN = tuple(b"import os\n"), tuple(b"def f(x):\n")
ROLLOUT = Rollout("a", PROMPT, DRAWN, (-0.1,) * len(DRAWN))


def cause(subject, tmp_path, at=5, apart=0.1):
    return causes(subject, [WorstToken(ROLLOUT, at, apart)], tmp_path)[0]


@pytest.mark.slow  # 15 s
def test_shares_add_up_and_name_decode_attention_in_float32(tmp_path):
    subject = load("tiny", "fp32-cast-decode", None, "cpu")
    found = cause(subject, tmp_path)
    assert found.verdict == "rounding"
    assert found.unknown is None
    assert found.change == pytest.approx(found.decode - found.rescore, rel=1e-9)
    assert found.explained == pytest.approx(found.change, rel=1e-3)
    assert abs(found.change) > 1e-3
    assert sum(x for _, x, _ in found.points) == pytest.approx(found.explained)
    # decode's attention leaves out three roundings to bfloat16 that rescore makes; what follows rounds other values
    (largest, net, size) = found.points[0]
    assert largest == "attn_out"
    assert 0 < abs(net) <= size
    assert net / found.change > 0.5
    (said,) = cause_sentences([found], subject.policy.settings())
    assert said.startswith("✓ a, token 5 (id 40)")
    assert "attn_out in bfloat16 +" in said
    other = replace(found, engine=3.0)
    (said,) = cause_sentences([other], subject.policy.settings())
    assert said.startswith("✗")
    assert "3.0e0 from the trainer, which this policy does not explain" in said


@pytest.mark.turn  # 7 s
def test_a_state_that_is_stale_is_no_rounding(tmp_path):
    def stale(cache, layer, rows, slots):
        kept = family_parts(subject.config).cache_write(cache, layer, rows, slots)
        return kept if slots is None else jnp.where(layer == 2, cache, kept)

    subject = load("tiny", "bf16", None, "cpu")
    subject = load("tiny", "bf16", None, "cpu", parts=changed(family_parts(subject.config), cache_write=stale))
    found = cause(subject, tmp_path)
    assert found.verdict == "state"
    assert found.records > 100
    (said,) = cause_sentences([found], subject.policy.settings())
    assert said.startswith("✗")
    assert "a cache differs from what was written" in said


def test_the_worst_tokens_are_those_farthest_from_the_trainer():
    subject = load("tiny", "fp32", None, "cpu")
    second = Rollout("b", PROMPT, DRAWN, (-0.1,) * 3 + (-30.0,) + (-0.1,) * (len(DRAWN) - 4))
    found = worst_of(score_parity(subject, [ROLLOUT, second], Checks(exact=False)), [ROLLOUT, second], 1)
    assert [(w.rollout.id, w.at) for w in found] == [("b", 3)]
    assert np.isfinite(found[0].apart)
    assert found[0].apart < -10


@pytest.mark.parametrize(
    ("verdicts", "before", "code"),
    [
        ((), 0, 0), (("rounding",), 0, 0), (("rounding", "state"), 0, 1), (("unknown",), 0, 3), (("rounding",), 1, 1),
        (("rounding",), 3, 3), (("unknown", "formula"), 3, 1),
    ],
)  # fmt: skip
def test_what_is_no_rounding_is_a_finding_and_what_is_unknown_no_pass(verdicts, before, code):
    made = [TokenCause(id="a", policy="bf16", index=0, token=1, engine=0.1, verdict=v) for v in verdicts]
    assert exit_code_with_causes(made, before) == code
