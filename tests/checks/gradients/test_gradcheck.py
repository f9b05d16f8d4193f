"""Kernels and references against FP64: honest ones pass, each planted fault is found on its side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from precaudit.checks.gradients.awkward import awkward
from precaudit.checks.gradients.case import KERNEL, REFERENCE
from precaudit.checks.gradients.check import gradcheck
from precaudit.checks.gradients.flips import Choosing, record_choices
from precaudit.checks.gradients.formula import Formula, differentiate
from precaudit.checks.gradients.shrinking import shrunk
from precaudit.checks.gradients.subjects import read_inputs, write_inputs
from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.subnormals import device_flushes
from precaudit.judging.gate import gate
from tests.helpers.selected import few

T, V, TILE = 6, 40, 8


def inputs(seed):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((T, V)).astype(np.float32)
    tokens = rng.integers(0, V, T).astype(np.int32)
    old, ref = (-4 + rng.standard_normal(T).astype(np.float32) * 0.3 for _ in range(2))
    return logits, tokens, old.astype(np.float32), ref.astype(np.float32), rng.standard_normal(T).astype(np.float32)


def grpo(logits, tokens, old, ref, adv, logsumexp=jax.nn.logsumexp, low=0.8, high=1.2, beta=0.5, held=True):
    logp = jnp.take_along_axis(logits, tokens[:, None], -1)[:, 0] - logsumexp(logits, -1)
    ratio = jnp.exp(logp - (jax.lax.stop_gradient(old) if held else old))
    d = ref - logp
    kl = jnp.exp(d) - d - 1
    return jnp.mean(beta * kl - jnp.minimum(ratio * adv, jnp.clip(ratio, low, high) * adv))


def streamed(logits, tile=TILE, dtype=jnp.float32, last=None):
    m, total = jnp.full(logits.shape[0], -1e30), jnp.zeros(logits.shape[0], dtype)
    for i in range(0, last or logits.shape[1], tile):
        part = logits[:, i : i + tile].astype(jnp.float32)
        new = jnp.maximum(m, part.max(-1))
        scale = jnp.exp(m - new)
        total = (total * scale.astype(dtype) + jnp.exp(part - new[:, None]).sum(-1).astype(dtype)).astype(dtype)
        m = new
    return m + jnp.log(total.astype(jnp.float32))


@jax.custom_vjp
def scaled(logits, tokens, old, ref, adv):
    return grpo(logits, tokens, old, ref, adv)


def _backward(given, g):
    return jax.tree.map(
        lambda x: x * 1.001, jax.vjp(lambda *x: grpo(x[0], given[1], *x[1:]), *given[:1], *given[2:])[1](g)
    )


scaled.defvjp(
    lambda *x: (grpo(*x), x),
    lambda x, g: (lambda d: (d[0], np.zeros(x[1].shape, jax.dtypes.float0), *d[1:]))(_backward(x, g)),
)
FAULTS = {
    "a gradient × 1.001": scaled,
    "no KL term": lambda *x: grpo(*x, beta=0.0),
    "a clip on the wrong side": lambda *x: grpo(*x, low=0.8, high=0.9),
    "a tile too few": lambda *x: grpo(*x, logsumexp=lambda z, _: streamed(z, last=V - TILE)),
    "an accumulator in bfloat16": lambda *x: grpo(*x, logsumexp=lambda z, _: streamed(z, dtype=jnp.bfloat16)),
    "a stop_gradient forgotten": lambda *x: grpo(*x, held=False),
}


def check(kernel, reference=grpo, **how):
    return gradcheck(kernel, reference, inputs, **({"seeds": 1, "hostile": False} | how))


@pytest.mark.slow  # 18 s; those that ship are checked in test_shipped_kernels.py
def test_honest_kernels_of_another_algorithm_pass_on_every_input():
    found = gradcheck(lambda *x: grpo(*x, logsumexp=streamed), grpo, inputs, seeds=2)
    assert found.exit_code == 0, found.conclusions
    assert len(found.cases) > 40


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("fault", few(FAULTS, "a gradient × 1.001", "a clip on the wrong side"))  # 7 to 12 s
def test_a_fault_is_the_kernels(fault):
    found = check(FAULTS[fault])
    assert found.exit_code == 1
    assert {f.side for f in found.found if f.verdict.status != "pass"} == {KERNEL}


@pytest.mark.turn  # 18 s
def test_a_scaled_gradient_is_said_to_be_scaled_and_check_grads_misses_it():
    told = " ".join(check(scaled).conclusions)
    assert "it is 1.001 × FP64; no format narrower" in told
    logits, tokens, *rest = inputs(0)
    check_grads(lambda x: scaled(x, tokens, *rest), (logits,), order=1, modes=("rev",))


@pytest.mark.turn  # 13 s
def test_a_bfloat16_accumulator_is_explained_by_its_line():
    told = check(FAULTS["an accumulator in bfloat16"]).conclusions[0]
    assert told.startswith("kernel: out")
    assert "rounding explains it" in told
    assert "(streamed)" in told


@pytest.mark.slow  # 10 s
def test_the_less_precise_side_is_the_reference_and_its_line():
    def narrow(logits, *rest):
        return grpo(logits, *rest, logsumexp=lambda z, a: jax.nn.logsumexp(z.astype(jnp.bfloat16), a).astype(z.dtype))

    found = check(grpo, narrow)
    assert {f.side for f in found.found if f.verdict.status != "pass"} == {REFERENCE}
    assert "the reference is the less precise side" in found.conclusions[0]
    assert "test_gradcheck.py" in found.conclusions[0]
    both = check(narrow, narrow)
    assert both.exit_code == 0
    assert any(f.declared for f in both.found)


@pytest.mark.turn  # 5 s
def test_gradients_in_bfloat16_are_fp64_rounded_once():
    def short(seed):
        return tuple(jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else x for x in inputs(seed))

    def kernel(logits, tokens, *rest):
        return grpo(logits.astype(jnp.float32), tokens, *(x.astype(jnp.float32) for x in rest))

    found = gradcheck(kernel, kernel, short, hostile=False)
    assert found.exit_code == 0
    gradients = [f for f in found.found if f.array == "dlogits"]
    assert all(f.record.dtype == "bfloat16" for f in gradients)
    assert max(f.distance.componentwise for f in gradients if f.distance) < 1.02


def over_head(hidden, head, tokens, adv, normal=1.0):
    logits = hidden @ head.T
    logp = jnp.take_along_axis(logits, tokens[:, None], -1)[:, 0] - jax.nn.logsumexp(logits, -1) * normal
    return jnp.sum(logp * adv)


@jax.custom_vjp
def unnormalised(hidden, head, tokens, adv):
    return over_head(hidden, head, tokens, adv)


def _not_one(given, g):
    d = jax.grad(lambda h, w: over_head(h, w, given[2], given[3], 1.0 + 1e-4), (0, 1))(*given[:2])
    return *(g * x for x in d), None, None


unnormalised.defvjp(lambda *x: (over_head(*x), x), _not_one)


def of_one_constant(seed):
    """Logits of a row are all alike: that row's exact gradient is 0 by cancellation, times a slope of 1e6."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((T, 48)).astype(np.float32)
    head = np.full((V, 48), rng.standard_normal(), np.float32)
    return hidden, head, rng.integers(0, V, T).astype(np.int32), (1e6 * rng.standard_normal(T)).astype(np.float32)


@pytest.mark.turn  # 8 s
def test_what_is_left_of_a_sum_that_cancels_is_noise_common_to_a_row_and_what_does_not_cancel_a_fault():
    def otherwise(hidden, head, tokens, adv):
        return over_head(hidden[:, ::-1], head[::-1, ::-1], V - 1 - tokens, adv)

    found = gradcheck(otherwise, over_head, of_one_constant, argnums=(0, 1), seeds=8, hostile=False)
    assert found.exit_code == 0, found.conclusions
    wrong = gradcheck(unnormalised, over_head, of_one_constant, argnums=(0, 1), seeds=1, hostile=False)
    assert {(f.side, f.array) for f in wrong.found if f.verdict.status != "pass"} >= {(KERNEL, "dhidden")}
    assert {f.side for f in wrong.found if f.verdict.status != "pass"} == {KERNEL}


def test_a_minimum_keeps_its_derivative_in_every_realisation():
    x, y = np.linspace(0.1, 0.9, 7, dtype=np.float32), np.linspace(0.9, 0.1, 7, dtype=np.float32)
    both = differentiate(lambda x, y: jnp.sum(jnp.minimum(3 * x, 0.7 * y)), (0, 1))
    for _, dx, dy in Formula.of(both, np.float32(1), (x, y)).draws(np.float32(1), (x, y)):
        less = 3 * x < 0.7 * y
        np.testing.assert_allclose(dx, np.where(less, 3.0, 0.0), rtol=1e-6)
        np.testing.assert_allclose(dy, np.where(less, 0.0, 0.7), rtol=1e-6)


@pytest.mark.skipif(not device_flushes(), reason="this device keeps subnormals")
def test_what_a_device_flushes_is_noise_and_a_factor_a_fault_still():
    def weighted(x, a):
        return (jnp.exp(x) * a).sum(-1)

    def draw(seed):  # rows of exp(x) below the smallest normal number, of products far above
        r = np.random.default_rng(seed)
        x = np.linspace(-95, -80, 16)[:, None] + r.standard_normal((16, 8)) / 4
        return np.float32(x), np.float32(1e4 + r.standard_normal((16, 8)))

    how = {"seeds": 1, "hostile": False}
    assert gradcheck(weighted, weighted, draw, **how).exit_code == 0
    assert gradcheck(lambda x, a: weighted(x, a) * 1.001, weighted, draw, **how).exit_code == 1


@pytest.mark.parametrize(
    ("choice", "take"),
    [
        (lambda x: jnp.argsort(x, axis=0), lambda x, i: np.take_along_axis(x, i, 0)),
        (lambda x: jnp.argmax(x, -1), lambda x, i: np.take_along_axis(x, i[:, None], 1)[:, 0]),
        (lambda x: jax.lax.top_k(x, 2)[1], lambda x, i: np.take_along_axis(x, i, 1)),
    ],
)
def test_fp64_goes_on_with_the_choices_of_a_run(choice, take):
    x, y = (np.random.default_rng(seed).standard_normal((5, 4)).astype(np.float32) for seed in range(2))

    def chosen(x):
        i = choice(x)
        return jnp.take_along_axis(x, i if i.ndim == 2 else i[:, None], 0 if i.shape == x.shape else 1)

    made = jax.make_jaxpr(chosen)(x)
    (other,) = record_choices(made, (y,), None)
    with jax.enable_x64(True):
        one = Choosing(None, [other])
        (out,) = one.run(made.jaxpr, made.consts, (x,))
    np.testing.assert_array_equal(np.asarray(out).reshape(take(x, other).shape), take(x, other))
    np.testing.assert_array_equal(one.made[0][2], record_choices(made, (x,), None)[0])


def test_lost_determinism_is_found():
    count = iter(range(1000))

    @jax.custom_vjp
    def kernel(x):
        return jax.pure_callback(lambda x: x * np.float32(1 + 1e-7 * (next(count) % 2)), x, x)

    kernel.defvjp(lambda x: (kernel(x), None), lambda _, g: (g,))
    found = gradcheck(kernel, lambda x: x * 1.0, (np.ones(3, np.float32),), hostile=False)
    assert any("differ in a second run on the same inputs" in x for x in found.conclusions)


def test_a_constant_that_the_reference_rounds_leaves_fp64_in_doubt():
    def narrow(x):
        return (x.astype(jnp.bfloat16) * 0.7).astype(jnp.float32)

    x = (np.linspace(1, 2, 9, dtype=np.float32),)
    found = gradcheck(lambda x: x * 0.7, narrow, x, hostile=False)
    assert found.exit_code == 3
    assert "0.69921875 in bfloat16" in found.notes[0]
    assert gradcheck(lambda x: x * 0.7, narrow, x, hostile=False, exact=lambda x: x * 0.7).exit_code == 1


def test_fp64_of_a_rounding_reference_is_its_formula():
    rng = np.random.default_rng(0)
    x, c = rng.standard_normal((4, 33)).astype(np.float32), rng.standard_normal((4, 33)).astype(np.float32)

    def f(x, t):
        return jax.nn.log_softmax((x * 0.7).astype(jnp.bfloat16) / t.astype(jnp.bfloat16))

    t = np.float32(1.5)
    out, dx = Formula.of(differentiate(f, (0,)), c, (x, t)).exact(c, (x, t))
    k = float(np.float32(0.7)) / 1.5
    z = x.astype(np.float64) * k
    logp = z - np.log(np.exp(z).sum(1, keepdims=True))
    np.testing.assert_allclose(out, logp, rtol=0, atol=1e-13)
    np.testing.assert_allclose(dx, k * (c - np.exp(logp) * c.astype(float).sum(1, keepdims=True)), rtol=0, atol=1e-13)


def contradicted(reference):
    return [x.partition(":")[0] for x in check(grpo, reference).notes]


@pytest.mark.turn  # 6 s
def test_differences_contradict_a_derivative_rule():
    assert contradicted(scaled) == ["dlogits", "dold", "dref", "dadv"]


@pytest.mark.slow  # 16 s
def test_differences_agree_with_a_correct_gradient():
    assert contradicted(grpo) == ["dold"]  # which is held
    assert contradicted(lambda *x: grpo(*x, held=False)) == []


X = np.ones(3, np.float32)
BAD = {
    "they have to be of one structure": (lambda x: x, lambda x: (x, x), (X,), {}),
    "the kernel returns float32[3], the reference float32[]": (lambda x: x, jnp.sum, (X,), {}),
    "the kernel cannot be traced on these inputs": (lambda x: x @ jnp.ones((4, 4)), jnp.sum, (X,), {}),
    "no gradient; return floats alone": (jnp.argmax, jnp.sum, (X,), {}),
    "input 0 holds integers": (jnp.sum, jnp.sum, (np.ones(3, np.int32),), {"argnums": (0,)}),
    "there is nothing to differentiate": (jnp.sum, jnp.sum, (np.ones(3, np.int32),), {}),
    "argnums names input 2 of 1": (jnp.sum, jnp.sum, (X,), {"argnums": (2,)}),
    "inputs failed: ZeroDivisionError": (jnp.sum, jnp.sum, lambda _: 1 / 0, {}),
    "a tuple of arrays is wanted": (jnp.sum, jnp.sum, lambda _: X, {}),
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_use_is_said(message):
    kernel, reference, given, how = BAD[message]
    with pytest.raises(UserError) as error:
        gradcheck(kernel, reference, given, hostile=False, **how)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) <= 2


@pytest.mark.turn  # 5 s
def test_nothing_finite_is_no_pass():
    def bad(x):
        return jnp.where(x > 1.5, jnp.nan, x)

    found = gradcheck(bad, lambda x: x, (np.linspace(1, 2, 4, dtype=np.float32),), hostile=False)
    assert [f.verdict.status for f in found.found if f.side == KERNEL and f.array == "out"] == ["nonfinite"]
    found = gradcheck(jnp.exp, jnp.exp, (np.full(3, 100, np.float32),), hostile=False)
    assert {f.verdict.status for f in found.found} == {"pass"}  # what overflows in the format is infinite there
    over = lambda x: jnp.sum(x * x) / jnp.max(x * x)  # noqa: E731
    found = gradcheck(over, over, (np.full(3, 1e30, np.float32),), hostile=False)
    assert "pass" not in {f.verdict.status for f in found.found if f.array == "out"}
    assert found.exit_code != 0


def test_the_command_names_the_side_and_what_gate_reads(tmp_path):
    from click.testing import CliRunner

    from precaudit.cli import cli

    kernel = "examples/bf16_reference.py:kernel"
    asked = ["gradcheck", kernel, "--plain", "--seeds", "1", "-o", str(tmp_path / "e.jsonl")]
    found = CliRunner().invoke(cli, asked, standalone_mode=False)
    assert found.return_value == 1
    assert "the reference is the less precise side" in found.output
    assert "examples/bf16_reference.py" in found.output
    judged = gate(tmp_path / "e.jsonl")
    assert judged.exit_code == 1
    assert {v.point for v in judged.verdicts} == {"reference.out", "reference.dlogits"}


def test_awkward_inputs_change_one_array_and_keep_formats():
    first = inputs(0)
    names = []
    for name, make in awkward(first):
        names.append(name)
        made = make()
        assert [x.dtype for x in made] == [x.dtype for x in first]
        if not name.startswith("size"):
            assert sum(not np.array_equal(a, b, equal_nan=True) for a, b in zip(made, first, strict=True)) <= 1
    assert {"size 40 cut to 39", "input 0 one-hot", "input 1 all the largest", "input 4 zero"} <= set(names)


def test_failing_inputs_are_shrunk_and_written(tmp_path):
    small = shrunk(inputs(0), lambda given: given[0].shape[1] > 10)
    assert small[0].shape == (1, 16)
    assert not small[0].any()
    assert small[1].max() < 1
    assert write_inputs(tmp_path / "x.safetensors", (jnp.ones(2, jnp.bfloat16), np.arange(3, dtype=np.int32)))
    back = read_inputs(tmp_path / "x.safetensors")
    assert [x.dtype for x in back] == [jnp.bfloat16, jnp.int32]
    with pytest.raises(UserError):
        read_inputs(tmp_path / "none.safetensors")


def norm(x, w, epsilon=1e-5):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon) * w


EPSILONS = {
    "3e-6 at": lambda x, w: norm(x, w, 3e-6), "1e-6 at": lambda x, w: norm(x, w, 1e-6),
    "is omitted": lambda x, w: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * w,
}  # fmt: skip


@pytest.mark.parametrize("told", EPSILONS)
def test_an_epsilon_is_told_by_its_number_and_left_out_where_there_is_none(told):
    rng = np.random.default_rng(0)
    given = rng.standard_normal((8, 64)).astype(np.float32) / 64, rng.standard_normal(64).astype(np.float32)
    found = gradcheck(EPSILONS[told], norm, given, argnums=(), hostile=False)
    assert told in found.conclusions[0]
    assert "1e-5 at" in found.conclusions[0]
    assert ("is omitted" in found.conclusions[0]) == (told == "is omitted")
    assert gradcheck(norm, norm, given, argnums=(), hostile=False).exit_code == 0
