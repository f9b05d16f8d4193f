"""Honest programs pass: other ways to write an operation, devices, traits of large models; and their faults do not."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from exams import calibrate
from exams.rewrites import ATTENTIONS, DEVICES, unnormalised
from exams.traits import TRAITS, bundled, models, prompts
from precaudit import assert_close
from precaudit.judging.gate import gate
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.numpy_decoder.ensemble import ensemble
from precaudit.models.numpy_decoder.honest import truncated_product
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import PLACES, Blocks, Rounding, of_policy
from precaudit.numbers.arrays import as_format, rounder
from precaudit.numbers.formats import FORMATS
from precaudit.recording.runs import written as written_records
from precaudit.recording.runs.reader import open_run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing import programs
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.closing import Yardstick
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
from precaudit.references.comparison.compare import compare
from precaudit.references.textbook.alternatives import consistent
from precaudit.references.textbook.closing import honest
from precaudit.references.textbook.operations import parts, prepare
from precaudit.references.textbook.pooled import sampled_rows
from precaudit.schema.filed import of_kinds
from precaudit.schema.limits import Limit, default_limits, quantile
from precaudit.schema.metrics.logits import expected_kl, kl, log_softmax
from precaudit.schema.metrics.residue import Noise, Sums, excesses, gain_and_mean
from precaudit.schema.metrics.sizes import half_ulp
from precaudit.schema.places import Place
from precaudit.schema.policies import KEYS, WORDS, load_policy
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.devices import SplitSum
from precaudit.schema.records.errors import ForwardError, LocalError
from precaudit.schema.selection import Selection
from tests.helpers.gpu_runs import unpacked
from tests.helpers.paths import FIXTURES
from tests.helpers.selected import KEEPS_FEWER, few

TEXT = "def read(path):\n    with open(path) as f:\n        return [line for line in f]"
f32 = jnp.float32


def judged(folder, subject, given=None, points="all", phases="prefill,decode", steps=1):
    given = given or [Prompt(id="c0", prompt=TEXT), Prompt(id="c1", prompt="import os")]
    run = trace(
        subject, folder / "run", given, Selection.parse(points=points, phases=phases), TraceOptions(steps, force=True)
    )
    return gate(compare(run, options=CompareOptions(accum=(), cache=folder / "refs")))


def failures(judgement):
    return [(v.status, v.kind, v.layer, v.point, v.metric, v.scope, v.value, v.limit) for v in judgement.verdicts]


@pytest.mark.turn  # 3 s
def test_a_tie_inside_what_was_handed_on_unrounded_passes(tmp_path):
    """A rounding of gate or up that falls the other way moves mlp_out by 0.001; one of its channels nearly cancels."""
    path = bundled("float32", tmp_path / "wide")
    repeated = [p for p in prompts(250, 6) if "repeated" in p.id]
    found = judged(tmp_path, load(str(path), "bf16", None, "cpu"), repeated, "all", "prefill,decode", 2)
    assert found.exit_code == 0, failures(found)


@pytest.mark.turn  # 4 s
def test_a_rounding_that_sums_move_across_a_tie_in_every_row_passes(tmp_path):
    """Forty equal tokens round one element of mlp_out the other way: a whole channel is off by one ulp."""
    path = next(t for t in TRAITS if t.name == "float32 weights").make(tmp_path / "model")
    given = [p for p in prompts(250, 8) if "repeated" in p.id]
    found = judged(tmp_path, load(str(path), "bf16", {"excess_precision": "off"}, "cpu"), given)
    assert found.exit_code == 0, failures(found)


def test_an_input_read_unrounded_rounds_to_what_was_recorded():
    """Whatever was read, what is taken for it is no farther from it than what was made."""
    draw = np.random.default_rng(3)
    true = draw.standard_normal(4000) * np.exp(draw.uniform(-9, 9, 4000))
    read = as_format(true, "bfloat16").astype(np.float64)
    made = true * (1 + 2.0**-8 * draw.standard_normal(4000) * (draw.uniform(size=4000) < 0.2))
    found = consistent(made, read, "bfloat16")
    assert (np.abs(found - true) <= np.abs(made - true)).all()
    assert (np.abs(found - read) <= np.abs(read) * 2.0**-8 * (1 + 1e-12)).all()
    assert (found != made).any()
    assert (found[made == true] == true[made == true]).all()


@pytest.mark.slow  # 18 s each
@pytest.mark.parametrize("on_bits", [True, False])
def test_a_long_prompt_at_default_points_passes(tmp_path, monkeypatch, on_bits):
    """From some length on XLA:CPU multiplies the norm as it was before it was rounded: resid_in tells.

    It does so in the program as it is written, not where narrow floats are moved as bits, which is what runs there.
    """
    compiled = programs._compile
    monkeypatch.setattr(programs, "_compile", lambda *given: compiled(*given[:-1], "cpu" if on_bits else ""))
    path = next(t for t in TRAITS if t.name == "massive activations").make(tmp_path / "model")
    tokens = tuple(int(t) for t in np.random.default_rng(4096).integers(1, 250, 4096))
    select = Selection.parse(layers="0", points="q,k,v,logits", phases="prefill")
    run = trace(load(str(path), "bf16", None, "cpu"), tmp_path / "run", [Prompt(id="c", tokens=tokens)], select)
    found = compare(run, options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    assert gate(found).exit_code == 0, failures(gate(found))
    unrounded = [
        e.point for e in of_kinds(found.errors, LocalError) if "attn_norm" in (e.elided or {}).get("policy:bf16", ())
    ]
    assert unrounded == ([] if on_bits or not KEEPS_FEWER else ["q", "k", "v"])


# Attention written otherwise


@pytest.mark.turn  # 7 s
@pytest.mark.parametrize("policy", ["bf16", pytest.param("bf16-fp32-scores", marks=pytest.mark.slow)])  # 10 s each
@pytest.mark.parametrize("name", few(ATTENTIONS, "running maxima, blocks of 16"))
def test_attention_written_otherwise_passes(tmp_path, name, policy):
    points = "all" if name == "P rounded before the division" else "q,k,v,attn_out"
    found = judged(tmp_path, load("tiny", policy, None, "cpu", ATTENTIONS[name]), points=points)
    assert found.exit_code == 0, failures(found)


@pytest.mark.turn
@pytest.mark.parametrize("factor", few([0.99, 1.02], 1.02))
def test_a_scaled_one_of_them_fails(tmp_path, factor):
    form = unnormalised(False)
    parts = replace(form, attend=lambda p, v, a: (form.attend(p, v, a).astype(f32) * factor).astype(a.attn_out))
    found = judged(tmp_path, load("tiny", "bf16-fp32-scores", None, "cpu", parts), points="q,k,v,attn_out")
    assert {v.point for v in found.verdicts if v.kind == "local" and v.status == "fail"} == {"attn_out"}


# Devices


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traits")


@pytest.fixture(scope="module")
def wide(folder):
    return next(t for t in TRAITS if t.name == "wide").make(folder / "wide")


@pytest.mark.slow  # 11 s
def test_sums_truncated_as_on_a_tensor_core_pass(tmp_path, wide):
    subject = load(str(wide), "fp32-highest", None, "cpu", DEVICES["sums truncated every 16"])
    given = [Prompt(id="c0", tokens=tuple(range(2, 22)))]
    found = judged(tmp_path, subject, given, points="q,v,attn_proj,mlp_out", phases="prefill", steps=0)
    assert found.exit_code == 0, failures(found)


@pytest.mark.slow  # 8 s
def test_a_rough_exponential_and_reciprocal_pass(tmp_path):
    found = judged(tmp_path, load("tiny", "fp32-highest", None, "cpu", DEVICES["rough exponential and reciprocal"]))
    assert found.exit_code == 0, failures(found)


@pytest.mark.turn  # 4 s
def test_a_fused_multiply_add_into_the_stream_passes(tmp_path):
    """Gemma's post-norm ends in a product: where the sum cancels, the half ulp a fused sum skips is 46 × the noise."""
    repeated = [Prompt(id=p.id, tokens=p.tokens[:30]) for p in prompts(96, 7)[1:2]]
    found = judged(tmp_path, load(str(FIXTURES / "gemma2-gqa"), "fp32-highest", None, "cpu"), repeated)
    assert found.exit_code == 0, failures(found)


def test_truncation_is_toward_zero():
    a = np.array([[1.0] * 16 + [2.0**-24] * 16])
    b = np.ones((32, 1))
    assert truncated_product(16, a, b)[0, 0] == 16.0
    assert truncated_product(16, -a, b)[0, 0] == -16.0


# Traits of large models


@pytest.fixture(scope="module")
def written(folder):
    return models(folder / "models")


QUICK = ("massive activations", "key biases", "scores beyond 1000", "vanishing gelu", "float32 weights")


def pass_with(tmp_path, path, policy):
    subject = load(str(path), policy, None, "cpu")
    found = judged(tmp_path, subject, prompts(subject.config.vocab))
    assert found.exit_code == 0, failures(found)


@pytest.mark.turn  # 8 s
@pytest.mark.parametrize("name", few(QUICK, "massive activations"))  # 8 s each
def test_models_with_traits_of_large_ones_pass(tmp_path, written, name):
    pass_with(tmp_path, written[name], "bf16")


@pytest.mark.turn  # 4 s
def test_an_operation_that_amplifies_its_rounding_is_told_with_its_price(tmp_path, written):
    subject = load(str(written["scores beyond 1000"]), "bf16", None, "cpu")
    select = Selection.parse(points="q,k,v,attn_out", phases="prefill")
    run = trace(subject, tmp_path / "run", prompts(512)[:1], select, TraceOptions(0))
    found = compare(run, options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    dear = [e for e in of_kinds(found.errors, LocalError) if e.costly is not None]
    assert {(e.point, e.costly) for e in dear} == {("attn_out", "scores")}
    assert max(e.rel_l2 for e in dear) > 0.02
    assert any("rounding at scores costs up to" in note and "attn_out" in note for note in found.notes)
    assert gate(found).exit_code == 0
    subject = load("tiny", "bf16", None, "cpu")
    run = trace(subject, tmp_path / "tame", [Prompt(id="c0", prompt=TEXT)], select, TraceOptions(0))
    assert not any("price" in note for note in compare(run, options=CompareOptions(accum=())).notes)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["bf16", "bf16-fp32-scores", "fp32-highest"])
@pytest.mark.parametrize("name", [*(t.name for t in TRAITS), "tiny in float32", "tiny in float16"])
def test_every_model_with_a_trait_passes(tmp_path, written, name, policy):
    pass_with(tmp_path, written[name], policy)


# Every policy key at every value


def values():
    for key in KEYS:
        for value in WORDS.get(key, ("float32", "bfloat16", "float16")):
            yield key, value


@pytest.mark.slow  # 8 s
def test_a_float8_cache_passes(tmp_path):
    found = judged(tmp_path, load("tiny", "bf16", {"kv_cache": "float8_e4m3fn"}, "cpu"), steps=3)
    assert found.exit_code == 0, failures(found)


def test_what_was_not_rounded_between_three_operations_passes(tmp_path):
    """Products of float32 operands leave nothing rounded between them: mlp_out reads on from an unrounded residual."""
    subject = load("tiny", "bf16", {"matmul": "F32_F32_F32"}, "cpu")
    select = Selection.parse(
        points="resid_in,attn_proj,resid_mid,mlp_norm,mlp_act,mlp_out", layers="0", phases="prefill"
    )
    run = trace(subject, tmp_path / "run", [Prompt(id="c0", prompt=TEXT)], select, TraceOptions(0))
    found = compare(run, options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    elided = {e.point: next(iter(e.elided.values())) for e in found.errors if e.kind == "local" and e.elided}
    assert elided["mlp_out"] == ("mlp_act", "mlp_norm", "resid_mid")
    assert gate(found).exit_code == 0


@pytest.mark.slow  # 10 s
def test_decode_from_a_narrow_cache_errs_more_and_ties_are_as_near(tmp_path):
    sigma = {}
    for name, settings in (("narrow", {"kv_cache": "float8_e5m2"}), ("wide", None)):
        subject = load("tiny", "bf16", settings, "cpu")
        run = trace(
            subject, tmp_path / name, [Prompt(id="c0", prompt=TEXT)], Selection.parse(points="logits"), TraceOptions(2)
        )
        compare(run, options=CompareOptions(accum=(), cache=tmp_path / "refs"))
        found = written_records.read_compare_record(run)
        assert found is not None
        sigma[name] = float(found.sigma)
    assert sigma["narrow"] > 2 * sigma["wide"]


@pytest.mark.slow
@pytest.mark.parametrize(("key", "value"), values())
def test_every_value_of_every_key_passes_or_is_refused_or_unknown(tmp_path, key, value):
    from precaudit.errors import UserError

    try:
        subject = load("tiny", "bf16", {key: value}, "cpu")
    except UserError:
        return
    found = judged(tmp_path, subject)
    assert found.exit_code == 0 or {v.status for v in found.verdicts} == {"unknown"}, failures(found)


def test_every_place_is_read_by_an_operation():
    """A place that is declared and read by nothing emulates nothing: in the forward pass, and in operations."""
    from precaudit.models.configs import model_tensors
    from precaudit.models.numpy_decoder.forward import Decoding, Sequences, Wanted, forward
    from precaudit.models.numpy_decoder.model import Model
    from tests.helpers.paths import FIXTURES

    seen = set()

    def noting(place):
        def call(x):
            seen.add(place)
            return x + 0.0

        return call

    rounding = Rounding(**{place: noting(place) for place in PLACES})
    for name in ("gemma2-caps", "llama-bias", "qwen3-moe-gqa", "granite-gqa"):
        subject = load(str(FIXTURES / name), device="cpu")
        assert model_tensors(subject.config)
        model = Model(subject.config, subject.checkpoint.tensors.read_tensor)
        wanted = Wanted({"logits", "scores", "probs"}, None, [np.array([3])])
        on_two = replace(rounding, splits=(("attn_proj", SplitSum(parts=2, summed="bfloat16")),))
        for r in (rounding, replace(rounding, blocks=Blocks(4)), on_two):
            forward(model, Sequences([np.arange(1, 8)], decoding=Decoding([4], [r])), [r], wanted, lambda *_: None)
    assert seen == set(PLACES)


# Numbers


def test_a_narrow_accumulator_fails_assert_close():
    draw = np.random.default_rng(4)
    bf = FORMATS["bfloat16"].dtype
    x, w = (as_format(draw.standard_normal(s), "bfloat16") for s in ((32, 1024), (1024, 64)))

    def product(x, w):
        return x @ w

    honest = (x.astype(np.float32) @ w.astype(np.float32)).astype(bf)
    assert_close(honest, product, inputs=[x, w])
    for block in (128, 32):
        total = np.zeros((32, 64), bf)
        for i in range(0, 1024, block):
            part = x[:, i : i + block].astype(np.float32) @ w[i : i + block].astype(np.float32)
            total = (total.astype(np.float32) + part).astype(bf)
        with pytest.raises(AssertionError, match="fail"):
            assert_close(total, product, inputs=[x, w])
    # inputs that were rounded just before: only on request
    off = (x * (1 + draw.uniform(-1, 1, x.shape) * 2.0**-8)).astype(bf)
    moved = (off.astype(np.float32) @ w.astype(np.float32)).astype(bf)
    with pytest.raises(AssertionError):
        assert_close(moved, product, inputs=[x, w])
    assert_close(moved, product, inputs=[x, w], perturbed=True)


def test_float16_is_floored_below_its_smallest_normal_only():
    y = np.array([0.01, 6.2e-5, 6.0e-5, 1e-7, 0.0])
    ulps = np.abs(np.spacing(y.astype(np.float16))).astype(np.float64) / 2
    smallest = 2.0**-14
    assert np.array_equal(half_ulp(y, "float16"), np.where(y < smallest, smallest, ulps))


def test_kl_is_never_negative_and_is_exact_near_zero():
    import mpmath

    draw = np.random.default_rng(0)
    for size in (1e-15, 1e-9, 1e-4, 0.3, 30.0):
        for _ in range(20):
            p = 8 * draw.standard_normal(50)
            q = p + size * draw.standard_normal(50)
            found = kl(p, q)
            assert found >= 0
            with mpmath.workdps(60):
                a, b = ([mpmath.mpf(float(v)) for v in x] for x in (p, q))
                za, zb = (mpmath.log(sum(map(mpmath.exp, x))) for x in (a, b))
                exact = sum(mpmath.exp(u - za) * ((u - za) - (v - zb)) for u, v in zip(a, b, strict=True))
            if size >= 1e-9:
                assert abs(found - float(exact)) <= 1e-5 * float(exact)


def test_expected_kl_is_kl_to_second_order():
    draw = np.random.default_rng(1)
    x, e = 4 * draw.standard_normal((3, 60)), 1e-4 * draw.standard_normal((5, 60))
    for r in range(3):
        each = [kl(x[r], x[r] + e[s]) for s in range(5)]
        for s in range(5):
            assert expected_kl(x[r : r + 1], [e[s : s + 1]]) == pytest.approx(each[s], rel=1e-3)
        assert expected_kl(x, [e[:2], e[2:]])[r] == pytest.approx(np.mean(each), rel=1e-3)
    assert np.allclose(np.exp(log_softmax(x)).sum(axis=1), 1.0)


@pytest.mark.parametrize("gap", [10.0, 20.0, 40.0, 60.0])
def test_expected_kl_of_a_row_that_is_nearly_one_token(gap):
    """½ Var_p(δ) in 60 digits; E δ² − (E δ)² in FP64 has none left from a gap of 37 on."""
    import mpmath

    draw = np.random.default_rng(2)
    x = draw.standard_normal(20)
    x[3] = x.max() + gap
    e = 0.1 * draw.standard_normal((5, 20))
    with mpmath.workdps(60):
        weights = [mpmath.exp(mpmath.mpf(float(v))) for v in x]
        p = [w / mpmath.fsum(weights) for w in weights]

        def half_variance(errors):
            mean = mpmath.fsum(a * mpmath.mpf(float(b)) for a, b in zip(p, errors, strict=True))
            return mpmath.fsum(a * (mpmath.mpf(float(b)) - mean) ** 2 for a, b in zip(p, errors, strict=True)) / 2

        exact = mpmath.fsum(map(half_variance, e)) / len(e)
    assert expected_kl(x[None], [e])[0] == pytest.approx(float(exact), rel=1e-9, abs=0)


@pytest.mark.parametrize(("vocab", "prompts", "rows"), [(512, 6, 8), (1 << 18, 10, 3), (1 << 18, 99, 1)])
def test_what_is_kept_for_the_noise_of_kl_is_bounded(vocab, prompts, rows):
    """Eight rows a prompt, or as many as 256 MiB of float32 errors of eight draws hold; one at least."""
    assert len(sampled_rows(50, prompts, vocab)) == rows
    assert len(sampled_rows(0, prompts, vocab)) == 0


def test_negative_noise_passes_nothing():
    from precaudit.schema.limits.checks import kl_over_noise, units
    from precaudit.schema.records.errors import Signed

    assert not kl_over_noise(1.0, -1.0) <= 1e9
    assert not units(Signed(value=1.0, noise=-1.0)) <= 1e9


def test_limits_grow_with_the_number_of_slices():
    limit = Limit(2.5, 512)
    assert limit.at(1) == limit.at(512) == 2.5
    assert 2.5 < limit.at(10**4) < limit.at(10**7) < 2 * 2.5
    assert Limit(2.5).at(10**7) == 2.5
    assert Limit(30.0, 1, 2).at(1000) == pytest.approx(30 * (quantile(1000) / quantile(1)) ** 2)


@pytest.mark.parametrize("n", [10**2, 10**4, 10**6, 10**7])
def test_honest_noise_of_any_number_of_elements_stays_within(n):
    """Errors of another draw: no false alarm in the worst of n elements, tokens and channels.

    As float32 results leave them; below float32 roundings are known, and less than a whole draw may be left.
    """
    draw = np.random.default_rng(n)
    limits = default_limits().float32
    k = min(n, 64)
    shape = (n // k, 1, k)
    r = draw.standard_normal(shape)
    u = 2.0**-9 / 3**0.5
    left, *others = (u * r * draw.uniform(-1.0, 1.0, shape) * 3**0.5 for _ in range(4))
    noise = Noise.pool(others, r, 2.0**-9)
    whole, worst, slices = excesses(Sums.of(left, noise, r), noise, np.arange(shape[0]), "TD")
    assert whole <= limits.tensor.at(1)
    for scope, (found, _) in worst.items():
        assert found <= getattr(limits, scope).at(slices[scope]), scope
    tensor, _ = gain_and_mean(Sums.of(left, noise, r), noise, False)
    for name in ("gain", "mean"):
        assert abs(tensor[name].value) <= getattr(limits, name).at(1) * tensor[name].noise * 3


def test_equal_tokens_round_alike_and_their_noise_adds_up():
    draw = np.random.default_rng(3)
    one = draw.standard_normal((1, 1, 64))
    r = np.repeat(one, 400, axis=0)
    errors = [np.repeat(1e-3 * draw.standard_normal((1, 1, 64)), 400, axis=0) for _ in range(4)]
    noise = Noise.pool(errors[1:], r, 2.0**-9)
    tensor, _ = gain_and_mean(Sums.of(errors[0], noise, r), noise, False)
    assert abs(tensor["gain"].value) < 4 * tensor["gain"].noise


def test_forward_errors_of_one_token_or_head_are_judged():
    """A head or token that is off hides in the tensor's norm: it has a noise and a limit of its own."""
    from precaudit.judging.rules import judge
    from precaudit.references.textbook.forward import _scopes
    from precaudit.schema.metrics.sizes import Difference

    draw = np.random.default_rng(8)
    r = draw.standard_normal((200, 8, 16))
    energy = np.full((200, 8), 16 * 1e-4)  # [T, H]: errors of rms 1e-2
    for scope, where, index in (("token", np.s_[17], 1017), ("head", np.s_[:, 5], 5)):
        e = 1e-2 * draw.standard_normal(r.shape)
        e[where] *= 20
        scopes: dict = {}
        slices = _scopes(scopes, Difference.of(r + e, r), energy, np.arange(1000, 1200), "attn_out")
        assert slices == {"token": 200, "head": 8}
        assert scopes[scope]["ratio"][1] == index
        record = ForwardError(
            prompt="p", phase="prefill", step=0, layer=1, point="attn_out", candidate="run",
            reference="fp64", n=r.size, rel_l2=0.02, mae=0.01, max_diff=0.1, ratio=2.0, scopes=scopes, slices=slices,
        )  # fmt: skip
        verdict = judge(record, default_limits())
        assert (verdict.status, verdict.metric, verdict.scope, verdict.index) == ("fail", "ratio", scope, index)


@pytest.mark.parametrize(("turned", "factor", "passes"), [(1, 1.0, True), (2, 1.0, False), (1, 1.03, False)])
def test_a_tie_inside_one_row_of_many_that_read_an_unrounded_input(turned, factor, passes):
    """Three rows read an input before it was rounded; in ``turned`` of them one of its roundings fell the other way.

    Most rows tell that it was read unrounded. Where they do not, or a row is scaled, nothing is excused.
    """
    draw = np.random.default_rng(3)
    matrix = draw.standard_normal((512, 128)) / 16
    inside = draw.standard_normal((3, 512))
    other = inside.copy()
    other[:turned, 5] *= 1 + 2.0**-5  # a neighbour in bfloat16 of one factor, and some products on
    bf16 = rounder("bfloat16")
    rounded, unrounded, candidate = ((x @ matrix)[:, None, :] for x in (bf16(inside), inside, other))
    candidate = bf16(candidate)
    candidate[0] *= factor
    noise = Noise.pool([bf16(rounded) - rounded] * 3, rounded, 2.0**-9)
    sizes = (np.abs(inside) @ np.abs(matrix))[:, None, :]
    least = np.spacing(np.abs(rounded).astype(np.float32)) * 2.0**15
    yard = Yardstick(
        "TD", "bfloat16", np.arange(3), candidate, rounded, noise,
        allowed=2.0**-24 * sizes + least, fused=2.0**-9 * sizes + least,
    )  # fmt: skip
    assert yard.badness(bf16(unrounded)) > 1
    right = replace(yard, candidate=np.where(np.arange(3)[:, None, None] == 0, candidate, rounded))
    assert right.reading_unrounded(right.candidate, bf16(rounded)).noise is not yard.noise
    silent = np.where(np.arange(3)[:, None, None] == 0, bf16(unrounded) + 1, rounded)  # no error: nothing is told
    assert right.reading_unrounded(silent, bf16(rounded)) is right
    assert (yard.reading_unrounded(bf16(unrounded), bf16(rounded)).badness(bf16(unrounded)) <= 1) == passes


@pytest.mark.parametrize("few", [False, True])
def test_the_noise_of_few_results_is_of_many_orders(few):
    """Of one score a head three realisations may all be small by luck: 400 honest ones, judged by their own noise."""
    config, policy = load("tiny", "fp32-highest", None, "cpu").config, load_policy("fp32-highest")
    draw = np.random.default_rng(3)
    largest = 0.0
    for _ in range(400):
        a, b = (as_format(draw.normal(size=shape), "float32").astype(np.float64) for shape in ((1, 8), (8, 1)))
        members = ensemble("scores", config, policy, of_policy(policy, False), "float32", few)
        assert len(members) == (12 if few else 3)
        exact = a @ b
        lanes = np.cumsum((a * b.T).astype(np.float32).reshape(2, 4), axis=1, dtype=np.float32)[:, -1]
        made = np.float64(lanes[0] + lanes[1]) - exact
        noise = Noise.pool([m.dot(a, b)[..., None] - exact[..., None] for m in members], exact[..., None], 2.0**-24)
        largest = max(largest, excesses(Sums.of(made[..., None], noise, exact[..., None]), noise, [0], "HTS")[0])
    assert (largest < 3) == few, largest


def test_a_head_of_few_results_is_judged_by_many_orders(tmp_path):
    """One score a head of a decode step, and the 30 × 30 of a prefill."""
    model = open_checkpoint(str(FIXTURES / "llama-mha"))
    recorded = Recorded.of(open_run(unpacked("one-row-heads", tmp_path / "run")))
    policy, reader = load_policy("bf16-fp32-scores"), Model(model.config, model.tensors.read_tensor)
    for prompt, phase, members in (("c3-alone", "decode", 12), ("c0-random", "prefill", 3)):
        place = Place(prompt, phase, 0, 1, "scores")
        operation = prepare(recorded, reader, place, parts(recorded, place)[0])
        assert len(honest(operation, reader, policy, of_policy(policy, phase == "decode"))) == members


def test_a_limit_from_one_half_is_held_against_the_other(capsys):
    """1.5 × the largest of one half, 1.5² where the number is a square: 2 / (1.5 · 1) and 2 / (2.25 · 1)."""

    def half(top):
        return {"bins": {"0": 1}, "top": top, "at": "logits"}

    checks = {f"{name}.{i}": half(i + 1.0) for name in ("forward.kl", "forward.ratio") for i in (0, 1)}
    calibrate.table([{"name": "r", "checks": checks, "judged": 1000, "alarms": [], "seconds": 1.0}])
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert (rows["forward.kl"][5], rows["forward.kl"][6]) == ("4.5", "0.89")
    assert (rows["forward.ratio"][5], rows["forward.ratio"][6]) == ("3", "1.33")
