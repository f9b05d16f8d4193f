"""An engine's log-probabilities: correct ones are rounding, and what is more has its cause.

Engines here are written without precaudit's own sampling: logits of a bf16 prefill, then plain NumPy and loops.
"""

import json
import math
from dataclasses import replace

import jax
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from precaudit.checks.rollouts.engine import engine_policy
from precaudit.checks.rollouts.engine_rounding import EngineRounding, engine_noise, explain_engine, judge_engine
from precaudit.checks.rollouts.hypotheses import Sample, hypotheses, residual
from precaudit.checks.rollouts.parity import Checks, score_parity
from precaudit.checks.rollouts.reading import Rollout
from precaudit.checks.rollouts.samples import other_prompts
from precaudit.checks.rollouts.scoring import by_policy
from precaudit.cli import run as command
from precaudit.cli.rollout import command as rollout_command
from precaudit.progress import silent
from precaudit.recording.programs.own import prefill_call
from precaudit.recording.tracing.subject import load
from precaudit.schema.policies import load_policy
from precaudit.schema.records.base import value
from tests.helpers.engine_noise import HALF, random_rollouts

TEMPERATURE, SLOTS, DRAWN = 0.7, 64, 16


class Engine:
    """tiny in bf16, by one prefill of 64 slots; ``weights``: what becomes of its matrices."""

    def __init__(self, weights=lambda x: x):
        subject = load("tiny", "bf16", device="cpu")
        program = prefill_call(subject, {"a": [0] * SLOTS})
        params = jax.tree.map(weights, program.params)
        run = jax.jit(program.call)
        self.logits = lambda ids: np.asarray(run(params, np.array([*ids, *[0] * (SLOTS - len(ids))], np.int32)), float)

    def rows(self, prompt, tokens, by=0):
        first = len(prompt) - 1 + by
        return self.logits([*prompt, *tokens])[first : first + len(tokens)]

    def draw(self, prompt, rng):
        ids = list(prompt)
        for _ in range(DRAWN):
            row = self.logits(ids)[len(ids) - 1] / TEMPERATURE
            p = np.exp(row - row.max())
            kept = np.argsort(-p)[:8]
            kept = kept[: int((np.cumsum(p[kept]) < 0.8 * p.sum()).sum()) + 1]
            ids.append(int(rng.choice(kept, p=p[kept] / p[kept].sum())))
        return tuple(ids[len(prompt) :])


def logprob(row, token, among=None):
    """log p of a token among some of all: the sum is taken term after term."""
    largest = max(row)
    total = sum(math.exp(x - largest) for i, x in enumerate(row) if among is None or i in among)
    return row[token] - largest - math.log(total)


def top(row, k=None, p=None):
    """The k most likely tokens, or the fewest that reach p."""
    order = np.argsort(-row)
    if k is not None:
        return set(order[:k].tolist())
    share, kept = np.exp(row - row.max()), set()
    for i in order:
        kept.add(int(i))
        if sum(share[j] for j in kept) >= p * share.sum():
            return kept
    return kept


@pytest.fixture(scope="module")
def engine():
    return Engine()


@pytest.fixture(scope="module")
def drawn(engine):
    rng = np.random.default_rng(4)
    prompts = [tuple(rng.integers(0, 256, 6 + i).tolist()) for i in range(3)]
    return [(p, engine.draw(p, rng)) for p in prompts]


def rollouts(drawn, made):
    return [Rollout(f"r{i}", p, t, tuple(float(x) for x in made(p, t))) for i, (p, t) in enumerate(drawn)]


def judged(found, temperature=TEMPERATURE, policy="bf16", formats=None):
    subject = load("tiny", policy, device="cpu")
    formats = engine_policy(subject.policy) if formats is None else load_policy(formats)
    engine = subject if formats == subject.policy else load("tiny", formats, device="cpu")
    return score_parity(subject, found, Checks(), temperature, engine=engine).rounding


def plain(engine, temperature=TEMPERATURE):
    return lambda p, t: [logprob(row / temperature, x) for row, x in zip(engine.rows(p, t), t, strict=True)]


def moved(values, by):
    return values[by:] + values[:by]


@pytest.mark.parametrize(
    ("policy", "settings"),
    [("bf16", {}), ("bf16", HALF), ("fp32", {}), ("bf16", {"logits": "bfloat16"}), ("bf16", {"attention": "sdpa"}),
     ("bf16", {"excess_precision": "off"}), ("bf16", {"attention": "flash"})],
)  # fmt: skip
def test_a_correct_engine_is_rounding_whatever_it_computes_in(drawn, policy, settings):
    found = rollouts(drawn, lambda _p, t: [-1.0] * len(t))
    subject = load("tiny", policy, settings, device="cpu")
    made = by_policy(subject, found, TEMPERATURE, silent)
    given = [replace(r, logprobs=tuple(map(float, x))) for r, x in zip(found, made, strict=True)]
    for some in (given, [replace(r, tokens=r.tokens[:3], logprobs=r.logprobs[:3]) for r in given]):
        verdict = judged(some)
        assert verdict.status == "pass"
        assert value(verdict.rms) < 1.7
        assert (verdict.cause, verdict.tried) == (None, {})
    assert judged(given, policy="fp32").status == "pass"  # a trainer in float32 does not make the engine's bf16 a fault


@pytest.mark.turn  # 3 s
def test_an_engine_of_integer_weights_is_rounding_where_it_says_so():
    asked = random_rollouts(256, 6, 20, 0)
    made = by_policy(load("tiny", "int4-groups", device="cpu"), asked, 1.0, silent)
    given = [replace(r, logprobs=tuple(map(float, x))) for r, x in zip(asked, made, strict=True)]
    assert judged(given, 1.0).status == "fail"
    assert judged(given, 1.0, formats="int4-groups").status == "pass"


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda e: plain(e, TEMPERATURE**2), "temperature 0.7 is applied twice"),
        (lambda e: plain(e, 1.0), "temperature 0.7 is not applied"),
        (lambda e: plain(e, 1 / TEMPERATURE), "logits are multiplied by temperature 0.7, not divided"),
        (lambda e: plain(e, 0.5), "logits are divided by 0.5"),
        (lambda e: lambda p, t: [
            logprob(r, x, top(r, k=8)) for r, x in zip(e.rows(p, t) / TEMPERATURE, t, strict=True)
        ], "among the top 8"),
        (lambda e: lambda p, t: [
            logprob(r, x, top(r, p=0.8)) for r, x in zip(e.rows(p, t) / TEMPERATURE, t, strict=True)
        ], "within top-p 0.8"),
        (lambda e: lambda p, t: moved(plain(e)(p, t), 1), "each is that of the token after it"),
        (lambda e: lambda p, t: moved(plain(e)(p, t), -1), "each is that of the token before it"),
        (lambda e: lambda p, t: [
            logprob(r / TEMPERATURE, x) for r, x in zip(e.rows(p, t, 1), t, strict=True)
        ], "scored by the logits after it"),
        (lambda e: lambda p, t: [
            logprob(r / TEMPERATURE, x) for r, x in zip(e.rows(p, t, -1), t, strict=True)
        ], "one position too early"),
        (lambda e: lambda p, t: plain(e)(p[1:], t), "its first token is missing"),
        (lambda e: lambda p, t: [x / math.log(2) for x in plain(e)(p, t)], "logarithms have base 2"),
        (lambda e: lambda p, t: np.cumsum(plain(e)(p, t)), "the sum of all log-probabilities so far"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_a_mistake_is_beyond_rounding_and_named(engine, drawn, make, cause):
    found = judged(rollouts(drawn, make(engine)))
    assert found.status == "fail"
    assert found.cause is not None
    assert cause in found.cause
    assert value(found.left) < 1.7 < value(found.rms)


def test_one_token_that_is_off_fails_and_no_cause_is_made_up(engine, drawn):
    def made(p, t):
        values = plain(engine)(p, t)
        return [values[0] - 1, *values[1:]] if p == drawn[1][0] else values

    found = judged(rollouts(drawn, made))
    assert (found.status, found.id, found.index, found.cause) == ("fail", "r1", 0, None)
    assert {"temperature", "top-k", "top-p", "shift", "row", "prompt"} <= found.tried.keys()


def test_other_weights_fail_and_are_named_where_they_are_known(drawn):
    rng = np.random.default_rng(0)
    other = Engine(lambda x: x * (1 + 0.05 * rng.standard_normal(x.shape)).astype(x.dtype) if x.ndim > 1 else x)
    given = rollouts(drawn, plain(other))
    found = judged(given)
    assert (found.status, found.cause) == ("fail", None)
    exact = np.array(given[0].logprobs)
    logits = np.random.default_rng(1).standard_normal((DRAWN, 8)) * 4
    known = {"the trainer": exact}
    sample = Sample(exact, np.zeros(DRAWN, int), logits, logits, logits, 1.0, {}, known)
    told = explain_engine(found, [sample])
    assert told.cause == "the weights are those of the trainer"


def test_numbers_that_few_tokens_cannot_tell_apart_are_a_range(engine, drawn):
    made = rollouts(drawn, lambda p, t: [
        logprob(r, x, top(r, k=64)) for r, x in zip(engine.rows(p, t) / 1.4, t, strict=True)
    ])  # fmt: skip
    found = judged(made, 1.4)
    assert "among the top" in found.cause
    low, _, high = found.cause.partition("among the top ")[2].partition(" to ")
    assert int(low) <= 64 <= int(high.partition(",")[0] or low)


def test_what_an_engine_may_have_read_instead_of_the_prompt():
    class Marks:
        def encode(self, text, add_special_tokens=True):
            return [1, *map(ord, text)] if add_special_tokens else [*map(ord, text)]

        def decode(self, ids, skip_special_tokens=False):
            return "".join("" if i < 10 and skip_special_tokens else f"<{i}>" for i in ids)

    assert other_prompts((65, 66), Marks()) == {
        "its first token is missing": (66,),
        "its last token is missing": (65,),
        "the tokenizer's first special tokens stand before it": (1, 65, 66),
    }
    marked = other_prompts((1, 65, 2, 66), Marks())
    assert marked["its special tokens are missing"] == (65, 66)
    assert marked["the tokenizer's first special tokens stand before it twice"] == (1, 1, 65, 2, 66)
    assert other_prompts((65,), None) == {}


def test_nothing_is_judged_without_a_token_and_nothing_explained_by_less_than_half():
    nothing = judge_engine("bf16", [], np.zeros((1, 2)), np.zeros((1, 2)), 1.0, np.zeros((1, 2), bool))
    assert nothing == EngineRounding(policy="bf16", status="unknown", tokens=0)
    logits = np.log(np.array([[0.5, 0.3, 0.2]]))
    sample = Sample(np.array([-0.1]), np.array([0]), logits, np.full((1, 3), np.nan), logits, 1.0)
    early = next(h for h in hypotheses([sample]) if "too early" in h.cause)
    assert residual(early, [sample], 1.0) == (math.inf, math.inf)


def test_the_command_names_it_and_so_does_gate(tmp_path, engine, drawn, capsys):
    path = tmp_path / "r.jsonl"
    shifted = rollouts(drawn, lambda p, t: moved(plain(engine)(p, t), 1))
    lines = ({"id": r.id, "prompt_token_ids": r.prompt, "token_ids": r.tokens, "logprobs": r.logprobs} for r in shifted)
    path.write_text("\n".join(map(json.dumps, lines)))
    words = ["tiny", "--from", str(path), "--temperature", str(TEMPERATURE), "-o", str(tmp_path / "out.jsonl")]
    done = CliRunner().invoke(rollout_command, words, standalone_mode=False)
    assert done.return_value == 1
    assert done.output.startswith("✗ the engine differs from FP64 by ")
    assert "shifted by one" in done.output.splitlines()[0]
    assert "change: write with each token the log-probability of that token" in done.output
    assert "differences of opposite signs cancel in kl" in done.output
    assert command(["gate", str(tmp_path / "out.jsonl")]) == 1
    assert "✗ engine / fp64: the engine differs" in capsys.readouterr().out
    for more, told in (
        (["--engine-policy", "bf16", "--no-fp64"], "judges the engine against FP64"),
        (["--engine-policy", "nope"], "unknown policy 'nope'"),
    ):
        assert command(["rollout", "tiny", "--from", str(path), *more]) == 2
        assert told in capsys.readouterr().err
    assert command(["rollout", "tiny", "--engine-policy", "bf16"]) == 2
    assert "give them with --from FILE" in capsys.readouterr().err


def test_the_engine_is_taken_to_round_to_sixteen_bits_unless_it_says_so():
    assert engine_policy(load_policy("bf16")) == load_policy("bf16")
    assert engine_policy(load_policy("fp32")).name.startswith("bf16")
    assert engine_policy(load_policy("kv-int8")) == load_policy("kv-int8")


def test_noise_adds_what_the_policy_and_rounded_logits_make():
    exact, where = np.zeros((1, 4)), np.ones((1, 4), bool)
    policy, rounded = np.full((1, 4), 3e-3), np.full((1, 4), 4e-3)
    assert engine_noise(exact, [policy], where) == pytest.approx(3e-3)
    assert engine_noise(exact, [policy, rounded], where) == pytest.approx(5e-3)


@pytest.mark.parametrize(("size", "status"), [(14.9, "pass"), (15.1, "fail")])
def test_one_token_of_a_thousand_is_judged_by_its_own_size(size, status):
    """6 + 3 log₁₀ 1000 = 15 times noise, where the root mean square of all is below a half."""
    rollout = Rollout("a", (1,), (0,) * 1000, (-1.0,) * 1000)
    exact = np.full((1, 1000), -1.0)
    engine = exact.copy()
    engine[0, 17] += size * 0.01
    found = judge_engine("bf16", [rollout], engine, exact, 0.01, np.ones((1, 1000), bool))
    assert (found.status, found.id, found.index) == (status, "a", 17)
    assert value(found.rms) < 0.5


def test_a_cause_leaves_well_below_half_of_what_it_explains():
    """Half a shift: log-probabilities of the next token, as far off as what they would explain."""
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((16, 8)) * 3
    tokens = rng.integers(0, 8, 16)
    sample = Sample(np.zeros(16), tokens, logits, logits, logits, 1.0)
    moved_on = np.array([*sample.exact[1:], sample.exact[0]])
    rollout, where = Rollout("a", (1,), (0,) * 16, (-1.0,) * 16), np.ones((1, 16), bool)
    verdict = judge_engine("bf16", [rollout], moved_on[None], sample.exact[None], 0.5, where)
    named = explain_engine(verdict, [replace(sample, engine=moved_on)])
    assert "shifted" in named.cause
    apart = moved_on - sample.exact
    partly = replace(sample, engine=sample.exact + 2 / 3 * apart)  # 4 × noise, of which a shift leaves 2
    close = msgspec.structs.replace(verdict, noise=float(np.sqrt(np.square(apart).mean()) / 6))
    assert explain_engine(close, [partly]).cause is None


def test_a_sum_that_rounding_moves_past_p_may_keep_one_token_less():
    logits = np.log(np.array([[0.5, 0.2999, 0.1, 0.1001]] * 8))
    tokens = np.zeros(8, int)
    kept = np.full(8, math.log(0.5 / 0.7999))  # FP64 needs a third token to reach 0.8
    sample = Sample(kept, tokens, logits, logits, logits, 1.0)
    found = {h.text: residual(h, [sample], 0.01) for h in hypotheses([sample])}
    assert found["log-probabilities are those within top-p 0.8"].largest < 1e-9
    assert found["log-probabilities are those within top-p 0.9"].largest > 5


def test_noise_of_a_sum_is_that_of_all_its_terms():
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((256, 8))
    sample = Sample(np.zeros(256), rng.integers(0, 8, 256), logits, logits, logits, 1.0)
    sample = replace(sample, engine=np.cumsum(sample.exact + 0.1 * rng.standard_normal(256)))
    (summed,) = (h for h in hypotheses([sample]) if h.kind == "sum")
    assert residual(summed, [sample], 0.1).rms == pytest.approx(1, abs=0.6)


def test_an_engine_of_which_nothing_can_be_judged_is_no_success(engine, drawn):
    found = score_parity(load("tiny", "bf16", device="cpu"), rollouts(drawn[:1], plain(engine)), Checks(), TEMPERATURE)
    assert (found.rounding, found.exit_code) == (None, 0)  # was not asked for
    unknown = EngineRounding(policy="bf16", status="unknown", tokens=0)
    assert replace(found, rounding=unknown).exit_code == 3
