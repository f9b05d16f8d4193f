"""Rollouts made elsewhere: reading what engines dump, scoring it, limits and exit codes."""

import json
import math
import re

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from precaudit.checks.rollouts import scoring
from precaudit.checks.rollouts.budgets import engine_budget, parse_limits
from precaudit.checks.rollouts.engine_rounding import EngineRounding
from precaudit.checks.rollouts.limits import RolloutRecord
from precaudit.checks.rollouts.origin import RolloutRun
from precaudit.checks.rollouts.parity import Checks, score_parity
from precaudit.checks.rollouts.reading import Rollout, read_rollouts
from precaudit.checks.rollouts.scoring import BATCH, ROWS, by_fp64, by_policy
from precaudit.cli.rollout import command
from precaudit.errors import CannotJudge, UserError
from precaudit.models.numpy_decoder.model import Model
from precaudit.recording.tracing.subject import load
from precaudit.schema.records.base import value
from precaudit.schema.records.lines import decode_lines
from tests.helpers.paths import FIXTURES


def quiet(done, total, what):
    """Show no progress."""


def drawn(vocab, lengths, seed=3):
    rng = np.random.default_rng(seed)
    return [
        Rollout(f"r{i}", tuple(rng.integers(0, vocab, 3 + i).tolist()), tuple(rng.integers(0, vocab, n).tolist()), ())
        for i, n in enumerate(lengths)
    ]


def logged(rollouts, values):
    return [Rollout(r.id, r.prompt, r.tokens, tuple(map(float, x))) for r, x in zip(rollouts, values, strict=True)]


def written(path, rollouts):
    lines = [
        json.dumps({"id": r.id, "prompt_token_ids": r.prompt, "token_ids": r.tokens, "logprobs": r.logprobs})
        for r in rollouts
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", "bf16", device="cpu")


@pytest.fixture(scope="module")
def engine(tiny):
    """Rollouts with the log-probabilities of another policy, float32."""
    rollouts = drawn(tiny.config.vocab, (20, 7, 33))
    return logged(rollouts, by_policy(load("tiny", "fp32", device="cpu"), rollouts, 1.0, quiet))


OURS = {"id": "a", "prompt_token_ids": [5, 6], "token_ids": [7, 8], "logprobs": [-0.5, -1]}
VLLM = {
    "request_id": "q", "prompt": "x", "prompt_token_ids": [5, 6], "finished": True,
    "outputs": [
        {"index": 0, "text": "", "token_ids": [7, 8], "cumulative_logprob": -1.5,
         "logprobs": [{"7": {"logprob": -0.5, "rank": 1}, "9": {"logprob": -0.1}}, {"8": {"logprob": -1.0}}]},
        {"index": 1, "token_ids": [9], "logprobs": [{"9": {"logprob": -0.1}}]},
    ],
}  # fmt: skip
SGLANG = {
    "text": "", "output_ids": [7, 8],
    "meta_info": {"id": "s", "prompt_tokens": 2, "input_token_logprobs": [[None, 5, None], [-2.0, 6, None]],
                  "output_token_logprobs": [[-0.5, 7, None], [-1.0, 8, None]]},
}  # fmt: skip


def test_the_forms_of_engines_say_the_same(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text("\n\n".join(map(json.dumps, (OURS, VLLM, SGLANG))))
    found = read_rollouts(path)
    assert [r.id for r in found] == ["a", "q/0", "q/1", "s"]
    for i in (0, 1, 3):
        assert (found[i].prompt, found[i].tokens, found[i].logprobs) == ((5, 6), (7, 8), (-0.5, -1.0))
    assert found[2] == Rollout("q/1", (5, 6), (9,), (-0.1,))


def test_a_line_without_an_id_is_called_by_its_number(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({k: v for k, v in OURS.items() if k != "id"}))
    assert read_rollouts(path)[0].id == "1"


def test_what_is_no_finite_number_is_read_as_it_stands(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(OURS | {"logprobs": [math.nan, -math.inf]}))
    first, second = read_rollouts(path)[0].logprobs
    assert math.isnan(first)
    assert second == -math.inf


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "no rollout in it"),
        ("{", ":1: not JSON"),
        ("[" * 100_000, ":1: not JSON"),
        ("[1]", "an object is wanted"),
        (OURS | {"token_ids": None}, "token_ids is missing or no list"),
        (OURS | {"token_ids": [7, "8"]}, "token_ids[1] is '8', no token id"),
        (OURS | {"token_ids": [True, 8]}, "token_ids[0] is 'True', no token id"),
        (OURS | {"logprobs": [-1]}, "1 log-probabilities for 2 tokens"),
        (OURS | {"logprobs": None}, "was the engine asked for log-probabilities"),
        (OURS | {"logprobs": [-1, None]}, "logprobs[1] is 'None', no number"),
        (OURS | {"logprobs": [-1, -(10**400)]}, "more digits than a float"),
        (OURS | {"prompt_token_ids": []}, "prompt_token_ids is empty"),
        (VLLM | {"outputs": 3}, "outputs is not a list"),
        (VLLM | {"outputs": [VLLM["outputs"][1] | {"token_ids": [4]}]}, "no entry for token 4"),
        (SGLANG | {"meta_info": 3}, "meta_info is not an object"),
        (SGLANG | {"output_ids": [7]}, "output_ids are not the ids"),
        (SGLANG | {"meta_info": {"id": "s"}}, "meta_info has no output_token_logprobs"),
        (SGLANG | {"meta_info": SGLANG["meta_info"] | {"prompt_tokens": 4}}, "2 of 4 prompt tokens"),
    ],
)
def test_broken_rollouts_are_said_in_a_line(tmp_path, line, told):
    path = tmp_path / "r.jsonl"
    path.write_text(line if isinstance(line, str) else json.dumps(line))
    with pytest.raises(UserError) as error:
        read_rollouts(path)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_an_id_that_is_used_twice_and_a_missing_file_are_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(f"{json.dumps(OURS)}\n{json.dumps(OURS)}\n")
    with pytest.raises(UserError, match=":2: id 'a' is used twice"):
        read_rollouts(path)
    with pytest.raises(UserError, match="no rollouts at"):
        read_rollouts(tmp_path / "other.jsonl")


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2-caps", "qwen3-moe-gqa"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_float32_scores_are_fp64_s(name, temperature):
    """Two decoders that share no numerics."""
    subject = load(str(FIXTURES / name), "fp32-highest", device="cpu")
    rollouts = drawn(subject.config.vocab, (5, 0, 1, 40))
    ours = by_policy(subject, rollouts, temperature, quiet)
    exact = by_fp64(Model(subject.config, subject.checkpoint.tensors.read_tensor), rollouts, temperature, quiet)
    assert [len(x) for x in ours] == [len(x) for x in exact] == [5, 0, 1, 40]
    for a, b in zip(ours, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


@pytest.mark.turn  # 5 s
def test_scores_are_those_of_the_policy_s_prefill(tiny):
    """Whole logits of a prefill, alone and unpadded, and log softmax in NumPy."""
    for r, score in zip(rs := drawn(tiny.config.vocab, (ROWS + 40, 3)), by_policy(tiny, rs, 1.0, quiet), strict=True):
        tokens = np.array([(*r.prompt, *r.tokens)[:-1]], np.int32)
        rows = np.arange(len(r.prompt) - 1, tokens.shape[1])[None]
        args = (tiny.parameters, tiny.tables(256), tokens, np.zeros(1, np.int32), rows, None)
        logits = np.asarray(jax.jit(tiny.decoder.prefill)(*args)[0][0], np.float64)
        whole = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        whole -= logits.max(-1, keepdims=True)
        expected = whole[np.arange(len(r.tokens)), list(r.tokens)]
        ulp = 2.0**-8 * np.abs(logits).max()  # XLA fuses another program otherwise: a rounding of bf16 logits
        assert np.abs(score - expected).max() <= 4 * ulp


def test_more_rollouts_than_a_batch_are_scored_as_each_alone(tiny):
    rollouts = drawn(tiny.config.vocab, [4] * (BATCH + 2))
    together = by_policy(tiny, rollouts, 1.0, quiet)
    for i in (0, BATCH - 1, BATCH, BATCH + 1):
        np.testing.assert_array_equal(together[i], by_policy(tiny, [rollouts[i]], 1.0, quiet)[0])


@pytest.mark.parametrize(("block", "kept"), [(ROWS, False), (256, True)], ids=["as shipped", "in one block"])
def test_no_logits_of_every_position_are_kept(tiny, monkeypatch, block, kept):
    """Of the compiled program's arrays with an axis of V; with every row in one block [B, T, V] is there."""
    monkeypatch.setattr(scoring, "ROWS", block)
    length, vocab = 256, tiny.config.vocab
    ids, starts = np.zeros((BATCH, length), np.int32), np.zeros(BATCH, np.int32)
    program = scoring._program.__wrapped__(tiny.decoder, (), "cpu")
    given = (tiny.parameters, tiny.tables(length), ids, starts, ids, scoring.Targets(ids, np.float32(1)))
    text = program.lower(*given).compile().as_text()
    shapes = {tuple(map(int, x.split(","))) for x in re.findall(r"\[(\d+(?:,\d+)*)\]", text)}
    largest = max(math.prod(x) for x in shapes if vocab in x)
    assert largest == BATCH * block * vocab
    assert (largest >= BATCH * length * vocab) == kept


def test_an_engine_in_float32_is_nearer_fp64_than_a_bf16_policy(tiny, engine):
    found = score_parity(tiny, engine)
    engine_policy, engine_exact, policy_exact = (r.mismatch for r in found.whole)
    assert value(engine_exact.abs_diff_max) < 1e-4 < value(policy_exact.abs_diff_max)
    assert value(engine_policy.abs_diff_max) == pytest.approx(value(policy_exact.abs_diff_max), abs=1e-4)
    assert (engine_exact.sequences, engine_exact.tokens) == (3, 60)
    assert len(found.each) == 9
    assert found.exit_code == 0


def test_a_token_that_is_off_is_found(tiny, engine):
    values = [list(r.logprobs) for r in engine]
    values[1][4] -= 0.5
    found = score_parity(tiny, logged(engine, values), Checks(limits=(engine_budget("abs_diff_max", 0.1),)))
    assert [(h.trainer, h.status) for h in found.held] == [("policy", "fail"), ("fp64", "fail")]
    assert found.exit_code == 1
    worst = max((r for r in found.each if r.trainer == "fp64"), key=lambda r: value(r.mismatch.abs_diff_max))
    assert (worst.id, worst.worst[0], worst.worst[1]) == ("r1", 4, engine[1].tokens[4])
    assert (worst.mismatch.first_divergence, worst.mismatch.clip_fraction) == (4, pytest.approx(1 / 7))


def test_an_engine_whose_positions_are_off_by_one_is_far_off(tiny, engine):
    shifted = logged(engine, [(r.logprobs[-1], *r.logprobs[:-1]) for r in engine])
    assert value(score_parity(tiny, shifted, Checks(exact=False)).whole[0].mismatch.abs_diff_p50) > 0.5


def test_an_engine_s_temperature_is_part_of_its_log_probabilities(tiny):
    rollouts = drawn(tiny.config.vocab, (12,))
    hot = logged(rollouts, by_policy(tiny, rollouts, 2.0, quiet))
    assert value(score_parity(tiny, hot, Checks(exact=False), 2.0).whole[0].mismatch.abs_diff_max) == 0
    assert value(score_parity(tiny, hot, Checks(exact=False)).whole[0].mismatch.abs_diff_max) > 0.5


@pytest.mark.parametrize("bad", [math.nan, 0.25, -math.inf])
def test_what_is_no_log_probability_fails_whatever_the_limits(tiny, engine, bad):
    values = [list(r.logprobs) for r in engine]
    values[2][0] = bad
    found = score_parity(tiny, logged(engine, values), Checks(exact=False, limits=(engine_budget("kl", 1e9),)))
    assert found.exit_code == 1
    assert sum(found.faults.values()) == 1
    assert next(iter(found.faults)).startswith("engine: ")
    assert found.whole[0].mismatch.left_out == 1
    assert [h.status for h in found.held] == ["pass"]


def test_an_undefined_metric_passes_no_limit(tiny):
    one = logged(drawn(tiny.config.vocab, (1,)), [[-1.0]])
    found = score_parity(
        tiny, one, Checks(exact=False, limits=(engine_budget("rollout_actor_probs_pearson_corr", 0.9),))
    )
    assert [h.status for h in found.held] == ["unknown"]
    assert found.exit_code == 3


def test_no_token_at_all_cannot_be_judged(tiny):
    with pytest.raises(CannotJudge, match="none of the 2 rollouts has a token"):
        score_parity(tiny, drawn(tiny.config.vocab, (0, 0)))


@pytest.mark.parametrize(
    ("prompt", "tokens", "told"),
    [
        ((1,), (10**6,), "outside the vocabulary"),
        ((1,), (-1,), "outside the vocabulary"),
        ((1,), (2,) * 10**5, "context"),
    ],
)
def test_tokens_of_another_model_are_refused(tiny, prompt, tokens, told):
    with pytest.raises(UserError, match=f"rollout 'x': .*{told}"):
        score_parity(tiny, [Rollout("x", prompt, tokens, (-1.0,) * len(tokens))])


def test_limits_are_parsed_and_refused():
    found = parse_limits(["kl=1e-3"], ["rollout_is_eff_sample_size=.9"])
    assert [(b.entry.metric, b.entry.limit) for b in found] == [("kl", 1e-3), ("rollout_is_eff_sample_size", 0.9)]
    assert [b.entry.why for b in found] == ["--fail-above kl=1e-3", "--fail-below rollout_is_eff_sample_size=.9"]
    assert [b.entry.limit for b in parse_limits([], ["answers_difference=-0.02"])] == [-0.02]
    for above, below, told in (
        (["k1=1"], [], "unknown metric 'k1'; did you mean"),
        (["kl"], [], "a number is wanted"),
        (["kl=nan"], [], "a finite number is wanted"),
        ([], ["kl=1"], "of kl, larger is worse"),
        (["rollout_is_eff_sample_size=1"], [], "smaller is worse"),
        (["answers_difference=0"], [], "smaller is worse"),
        ([], ["answers_difference=-5"], "2 points fewer are -0.02"),
    ):
        with pytest.raises(UserError, match=told):
            parse_limits(above, below)


def run(*args):
    return CliRunner().invoke(command, [str(a) for a in args], standalone_mode=False)


def test_the_command_says_measures_and_gates(tmp_path, engine):
    path = written(tmp_path / "r.jsonl", engine)
    plain = run("tiny", "--from", path, "-o", tmp_path / "out.jsonl")
    assert plain.return_value == 0
    assert plain.output.startswith("✓ the engine differs from FP64 by ")
    assert " × what rounding in bf16 makes; fp64: kl " in plain.output
    assert "3 sequences of 60 tokens judged; 0 without tokens, 0 left out" in plain.output
    head, *records = decode_lines(
        (tmp_path / "out.jsonl").read_bytes(), RolloutRun | RolloutRecord | EngineRounding, "out.jsonl"
    )
    assert [r.status for r in records if isinstance(r, EngineRounding)] == ["pass"]
    records = [r for r in records if isinstance(r, RolloutRecord)]
    assert (head.model, list(head.policies), head.asked) == (
        "tiny",
        ["bf16"],
        {"rollouts": "read", "temperature": "1.0"},
    )
    assert head.sides == tuple((r.rollout, r.trainer) for r in records if r.id is None)
    assert [(r.rollout, r.trainer) for r in records if r.id is None] == [
        ("engine", "policy"), ("engine", "fp64"), ("policy", "fp64"),
    ]  # fmt: skip
    assert len(records) == 12
    held = run("tiny", "--from", path, "--no-fp64", "--fail-above", "kl=1", "--fail-above", "abs_diff_p50=1")
    assert (held.return_value, held.output[:22]) == (0, "✓ all 2 limits hold; e")
    broken = run("tiny", "--from", path, "--no-fp64", "--fail-above", "abs_diff_max=1e-9", "--json")
    assert broken.return_value == 1
    assert json.loads(broken.output.splitlines()[1])["trainer"] == "policy"


def test_the_command_names_what_is_no_log_probability(tmp_path, engine):
    values = [list(r.logprobs) for r in engine]
    values[0][:2] = [math.nan, math.nan]
    found = run("tiny", "--from", written(tmp_path / "r.jsonl", logged(engine, values)), "--no-fp64")
    assert found.return_value == 1
    assert found.output.startswith("✗ values that are no log-probability: 2 NaN (engine); 1 sequence left out.")
