"""Layers unrolled and products fused: other programs of the same numbers, and the default program as it was."""

import hashlib
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precaudit.checks.lint.linting import lint_model
from precaudit.cli import run as command
from precaudit.diagnosis.evidence import invariance
from precaudit.errors import UserError
from precaudit.judging.gate import gate
from precaudit.models.jax_decoder import Parts
from precaudit.models.jax_decoder.integers import IntegerMatrix
from precaudit.models.jax_decoder.parts import attention_scores, cache_write, split_fused
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.programs import decode_program, prefill_program
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
from precaudit.references.comparison.compare import compare
from precaudit.schema.policies import Policy, apply_settings, complete_policy, load_policy, shipped_policies
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from tests.helpers.paths import FIXTURES
from tests.helpers.runs import record
from tests.helpers.selected import few

TEXT = "import os\n\n\ndef read(path):\n"
BOTH = {"layers": "unrolled", "fused": "qkv+gate_up"}
WAYS = [{"layers": "unrolled"}, {"fused": "qkv"}, {"fused": "qkv+gate_up"}]
IDS = ["unrolled", "qkv", "qkv and gate, up"]


def under(policy="bf16", **settings):
    return apply_settings(load_policy(policy), settings)


def arguments(subject, batch=2, length=64):
    """Return the arguments of prefill and of decode."""
    cache, starts = subject.decoder.init_cache(batch, length), np.zeros(batch, np.int32)
    tables = subject.tables(length, np.full((batch, length), length))
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, subject.config.vocab, (batch, length)).astype(np.int32)
    prefill = (subject.parameters, tables, tokens, starts, np.full((batch, 1), length - 1, np.int32), cache)
    return {"prefill": prefill, "decode": (subject.parameters, tables, tokens[:, 0], starts, starts, cache)}


def lowered(subject, phase, platform="cpu"):
    """Return a phase's StableHLO."""
    function = getattr(subject.decoder, phase)
    return jax.jit(function).trace(*arguments(subject)[phase]).lower(lowering_platforms=(platform,)).as_text()


def judged(folder, subject, select=None, steps=2):
    select = select or Selection.parse(points="all", phases="prefill,decode")
    run = trace(subject, folder / "run", [Prompt(id="p0", prompt=TEXT)], select, TraceOptions(steps, force=True))
    found = compare(run, options=CompareOptions(accum=(), cache=folder / "refs"))
    return found, gate(found)


# The default program


WRITTEN = {
    ("prefill", "cpu"): "25d336ffd5b47ad7df77bc254d4847d13845dd4262fe5cd2a880d89260b66c00",
    ("decode", "cpu"): "4842e1f780c69445a45bfc66e18075dab48d1cca208c7914ee9d77c59c4523e4",
    ("prefill", "tpu"): "7af003dc108479beb7b696ed292179f51aa2a17f4ec3a981650df70505218513",
    ("decode", "tpu"): "3d82397daf034c67c9705aab88c038dc90dd5bb969943842191caa5d467c03c9",
}


@pytest.mark.skipif(jax.__version__ != "0.10.2", reason="another JAX writes the same program otherwise")
@pytest.mark.parametrize(("phase", "platform"), WRITTEN)
def test_the_default_program_is_what_it_was(phase, platform):
    """StableHLO of tiny under bf16, SHA-256, from before these keys; an intended change of the decoder is another."""
    subject = load("tiny", "bf16", None, "cpu")
    if platform == "tpu":
        text = lowered(subject, phase, platform)
    else:
        program = (prefill_program if phase == "prefill" else decode_program)(subject, None)
        text = program.lower(*arguments(subject)[phase], None).as_text()
    assert hashlib.sha256(text.encode()).hexdigest() == WRITTEN[phase, platform]


# What the programs are


@pytest.mark.turn  # 6 s
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_unrolled_layers_are_in_no_loop(phase):
    """And each has products of its own: seven a layer, two of attention, and that of logits."""
    for settings, loops, layers in (({}, 1, 1), ({"layers": "unrolled"}, 0, 5)):
        subject = load("tiny", under(**settings), None, "cpu")
        text = jax.jit(getattr(subject.decoder, phase)).lower(*arguments(subject)[phase]).compile().as_text()
        assert text.count(" while(") == loops
        assert text.count(" dot(") == 9 * layers + 1


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(("fused", "products"), [("none", 10), ("qkv", 8), ("qkv+gate_up", 7)])
def test_a_fused_product_is_one_and_its_weights_are_put_together_beforehand(phase, fused, products):
    subject = load("tiny", under(fused=fused), None, "cpu")
    text = lowered(subject, phase)
    assert text.count("stablehlo.dot_general") == products
    width = f"x{subject.config.width}x"
    assert not [x for x in text.splitlines() if "stablehlo.concatenate" in x and width in x.rpartition("->")[2]]


@pytest.mark.parametrize("policy", ["bf16", "fp32", "int8-weights", "int4-groups"])
def test_fused_weights_are_the_rows_of_the_weights(policy):
    plain = load("tiny", policy, None, "cpu").parameters["layers"]
    fused = load("tiny", under(policy, fused="qkv+gate_up"), None, "cpu").parameters["layers"]
    assert {"qkv", "gate_up"} == fused.keys() - plain.keys()
    assert {"wq", "wk", "wv", "gate", "up"} == plain.keys() - fused.keys()
    for name, parts in (("qkv", ("wq", "wk", "wv")), ("gate_up", ("gate", "up"))):
        for field in ("values", "scales") if isinstance(fused[name], IntegerMatrix) else (None,):
            held, *apart = (x if field is None else getattr(x, field) for x in (fused[name], *map(plain.get, parts)))
            axis = {None: 1, "values": 2, "scales": 2}[field]
            expected = np.concatenate([np.asarray(x) for x in apart], axis=axis)
            np.testing.assert_array_equal(np.asarray(held), expected)


def test_a_run_of_before_the_keys_is_in_a_scan_and_of_products_apart():
    recorded = {k: v for k, v in Policy().settings().items() if k not in BOTH}
    assert {k: complete_policy(recorded)[k] for k in BOTH} == {"layers": "scan", "fused": "none"}


def test_values_are_those_that_there_are():
    assert {"unrolled", "fused"} <= set(shipped_policies())
    assert under(**BOTH).name == "bf16+fused=qkv+gate_up+layers=unrolled"
    assert load_policy("fused").fused == "qkv+gate_up"
    for key, text in (("layers", "unroll"), ("fused", "gate_up")):
        with pytest.raises(UserError, match=f"policy key {key} cannot be '{text}'"):
            load("tiny", "bf16", {key: text}, "cpu")


def test_unrolled_layers_are_a_program_of_their_own():
    """Programs are kept by their decoder."""
    plain, other = (load("tiny", name, None, "cpu") for name in ("bf16", "unrolled"))
    assert other.decoder != plain.decoder
    assert prefill_program(other, None) is not prefill_program(plain, None)
    assert decode_program(other, None) is not decode_program(plain, None)


@pytest.mark.slow  # 13 s
def test_invariance_unrolls(tmp_path, monkeypatch):
    ran = []
    real = invariance.trace
    monkeypatch.setattr(invariance, "trace", lambda s, *rest: (ran.append(s.decoder.unroll), real(s, *rest))[1])
    subject = load("tiny", "bf16", None, "cpu")
    run = record(tmp_path / "run", prompts=["x = 1"], select=Selection.parse(points="v,logits", phases="prefill"))
    found = invariance.invariance(Recorded.of(run), subject, [])
    assert [x.status for x in found if x.way == "layers unrolled"] == ["bit-identical"]
    assert dict(zip([w.name for w in invariance.WAYS], ran, strict=True))["layers unrolled"] == subject.config.layers
    assert set(ran) == {1, subject.config.layers}


# The numbers


@pytest.mark.turn  # 8 s
@pytest.mark.parametrize("policy", few(["bf16", "fp32", "w8a8"], "bf16"))
@pytest.mark.parametrize("settings", WAYS, ids=IDS)
def test_logits_and_caches_are_those_of_the_default(policy, settings):
    """Bit for bit, where XLA:CPU gives them: it does for tiny, whose sums are as long in either program."""
    found = []
    for chosen in (load_policy(policy), under(policy, **settings)):
        subject = load("tiny", chosen, None, "cpu")
        given = arguments(subject)
        logits, cache, _ = prefill_program(subject, None)(*given["prefill"], None)
        step = (*given["decode"][:4], np.full(2, 60, np.int32), cache, None)
        row, cache, _ = decode_program(subject, None)(*step)
        found.append([np.asarray(x) for x in jax.tree.leaves((logits, row, cache))])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


FAMILIES = ("llama-bias", "qwen2-gqa", "qwen3-gqa", "qwen3-moe-gqa", "olmo2-gqa")


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("name", FAMILIES)
def test_families_with_biases_norms_and_experts_are_fused_too(name):
    """Against the same products apart, in float32 to its roundoff: a sum may be taken in another order."""
    found = []
    for fused in ("none", "qkv+gate_up"):
        subject = load(str(FIXTURES / name), under("fp32-highest", fused=fused), None, "cpu")
        given = arguments(subject, length=16)["prefill"]
        found.append(np.asarray(jax.jit(subject.decoder.prefill)(*given)[0], np.float64))
    assert np.abs(found[0] - found[1]).max() <= 64 * 2.0**-24 * np.abs(found[0]).max()


# Honest runs, and faulty ones


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize(
    "settings", [WAYS[0], WAYS[2], pytest.param(BOTH, marks=pytest.mark.slow)], ids=["unrolled", "fused", "both"]
)  # 4 s each
def test_an_honest_run_passes_at_every_point(tmp_path, settings):
    found, judgement = judged(tmp_path, load("tiny", under(**settings), None, "cpu"))
    assert judgement.exit_code == 0, [(v.point, v.metric, v.value) for v in judgement.verdicts if v.status != "pass"]
    assert {e.phase for e in found.errors} >= {"prefill", "decode"}
    assert not any(e.numberless for e in found.errors)
    assert found.run.record.policy["fused"] == settings.get("fused", "none")
    assert found.run.record.policy["layers"] == settings.get("layers", "scan")


@pytest.mark.slow  # 5 s each
@pytest.mark.parametrize("policy", ["w8a8", "int4-groups"])
def test_integers_pass_fused(tmp_path, policy):
    select = Selection.parse(points="q,v,mlp_act,logits", phases="prefill,decode", layers="0,2")
    _, judgement = judged(tmp_path, load("tiny", under(policy, fused="qkv+gate_up"), None, "cpu"), select)
    assert judgement.exit_code == 0, [(v.point, v.metric, v.value) for v in judgement.verdicts if v.status != "pass"]


def exchanged(y, sizes):
    """k and v, or gate and up, taken for each other."""
    *first, a, b = split_fused(y, sizes)
    return [*first, b, a]


def late(y, sizes):
    """Every projection begins a column too late."""
    return split_fused(jnp.roll(y, -1, axis=-1), sizes)


def one_layer_on(cache, layer, rows, slots):
    """Rows are written where the next layer's are."""
    return cache_write(cache, (layer + 1) % 5, rows, slots)


def louder(q, k, scale, a):
    return attention_scores(q, k, 1.02 * scale, a)


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize(
    ("settings", "part", "first"),
    [
        ({"fused": "qkv"}, {"cut": exchanged}, "k"),
        pytest.param({"fused": "qkv"}, {"cut": late}, "q", marks=pytest.mark.slow),
        (
            {"fused": "qkv+gate_up"},
            {"cut": lambda y, s: exchanged(y, s) if len(s) == 2 else split_fused(y, s)},
            "gate_out",
        ),
        ({"layers": "unrolled"}, {"cache_write": one_layer_on}, "k_cache"),
        ({"layers": "unrolled"}, {"scores": louder}, "attn_out"),
    ],
    ids=["k and v exchanged", "a column late", "gate and up exchanged", "another layer's cache", "scale"],
)
def test_a_fault_fails_at_its_point(tmp_path, settings, part, first):
    subject = load("tiny", under(**settings), None, "cpu", replace(Parts(), **part))
    points, phases = "q,k,v,attn_out,gate_out,mlp_act", "prefill,decode" if first == "k_cache" else "prefill"
    _, judgement = judged(tmp_path, subject, Selection.parse(points=points, phases=phases, layers="0"), steps=1)
    failed = {v.point for v in judgement.verdicts if v.kind in ("local", "state") and v.status == "fail"}
    expected = {
        "k": {"k", "v"}, "q": {"q", "k", "v"}, "gate_out": {"gate_out", "mlp_act"}, "k_cache": {"k_cache", "v_cache"},
        "attn_out": {"attn_out"},
    }  # fmt: skip
    assert judgement.exit_code == 1
    assert failed == expected[first]


def test_a_linter_reads_both():
    assert lint_model("tiny", under(**BOTH)).exit_code("unknown") == 0


@pytest.mark.slow  # 20 s
def test_a_sweep_prices_all(tmp_path):
    text = "def first(x):\n    return x[0]\n\n\ndef second(x):"
    given = ["sweep", "tiny", "--text", text, "--decode-steps", "1", "--points", "v,logits", "--new-tokens", "3",
             "--rounds", "1", "--policy", "bf16,unrolled,fused,window-32", "-o", str(tmp_path / "out")]  # fmt: skip
    assert command(given) == 0
    rows = [json.loads(x) for x in (tmp_path / "out" / "sweep.jsonl").read_text().splitlines()]
    assert [r["policy"] for r in rows] == ["bf16", "unrolled", "fused", "window-32"]
    assert all(r["decode_ms"] > 0 and r["errors"]["verdict"] == "✓ pass" for r in rows)
    kl = [r["errors"]["kl"] for r in rows]
    assert kl[0] == kl[1] == kl[2]
    assert kl[3] > 2 * kl[0]
