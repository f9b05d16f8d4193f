"""What a run is held against: the textbook and a program's own jaxpr answer alike, and with independent values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precaudit
from precaudit import Program
from precaudit.models.checkpoints import open_checkpoint
from precaudit.progress import silent
from precaudit.recording.programs.own import prefill_call
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.subject import load
from precaudit.references.comparison.against import place_errors
from precaudit.references.comparison.program_pieces import traced_entries
from precaudit.references.comparison.programs import compare_program
from precaudit.references.comparison.selected import resolve_selection
from precaudit.references.textbook.reference import Textbook
from precaudit.references.traced.reference import Traced
from precaudit.schema.places import Place
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.runs import PROGRAM_CALL
from precaudit.schema.selection import Selection

LAYERS, WIDTH = 3, 8
TOKENS = (5, 9, 2, 40, 77, 3)


@pytest.fixture(scope="module")
def scanned(tmp_path_factory):
    draw = np.random.default_rng(5)
    weights = jnp.asarray(draw.standard_normal((LAYERS, WIDTH, WIDTH)) / WIDTH**0.5, jnp.bfloat16)
    x = jnp.asarray(draw.standard_normal((4, WIDTH)), jnp.bfloat16)

    def call(w, x):
        def layer(x, w):
            act = jnp.tanh(x)
            mixed = act @ w
            return x + mixed, None

        return jax.lax.scan(layer, x, w)[0]

    program = Program(call, weights, {"a": (x,)}, outputs="y")
    opened = trace_program(program, tmp_path_factory.mktemp("scanned") / "run")
    return program, opened, compare_program(opened, program), np.asarray(weights, np.float64), np.asarray(x, np.float64)


def test_a_program_s_own_reference_is_fp64_of_the_whole_at_every_step(scanned):
    program, opened, errors, weights, x = scanned
    reference = Traced(traced_entries(opened, program)[0], silent, kept=True)
    for layer in range(LAYERS):
        mixed = np.tanh(x) @ weights[layer]
        found = reference.values(Place("a", PROGRAM_CALL, 0, layer, "mixed"))
        assert np.abs(found - mixed).max() <= 1e-14
        x = x + mixed
    assert np.abs(reference.values(Place("a", PROGRAM_CALL, 0, None, "outputs.y")) - x).max() <= 1e-14
    assert reference.values(Place("a", PROGRAM_CALL, 0, 0, "nothing")) is None
    assert reference.values(Place("a", PROGRAM_CALL, 7, 0, "mixed")) is None
    places = dict.fromkeys(Place(e.prompt, e.phase, e.step, e.layer, e.point) for e in errors)
    assert list(place_errors(reference, places)) == list(errors)


def test_values_are_kept_where_they_are_asked_for_alone(scanned):
    program, opened, *_ = scanned
    reference = Traced(traced_entries(opened, program)[0], silent)
    assert reference.values(Place("a", PROGRAM_CALL, 0, 0, "mixed")) is None


@pytest.mark.turn  # 6 s
def test_the_textbook_and_the_program_itself_say_the_same_of_a_decoder(tmp_path):
    """Values of the whole in FP64, of two implementations that share no numerics, by the one protocol."""
    subject = load("tiny", device="cpu")
    run = precaudit.trace(
        subject, tmp_path / "run", [Prompt(id="a", tokens=TOKENS)], Selection(points=("q", "attn_out", "mlp_out"))
    )
    recorded = Recorded.of(run)
    checkpoint = open_checkpoint("tiny").with_weights(run.record.policy["weights"])
    selected = resolve_selection(recorded, None, ())
    book = Textbook.of(recorded, selected, checkpoint, tmp_path / "cache")
    program = prefill_call(subject, {"a": np.asarray(TOKENS)})
    opened = trace_program(program, tmp_path / "program")
    own = Traced(traced_entries(opened, program)[0], silent, kept=True)
    for point in ("q", "attn_out", "mlp_out"):
        for layer in range(subject.config.layers):
            expected = np.asarray(book.values(Place("a", "prefill", 0, layer, point)))[: len(TOKENS)]
            found = own.values(Place("a", PROGRAM_CALL, 0, layer, point)).reshape(expected.shape)
            # the program's constants are float32: the scale, epsilon
            assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max(), (point, layer)


@pytest.mark.turn
def test_without_weights_the_textbook_s_forward_is_unknown(tmp_path):
    run = precaudit.trace("tiny", tmp_path / "run", [Prompt(id="a", tokens=TOKENS)], Selection(points=("q",)))
    recorded = Recorded.of(run)
    book = Textbook.of(recorded, resolve_selection(recorded, None, ()), None, tmp_path / "cache")
    place = Place("a", "prefill", 0, 1, "q")
    assert book.values(place) is None
    assert [e.unknown for e in book.forward(place)] == ["weights"]
    assert [e.unknown for e in book.local(place)] == ["weights"]
