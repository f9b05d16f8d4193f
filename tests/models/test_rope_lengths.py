"""RoPE whose frequencies depend on the length of a sequence: what was turned by which, and that other lengths fail."""

import mpmath
import numpy as np
import pytest

from precaudit.checks.rollouts.generation import DrawShape, Generator
from precaudit.checks.rollouts.sampling import Sampling
from precaudit.errors import UserError
from precaudit.judging.gate import judge_found
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.configs import RopeScaling, from_config_json
from precaudit.models.jax_decoder.parameters import frequencies
from precaudit.models.numpy_decoder.forward import Sequences, Wanted, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.recording.tracing import subject as subjects
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.schema.lengths import row_lengths, telling, view_of
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from tests.helpers.paths import FIXTURES

MODEL = str(FIXTURES / "llama-dynamic-across")  # 32 positions, and beyond them by a factor of 2
LONG = str(FIXTURES / "phi3-longrope-beyond")
STEPS = 6
PROMPTS = [Prompt(id=f"p{n}", tokens=tuple(range(1, n + 1))) for n in (30, 35, 8)]


def recorded(folder, model=MODEL):
    select = Selection.parse(layers="0", points="q,k,k_cache,logits")
    return trace(load(model, "fp32", None, "cpu"), folder, PROMPTS, select, TraceOptions(STEPS, pad="left"))


def compared(run, folder, **more):
    return compare(run, options=CompareOptions(cache=folder / "cache", **more))


def statuses(found):
    return {(v.kind, v.point, v.phase, v.prompt, v.status) for v in judge_found(found).verdicts}


@pytest.fixture(scope="module", params=[MODEL, LONG])
def honest(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("honest")
    return compared(recorded(folder / "run", request.param), folder, formula=True)


@pytest.mark.turn  # 7 s
def test_an_honest_run_beyond_the_context_passes(honest):
    assert {e.kind for e in honest.errors} >= {"local", "forward", "state", "formula"}
    assert not statuses(honest)


@pytest.mark.parametrize("model", [MODEL, LONG])
def test_sums_of_turned_rows_know_how_long_the_sequence_was(model, tmp_path):
    select = Selection.parse(layers="0", points="resid_in", phases="prefill,decode")
    run = trace(load(model, "fp32", None, "cpu"), tmp_path / "run", PROMPTS, select, TraceOptions(STEPS, pad="left"))
    found = compared(run, tmp_path)
    assert {e.point for e in found.errors if e.kind == "sums"} >= {"q", "k"}
    assert not statuses(found)


@pytest.mark.turn  # 18 s
def test_rescore_beyond_the_context_has_a_reference_of_its_own(honest):
    own = {p.prompt for p in honest.prefill_decode if p.against == "rescore" and p.f64_against_top1 is not None}
    # p8 and what follows it stay within 32 positions; LongRoPE turns all of p35 by its long factors, whatever the call
    assert own == ({"p30", "p35"} if "llama" in honest.run.record.model.id else {"p30"})
    assert not [p for p in honest.prefill_decode if p.against == "prefill" and p.f64_against_top1 is not None]
    assert max(p.kl for p in honest.prefill_decode if p.against == "rescore") > 1e-4
    assert max(p.kl for p in honest.prefill_decode if p.against == "prefill") < 1e-8


@pytest.mark.parametrize(
    ("wrong", "phases"),
    [
        (lambda *_: None, {"prefill", "decode", "rescore"}),  # the stretching is left out
        (lambda config, lengths: telling(config, np.minimum(lengths, lengths[:, :1])), {"decode"}),  # by the prompt's
        (
            lambda config, lengths: telling(config, np.full_like(lengths, lengths.max())),
            {"prefill", "decode"},
        ),  # slots'
    ],
)
def test_rows_turned_by_another_length_fail(wrong, phases, tmp_path, monkeypatch):
    monkeypatch.setattr(subjects, "telling", wrong)
    found = statuses(compared(recorded(tmp_path / "run"), tmp_path))
    failed = {(point, phase) for kind, point, phase, _, status in found if (kind, status) == ("local", "fail")}
    assert {phase for _, phase in failed} == phases
    assert ("q", "decode") in failed


def test_lengths_are_those_of_the_call_that_turned_a_row():
    assert row_lengths("prefill", 3, 5, 6).tolist() == [3, 3, 3, 4, 5, 6]
    assert row_lengths("rescore", 3, 5, 6).tolist() == [5] * 6


def test_views_part_beyond_the_context_only():
    dynamic, plain = (open_checkpoint(str(FIXTURES / n)).config for n in ("llama-dynamic-across", "llama-yarn"))
    assert view_of(dynamic, "rescore", 33) == "rescore"
    assert {view_of(dynamic, "rescore", 32), view_of(dynamic, "decode", 40), view_of(plain, "rescore", 99)} == {
        "prefill"
    }
    assert telling(dynamic, np.arange(33)) is None
    assert telling(dynamic, np.arange(31, 36)).tolist() == [32, 32, 33, 34, 35]
    assert telling(open_checkpoint(LONG).config, np.arange(31, 36)).tolist() == [32, 32, 33, 33, 33]


def test_frequencies_grow_as_published():
    scaling = RopeScaling(kind="dynamic", factor=3.0, original=32)
    found = frequencies(1e4, 16, scaling, np.array([[32, 50]]))[0]
    for i in range(8):
        for got, length in zip(found[0, :, i], (32, 50), strict=True):
            base = 10000 * (mpmath.mpf(3) * length / 32 - 2) ** (mpmath.mpf(16) / 14)
            assert got == pytest.approx(float(base ** (-mpmath.mpf(2 * i) / 16)), rel=1e-14)


def test_what_is_longer_than_the_factor_allows_is_refused(tmp_path):
    tokens = Prompt(id="long", tokens=(1,) * 60)
    with pytest.raises(UserError, match="64"):
        trace(load(MODEL, "fp32", None, "cpu"), tmp_path / "run", [tokens], Selection.parse(), TraceOptions(8))


def test_a_dynamic_factor_below_one_is_refused():
    raw = {
        "model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "vocab_size": 8,
        "intermediate_size": 8, "rope_scaling": {"rope_type": "dynamic", "factor": 0.5}, "max_position_embeddings": 32,
    }  # fmt: skip
    with pytest.raises(UserError, match=r"dynamic with factor 0\.5"):
        from_config_json(raw, "config.json")


def test_what_is_drawn_beyond_the_context_is_scored_alike():
    """Decode through the cache and FP64's own sequence turn the same rows by the same lengths."""
    subject = load(MODEL, "fp32-highest", None, "cpu")
    prompt = tuple(range(1, 31))
    generator = Generator(subject, DrawShape.of(1, len(prompt), 8), Sampling(0.0, None, None, 0), ())
    made = generator.generate([prompt], [0], 8)
    fed = np.asarray((*prompt, *made.tokens[0]))
    rows, logits = np.arange(len(prompt) - 1, len(fed) - 1), {}
    model = Model(subject.config, subject.checkpoint.tensors.read_tensor)
    lengths = row_lengths("prefill", len(prompt), len(fed), len(fed))
    forward(
        model,
        Sequences([fed], [lengths]),
        [FP64],
        Wanted({"logits"}, (), [rows]),
        lambda _i, _at, p, x: logits.update({p: x}),
    )
    shares = logits["logits"] - np.log(np.exp(logits["logits"]).sum(axis=1, keepdims=True))
    exact = shares[np.arange(8), made.tokens[0]]
    np.testing.assert_allclose(made.logprobs[0], exact, atol=3e-6)
    assert (logits["logits"].argmax(axis=1) == made.tokens[0]).all()
