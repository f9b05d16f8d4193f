"""Drawing tokens: both loops against each other and against decode by hand, sampling against NumPy."""

import jax
import numpy as np
import pytest

from precaudit.errors import UserError
from precaudit.rollouts.generation import LOOPS, Generator, Shape
from precaudit.rollouts.sampling import Sampling, kept
from precaudit.rollouts.timing import How, Variant, measure, tasks
from precaudit.tracing.subject import load

PROMPTS = ([100, 101, 102, 32], [84, 104, 101, 32, 99, 97, 112], [32], [10, 10, 105, 102])


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", "bf16", device="cpu")


@pytest.fixture(scope="module")
def single():
    return load("tiny", "fp32", device="cpu")


def drawn(subject, sampling, prompts=PROMPTS, limit=20, loop="while", ends=(), batch=None, numbers=None):
    shape = Shape.of(batch or len(prompts), max(map(len, prompts)), limit)
    return Generator(subject, shape, sampling, ends).generate(prompts, numbers or range(len(prompts)), limit, loop)


@pytest.mark.parametrize(
    "sampling", [Sampling(0), Sampling(1.0, seed=3), Sampling(0.7, top_k=20, top_p=0.9)], ids=lambda s: s.kind
)
def test_both_loops_draw_the_same_bits(tiny, sampling):
    one, other = (drawn(tiny, sampling, loop=loop) for loop in LOOPS)
    assert one.tokens == other.tokens
    assert one.logprobs == other.logprobs
    assert one.steps == other.steps == 19
    assert [len(t) for t in one.tokens] == [20] * 4


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


def test_measured_rollouts_are_those_of_every_round(tiny):
    how = How(batch=3, new_tokens=8, rounds=2)
    found = measure([Variant(tiny, "python"), Variant(tiny, "while")], tasks([("a", PROMPTS[0]), ("b", [32])], 2), how)
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
        measure([Variant(tiny)], tasks([("a", [1] * 4090)], 1), How(new_tokens=7))
    with pytest.raises(UserError, match="at least 1"):
        measure([Variant(tiny)], tasks([("a", [1])], 1), How(batch=0))


def test_top_k_and_top_p_are_cut_as_numpy_cuts():
    rng = np.random.default_rng(5)
    for k, p in ((50, 1.0), (5, 1.0), (50, 0.6), (10, 0.8), (1, 0.1), (50, 1e-6)):
        x = (3 * rng.standard_normal(50)).astype(np.float32)
        order = np.argsort(-x.astype(np.float64))[:k]
        shares = np.exp(x[order].astype(np.float64))
        shares /= shares.sum()
        n = int(np.searchsorted(np.cumsum(shares), p)) + 1  # the fewest that reach p
        expected = set(order[:n].tolist())
        found = np.flatnonzero(np.asarray(jax.jit(kept)(x, np.int32(k), np.float32(p))))
        assert set(found.tolist()) == expected, (k, p)
