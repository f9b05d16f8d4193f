"""Causes with one number or none, made by formulas of their own; where nothing explains an error, none is named."""

import numpy as np
import pytest

from precaudit.diagnosis.evidence.misread import misread
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.numpy_decoder.model import Model
from precaudit.numbers.arrays import rounder, widen
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.mutations.bench import Tried
from precaudit.references.mutations.operands import single_weights
from precaudit.references.mutations.parts import scaled_parts
from precaudit.references.mutations.replay import _confirm, operands_of, replay
from precaudit.references.mutations.storing import to_bits
from precaudit.references.mutations.variants import Variant, to_odd
from precaudit.references.textbook.operations import parts, prepare
from precaudit.schema.places import Place
from tests.helpers.fixture_runs import fixture_run
from tests.helpers.paths import FIXTURES
from tests.helpers.recorded_operations import ALL, holding

pytestmark = pytest.mark.usefixtures("neutral", "own_programs")
DRAW = np.random.default_rng(11)


def answers(*explained, fitted=False):
    """Return the announced policy's answer, which leaves too much, and those of causes that close."""
    first = Tried(Variant("as announced", "rounding", ""), explained[0], 0.76, 1.1)
    rest = [
        Tried(Variant(f"cause {i}", "format", "", fitted=fitted), x, 0.77, 0.9) for i, x in enumerate(explained[1:])
    ]
    return [first, *rest]


def test_a_cause_that_explains_no_more_than_the_announced_policy_is_none():
    """It closes by chance: the record is near its limit, and a few roundings fall otherwise."""
    assert _confirm(None, None, answers(0.6118, 0.6122)) is None
    assert _confirm(None, None, answers(0.6118, 0.6122, 0.99)).variant.name == "cause 1"
    assert _confirm(None, None, answers(0.0, 0.45, fitted=True)) is None
    assert _confirm(None, None, answers(0.0, 0.97, fitted=True)).variant.name == "cause 0"


def test_no_number_is_taken_from_values_that_are_all_nan(operation):
    o, model, policy = operation("mistral-window", "attn_out", "fp32-highest", 1)
    found = replay(holding(o, np.full(o.stored.shape, np.nan)), model, policy)
    assert not [t for t in found.tried if t.variant.fitted and t.closes]


@pytest.fixture
def projection(operation):
    """Return attn_proj's operation, its model and policy, what it reads and its matrix in FP64."""
    o, model, policy = operation("llama-gqa", "attn_proj", "fp32-highest", 1)
    w = widen(np.asarray(model.read("model.layers.1.self_attn.o_proj.weight")))
    x = o.inputs[0].reshape(len(o.positions), -1)
    assert np.allclose(x @ w.T, widen(o.stored), rtol=1e-4, atol=1e-6)
    return o, model, policy, x, w


def of(found, values):
    o, model, policy, *_ = found
    return replay(holding(o, values), model, policy).named


def test_a_matrix_of_which_one_weight_or_column_is_another_is_told(projection):
    *_, x, w = projection
    one, column, whole = w.copy(), w.copy(), w * 1.02
    one[3, 5] *= 64
    column[:, 9] = 0
    assert of(projection, x @ one.T).variant.name == "one weight × 64"
    assert of(projection, x @ column.T).variant.name == "weights of input 9 zeroed"
    assert of(projection, x @ whole.T).variant.name in ("factor on the weights 1.02", "× 1.02")
    assert of(projection, x @ w.T).variant.name == "as announced"
    assert of(projection, x @ (w + 0.1 * DRAW.normal(size=w.shape)).T) is None  # a number for every weight


def test_parts_of_a_result_at_one_number_are_told(projection):
    *_, x, w = projection
    y = x @ w.T
    held, more, some = y.copy(), y.copy(), y.copy()
    held[:, 4] = -7
    more[:, [1, 6]] += 0.5
    some[:, :3] *= 1.25
    assert of(projection, held).variant.name == "channel 4 at -7"
    assert of(projection, more).variant.name == "+0.5 in channels 1, 6"
    assert of(projection, some).variant.name == "channels 0 to 2 × 1.25"
    assert of(projection, np.maximum(y, 0)).variant.name == "clipped, least 0"
    edge = np.sort(y, axis=1)[:, -5, None]
    assert of(projection, np.where(y >= edge, y, -3.0)).variant.name == "5 largest alone"
    kept = DRAW.uniform(size=y.shape) >= 0.25
    share = 1 - kept.mean()
    found = of(projection, np.where(kept, y / (1 - float(f"{share:.2g}")), 0))
    assert found.variant.name == f"dropout {float(f'{share:.2g}'):g}"


@pytest.mark.parametrize("what", ["stream", "addend"])
def test_what_is_added_once_more_after_a_rounding_is_told(operation, what):
    o, model, policy = operation("llama-gqa", "resid_mid", "bf16", 1)
    stream, addend = o.inputs
    rounds = rounder("bfloat16")
    again = rounds(rounds(stream + addend) + {"stream": stream, "addend": addend}[what])
    assert of((o, model, policy), again).variant.name == f"{what} added again"
    assert of((o, model, policy), rounds(stream + addend)).variant.name == "as announced"


def test_a_factor_on_one_element_names_nothing():
    y = DRAW.normal(size=(1, 1, 40))
    c = y.copy()
    c[0, 0, 7] = 5
    names = [v.name for v in scaled_parts(np.zeros(1, int), "TD", c, y, 2.0**-24) if not v.describes]
    assert "channel 7 at 5" in names
    assert not [n for n in names if n.startswith("channel") and "×" in n]


def turned(x, angles):
    """Return pairs (i, i + K/2) as complex numbers turned by angles [T, K/2]."""
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([z.real, z.imag], axis=-1)


def test_angles_of_rope_are_told(operation):
    o, model, policy = operation("llama-gqa", "k", "fp32-highest", 1)
    size, at = model.config.head_dim, np.asarray(o.positions, np.float64)[:, None]
    w = widen(np.asarray(model.read("model.layers.1.self_attn.k_proj.weight")))
    x = (o.inputs[0] @ w.T).reshape(len(at), -1, size)
    each = model.config.rope_theta ** (-np.arange(size // 2) * 2 / size)
    assert np.allclose(turned(x, at * each), widen(o.stored), rtol=1e-4, atol=1e-5)
    ways = {
        "cos and sin exchanged": turned(x, np.pi / 2 - at * each),
        "RoPE frequencies in reverse": turned(x, at * each[::-1]),
        "RoPE frequencies shifted by +1": turned(x, at * np.roll(each, 1)),
        "last position 5": turned(x, np.minimum(at, 5) * each),
        "halves of heads exchanged": np.roll(turned(x, at * each), size // 2, axis=-1),
    }  # fmt: skip
    for cause, values in ways.items():
        assert of((o, model, policy), values).variant.name == cause


def test_rounding_to_odd_keeps_what_a_second_rounding_needs():
    x = DRAW.normal(size=4000)
    wide = x.astype(np.float32).view(np.uint32)
    odd = (wide & 0xFFFF0000) | np.where((wide & 0xFFFF) != 0, 0x10000, 0).astype(np.uint32)
    assert np.array_equal(to_odd("bfloat16")(x.astype(np.float32).astype(np.float64)), odd.view(np.float32))
    assert np.array_equal(to_odd("bfloat16")(to_bits(3)(x)), to_bits(3)(x))


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


def test_single_weights_are_looked_for_in_matrices_alone(operation):
    o, model, _ = operation("llama-gqa", "resid_mid", "fp32-highest", 1)
    assert not list(single_weights(operands_of(o, model), np.ones((len(o.positions), 1, model.config.width))))


@pytest.mark.parametrize("shares", [True, False])
def test_a_head_that_lacks_a_share_of_its_probabilities_is_described(shares):
    """What it lacks is at keys that are not recorded, such as padding: no factor is the cause."""
    whole = np.random.default_rng(0).dirichlet(np.ones(16), (6, 4))  # [T, H, S]
    found = whole.copy()
    found[:, 1] *= 0.957
    named = [
        v for v in scaled_parts(np.arange(6), "HTS", found, whole, 2.0**-9, shares=shares) if "head 1 × " in v.name
    ]
    assert named
    assert all(v.describes == shares for v in named)
