"""Which tensor an operation read, and which rows of the embedding the first layer did."""

import jax.numpy as jnp
import numpy as np
import pytest

from precaudit.diagnosis.evidence.misread import misread
from precaudit.diagnosis.evidence.streams import stream_state
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.jax_decoder import Decoder
from precaudit.models.numpy_decoder.model import Model
from precaudit.numbers.arrays import widen
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.textbook.operations import parts, prepare
from precaudit.schema.places import Place
from precaudit.schema.prompts import Prompt
from tests.helpers.fixture_runs import fixture_run
from tests.helpers.paths import FIXTURES
from tests.helpers.recorded_operations import ALL, holding

pytestmark = pytest.mark.usefixtures("neutral", "own_programs")


@pytest.fixture
def layers(tmp_path):
    """Return an honest run of a fixture, and its model."""
    run = Recorded.of(fixture_run(tmp_path / "run", "llama-gqa", "fp32-highest", ALL))
    checkpoint = open_checkpoint(str(FIXTURES / "llama-gqa"))
    return run, Model(checkpoint.config, checkpoint.tensors.read_tensor)


def test_a_norm_that_reads_another_tensor_is_told(layers, operation):
    run, model = layers
    _, _, policy = operation("llama-gqa", "mlp_norm", "fp32-highest", 1)
    place = Place("p0", "prefill", 0, 1, "mlp_norm")
    o = prepare(run, model, place, parts(run, place)[0])
    came = widen(run.rows("p0", "prefill", 1, "resid_in").values)
    w = widen(np.asarray(model.read("model.layers.1.post_attention_layernorm.weight")))
    values = came / np.sqrt((came**2).mean(axis=1, keepdims=True) + model.config.norm_eps) * w
    assert misread(run, model, holding(o, values), policy).cause == "reads resid_in"
    assert misread(run, model, holding(o, 1.1 * values), policy) is None


WAYS = {
    "embedding × 2": lambda e: e * 2,
    "embedding rows shifted by -1": lambda e: jnp.roll(e, 1, axis=0),
    "embedding normalised": lambda e: (
        e / jnp.sqrt((e.astype(jnp.float32) ** 2).mean(-1, keepdims=True)).astype(e.dtype)
    ),
}


@pytest.mark.parametrize(
    "cause", [next(iter(WAYS)), *(pytest.param(w, marks=pytest.mark.slow) for w in list(WAYS)[1:])]
)
def test_how_the_embedding_is_handed_on_is_told(cause, tmp_path, monkeypatch):
    original = Decoder._layers
    monkeypatch.setattr(
        Decoder, "_layers",
        lambda self, params, *rest: original(self, params | {"embed": WAYS[cause](params["embed"])}, *rest),
    )  # fmt: skip
    tokens = [Prompt(id="p0", tokens=(3, 1, 4, 15, 9))]
    subject = load(str(FIXTURES / "llama-gqa"), "fp32-highest", None, "cpu")
    run = Recorded.of(trace(subject, tmp_path / "run", tokens, ALL, TraceOptions(decode_steps=0)))
    checkpoint = open_checkpoint(str(FIXTURES / "llama-gqa"))
    place = Place("p0", "prefill", 0, 0, "resid_in")
    assert stream_state(run, Model(checkpoint.config, checkpoint.tensors.read_tensor), place).cause == cause
