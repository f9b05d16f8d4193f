"""What compare says about honest runs and about faults injected through Parts. Must fire, must not fire."""

import resource
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precaudit.errors import UserError
from precaudit.models.jax_decoder import Parts
from precaudit.models.jax_decoder.parts import attend, attention_scores, cache_read, cache_write, rms_norm, rope
from precaudit.models.numpy_decoder.forward import Sequences, Wanted, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64, of_policy, redrawn, single_precision_dot
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.attribution import attribute, first_failing
from precaudit.references.comparison import prefill_decode
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
from precaudit.references.comparison.compare import compare
from precaudit.references.textbook.local import not_emulated
from precaudit.reports.summary import accumulation_sentence, local_sentence, prefill_decode_sentence, state_sentence
from precaudit.schema.policies import load_policy, on_device
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.errors import EmulatedError
from precaudit.schema.selection import Selection
from tests.helpers.paths import FIXTURES
from tests.helpers.runs import errors, everything, record
from tests.helpers.selected import few

pytestmark = pytest.mark.usefixtures("neutral")

PROMPTS = ["class Reader:\n    def __init__(self, path):\n", "import sys\n\nfor line in sys.stdin:\n    print(line"]


def compared(tmp_path, **options):
    return compare(tmp_path / "run", options=CompareOptions(cache=tmp_path / "refs", **options))


def names(found):
    return {(e.point, a.name) for e in found.errors if (a := attribute(e)) is not None}


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("honest")
    record(folder / "run", prompts=PROMPTS, select=everything())
    return compared(folder)


def test_rounding_explains_an_honest_run(honest):
    assert first_failing(honest.errors) is None
    named = names(honest)
    assert {name for point, name in named if point in ("q", "k", "v", "attn_out")} <= {"policy:bf16", "exact"}
    assert not any("accum:float16" in name for _, name in named)
    rows = [e for e in honest.errors if e.kind == "local" and e.point == "attn_out" and e.phase == "prefill"]
    assert min(e.explained["policy:bf16"] for e in rows) > 0.99
    assert "Rounding accounts for all" in local_sentence(honest.errors)
    assert "Accumulation does not explain" in accumulation_sentence(honest.errors)


def test_honest_caches_and_tokens_agree(honest):
    assert "bit for bit" in state_sentence(honest.errors)
    assert all(e.mismatched == 0 for e in honest.errors if e.kind == "state")
    assert "top-1 equal at 8 of 8" in prefill_decode_sentence(honest.prefill_decode)
    assert all(p.f64_match for p in honest.prefill_decode)


def test_rows_of_kind_accum_are_sizes_alone(honest):
    rows = [e for e in honest.errors if e.kind == "accum" and e.point == "attn_out"]
    assert {e.candidate for e in rows} == {"accum:float16", "accum:bfloat16", "accum:float32"}
    by = {name: np.mean([e.rel_l2 for e in rows if e.candidate == f"accum:{name}"]) for name in ("float16", "bfloat16")}
    assert by["bfloat16"] > 4 * by["float16"]  # three bits of significand
    assert not any(isinstance(e, EmulatedError) for e in rows)


def half_accumulation(x, y):
    """[..., M, K] · [..., K, N] with float16 products and sums, one term at a time.

    reduce_precision, because XLA drops a conversion to float16 and back (excess precision).
    """

    def step(total, terms):
        a, b = terms
        product = jax.lax.reduce_precision(a[..., :, None] * b[..., None, :], 5, 10)
        return jax.lax.reduce_precision(total + product, 5, 10), None

    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    first = jnp.zeros((*x.shape[:-1], y.shape[-1]), jnp.float32)
    return jax.lax.scan(step, first, (jnp.moveaxis(x, -1, 0), jnp.moveaxis(y, -2, 0)))[0]


def half_scores(q, k, scale, a):
    wide = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    products = half_accumulation(q.transpose(0, 2, 1, 3), wide.transpose(0, 2, 3, 1))
    return (products.astype(jnp.float32) * jnp.float32(scale)).astype(a.scores)


def half_attend(probs, v, a):
    wide = jnp.repeat(v, probs.shape[1] // v.shape[2], axis=2)
    return half_accumulation(probs, wide.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3).astype(a.attn_out)


@pytest.mark.turn  # 4 s
def test_float16_accumulation_is_named_where_it_happens(tmp_path):
    parts = replace(Parts(), scores=half_scores, attend=half_attend)
    record(tmp_path / "run", parts=parts, select=Selection.parse(phases="prefill"))
    found = compared(tmp_path)
    rows = [a for e in found.errors if e.point == "attn_out" and (a := attribute(e)) is not None]
    assert {a.name for a in rows} == {"policy:bf16+accum:float16"}
    assert "explains 5 of 5 attn_out errors" in accumulation_sentence(found.errors)


def faulty(name):
    def off_by_one(x, cos, sin, a):
        return rope(x, jnp.roll(cos, 1, axis=1), jnp.roll(sin, 1, axis=1), a)

    return {
        "scale": (replace(Parts(), scores=lambda q, k, s, a: attention_scores(q, k, s * 0.97, a)), "attn_out"),
        "value scale": (
            replace(Parts(), attend=lambda p, v, a: attend(p, v * jnp.asarray(1.04, v.dtype), a)),
            "attn_out",
        ),
        "rope": (replace(Parts(), rope=off_by_one), "q"),
        "epsilon": (replace(Parts(), norm=lambda x, w, eps, a: rms_norm(x, w, eps * 3e3, a)), "attn_norm"),
    }[name]


@pytest.mark.parametrize("name", few(["scale", "value scale", "rope", "epsilon"], "scale", "rope", "epsilon"))
def test_a_fault_is_unexplained_at_its_operation(tmp_path, name):
    parts, point = faulty(name)
    record(tmp_path / "run", parts=parts, select=everything(phases="prefill"))
    found = compared(tmp_path, accum=("float16",))
    first = first_failing(found.errors)
    assert first is not None
    assert (first.layer, first.point) in {(0, point), (0, "scores" if name == "scale" else point)}
    assert attribute(first).name == "none of these"
    assert f"First: layer 0 {first.point}" in local_sentence(found.errors)


@pytest.mark.turn  # 4 s
def test_a_stale_cache_row_is_a_state_fault(tmp_path):
    def stale(cache, layer, rows, slots):
        written = cache_write(cache, layer, rows, slots)
        return written if slots is not None else written.at[:, :, 3].set(0)

    record(tmp_path / "run", parts=replace(Parts(), cache_write=stale))
    found = compared(tmp_path, accum=())
    rows = [e for e in found.errors if e.kind == "state" and e.point != "resid_in"]
    assert all(e.mismatched > 0 for e in rows)
    assert rows[0].scopes["token"]["max_diff"][1] == 3
    assert any(note.startswith("state:") for note in found.notes)


@pytest.mark.turn  # 4 s
def test_decode_that_does_not_depend_on_the_prompt(tmp_path):
    """background: the same decode logits for every prompt point to state, not to precision."""

    def forgetful(cache, layer):
        return jnp.zeros_like(cache_read(cache, layer))

    record(
        tmp_path / "run", parts=replace(Parts(), cache_read=forgetful), prompts=["abc:\n", "x = f\n"], decode_steps=1
    )
    found = compared(tmp_path)
    assert any("decode does not depend on the prompt" in note for note in found.notes)
    assert not all(p.match for p in found.prefill_decode)
    assert not any(p.near_tie for p in found.prefill_decode if not p.match)


def test_every_two_prompts_are_compared_though_few_are_held(monkeypatch):
    draw = np.random.default_rng(4)
    rows = {f"p{i}": draw.standard_normal(10) for i in range(7)} | {"none": None}
    monkeypatch.setattr(prefill_decode, "HELD", 2 * 8 * 10)
    names = ("p0", "p1", "p2", "none", "p3", "p4", "p5", "p6")
    found = {frozenset((a, b)): x for a, b, x in prefill_decode._distances(rows.__getitem__, names, 10)}
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if "none" not in (a, b)]
    assert set(found) == {frozenset(p) for p in pairs}
    for a, b in pairs:
        assert found[frozenset((a, b))] == pytest.approx(np.linalg.norm(rows[a] - rows[b]) / np.sqrt(10), rel=1e-12)


def test_honest_prompts_are_not_called_independent(honest):
    assert not any("depend" in note for note in honest.notes)


def test_nan_in_the_program_is_nonfinite_not_explained(tmp_path):
    def poisoned(probs, v, a):
        return attend(probs, v, a).at[:, 2, 1].set(jnp.nan)

    record(tmp_path / "run", parts=replace(Parts(), attend=poisoned), select=Selection.parse(phases="prefill"))
    found = compared(tmp_path, accum=())
    rows = {e.layer: e for e in found.errors if e.kind == "local" and e.point == "attn_out"}
    assert rows[0].nonfinite == 32
    assert rows[1].nonfinite > 32  # NaN inputs make NaN outputs, and those agree with nothing
    assert all(not attribute(e).passes for e in rows.values())
    assert first_failing(found.errors).layer == 0
    assert any("NaN" in note for note in found.notes)


@pytest.mark.turn  # 4 s
def test_a_narrow_look_reuses_rows_and_a_wider_one_adds(tmp_path, monkeypatch):
    record(tmp_path / "run")
    look = Selection.parse(layers="1", points="attn_out")
    first = compare(tmp_path / "run", select=look, options=CompareOptions(cache=tmp_path / "refs"))
    assert {e.layer for e in first.errors if e.kind != "weights"} == {1}
    every = compared(tmp_path)
    assert {e.layer for e in every.errors} == {0, 1, 2, 3, 4, None}
    monkeypatch.setattr("precaudit.references.comparison.compare._compute", lambda *_: pytest.fail("computed again"))
    again = compare(tmp_path / "run", select=look, options=CompareOptions(cache=tmp_path / "refs"))
    assert [e for e in again.errors if e.kind == "local"] == [e for e in first.errors if e.kind == "local"]


@pytest.mark.turn  # 3 s
def test_two_runs_against_each_other(tmp_path):
    record(tmp_path / "run", policy="bf16")
    record(tmp_path / "other", policy="fp32-highest")
    found = compare(tmp_path / "run", tmp_path / "other")
    rows = [e for e in found.errors if e.unknown is None]
    assert {e.kind for e in rows} == {"pair"}
    assert all(e.rel_l2 < 0.1 for e in rows)
    assert any("policies differ in" in note for note in found.notes)


@pytest.mark.turn  # 4 s
def test_two_runs_without_a_common_prompt_are_told_what_each_has(tmp_path):
    few = Selection.parse(points="logits", phases="prefill")
    for name, prompt in (("run", "a"), ("other", "b")):
        trace(load("tiny", device="cpu"), tmp_path / name, [Prompt(id=prompt, tokens=(1, 2, 3))], few)
    with pytest.raises(UserError) as refused:
        compare(tmp_path / "run", tmp_path / "other")
    run, other = tmp_path / "run", tmp_path / "other"
    assert str(refused.value) == (
        f"{run} and {other} have no prompt in common: {run} has a; {other} has b. "
        f"Next: precaudit trace with --tokens-from {other}, which runs the same"
    )


def test_frames(honest):
    frame = honest.frame()
    assert {"layer", "point", "kind", "rel_l2", "worst_candidate", "unexplained_u"} <= set(frame.columns)
    assert len(honest.prefill_decode_frame()) == 8


def test_another_accumulation_is_not_taken_from_an_older_look(tmp_path):
    record(tmp_path / "run", select=Selection.parse(phases="prefill", layers="0"))
    for name in ("float16", "float32", "float16"):
        found = compared(tmp_path, accum=(name,))
        rows = [e for e in found.errors if e.kind == "local" and e.point == "attn_out"]
        assert rows
        assert all(f"accum:{name}" in e.explained for e in rows)


def test_a_setting_without_emulation_is_unknown_not_unexplained(tmp_path):
    record(tmp_path / "run", settings={"softmax": "bfloat16"}, select=Selection.parse(phases="prefill", layers="0"))
    rows = [e for e in compared(tmp_path, accum=()).errors if e.kind == "local" and e.point == "attn_out"]
    assert {e.unknown for e in rows} == {"no emulation of softmax = bfloat16"}


def test_float32_products_are_emulated_where_they_are_float32_products():
    fp32, best, bf16 = (load_policy(name) for name in ("fp32", "fp32-highest", "bf16"))
    nine = on_device(replace(fp32, matmul="BF16_BF16_F32_X9"), "gpu")
    assert not_emulated(nine, "q", False, "gpu") == "float32 products at matmul = BF16_BF16_F32_X9 on gpu"
    assert not_emulated(replace(bf16, probs="float32", matmul=nine.matmul), "attn_out", False, "gpu")
    assert not_emulated(replace(load_policy("fp32-cast-decode"), matmul=nine.matmul), "scores", True, "gpu")
    quiet = [
        (fp32, "q", "cpu"),
        (on_device(fp32, "gpu"), "q", "gpu"),
        (on_device(fp32, "tpu"), "q", "tpu"),
        (on_device(best, "tpu"), "q", "tpu"),
        (bf16, "q", "tpu"),
        (fp32, "probs", "tpu"),
        (fp32, "attn_norm", "gpu"),
    ]
    assert not [case for case in quiet if not_emulated(case[0], case[1], False, case[2])]


@pytest.mark.turn  # 10 s
def test_more_tensors_than_file_descriptors(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    record(tmp_path / "run", prompts=[f"x = {i}\n" for i in range(12)], decode_steps=1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, limits[1]))
    try:
        assert compared(tmp_path, accum=()).errors
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.turn  # 3 s
def test_short_and_long_prompts_with_a_position_filter_in_one_batch(tmp_path):
    select = Selection.parse(positions="0:4", points="q,attn_out")
    run = record(tmp_path / "run", prompts=["ab", "def f(x):\n    pass"], select=select, batch=2)
    assert {p.prompt for p in run.points if p.phase == "rescore" and p.point == "q"} == {"p0"}


def test_scores_outside_a_window_are_excluded(tmp_path):
    """A row at position p of a windowed layer reads min(p + 1, window) scores."""
    n, window = 20, 8
    subject = load(str(FIXTURES / "mistral-window"), "bf16", device="cpu")
    prompts = [Prompt(id="p0", tokens=tuple(range(1, n + 1)))]
    select = Selection.parse(points="scores", phases="prefill")
    trace(subject, tmp_path / "run", prompts, select, TraceOptions(force=True))
    found = [e for e in errors(tmp_path / "run", accum=()) if e.point == "scores"]
    read = sum(min(p + 1, window) for p in range(n)) * subject.config.heads
    assert {(e.kind, e.n) for e in found} == {("local", read), ("forward", read)}
    assert {e.excluded for e in found} == {n * n * subject.config.heads - read}


def test_other_draws_have_other_errors_of_the_same_size():
    x = np.random.default_rng(4).normal(size=20_000)
    policy = of_policy(load_policy("bf16"))
    found = [redrawn(policy, seed).rows(x) - x for seed in range(8)]
    np.testing.assert_array_equal(found[0], policy.rows(x) - x)
    sizes = [float(np.sqrt((e**2).mean())) for e in found]
    assert max(sizes) < 1.2 * min(sizes)
    for i, a in enumerate(found):
        for b in found[:i]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.5


def test_forward_noise_is_that_of_eight_draws(tmp_path):
    subject = load(str(FIXTURES / "llama-gqa"), "bf16", device="cpu")
    tokens = np.arange(1, 13)
    prompts = [Prompt(id="p0", tokens=tuple(int(t) for t in tokens))]
    select = Selection.parse(points="resid_out", phases="prefill")
    trace(subject, tmp_path / "run", prompts, select, TraceOptions(force=True))
    e = next(x for x in errors(tmp_path / "run", "forward", accum=(), cache=tmp_path / "refs") if x.layer == 1)
    model = Model(subject.config, subject.checkpoint.tensors.read_tensor)
    base = replace(of_policy(subject.policy), dot=single_precision_dot)
    found = []
    wanted = Wanted({"resid_out"}, [1], [tokens[-1:] - 1])
    draws = [FP64, *(redrawn(base, seed) for seed in range(8))]
    forward(model, Sequences([tokens]), draws, wanted, lambda _i, _at, _p, x: found.append(x))
    exact, emulated = found[0], found[1:]
    energy = np.mean([((y - exact) ** 2).sum() for y in emulated])
    assert float(e.noise) == pytest.approx(np.sqrt(energy) / np.linalg.norm(exact), rel=1e-9)
