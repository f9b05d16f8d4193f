"""The kernels that ship: against FP64 written in NumPy, against their references, and compiled for TPUs."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precaudit.checks.gradients.check import gradcheck
from precaudit.checks.kernels import grpo, grpo_linear, losses
from precaudit.checks.kernels.double_word import log, scale_pair, two_sum
from precaudit.interpreters.tpu.target import compile_for, parse_target
from tests.helpers.selected import few
from tests.helpers.tpus import needs_libtpu

SIZES = ((24, 1000), (128, 1001), (130, 500), (5, 7))


def exactly(logits, tokens, old, ref, advantages, mask, temperature):
    """Loss, log-probabilities and dlogits in FP64, tokens as they are normalised by default."""
    x = np.asarray(logits, np.float64) / temperature
    x -= x.max(1, keepdims=True)
    rows = np.arange(len(x))
    logp = x[rows, tokens] - np.log(np.exp(x).sum(1))
    old, ref, a, mask = (np.asarray(v, np.float64) for v in (old, ref, advantages, mask))
    r, d = np.exp(logp - old), ref - logp
    held = np.clip(r, 0.8, 1.2) * a < r * a
    each = -np.minimum(r * a, np.clip(r, 0.8, 1.2) * a) + 0.04 * (np.exp(d) - d - 1)
    slope = (np.where(held, 0.0, -r * a) + 0.04 * (1 - np.exp(d))) * mask / mask.sum()
    hot = np.zeros_like(x)
    hot[rows, tokens] = 1
    p = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    return (each * mask).sum() / mask.sum(), logp, (hot - p) * slope[:, None] / temperature


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("temperature", few([1.0, 0.7], 1.0))
def test_the_loss_and_its_gradient_are_fp64s_whatever_the_size(size, temperature):
    given = grpo.inputs(1, size=size, spread=1.0, temperature=temperature)
    exact, logp, d64 = exactly(*given, temperature)
    run = jax.jit(jax.value_and_grad(lambda *x: grpo.kernel(*x, temperature=temperature, block=(16, 256))))
    loss, d = run(*given)
    ours = grpo.token_log_probabilities(jnp.asarray(given[0]), jnp.asarray(given[1]), temperature, (16, 256))[0]
    assert np.abs(np.asarray(ours, np.float64) - logp).max() <= 4 * np.spacing(np.float32(np.abs(logp).max()))
    assert abs(float(loss) - exact) <= 1e-6 * max(abs(exact), 1)
    assert np.abs(np.asarray(d, np.float64) - d64).max() <= 1e-6 * np.abs(d64).max()


def test_a_gradient_in_bfloat16_is_rounded_once():
    given = grpo.inputs(2, "bfloat16", spread=1.0)
    _, _, d64 = exactly(*given, 1.0)
    d = np.asarray(jax.jit(jax.grad(grpo.kernel))(*given)).astype(np.float64)
    once = np.asarray(d64.astype(np.float32)).astype(jnp.bfloat16).astype(np.float64)
    assert np.mean(d != once) < 1e-3


def test_minus_infinity_masks_tokens_even_a_first_tile_of_them():
    given = list(grpo.inputs(3))
    given[0] = given[0].at[:, :300].set(-jnp.inf)
    given[1] = np.maximum(given[1], 300)
    ours, plain = (
        jax.jit(jax.value_and_grad(f))(*given) for f in (lambda *x: grpo.kernel(*x, block=(8, 128)), grpo.reference)
    )
    assert np.isfinite(ours[0])
    np.testing.assert_allclose(ours[1], plain[1], rtol=0, atol=1e-6 * np.abs(plain[1]).max())
    assert not np.asarray(ours[1][:, :300]).any()


@pytest.mark.parametrize("over", ["tokens", "sequences", "positions"])
def test_normalisations_by_hand(over):
    logp, mask = jnp.log(jnp.asarray([[0.5, 0.25], [0.5, 0.5]])), jnp.asarray([[1.0, 1.0], [1.0, 0.0]])
    a = jnp.asarray([[1.0, 3.0], [5.0, 7.0]])  # ratios are 1 and d is 0: a token's loss is −A
    expected = {"tokens": -9 / 3, "sequences": -(4 / 2 + 5) / 2, "positions": -9 / 4}[over]
    assert float(losses.grpo(losses.TokenScores(logp, logp, logp, a, mask), losses.GrpoRule(over=over))) == expected
    assert float(losses.grpo(losses.TokenScores(logp, logp, logp, a, 0 * mask), losses.GrpoRule(over=over))) == 0


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("name", few(["float32", "bfloat16"], "bfloat16"))  # 20 s
def test_gradcheck_finds_nothing(name):
    def given(seed):
        return grpo.inputs(seed, name, (8, 300))

    found = gradcheck(grpo.kernel, grpo.reference, given, argnums=(0,), hostile=name == "float32")
    assert found.exit_code == 0, found.conclusions
    assert found.counts["pass"] > (100 if name == "float32" else 10)


@needs_libtpu
@pytest.mark.parametrize("target", ["v5e", "v6e"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_tpu_needs_no_second_array_of_the_logits_size(target, dtype):
    t, v = 1024, 151_643
    per_token = [jax.ShapeDtypeStruct((t,), jnp.float32)] * 4
    given = (jax.ShapeDtypeStruct((t, v), dtype), jax.ShapeDtypeStruct((t,), jnp.int32), *per_token)
    made = compile_for(parse_target(target), jax.value_and_grad(grpo.kernel), given)
    assert made.text.count('custom_call_target="tpu_custom_call"') == 2
    assert made.temporaries <= 0.1 * t * v * np.dtype(dtype).itemsize


def over_hidden(hidden, head, *rest):
    """Loss, log-probabilities, dhidden and dhead in FP64."""
    h, w = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    loss, logp, d = exactly(h @ w.T, *rest)
    return loss, logp, d @ w, d.T @ h


@pytest.mark.parametrize("size", [(12, 300, 48), (70, 500, 130), (5, 7, 3)], ids=str)
def test_hidden_states_and_a_head_give_fp64s_gradients_tile_by_tile(size):
    given, block = grpo_linear.inputs(1, size=size, spread=1.0, temperature=0.7), (32, 128)
    exact, logp, *gradients = over_hidden(*given, 0.7)
    run = jax.value_and_grad(lambda *x: grpo_linear.kernel(*x, temperature=0.7, block=block), (0, 1))
    loss, found = jax.jit(run)(*given)
    ours = jax.jit(lambda *x: grpo_linear.token_log_probabilities(*x, 0.7, block))(*given[:3])[0]
    assert np.abs(np.asarray(ours, np.float64) - logp).max() <= 4 * np.spacing(np.float32(np.abs(logp).max()))
    assert abs(float(loss) - exact) <= 1e-6 * max(abs(exact), 1)
    for a, b in zip(found, gradients, strict=True):
        assert np.abs(np.asarray(a, np.float64) - b).max() <= 2e-6 * np.abs(b).max()


@pytest.mark.slow  # 10 s
def test_gradcheck_finds_nothing_over_hidden_states_even_where_all_logits_are_alike():
    def given(seed):
        hidden, head, *rest = grpo_linear.inputs(seed, size=(8, 60, 16))
        return {"drawn": (hidden, head, *rest), "constant": (hidden, jnp.full_like(head, head[0, 0]), *rest)}

    found = gradcheck(grpo_linear.kernel, grpo_linear.reference, given, argnums=(0, 1), hostile=False)
    assert found.exit_code == 0, found.conclusions
    assert found.counts["pass"] == 6 * 6


@pytest.mark.turn  # 6 s
def test_no_array_grows_with_tokens_or_vocabulary():
    def temporaries(t, v):
        each = [jax.ShapeDtypeStruct((t,), jnp.float32)] * 4
        given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((t, 16), (v, 16))]
        run = jax.value_and_grad(lambda *x: grpo_linear.kernel(*x, block=(32, 128)), (0, 1))
        made = jax.jit(run).lower(*given, jax.ShapeDtypeStruct((t,), jnp.int32), *each).compile()
        return made.memory_analysis().temp_size_in_bytes

    few = temporaries(64, 512)
    assert temporaries(64, 8192) == few
    assert temporaries(4096, 512) - few <= 16 * 4 * 4096  # float32 numbers a token: of the sums and of the loss
    assert few < 64 * 8192 * 4


@needs_libtpu
@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_a_tpu_makes_the_logits_by_tiles(target):
    t, v, d = 512, 8192, 64
    each = [jax.ShapeDtypeStruct((t,), jnp.float32)] * 4
    given = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((t, d), (v, d))]
    run = jax.value_and_grad(lambda *x: grpo_linear.kernel(*x, block=(64, 512)), (0, 1))
    made = compile_for(parse_target(target), run, (*given, jax.ShapeDtypeStruct((t,), jnp.int32), *each))
    assert made.temporaries < 0.1 * t * v * 4


def test_pairs_keep_what_float32_loses_compiled_too():
    random = np.random.default_rng(0)
    a, b = (100 * random.standard_normal(1000).astype(np.float32) for _ in "ab")
    total, lost = jax.jit(two_sum)(a, b)
    for x, y, high, low in zip(*(np.asarray(v, np.float64) for v in (a, b, total, lost)), strict=True):
        assert Fraction(x) + Fraction(y) == Fraction(high) + Fraction(low)
    high, low = (np.asarray(x, np.float64) for x in jax.jit(lambda a: scale_pair((a, jnp.zeros_like(a)), 1 / 0.7))(a))
    np.testing.assert_allclose(high + low, a.astype(np.float64) / 0.7, rtol=1e-10)
    wide = np.exp(random.uniform(-20, 40, 1000))
    pair = (wide.astype(np.float32), (wide - wide.astype(np.float32)).astype(np.float32))
    high, low = (np.asarray(x, np.float64) for x in jax.jit(lambda *x: log(x))(*pair))
    np.testing.assert_allclose(high + low, np.log(wide), rtol=0, atol=5e-8)


@pytest.mark.parametrize("spread", [4.0, 16.0])
def test_a_ratio_is_exact_where_its_log_probability_is_large(spread):
    given = grpo.inputs(5, size=(16, 4096), spread=spread, temperature=0.7)
    exact, _, d64 = exactly(*given, 0.7)
    loss, d = jax.jit(jax.value_and_grad(lambda *x: grpo.kernel(*x, temperature=0.7, block=(16, 1024))))(*given)
    assert abs(float(loss) - exact) <= 1.2e-7
    assert np.abs(np.asarray(d, np.float64) - d64).max() <= 4e-7 * np.abs(d64).max()


@pytest.mark.parametrize("module", [grpo, grpo_linear], ids=lambda m: m.__name__.rpartition(".")[2])
def test_on_a_gpu_they_are_loops_over_tiles_that_xla_compiles(module):
    """Lowered for CUDA, which needs no GPU; nothing of it ran on one."""
    run = jax.jit(jax.value_and_grad(module.kernel, argnums=module.ARGNUMS))
    text = run.trace(*module.inputs(0)).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" in text
    assert "custom_call" not in text
