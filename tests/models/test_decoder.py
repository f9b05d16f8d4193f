"""The JAX decoder against FP64, and prefill, decode, rescore, padding and batches against each other."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from precaudit.diagnosis.evidence.remedies import candidates
from precaudit.errors import UserError
from precaudit.judging.gate import gate
from precaudit.judging.rules import judge
from precaudit.models.checkpoints import open_checkpoint
from precaudit.numbers import threads
from precaudit.numbers.arrays import widen
from precaudit.recording.runs.reader import open_run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing import programs
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import Progress, TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
from precaudit.references.comparison.compare import compare
from precaudit.schema.graphs.decoder import POINTS, present
from precaudit.schema.limits import default_limits
from precaudit.schema.policies import apply_settings
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from tests.helpers.fixture_runs import FAMILIES_ONCE, SMALL, TOKENS, fixture_run
from tests.helpers.paths import FIXTURES
from tests.helpers.runs import errors, everything, record
from tests.helpers.selected import few, in_turn

FEW = ("llama-gqa", "gemma2-caps", "qwen3-moe-gqa")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A run of a fixture in float32: made once, whatever asks for it."""
    return cache(lambda name: fixture_run(tmp_path_factory.mktemp("single") / name, name))


@pytest.mark.parametrize("name", few(SMALL, *FEW))
def test_every_point_is_fp64_to_single_precision(single, name):
    found = compare(single(name), options=CompareOptions(accum=())).errors
    points = present("moe" in name)
    assert {e.point for e in found if e.kind == "forward"} == {p for p in points if not POINTS[p].state}
    for e in found:
        assert e.unknown is None, e
        if e.kind in ("forward", "local") and e.unknown is None:
            assert e.rel_l2 <= 2e-5, e
        if e.kind == "state":
            assert e.mismatched == 0, e


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("name", few([*FAMILIES_ONCE, "granite-bias"], *FEW))
def test_honest_rounding_passes_in_every_family(tmp_path, name):
    """No record of an honest bfloat16 run fails, and its emulation leaves less than a rounding."""
    fixture_run(tmp_path / "run", name, "bf16", tokens=(TOKENS[:20],))
    for e in errors(tmp_path / "run", accum=()):
        verdict = judge(e, default_limits())
        assert verdict is None or verdict.status == "pass", (e, verdict)
        if e.kind == "local" and e.dtype == "bfloat16" and e.unexplained is not None:
            assert float(e.unexplained.u) < 1, e


@pytest.mark.parametrize("name", in_turn(FAMILIES_ONCE, "qwen3-window-yarn", *FEW))
def test_prefill_decode_and_rescore_agree_everywhere(single, name):
    recorded = Recorded.of(single(name))
    n = len(TOKENS)
    prefill = widen(recorded.tensor("p0", "prefill", 0, None, "logits"))
    rescore = widen(recorded.tensor("p0", "rescore", 0, None, "logits"))
    size = np.abs(rescore).max()
    assert np.abs(prefill - rescore[:n]).max() <= 2e-5 * size
    for step in range(4):
        decoded = widen(recorded.tensor("p0", "decode", step, None, "logits"))
        assert np.abs(decoded[0] - rescore[n - 1 + step]).max() <= 2e-5 * size


def by_place(folder):
    run = Recorded.of(open_run(folder))
    return {k: run.run.tensor(p) for k, p in run.index.items()}


@pytest.mark.turn  # 5 s
@pytest.mark.parametrize("name", few(FAMILIES_ONCE, "gemma2-caps"))
def test_batch_and_padding_do_not_change_values(tmp_path, name):
    tokens = (TOKENS, TOKENS[:5], TOKENS[3:21])
    fixture_run(tmp_path / "one", name, tokens=tokens)
    one = by_place(tmp_path / "one")
    for pad in ("left", "right"):
        fixture_run(tmp_path / pad, name, tokens=tokens, batch=3, pad=pad)
        every = by_place(tmp_path / pad)
        assert one.keys() == every.keys()
        for key, x in one.items():
            y = every[key]
            assert x.shape == y.shape, (pad, key)
            scale = max(np.abs(widen(x)).max(), 1e-30)
            assert np.abs(widen(x) - widen(y)).max() <= 2e-5 * scale, (pad, key)


def test_what_pads_a_prompt_is_never_seen(tmp_path):
    """The same prompt beside two different neighbours: bit for bit the same."""
    for name, other in (("a", TOKENS[1:9]), ("b", TOKENS[20:31])):
        fixture_run(tmp_path / name, "llama-mqa", tokens=(TOKENS, other), batch=2, pad="left")
    a, b = by_place(tmp_path / "a"), by_place(tmp_path / "b")
    for key in a:
        if key[0] == "p0":
            assert a[key].tobytes() == b[key].tobytes(), key


@pytest.mark.turn  # 4 s
def test_one_token_prompt_decodes_from_an_empty_cache(tmp_path):
    fixture_run(tmp_path / "run", "llama-mha", tokens=((7,),))
    found = errors(tmp_path / "run", accum=())
    assert all(e.rel_l2 <= 2e-5 for e in found if e.kind in ("local", "forward") and e.rel_l2 is not None)
    assert all(e.mismatched == 0 for e in found if e.kind == "state")


def test_capturing_leaves_logits_bitwise_unchanged(tmp_path):
    run = record(tmp_path / "run", select=everything())
    checked = [(n.phase, n.step) for n in run.record.neutrality]
    assert checked == [("prefill", 0), ("decode", 0), ("rescore", 0)]  # every decode step is one program
    assert all(n.bitwise for n in run.record.neutrality)


@pytest.mark.turn  # 7 s
def test_a_layer_filter_records_what_the_whole_recorded(tmp_path):
    record(tmp_path / "all")
    record(tmp_path / "some", select=Selection.parse(layers="1,-1", positions="last:3,0"))
    every, some = Recorded.of(compare(tmp_path / "all").run), Recorded.of(compare(tmp_path / "some").run)
    assert {p.layer for p in some.run.points} == {1, 4, None}
    q, whole = some.rows("p0", "prefill", 4, "q"), every.rows("p0", "prefill", 4, "q")
    assert len(q.positions) == 4
    assert q.values.tobytes() == whole.at(q.positions).tobytes()
    assert len(some.rows("p0", "prefill", 4, "k").positions) == len(whole.positions)  # attention needs every key


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("policy", few(["bf16-fp32-scores", "fp32-cast-decode", "fp32"], "fp32-cast-decode"))
def test_policies_store_what_they_say(tmp_path, policy):
    run = record(tmp_path / "run", policy=policy, select=everything())
    kinds = {(p.phase, p.point): p.dtype for p in run.points}
    single = policy == "fp32"
    assert kinds["prefill", "q"] == ("float32" if single else "bfloat16")
    assert kinds["prefill", "scores"] == ("bfloat16" if policy == "fp32-cast-decode" else "float32")
    assert kinds["decode", "scores"] == "float32"
    assert kinds["decode", "attn_out"] == ("float32" if single else "bfloat16")
    assert all(e.unknown is None for e in errors(tmp_path / "run", accum=()))


@pytest.mark.turn  # 6 s
def test_another_cache_format_is_what_decode_read(tmp_path):
    record(
        tmp_path / "run",
        settings={"kv_cache": "float8_e4m3fn"},
        select=Selection.parse(points="q,k,v,k_cache,attn_out"),
    )
    found = errors(tmp_path / "run", accum=())
    assert all(e.mismatched == 0 for e in found if e.kind == "state")
    local = [e for e in found if e.kind == "local" and e.point == "attn_out" and e.phase == "decode"]
    assert local
    assert all(e.explained["policy:bf16+kv_cache=float8_e4m3fn"] > 0.9 for e in local)


@pytest.mark.turn  # 4 s
def test_given_tokens_are_fed(tmp_path):
    first = record(tmp_path / "a")
    again = trace(
        load("tiny", "fp32", device="cpu"),
        tmp_path / "b",
        options=TraceOptions(decode_steps=2, tokens_from=tmp_path / "a"),
    )
    fed = [[(s.phase, s.step, s.token) for s in r.steps] for r in (first, again)]
    assert fed[0] == fed[1]


@pytest.mark.turn  # 8 s
def test_a_trace_compiles_four_programs_a_length(tmp_path, caplog):
    """Prefill, which rescore runs too, and decode, each bare and with taps; not one more for a device or a step."""
    programs._compile.cache_clear()
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        record(tmp_path / "run", prompts=["x = 1", "import os"], select=everything())
    found = [m for m in caplog.messages if m.startswith("Finished XLA compilation of jit(program)")]
    assert len(found) == 4


@pytest.mark.turn  # 13 s
def test_gemma_s_factor_is_rounded_as_published(tmp_path):
    """√24 = 4.898979…; of bfloat16's neighbours 4.875 and 4.90625 the nearer. What ran is in the record."""
    name = str(FIXTURES / "gemma3-gqa")
    assert load(name, "bf16", {"embed_factor": "exact"}, "cpu").config.embed_scale == 24**0.5
    assert load(name, "bf16", {"weights": "float32"}, "cpu").config.embed_scale == float(np.float32(24**0.5))
    assert load(name, "bf16", {"weights": "float8_e4m3fn"}, "cpu").config.embed_scale == float(np.float32(24**0.5))
    run = fixture_run(tmp_path / "run", "gemma3-gqa", "bf16")
    assert run.record.model.config["embed_scale"] == 4.90625
    assert run.record.policy["embed_factor"] == "published"
    assert load("tiny", "bf16", device="cpu").config.embed_scale == 1.0


def test_another_policy_shares_the_arrays_that_stay_as_they_are():
    subject = load("tiny", "bf16", device="cpu")
    same, wider = (subject.under(apply_settings(subject.policy, {k: "float32"})) for k in ("scores", "activations"))
    assert same.parameters is subject.parameters
    assert wider.parameters["embed"].dtype == np.float32
    assert (same.policy.scores, same.decoder.arithmetic.scores) == ("float32", np.float32)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_split_rows_are_all_rows(monkeypatch, workers):
    monkeypatch.setattr(threads, "WORKERS", workers)
    for n, width in ((1, 1), (7, 1 << 14), (1001, 128)):
        ranges = threads.row_ranges(n, width)
        assert [i for a, b in ranges for i in range(a, b)] == list(range(n))
        assert len(ranges) == (1 if n * width < threads.SMALL else workers)
    x = np.random.default_rng(0).normal(size=(1001, 128)).astype(np.float32)
    wide, same = threads.to_float64(x, y := x[0].astype(np.float64))
    np.testing.assert_array_equal(wide, x.astype(np.float64))
    assert same is y


@pytest.mark.parametrize("name", [n for n in FAMILIES_ONCE if "moe" not in n])
def test_gate_out_is_the_activation_of_the_gate_alone(single, name):
    """Closed forms: silu as x (1 + tanh(x/2)) / 2, gelu by its tanh formula; times up it is mlp_act."""
    checkpoint = open_checkpoint(str(FIXTURES / name))
    run = Recorded.of(single(name))
    for layer in range(checkpoint.config.layers):
        h, act, both = (widen(run.tensor("p0", "prefill", 0, layer, p)) for p in ("mlp_norm", "gate_out", "mlp_act"))

        def projected(which, h=h, layer=layer):
            name = f"model.layers.{layer}.mlp.{which}_proj"
            names = checkpoint.tensors.shapes()
            y = h @ widen(checkpoint.tensors.read_tensor(f"{name}.weight")).T
            return y + widen(checkpoint.tensors.read_tensor(f"{name}.bias")) if f"{name}.bias" in names else y

        x = projected("gate")
        inner = x / 2 if checkpoint.config.activation == "silu" else np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
        expected = x * (1 + np.tanh(inner)) / 2
        assert np.linalg.norm(act - expected) <= 1e-6 * np.linalg.norm(expected)
        assert np.linalg.norm(both - expected * projected("up")) <= 1e-6 * np.linalg.norm(both)


@pytest.mark.turn  # 6 s
def test_an_activation_without_a_tap_leaves_its_point_out(tmp_path):
    """A part of one's own need not show what lies within its operation: that is said, and is not missing."""
    subject = load("tiny", "bf16", device="cpu")

    def plain(gate, up, a):
        return (jax.nn.silu(gate.astype("float32")).astype(a.mlp) * up).astype(a.activations)

    own = replace(subject, parts=replace(subject.parts, activate=plain))
    said = []
    run = trace(
        own, tmp_path / "run", [Prompt(id="p0", tokens=TOKENS)], everything(), TraceOptions(), Progress(said.append)
    )
    assert "left out: gate_out: the program has no such tap" in said
    assert "gate_out" not in run.record.requested.points
    assert {v.status for v in gate(compare(run)).verdicts} <= {"unknown"}
    assert {e.point for e in run.points} >= {"mlp_act", "probs"}
    assert "gate_out" not in {e.point for e in compare(run, select=everything()).errors}
    with pytest.raises(UserError, match="'gate_out' was not recorded"):
        compare(run, select=Selection.parse(points="gate_out"))


@pytest.mark.turn  # 4 s
def test_all_that_a_bisection_by_layers_raises_together_is_float32():
    """Layers, what they hand on and the head: logits of float32. Without the head they are rounded before."""
    tokens = np.arange(1, 13, dtype=np.int32)[None]
    subject, single = load("tiny", "bf16", device="cpu"), load("tiny", "fp32-highest", device="cpu")
    wide = apply_settings(subject.policy, dict(candidates(subject.policy, subject.config, "cpu"))["all"])
    between = apply_settings(subject.policy, {"residual": "float32", "kv_cache": "float32"})
    layers = tuple(range(subject.config.layers))

    def logits(of):
        rows = np.arange(12, dtype=np.int32)[None]
        out, _ = of.decoder.prefill(of.parameters, of.tables(12), tokens, np.zeros(1, np.int32), rows, None)
        return np.asarray(out, np.float64)

    exact = logits(single)
    size = np.linalg.norm(exact)
    assert np.linalg.norm(logits(subject.under(between, ((*layers, len(layers)), wide))) - exact) < 1e-5 * size
    assert np.linalg.norm(logits(subject.under(between, (layers, wide))) - exact) > 1e-4 * size
