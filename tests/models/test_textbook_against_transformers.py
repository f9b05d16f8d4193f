"""The NumPy FP64 decoder against transformers' own models in patched torch float64 (refs/fixtures/generate.py)."""

import pytest

from precaudit.models.checkpoints import open_checkpoint
from precaudit.schema.lengths import row_lengths
from tests.helpers.paths import FIXTURES
from tests.helpers.textbook_values import expected, reference, relative

SMALL = sorted(p.stem for p in (FIXTURES / "expected").glob("*.safetensors") if p.stem != "smollm2")


def test_there_are_enough_fixtures():
    assert len(SMALL) >= 6


@pytest.mark.parametrize("name", SMALL)
def test_numpy_is_transformers_in_float64(name):
    want = expected(name)
    hidden, logits = reference(open_checkpoint(str(FIXTURES / name)), want["tokens"])
    assert relative(logits, want["logits"]) <= 1e-12
    for got, layer in zip(hidden, want["hidden"], strict=True):
        assert relative(got, layer) <= 1e-12
    # transformers' own .double() keeps norms, rotary tables and softmax in float32 (docs/numerics.md)
    unpatched = want["logits_unpatched"]
    assert 1e-9 < relative(logits[-len(unpatched) :], unpatched) <= 1e-5


BEYOND = [name for name in SMALL if "decoded" in expected(name)]


def test_there_are_models_beyond_their_context():
    assert len(BEYOND) >= 3


@pytest.mark.parametrize("name", BEYOND)
def test_what_is_decoded_beyond_the_context_is_transformers(name):
    want, prompt = expected(name), {"llama-dynamic-beyond": 60}.get(name, 28)
    n = len(want["tokens"])
    lengths = row_lengths("prefill", prompt, n, n)
    logits = reference(open_checkpoint(str(FIXTURES / name)), want["tokens"], lengths)[1]
    assert relative(logits, want["decoded"]) <= 1e-12
    assert relative(want["logits"], want["decoded"]) > 0.01  # rescore, held to its own above, is another formula


def test_numpy_is_transformers_on_smollm2():
    want = expected("smollm2")
    hidden, logits = reference(open_checkpoint("smollm2"), want["tokens"])
    at = want["logits_at"]
    assert relative(logits[at[:, 0], at[:, 1]], want["logits"]) <= 1e-12
    for i, (positions, values) in enumerate(zip(want["hidden_at"], want["hidden"], strict=True)):
        assert relative(hidden[i, positions[:, 0], positions[:, 1]], values) <= 1e-12
