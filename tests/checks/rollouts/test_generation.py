"""Drawing tokens: both loops against each other and against decode by hand, sampling against NumPy."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from precaudit.checks.rollouts.generation import LOOPS, DrawShape, Generator
from precaudit.checks.rollouts.sampling import Sampling, draw_tokens, kept_tokens
from precaudit.checks.rollouts.timing import DrawVariant, How, tasks, time_variants
from precaudit.errors import UserError
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.checkpoints.ends import end_tokens
from precaudit.recording.tracing.subject import load

PROMPTS = ([100, 101, 102, 32], [84, 104, 101, 32, 99, 97, 112], [32], [10, 10, 105, 102])


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", "bf16", device="cpu")


@pytest.fixture(scope="module")
def single():
    return load("tiny", "fp32", device="cpu")


PROGRAMS = {}


def drawn(subject, sampling, prompts=PROMPTS, limit=20, loop="while", ends=(), batch=None, numbers=None):
    """Draw; programs of one subject, shape, kind and number of end tokens are compiled once."""
    shape = DrawShape.of(batch or len(prompts), max(map(len, prompts)), limit)
    programs = PROGRAMS.setdefault((subject.policy, shape, sampling.kind, len(ends) or 1), {})
    made = Generator(subject, shape, sampling, ends, programs)
    return made.generate(prompts, numbers or range(len(prompts)), limit, loop)


@pytest.mark.turn  # 10 s
@pytest.mark.parametrize(
    "sampling",
    [Sampling(0), pytest.param(Sampling(1.0, seed=3), marks=pytest.mark.slow), Sampling(0.7, top_k=20, top_p=0.9)],
    ids=lambda s: s.kind,
)
def test_both_loops_draw_the_same_bits(tiny, sampling):
    one, other = (drawn(tiny, sampling, loop=loop) for loop in LOOPS)
    assert one.tokens == other.tokens
    assert one.logprobs == other.logprobs
    assert one.steps == other.steps == 19
    assert [len(t) for t in one.tokens] == [20] * 4


@pytest.mark.turn  # 6 s
def test_greedy_is_the_largest_logit_of_whole_prefills(single):
    """No cache, no loop: the whole sequence again for every token."""
    found = drawn(single, Sampling(0), limit=6)
    prefill = jax.jit(single.decoder.prefill)
    for prompt, tokens, logprobs in zip(PROMPTS, found.tokens, found.logprobs, strict=True):
        for i, (token, share) in enumerate(zip(tokens, logprobs, strict=True)):
            ids = np.zeros((1, 16), np.int32)
            so_far = [*prompt, *tokens[:i]]
            ids[0, : len(so_far)] = so_far
            rows = np.array([[len(so_far) - 1]], np.int32)
            given = (single.parameters, single.tables(16), ids, np.zeros(1, np.int32), rows, None)
            logits = np.asarray(prefill(*given)[0][0, 0], np.float64)
            assert token == logits.argmax()
            assert share == pytest.approx(logits[token] - np.log(np.exp(logits).sum()), abs=1e-4)


@pytest.mark.turn  # 10 s
def test_measured_rollouts_are_those_of_every_round(tiny):
    how = How(batch=3, new_tokens=8, rounds=2)
    found = time_variants(
        [DrawVariant(tiny, "python"), DrawVariant(tiny, "while")], tasks([("a", PROMPTS[0]), ("b", [32])], 2), how
    )
    assert [m.timing.loop for m in found] == ["python", "while"]
    assert found[0].rollouts == found[1].rollouts
    assert [r.id for r in found[0].rollouts] == ["a/0", "a/1", "b/0", "b/1"]
    assert found[0].timing.ratio.median == found[0].timing.ratio.low == found[0].timing.ratio.high == 1
    assert found[0].timing.tokens == 32


def test_what_cannot_be_drawn_is_refused(tiny):
    for wrong in ({"temperature": -1}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0}, {"seed": -1}):
        with pytest.raises(UserError, match="is wanted"):
            Sampling(**wrong)
    with pytest.raises(UserError, match="longer than the model's context of 4096"):
        time_variants([DrawVariant(tiny)], tasks([("a", [1] * 4090)], 1), How(new_tokens=7))
    with pytest.raises(UserError, match="at least 1"):
        time_variants([DrawVariant(tiny)], tasks([("a", [1])], 1), How(batch=0))


def test_top_k_and_top_p_are_cut_as_numpy_cuts():
    rng = np.random.default_rng(5)
    for k, p in ((50, 1.0), (5, 1.0), (50, 0.6), (10, 0.8), (1, 0.1), (50, 1e-6)):
        x = (3 * rng.standard_normal(50)).astype(np.float32)
        order = np.argsort(-x.astype(np.float64))[:k]
        shares = np.exp(x[order].astype(np.float64))
        shares /= shares.sum()
        n = int(np.searchsorted(np.cumsum(shares), p)) + 1  # the fewest that reach p
        expected = set(order[:n].tolist())
        found = np.flatnonzero(np.asarray(jax.jit(kept_tokens)(x, np.int32(k), np.float32(p))))
        assert set(found.tolist()) == expected, (k, p)


def test_a_sequence_draws_by_its_number_whatever_is_drawn_beside_it(single):
    """Other rows, another order, rows that draw nothing: float32, where rows of one shape do not mix."""
    sampling = Sampling(1.0, seed=9)
    whole = drawn(single, sampling)
    turned = drawn(single, sampling, PROMPTS[::-1], numbers=(3, 2, 1, 0))
    assert turned.tokens == whole.tokens[::-1]
    alone = drawn(single, sampling, PROMPTS[2:3], batch=4, numbers=(2,))
    assert alone.tokens == whole.tokens[2:3]
    again = drawn(single, sampling, [PROMPTS[0]] * 4, numbers=(0, 1, 0, 7))
    assert again.tokens[0] == again.tokens[2] == whole.tokens[0]
    assert len(set(again.tokens)) == 3
    assert drawn(single, Sampling(1.0, seed=10)).tokens != whole.tokens


@pytest.mark.turn  # 9 s
def test_sequences_end_with_an_end_token_and_the_loops_with_the_last(tiny):
    sampling = Sampling(1.0, seed=3)
    whole = drawn(tiny, sampling)
    ends = (whole.tokens[0][4], whole.tokens[2][7])
    cut = [next((i + 1 for i, t in enumerate(row) if t in ends), 20) for row in whole.tokens]
    for loop in LOOPS:
        found = drawn(tiny, sampling, loop=loop, ends=ends)
        assert found.tokens == tuple(row[:n] for row, n in zip(whole.tokens, cut, strict=True))
        assert found.steps == max(cut) - 1
    firsts = tuple(row[0] for row in whole.tokens)
    every = drawn(tiny, sampling, PROMPTS[:1], batch=4, ends=(firsts[0], firsts[0]))
    assert (every.steps, every.tokens) == (0, (firsts[:1],))


@pytest.mark.turn  # 7 s
def test_both_loops_draw_the_same_tokens_of_one_sequence(tiny):
    """XLA:CPU multiplies the last product otherwise in a loop: log-probabilities may differ in the last bits."""
    one, other = (drawn(tiny, Sampling(1.0, seed=2), PROMPTS[:1], loop=loop) for loop in LOOPS)
    assert one.tokens == other.tokens
    np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.3, top_k=4), Sampling(1.0, top_p=0.75)], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(sampling):
    """20,000 draws of 6 tokens: shares within 5 standard deviations of NumPy's."""
    logits = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -4.0], np.float32)
    scaled = logits.astype(np.float64) / sampling.temperature
    p = np.exp(scaled) / np.exp(scaled).sum()
    cut = p.copy()
    if sampling.top_k:
        cut[sampling.top_k :] = 0
    if sampling.top_p:
        cut[int(np.searchsorted(np.cumsum(cut), sampling.top_p)) + 1 :] = 0
    cut /= cut.sum()
    n = 20_000
    numbers = np.arange(n, dtype=np.uint32)
    given = (sampling.knobs(6, n), np.broadcast_to(logits, (n, 6)), numbers, np.full(n, 3, np.int32))
    tokens, shares = jax.jit(partial(draw_tokens, sampling.kind))(*given)
    counts = np.bincount(np.asarray(tokens), minlength=6) / n
    assert (np.abs(counts - cut) <= 5 * np.sqrt(cut * (1 - cut) / n)).all()
    np.testing.assert_allclose(np.asarray(shares), np.log(p)[np.asarray(tokens)], rtol=0, atol=2e-6)


def test_end_tokens_are_those_of_the_model_s_files(tmp_path):
    model = Path(shutil.copytree(open_checkpoint("tiny").path, tmp_path / "model"))
    assert end_tokens(open_checkpoint(str(model))) == (256,)
    (model / "generation_config.json").write_text('{"eos_token_id": [258, 256, 258]}')
    assert end_tokens(open_checkpoint(str(model))) == (258, 256)
    (model / "generation_config.json").write_text("{}")
    assert end_tokens(open_checkpoint(str(model))) == (256,)
    for wrong, told in (("260", "end token 260 is outside the vocabulary of 260"), ('["x"]', "'x' is no token id")):
        (model / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(UserError, match=told):
            end_tokens(open_checkpoint(str(model)))


def test_warming_up_compiles_what_is_run_then(tmp_path):
    """In a cache of its own: the programs of a rollout are all read from it after."""
    code = (
        "import sys\n"
        "from precaudit.checks.rollouts import warmup\n"
        "from precaudit.checks.rollouts.sampling import Sampling\n"
        "from precaudit.checks.rollouts.timing import DrawVariant, How, tasks, time_variants\n"
        "from precaudit.recording.tracing.subject import load\n"
        "subject, how, given = load('tiny', device='cpu'), How(2, 5, ends=(256,)), tasks([('a', [5, 6])], 2)\n"
        "if sys.argv[1] == 'warm':\n"
        "    found = list(warmup.for_rollouts(subject, given, how, ['while']))\n"
        "    print([(w.what.split()[0], w.read) for w in found], sum(w.compiled for w in found) >= 3)\n"
        "else:\n"
        "    with warmup._count_events() as seen:\n"
        "        time_variants([DrawVariant(subject)], given, how)\n"
        "    print(seen[warmup.HIT] >= 2)\n"
    )
    changed = {"PRECAUDIT_CACHE": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla")}

    def run(how):
        done = subprocess.run(
            [sys.executable, "-c", code, how], env=os.environ | changed, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert run("warm") == "[('prefill', 0), ('scoring', 0)] True"
    assert run("then") == "True"
