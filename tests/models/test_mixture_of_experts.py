"""A mixture of experts: what is recorded, which mistakes are flagged, and whether a flip of routing is a near tie."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precaudit.diagnosis.evidence.remedies import candidates
from precaudit.judging.gate import gate
from precaudit.judging.rules import judge
from precaudit.models.jax_decoder import Parts
from precaudit.models.jax_decoder.parts import project, route
from precaudit.models.numpy_decoder.magnitudes import rowwise
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.routing import ExactRouting, TurnedRouting
from precaudit.numbers.arrays import widen
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
from precaudit.references.comparison.compare import compare
from precaudit.references.textbook import pooled
from precaudit.schema.limits import default_limits
from precaudit.schema.policies import apply_settings, load_policy
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from precaudit.workflows.verbs import diagnose
from tests.helpers.paths import FIXTURES
from tests.helpers.selected import few
from tests.helpers.tpus import needs_libtpu

pytestmark = pytest.mark.usefixtures("neutral")

TOKENS = tuple(int(t) for t in np.random.default_rng(8).integers(0, 96, 40))


def found(tmp_path, parts=None, policy="bf16"):
    subject = load(str(FIXTURES / "qwen3-moe-gqa"), policy, device="cpu", parts=parts)
    select = Selection.parse(points="all")
    trace(subject, tmp_path / "run", [Prompt(id="p0", tokens=TOKENS)], select, TraceOptions(force=True, decode_steps=2))
    return compare(tmp_path / "run", options=CompareOptions(accum=(), cache=tmp_path / "refs"))


def failing(compared):
    verdicts = [(e, judge(e, default_limits())) for e in compared.errors if e.kind == "local"]
    return {(e.layer, e.point) for e, v in verdicts if v.status != "pass"}


@pytest.mark.turn  # 4 s
def test_the_chosen_experts_are_recorded(tmp_path):
    compared = found(tmp_path)
    recorded = Recorded.of(compared.run)
    logits, weights = (widen(recorded.tensor("p0", "prefill", 0, 1, p)) for p in ("router", "experts"))
    assert recorded.tensor("p0", "prefill", 0, 1, "mlp_act") is None
    assert ((weights != 0).sum(axis=1) == 2).all()
    for row, weight in zip(logits, weights, strict=True):
        assert set(np.flatnonzero(weight)) == set(np.argsort(-row, kind="stable")[:2])
        assert weight.sum() == pytest.approx(1, abs=2**-8)
    assert not failing(compared)
    note = next(n for n in compared.notes if n.startswith("routing:"))
    flips = int(note.split()[1])
    assert f"of {2 * (40 + 3 + 3)} tokens" in note
    assert not flips or f"{flips} of them near ties" in note


def second_best(logits, used, renormalise, a):
    """Leave out the best expert and take the next ones."""
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=logits.dtype)
    return route(logits - 100 * best, used, renormalise, a)


def otherwise_normalised(x, used, renormalise, a):
    return route(x, used, not renormalise, a)


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("wrong", few([second_best, otherwise_normalised], second_best))  # 7 s each
def test_wrong_routing_is_flagged_where_it_is(tmp_path, wrong):
    compared = found(tmp_path, replace(Parts(), route=wrong))
    assert failing(compared) == {(0, "experts"), (1, "experts")}
    if wrong is second_best:
        note = next(n for n in compared.notes if n.startswith("routing:"))
        assert note.endswith("of 92 tokens use other experts than FP64, 0 of them near ties")
        assert int(note.split()[1]) >= 46  # every token of layer 0; layer 1 reads another residual


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("more", few([1, -1], -1))  # 9 s
def test_another_number_of_experts_is_a_flip_of_every_token(tmp_path, more):
    parts = replace(Parts(), route=lambda x, used, renormalise, a: route(x, used + more, renormalise, a))
    note = next(n for n in found(tmp_path, parts).notes if n.startswith("routing:"))
    assert note == "routing: 92 of 92 tokens use other experts than FP64, 0 of them near ties"


def test_flips_of_an_honest_run_are_near_ties(tmp_path):
    """Six of these 600 tokens use another expert in bfloat16; FP64 held every one of them for a tie."""
    subject = load(str(FIXTURES / "qwen3-moe-plain"), "bf16", device="cpu")
    rng = [np.random.default_rng(i) for i in range(3)]
    prompts = [Prompt(id=f"p{i}", tokens=tuple(int(x) for x in r.integers(0, 96, 100))) for i, r in enumerate(rng)]
    select = Selection.parse(points="router,experts", phases="prefill")
    trace(subject, tmp_path / "run", prompts, select, TraceOptions(force=True))
    compared = compare(tmp_path / "run", options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    note = next(n for n in compared.notes if n.startswith("routing:"))
    flips = int(note.split()[1])
    assert flips > 0
    assert note == f"routing: {flips} of 600 tokens use other experts than FP64, {flips} of them near ties"


ROUTER = apply_settings(load_policy("bf16"), {"router": "float32"})


@pytest.mark.turn  # 5 s
@pytest.mark.parametrize("stored", few(["float32", "float16"], "float32"))  # 5 s
def test_router_logits_are_kept_in_the_policy_s_format(tmp_path, stored):
    policy = apply_settings(load_policy("bf16"), {"router": stored})
    compared = found(tmp_path, policy=policy)
    recorded = Recorded.of(compared.run)
    logits, weights = (recorded.tensor("p0", "prefill", 0, 1, p) for p in ("router", "experts"))
    assert (logits.dtype.name, weights.dtype.name) == (stored, "bfloat16")
    assert gate(tmp_path / "run").exit_code == 0
    assert not failing(compared)


def rounding_router(x, weight, bias, a):
    """Round router logits, which alone are kept in float32, to bfloat16."""
    y = project(x, weight, bias, a)
    return y if y.dtype == x.dtype else y.astype(x.dtype).astype(y.dtype)


@pytest.mark.turn  # 3 s
def test_a_router_that_rounds_where_its_policy_does_not_fails(tmp_path):
    compared = found(tmp_path, replace(Parts(), project=rounding_router), ROUTER)
    assert failing(compared) == {(0, "router"), (1, "router")}


@pytest.mark.slow
def test_a_router_that_rounds_where_its_policy_does_not_is_named(tmp_path):
    parts = replace(Parts(), project=rounding_router)
    found(tmp_path, parts, ROUTER)
    subject = load(str(FIXTURES / "qwen3-moe-gqa"), ROUTER, device="cpu", parts=parts)
    findings = diagnose(tmp_path / "run", subject=subject).findings
    assert {(f.point, f.cause) for f in findings} == {("router", "stored in bfloat16")}


@needs_libtpu
@pytest.mark.slow
def test_a_router_that_reads_an_unrounded_norm_of_an_unrounded_sum_is_rounding(tmp_path):
    """A v5e's compiler fuses the sum of squares with the residual, and the router reads the norm unrounded."""
    subject = load(str(FIXTURES / "qwen3-moe-gqa"), ROUTER, device="tpu-predicted:v5e")
    select = Selection.parse(points="resid_in,attn_proj,resid_mid,mlp_norm,router", phases="prefill,decode")
    tokens = tuple(int(t) for t in np.random.default_rng(5).integers(0, 96, 37))[::-1]
    run = trace(subject, tmp_path / "run", [Prompt(id="b", tokens=tokens)], select, TraceOptions(decode_steps=5))
    compared = compare(run, options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    assert gate(compared).exit_code == 0
    made = [e for e in compared.errors if (e.kind, e.phase, e.point) == ("local", "decode", "router") and e.elided]
    assert any("in its statistics" in how for e in made for how in e.elided.values())


def test_a_router_in_float32_is_a_remedy_of_sparse_models_alone():
    sparse, dense = (load(str(FIXTURES / name), "bf16", device="cpu").config for name in ("qwen3-moe-gqa", "llama-gqa"))
    assert dict(candidates(load_policy("bf16"), sparse, "cpu"))["router"] == {"router": "float32"}
    assert "router" not in dict(candidates(load_policy("bf16"), dense, "cpu"))
    assert "router" not in dict(candidates(ROUTER, sparse, "cpu"))


# Rounding exchanges two experts of its row 30, whose router logits are nearly the same.
TIED = (
    10, 66, 65, 3, 39, 76, 11, 61, 2, 29, 89, 14, 63, 78, 84, 62, 32, 1, 47, 38, 18, 86, 78, 25, 66, 21, 43, 84, 56,
    63, 30, 41, 51, 85, 32, 25, 81, 55,
)  # fmt: skip


def test_what_comes_of_a_near_tie_is_rounding(tmp_path, monkeypatch):
    subject = load(str(FIXTURES / "qwen3-moe-gqa"), ROUTER, device="cpu")
    select = Selection.parse(points="router,experts,mlp_out,logits", phases="prefill")
    run = trace(subject, tmp_path / "run", [Prompt(id="p", tokens=TIED)], select, TraceOptions(force=True))
    compared = compare(run, options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    note = next(n for n in compared.notes if n.startswith("routing:"))
    flips = int(note.split()[1])
    assert flips > 0
    assert note == f"routing: {flips} of 76 tokens use other experts than FP64, {flips} of them near ties"
    assert gate(compared).exit_code == 0
    e = next(e for e in compared.errors if (e.kind, e.layer, e.point) == ("forward", 0, "mlp_out"))
    assert e.scopes["token"]["rel_l2"][0] > 0.5  # as far from FP64 as other experts are
    assert 1 < e.ratio < 5
    monkeypatch.setattr(pooled, "_routings", lambda *_: [])  # eight draws of rounding do not turn this tie
    again = compare(run, options=CompareOptions(accum=(), cache=tmp_path / "refs", fresh=True))
    assert gate(again).exit_code == 1


def turned(number, router, exact, layer=0):
    """Return the experts of a draw, of two used, and whether its rows are parted after."""
    routing = ExactRouting(len(exact))
    routing.prepare(exact.shape[1], 2)
    chosen = np.argsort(-exact, axis=1, kind="stable")[:, :2]
    routing.choose(layer, 0, exact, chosen)
    mine = TurnedRouting(routing, number, 4)
    own = np.argsort(-router, axis=1, kind="stable")[:, :2]
    return mine.choose(layer, 0, router, own), mine


def test_one_draw_turns_a_tie_that_rounding_reaches():
    exact = np.array([[3.0, 1.0, 0.9, -2.0], [3.0, 1.0, 0.0, -2.0], [1.0, 0.9, 3.0, -2.0]])
    router = exact + 0.02 * np.array([1, -1, 1, -1])
    assert turned(0, router, exact)[0].tolist() == [[0, 2], [0, 1], [2, 1]]
    assert turned(1, router, exact)[0].tolist() == [[0, 1], [0, 1], [2, 0]]
    assert turned(1, router, exact, layer=5)[0].tolist() == [[0, 2], [0, 1], [2, 1]]
    assert turned(0, router, exact)[1].parted.tolist() == [True, False, True]


def test_a_row_that_has_parted_is_turned_no_more():
    exact = np.array([[3.0, 1.0, 0.9, -2.0]])
    _, routing = turned(0, exact + 0.02 * np.array([1, -1, 1, -1]), exact)
    far = np.array([[0.0, 5.0, 4.9, 3.0]])
    assert routing.choose(4, 0, far, np.array([[1, 2]])).tolist() == [[1, 2]]


def test_a_draw_that_turns_a_tie_by_itself_keeps_it():
    exact, router = np.array([[3.0, 1.0, 0.99, -2.0]]), np.array([[3.0, 0.98, 1.01, -2.0]])
    found, routing = turned(0, router, exact)
    assert found.tolist() == [[0, 2]]
    assert routing.parted.tolist() == [True]


def test_where_every_expert_is_used_none_is_turned():
    exact = np.array([[3.0, 2.9]])
    assert turned(0, exact + 0.1, exact)[0].tolist() == [[0, 1]]


def test_a_sum_that_is_normalised_is_bounded_by_its_true_size():
    """OLMo 2 normalises W·x: |W|·|x| is divided by the root mean square of W·x, not by its own."""
    subject = load(str(FIXTURES / "olmo2-gqa"), "bf16", device="cpu")
    model, c = Model(subject.config, subject.checkpoint.tensors.read_tensor), subject.config
    x = np.random.default_rng(1).normal(size=(3, c.heads, c.head_dim))
    w = widen(subject.checkpoint.tensors.read_tensor("model.layers.1.self_attn.o_proj.weight"))
    g = widen(subject.checkpoint.tensors.read_tensor("model.layers.1.post_attention_layernorm.weight"))
    flat = x.reshape(3, -1)
    rms = np.sqrt(((flat @ w.T) ** 2).mean(axis=1, keepdims=True) + c.norm_eps)
    want = np.abs(flat) @ np.abs(w).T / rms * np.abs(g)
    np.testing.assert_allclose(rowwise("attn_proj", model, 1, [x]), want, rtol=1e-5)
