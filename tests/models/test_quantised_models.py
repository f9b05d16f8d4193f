"""Integers with scales: weights as a model of their own, caches bit for bit, integer products, and their faults."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precaudit.diagnosis.evidence.caches import cache_state
from precaudit.errors import UserError
from precaudit.judging.gate import gate
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.jax_decoder.arithmetic import Arithmetic
from precaudit.models.jax_decoder.integers import IntegerMatrix, dequantise_rows, integer_product, quantise_rows
from precaudit.models.jax_decoder.parts import Parts, cache_read
from precaudit.models.numpy_decoder.model import Model
from precaudit.numbers.arrays import as_format, widen
from precaudit.numbers.formats import FORMATS, INTEGERS, Integers
from precaudit.numbers.integers import InRows, dequantise, in_rows, quantise
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.references.mutations.replay import replay
from precaudit.references.textbook.operations import parts, prepare
from precaudit.schema.places import Place
from precaudit.schema.policies import Policy, load_policy, recorded_policy, shipped_policies
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.base import value
from precaudit.schema.selection import Selection

SHIPPED = ("int8-weights", "int8-groups", "int4-groups", "kv-int8", "kv-fp8", "w8a8")
FIRST = ("int4-groups", "w8a8")
TEXT = "import os\n\n\ndef read(path):\n"
BF16 = FORMATS["bfloat16"].dtype
draw = np.random.default_rng


# The definition


def exactly(w, to: Integers):
    """Integers and scales of one row, in exact arithmetic: Python's round of a Fraction is half to even."""
    size = to.group or len(w)
    integers, scales = [], []
    for i in range(0, len(w), size):
        part = [Fraction(float(x)) for x in w[i : i + size]]
        scale = np.float32(float(max(map(abs, part)) / to.most))
        scales.append(scale)
        integers.append([round(x / Fraction(float(scale))) if scale else 0 for x in part])
    return integers, scales


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_and_scales_are_those_of_the_definition(name):
    to = INTEGERS[name]
    w = draw(0).standard_normal((6, 200)) * np.exp(draw(1).uniform(-30, 30, (6, 1)))
    w[2, :128] = 0.0
    w[3, :4] = [to.most, 0.5, 1.5, -0.5]  # the scale is 1: ties go to the even integer
    w[3, 4:] = 0.0
    w = widen(as_format(w, "bfloat16"))
    values, scales = quantise(w, to)
    for row in range(len(w)):
        integers, expected = exactly(w[row], to)
        for g, part in enumerate(integers):
            assert values[g, row, : len(part)].tolist() == part
            assert not values[g, row, len(part) :].any()
            assert scales[g, row] == expected[g]
    assert np.abs(values).max() == to.most
    back = dequantise(values, scales, 200)
    step = np.repeat(scales.T, to.group or 200, axis=1)[:, :200]
    assert (np.abs(back - w) <= step / 2 * (1 + 2.0**-22)).all()


def test_what_is_not_finite_stays_so():
    w = np.ones((3, 8))
    w[0, 3], w[1, 2] = np.nan, np.inf
    assert np.isnan(dequantise(*quantise(w, INTEGERS["int8"]), 8)).any(axis=1).tolist() == [True, True, False]
    rows = InRows(stored="bfloat16")(w)
    assert np.isnan(rows).all(axis=1).tolist() == [True, True, False]
    here = dequantise_rows(*quantise_rows(jnp.asarray(w, jnp.float32)), BF16)
    np.testing.assert_array_equal(np.asarray(here, np.float64), rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_have_the_same_bits_on_the_device_and_here(dtype):
    """One over a constant and a division by a row's maximum are written so that a compiler keeps them."""
    x = draw(2).standard_normal((500, 3, 32)) * np.exp(draw(3).uniform(-6, 6, (500, 1, 1)))
    x[7] = 0.0
    x = as_format(x, dtype)
    values, scales = jax.jit(quantise_rows)(x)
    integers, expected = in_rows(widen(x))
    np.testing.assert_array_equal(np.asarray(values), integers)
    np.testing.assert_array_equal(np.asarray(scales), expected[..., 0])
    largest = np.abs(widen(x)).max(axis=-1)
    assert np.abs(np.asarray(values)).max(axis=-1)[largest > 0].min() == 127
    np.testing.assert_allclose(np.asarray(scales, np.float64), largest / 127, rtol=2.0**-22)
    read = jax.jit(lambda v, s: dequantise_rows(v, s, FORMATS[dtype].dtype))(values, scales)
    once = InRows(stored=dtype)(widen(x))
    np.testing.assert_array_equal(np.asarray(read).view(np.uint8), once.astype(FORMATS[dtype].dtype).view(np.uint8))


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("in_int8", [False, True])
def test_a_product_is_that_of_the_values_held(name, in_int8):
    """Against exact sums of scale · integer in FP64: float32 arithmetic and one rounding are between them."""
    w = widen(as_format(draw(4).standard_normal((24, 300)), "bfloat16"))
    x = as_format(draw(5).standard_normal((3, 7, 300)), "bfloat16")
    values, scales = quantise(w, INTEGERS[name])
    arithmetic = Arithmetic.of(Policy())
    held = IntegerMatrix(jnp.asarray(values), jnp.asarray(scales), 300)
    made = jax.jit(lambda x: integer_product(x, held, np.dtype(np.float32), arithmetic, in_int8))(x)
    read = widen(x)
    if in_int8:
        largest = np.abs(read).max(axis=-1, keepdims=True)
        read = np.rint(read / largest * 127) * largest / 127
    whole = dequantise(values, scales, 300)
    bound = 20 * 2.0**-24 * (np.abs(read) @ np.abs(whole).T)
    assert (np.abs(np.asarray(made, np.float64) - read @ whole.T) <= bound).all()


# The model


def test_projections_alone_are_integers_unless_asked():
    plain = open_checkpoint("tiny")
    for embeddings in ("as-stored", "as-weights"):
        tensors = plain.with_weights("int8", embeddings).tensors
        same = [
            n
            for n in tensors.shapes()
            if np.array_equal(widen(tensors.read_tensor(n)), widen(plain.tensors.read_tensor(n)))
        ]
        kept = {n for n in tensors.shapes() if not n.endswith("_proj.weight")}
        table = "model.embed_tokens.weight"
        assert set(same) == (kept if embeddings == "as-stored" else kept - {table})
    half = plain.with_weights("float16", "as-stored").tensors
    assert half.read_tensor(table).dtype == BF16
    assert half.read_tensor("model.norm.weight").dtype == np.float16


@pytest.mark.parametrize(("name", "kept"), [("int8-weights", 0.52), ("int8-groups", 0.52), ("int4-groups", 0.27)])
def test_the_device_holds_the_integers(name, kept):
    """And nothing wider: bytes of the projections against bfloat16's."""
    subject, plain = load("tiny", name, None, "cpu"), load("tiny", "bf16", None, "cpu")
    matrices = {k: m for k, m in subject.parameters["layers"].items() if isinstance(m, IntegerMatrix)}
    assert set(matrices) == {"wq", "wk", "wv", "wo", "gate", "up", "down"}
    bits = INTEGERS[subject.policy.weights].bits
    assert {m.values.dtype.name for m in matrices.values()} == {f"int{bits}"}
    size = sum(m.values.size * bits / 8 + m.scales.nbytes for m in matrices.values())
    assert size / sum(plain.parameters["layers"][k].nbytes for k in matrices) < kept


def test_old_runs_have_the_keys_as_they_were():
    from precaudit.schema.policies import complete_policy

    old = {k: v for k, v in Policy().settings().items() if k not in ("embeddings", "projection_inputs")}
    assert complete_policy(old)["embeddings"] == "as-weights"
    assert complete_policy(old)["projection_inputs"] == "as-activations"


def test_integer_products_without_integers_are_refused():
    with pytest.raises(UserError, match="projection_inputs = int8 multiplies integers, and weights = as-stored are"):
        load("tiny", "bf16", {"projection_inputs": "int8"}, "cpu")
    with pytest.raises(UserError, match="weights cannot be 'int9'"):
        load("tiny", "bf16", {"weights": "int9"}, "cpu")


def test_the_policies_are_shipped_and_named():
    assert set(SHIPPED) <= set(shipped_policies())
    assert {load_policy(name).settings()["embeddings"] for name in ("int8-weights", "w8a8")} == {"as-stored"}


# Honest programs pass


POINTS = "q,v,attn_out,mlp_out,logits"


def compared(folder, subject, points=POINTS, formula=False, steps=2, phases="prefill,decode", own=None):
    """Trace a subject, or a policy of tiny, in two layers, and compare it."""
    select = Selection.parse(points=points, phases=phases, layers="0,2")
    subject = load("tiny", subject, None, "cpu", own) if isinstance(subject, str) else subject
    run = trace(subject, folder / "run", [Prompt(id="p0", prompt=TEXT)], select, TraceOptions(steps, force=True))
    return compare(run, options=CompareOptions(accum=(), cache=folder / "refs", formula=formula), subject=subject)


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("policy", [p if p in FIRST else pytest.param(p, marks=pytest.mark.slow) for p in SHIPPED])
def test_a_shipped_policy_passes(tmp_path, policy):
    found = compared(tmp_path, policy, formula=policy in ("kv-int8", "w8a8"))
    judged = gate(found)
    assert judged.exit_code == 0, [(v.kind, v.point, v.metric, v.value) for v in judged.verdicts]
    assert not any(e.numberless for e in found.errors)
    formula = [value(e.rel_l2) for e in found.errors if e.kind == "formula"]
    assert len(formula) > 20 if policy in ("kv-int8", "w8a8") else not formula
    assert max(formula, default=0.0) < 1e-7  # float32 constants
    written = {e.point: value(e.rel_l2) for e in found.errors if e.kind == "weights"}
    if load_policy(policy).weights in INTEGERS:
        name = "model.layers.2.mlp.down_proj.weight"
        w = widen(open_checkpoint("tiny").tensors.read_tensor(name))
        to = INTEGERS[load_policy(policy).weights]
        step = np.abs(w.reshape(len(w), -1, to.group or w.shape[1])).max(axis=2, keepdims=True) / to.most
        grid = np.rint(w.reshape(len(w), -1, to.group or w.shape[1]) / step) * step
        assert written[name] == pytest.approx(np.linalg.norm(grid.reshape(w.shape) - w) / np.linalg.norm(w), rel=1e-4)
        assert len(written) == 14  # of two layers
    else:
        assert not written


@pytest.mark.slow  # 70 s
@pytest.mark.parametrize("policy", SHIPPED)
def test_a_shipped_policy_passes_at_every_point(tmp_path, policy):
    found = compared(tmp_path, policy, points="all", formula=True, steps=3)
    assert gate(found).exit_code == 0
    assert max(value(e.rel_l2) for e in found.errors if e.kind == "formula") < 1e-7


@pytest.mark.slow
def test_what_integer_products_cost_is_told_and_explained(tmp_path):
    """The local error of q is that of quantised rows beside bfloat16's, and the emulation makes all of it."""
    cost = {}
    for policy in ("w8a8", "int8-weights"):
        found = compared(tmp_path / policy, policy, points="q", phases="prefill")
        local = [e for e in found.errors if e.kind == "local" and e.phase == "prefill"]
        cost[policy] = np.median([value(e.rel_l2) for e in local])
        assert min(value(e.explained[f"policy:{policy}"]) for e in local) > 0.9
    assert cost["w8a8"] > 1.5 * cost["int8-weights"]


# Faults do not


def altered(policy: str, name: str, change: Callable[[Any, Any], tuple[Any, Any]]):
    """Return a subject whose device holds other integers or scales in layer 2 than its checkpoint makes."""
    subject = load("tiny", policy, None, "cpu")
    layers = dict(subject.parameters["layers"])
    w = layers[name]
    values, scales = change(w.values[2].astype(jnp.int16), w.scales[2])
    values = w.values.astype(jnp.int16).at[2].set(values)
    layers[name] = replace(w, values=values, scales=w.scales.at[2].set(scales))
    vars(subject)["parameters"] = {**subject.parameters, "layers": layers}
    return subject


def one_channel(values, scales):
    return values, scales.at[:, 5].multiply(1.02)


def groups_shifted(values, scales):
    return values, jnp.roll(scales, 1, axis=0)


def zero_point(values, scales):
    return values + 1, scales


CHANGED = [
    ("int8-weights", "wq", one_channel, "q", None),
    ("int4-groups", "wv", zero_point, "v", "zero-point of weights wrong by +1"),
]
MORE = [
    ("w8a8", "down", one_channel, "mlp_out", "channel 5 × 1.02"),
    ("int8-groups", "down", groups_shifted, "mlp_out", "group scales shifted by +1"),
    ("int8-weights", "down", one_channel, "mlp_out", "channel 5 × 1.02"),
    ("int8-weights", "wv", zero_point, "v", "zero-point of weights wrong by +1"),
    ("int4-groups", "down", groups_shifted, "mlp_out", "group scales shifted by +1"),
    ("int4-groups", "wq", one_channel, "q", None),
    ("w8a8", "wq", one_channel, "q", None),
]


def named(found, point):
    """Return what diagnosis names for a point of layer 2, or None."""
    recorded = Recorded.of(found.run)
    policy = recorded_policy(found.run.record)
    model = Model(recorded.config, open_checkpoint("tiny").under(policy).tensors.read_tensor)
    place = Place("p0", "prefill", 0, 2, point)
    operation = prepare(recorded, model, place, parts(recorded, place)[0])
    told = replay(operation, model, policy).named
    return None if told is None else told.variant.name


SLOW = [pytest.param(*m, marks=pytest.mark.slow) for m in MORE]


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize(("policy", "name", "change", "point", "cause"), [*CHANGED, *SLOW])
def test_other_integers_or_scales_fail_and_are_named(tmp_path, policy, name, change, point, cause):
    """One channel of q, turned by RoPE, is two channels of a factor that depends on the position: found, not named."""
    found = compared(tmp_path, altered(policy, name, change), points=point, phases="prefill")
    judged = gate(found)
    failed = {(v.layer, v.point) for v in judged.verdicts if v.status == "fail" and v.kind == "local"}
    assert judged.exit_code == 1
    assert failed == {(2, point)}
    assert named(found, point) == cause


@pytest.mark.turn  # 3 s
def test_inputs_that_were_never_quantised_fail_and_are_named(tmp_path):
    """Declared w8a8, run as w8a16."""
    subject = load("tiny", "w8a8", None, "cpu")
    wide = replace(subject.decoder, arithmetic=replace(subject.decoder.arithmetic, inputs_in_int8=False))
    vars(subject)["decoder"] = wide
    found = compared(tmp_path, subject, points="v,mlp_out", phases="prefill")
    assert gate(found).exit_code == 1
    assert {named(found, point) for point in ("v", "mlp_out")} == {"inputs not quantised"}


def other_scale(cache, layer):
    scales = cache_read(cache.scales, layer)
    return dequantise_rows(cache_read(cache.values, layer), scales.at[:, 3].set(scales[:, 8]), cache.read)


def moved_zero(cache, layer):
    values = cache_read(cache.values, layer).astype(jnp.int16) + 1
    return dequantise_rows(values, cache_read(cache.scales, layer), cache.read)


def larger(cache, layer):
    return dequantise_rows(cache_read(cache.values, layer), cache_read(cache.scales, layer) * 1.02, cache.read)


def bf16_scales(cache, layer):
    scales = jax.lax.reduce_precision(cache_read(cache.scales, layer), 8, 7)
    return dequantise_rows(cache_read(cache.values, layer), scales, cache.read)


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize(
    ("read", "cause"),
    [
        (other_scale, "scale of row 8"), (moved_zero, "zero-point wrong by 1"),
        pytest.param(larger, "scales × 1.02", marks=pytest.mark.slow),
        (bf16_scales, None),
    ],
)  # fmt: skip
def test_a_cache_that_reads_other_rows_fails_and_is_named(tmp_path, read, cause):
    found = compared(tmp_path, "kv-int8", own=replace(Parts(), cache_read=read), points="attn_out", phases="decode")
    states = [e for e in found.errors if e.kind == "state" and e.point != "resid_in"]
    assert gate(found).exit_code == 1
    assert len(states) == 12
    assert all(e.mismatched > 0 for e in states)  # at every step, hashed ones too
    if cause is not None:
        told = cache_state(Recorded.of(found.run), Place("p0", "decode", 0, 2, "k_cache"))
        assert (told.cause, told.explained > 0.9) == (cause, True)


def test_a_cache_that_was_never_quantised_fails_and_is_named(tmp_path):
    """Declared int8, kept as written: what is read is better than announced, and not what was announced."""
    subject = load("tiny", "kv-int8", None, "cpu")
    wide = replace(subject.decoder, arithmetic=replace(subject.decoder.arithmetic, kv_cache=BF16))
    vars(subject)["decoder"] = wide
    found = compared(tmp_path, subject, points="attn_out", phases="decode")
    assert gate(found).exit_code == 1
    told = cache_state(Recorded.of(found.run), Place("p0", "decode", 0, 2, "k_cache"))
    assert told.cause == "cache not quantised"
