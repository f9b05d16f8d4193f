"""Causes that were asked for: heads that are exchanged, random rounding, keys that are hidden, values that are cut."""

import numpy as np
import pytest

from precaudit.diagnosis.evidence.caches import explain
from precaudit.models.numpy_decoder.rounding import of_policy
from precaudit.numbers.arrays import cutter, rounder, widen
from precaudit.numbers.formats import FORMATS
from precaudit.references.mutations.forms import evaluate_form, usual_form
from precaudit.references.mutations.replay import operands_of, replay
from precaudit.references.mutations.stochastic import neighbours, stochastic_variants
from precaudit.schema.metrics.rows import unseen
from tests.helpers.recorded_operations import holding

pytestmark = pytest.mark.usefixtures("neutral")
DRAW = np.random.default_rng(5)


def attended(q, k, v, seen):
    """Return softmax(q·k/√K)·v [T, H, K] of keys that are seen [T, S], query head h on key head h // (H/G)."""
    heads, groups = q.shape[1], k.shape[1]
    out = np.empty((len(q), heads, v.shape[-1]))
    for h in range(heads):
        g = h // (heads // groups)
        s = np.where(seen, q[:, h] @ k[:, g].T / np.sqrt(q.shape[-1]), -np.inf)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        out[:, h] = (p / p.sum(axis=1, keepdims=True)) @ v[:, g]
    return out


@pytest.fixture
def attention(operation):
    """Return attn_out's operation of a fixture, its model and policy, q, k and v, and the keys that rows see."""
    o, model, policy = operation("llama-mha", "attn_out", "fp32-highest", 1)
    q, k, v = o.inputs
    hidden = unseen(np.asarray(o.positions), len(k), None)
    assert np.allclose(attended(q, k, v, ~hidden), widen(o.stored), rtol=1e-4, atol=1e-5)
    return o, model, policy, (q, k, v), ~hidden


def named(found):
    o, model, policy, values = found
    return replay(holding(o, values), model, policy).named


@pytest.mark.parametrize(("which", "says"), [((1,), "keys"), ((2,), "values"), ((1, 2), "keys and values")])
def test_exchanged_heads_are_told_by_number(attention, which, says):
    o, model, policy, values, seen = attention
    order = list(range(values[1].shape[1]))
    order[0], order[-1] = order[-1], order[0]
    changed = [x[:, order] if i in which else x for i, x in enumerate(values)]
    found = named((o, model, policy, attended(*changed, seen)))
    assert found.variant.name == f"{says} of heads 0 and {len(order) - 1} exchanged"


def test_keys_that_another_rows_mask_hides_are_told_by_slot(attention):
    o, model, policy, values, seen = attention
    own = np.eye(*seen.shape, dtype=bool)
    first, last = seen.copy(), seen.copy()
    first[:, :3] = False
    last[:, 5:] = False
    found = named((o, model, policy, attended(*values, first | own)))
    assert found.variant.name == "first key attended to 3"
    found = named((o, model, policy, attended(*values, last | own)))
    assert found.variant.name == "number of keys attended to 5"


@pytest.mark.parametrize("bits", [3, 6])
def test_values_that_are_cut_are_told_by_their_bits(attention, bits):
    o, model, policy, (q, k, v), seen = attention
    power = 2.0 ** (np.floor(np.log2(np.abs(v))) + 1 - bits)
    found = named((o, model, policy, attended(q, k, np.trunc(v / power) * power, seen)))
    assert found.variant.name == f"significant bits of values {bits}"


@pytest.mark.parametrize("point", ["attn_norm", "resid_mid", "q"])
def test_random_rounding_is_named_and_rounding_to_nearest_is_not(operation, point):
    o, model, policy = operation("llama-gqa", point, "bf16", 1)
    store = operands_of(o, model).row.place
    exact = evaluate_form(usual_form, operands_of(o, model), of_policy(policy).eliding((store,)))
    low, high = neighbours("bfloat16", exact)
    share = np.where(high > low, (exact - low) / np.where(high > low, high - low, 1), 0)
    random = np.where(DRAW.uniform(size=share.shape) < share, high, low)
    assert replay(holding(o, random), model, policy).named.variant.name == "stochastic rounding"
    assert replay(holding(o, rounder("bfloat16")(exact)), model, policy).named.variant.name == "as announced"
    cut = replay(holding(o, cutter("bfloat16")(exact)), model, policy).named
    assert cut.variant.name in ("cut to bfloat16", "as announced")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_neighbours_are_the_numbers_of_a_format_on_both_sides(dtype):
    x = np.concatenate([DRAW.standard_normal(2000), 2.0**-20 * DRAW.standard_normal(200), [1.0, -1.5, 1 - 2**-13]])
    low, high = neighbours(dtype, x)
    stored = FORMATS[dtype].dtype
    assert np.array_equal(low.astype(stored).astype(np.float64), low)
    assert np.array_equal(high.astype(stored).astype(np.float64), high)
    assert ((low <= x) & (x <= high)).all()
    nearest = rounder(dtype)(x)
    assert ((nearest == low) | (nearest == high)).all()
    middle = (low + high) / 2
    between = high > low
    assert (rounder(dtype)(middle[between]) != middle[between]).all()  # nothing of the format lies between


def test_frequencies_that_are_not_the_distances_name_nothing():
    x = DRAW.standard_normal((64, 1, 64))
    low, high = neighbours("bfloat16", x)
    for share in (0.5, 0.3):  # of rounding up, whatever the distance
        taken = np.where(DRAW.uniform(size=x.shape) < share, high, low)
        assert not list(stochastic_variants("TD", "bfloat16", taken, x))
    for other in (rounder("bfloat16")(x), cutter("bfloat16")(x), rounder("bfloat16")(1.01 * x)):
        assert not list(stochastic_variants("TD", "bfloat16", other, x))


def test_rows_of_a_cache_times_a_factor_are_told_by_it():
    rows = DRAW.standard_normal((12, 2, 16)).astype(FORMATS["bfloat16"].dtype)
    held = rows.copy()
    held[8:] = (widen(held[8:]) * 1.25).astype(rows.dtype)
    state = explain(held, rows)
    assert (state.cause, state.kind, state.rows) == ("rows × 1.25", "state", (8, 9, 10, 11))
    assert "8 to 11" in state.says
