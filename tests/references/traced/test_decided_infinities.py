"""Infinities of a mask that rounding decides are no fault; those that a program makes of its numbers are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import precaudit
from precaudit import Program
from precaudit.judging.gate import gate
from precaudit.recording.programs.tracing import trace_program
from precaudit.references.comparison.programs import compare_program
from precaudit.references.traced.infinities import as_decided
from precaudit.reports.headline import how_bad
from precaudit.reports.judgement import verdict_message
from precaudit.schema.limits.checks import farthest_token

INF = np.inf


def most_likely(w, h, p):
    """Return logits with -inf where those before them hold the probability p: top-p, as a sampler masks."""
    for _ in range(3):
        h = jnp.tanh(h @ w * 3)
    logits = (h @ w * 4).astype(jnp.float32)
    probs = jax.nn.softmax(logits, axis=-1)
    return jnp.where(jnp.cumsum(probs, -1) - probs > p, -jnp.inf, logits)


@pytest.mark.turn  # 5 s
@pytest.mark.parametrize("seed", range(3))
def test_a_mask_at_its_boundary_passes(seed):
    first, second = jax.random.split(jax.random.key(seed))
    w = (jax.random.normal(first, (64, 64)) / 8).astype(jnp.bfloat16)
    h = jax.random.normal(second, (400, 64)).astype(jnp.bfloat16)
    precaudit.assert_explained(most_likely, w, h, jnp.float32(0.7))


def test_the_logarithm_of_what_is_too_small_fails():
    def scores(w, x):
        return jnp.log(jax.nn.softmax(x @ w))

    w = jnp.diag(jnp.linspace(1, 2, 8))
    judged = precaudit.check(scores, w, jnp.linspace(0, 120, 8)[None])
    assert judged.exit_code == 1
    assert "nonfinite" in {v.status for v in judged.verdicts}


@pytest.mark.turn  # 3 s
def test_an_overflow_inside_fails_though_a_compiler_may_leave_its_rounding_out():
    def mean_square(w, x):
        y = x @ w
        return jnp.mean((y * y).astype(jnp.float32), -1)

    w = jnp.eye(8, dtype=jnp.float16)
    x = jnp.concatenate([jnp.ones((40, 8)), jnp.full((1, 8), 300)]).astype(jnp.float16)
    opened = precaudit.check(mean_square, w, x)
    found = [v for v in opened.verdicts if v.status == "nonfinite"]
    y = jax.jit(mean_square)(w, x)
    assert bool(found) == (not np.isfinite(y).all())


def test_what_all_realisations_make_stays():
    stored, exact = np.float32([1, INF, INF, np.nan]), np.array([1.0, 2.0, 2.0, 2.0])
    one, other = np.array([1, INF, 2.0, 2.0]), np.array([1, INF, INF, 2.0])
    assert as_decided(stored, exact, [one, other]).tolist() == [1.0, 2.0, INF, 2.0]
    assert as_decided(stored, exact, []) is exact


def hidden(x):
    """Return a norm in float16 whose squares overflow: their root is infinite and the quotient 0."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + jnp.float16(1e-3))


def test_an_overflow_that_a_quotient_takes_away_fails_at_its_line(tmp_path):
    draw = np.random.default_rng(1).standard_normal((4, 32))
    for size, code in ((300.0, 1), (30.0, 0)):
        x = jnp.asarray(draw * size, jnp.float16)
        program = Program(lambda p, x: hidden(x) @ p, jnp.ones((32, 64), jnp.float16), {"a": (x,)}, outputs="logits")
        run = trace_program(program, tmp_path / str(size)).folder
        compare_program(run, program)
        judged = gate(run)
        assert judged.exit_code == code
    judged = gate(tmp_path / "300.0")
    (v,) = [v for v in judged.verdicts if v.status == "fail"]
    assert v.metric == "overflow"
    assert "exceeds float16's 65504 at test_decided_infinities.py:" in v.text
    told = f"{v.text}; a token made of it is 100 % away from FP64"
    assert how_bad(v) == told
    assert verdict_message(v).partition("[local] ")[2].startswith(f"{told}, limit 50 %; error 1, ")
    assert verdict_message(v).count("overflow") == 1
    (found,) = precaudit.diagnose(tmp_path / "300.0", program=program).findings
    assert (found.kind, found.cause, found.says) == ("format", "overflow", v.text)


def test_a_small_gate_that_is_nothing_in_float16_passes(tmp_path):
    """Its exponential overflows, and 0 is all but what FP64 makes of it: 6e-6 beside gates of 1."""

    def call(p, x):
        return 1 / (1 + jnp.exp(-(x @ p)))

    x = jnp.asarray(np.linspace(-1, 1, 33)[:, None] * np.ones((1, 4)), jnp.float16)
    program = Program(call, jnp.full((4, 1), 3, jnp.float16), {"a": (x,)}, outputs="gate")
    run = trace_program(program, tmp_path / "run").folder
    errors = compare_program(run, program)
    assert max(farthest_token(e)[0] for e in errors if e.kind == "local") == 1.0
    assert gate(run).exit_code == 0


def selected(a):
    """Return softplus, whose exponential overflows where it is not taken."""
    return jnp.where(a > 8, a, jnp.log1p(jnp.exp(a)))


def divided(a):
    """Return the same by a quotient by what overflows, which is not taken either."""
    return jnp.where(a > 8, a, a + jnp.log1p(1 / jnp.exp(a)))


def vanishing(a):
    """Return softplus of what is less than 8, with an exponential that is 0, too, where its square overflows."""
    return jnp.log1p(jnp.exp(jnp.minimum(a, 8))) + jnp.exp(-jnp.square(a * 30))


@pytest.mark.parametrize("soft", [selected, divided, vanishing])
def test_what_is_no_part_of_a_value_is_no_overflow_of_it(soft, tmp_path):
    """In float16, less what it nearly is: a token is far off by rounding alone."""

    def call(p, a):
        return (soft(a) - p) / (1 + jnp.abs(a))

    draw = np.random.default_rng(1).standard_normal((4, 8))
    a = jnp.asarray(np.where(np.arange(4)[:, None] == 0, 12.0, draw), jnp.float16)
    with jax.enable_x64(True):
        exact = np.asarray(soft(jnp.asarray(a, jnp.float64)))
    program = Program(call, jnp.asarray(exact, jnp.float16), {"a": (a,)}, outputs="y")
    run = trace_program(program, tmp_path / "run").folder
    errors = compare_program(run, program)
    assert max(farthest_token(e)[0] for e in errors if e.kind == "local") > 0.5
    assert not any(e.origin for e in errors if e.kind == "local")
    assert not any(v.metric == "overflow" for v in gate(run).verdicts)


def test_an_overflow_is_of_the_step_that_it_is_in(tmp_path):
    """Steps before it cancel: they are as far off, by rounding."""

    def call(w, x, less):
        def layer(h, given):
            h = checkpoint_name(h + w, "stream")
            y = h * given[0]
            return h, checkpoint_name(y * jax.lax.rsqrt(jnp.sum(y * y, -1, keepdims=True)) - given[1], "normed")

        return jax.lax.scan(layer, x, (jnp.asarray([1, 1, 600], jnp.float16), less))[1]

    draw = np.random.default_rng(1).standard_normal
    w, x = (draw((4, 8)).astype(np.float16) for _ in range(2))
    h = [np.float64(x + w), np.float64((x + w) + w)]
    less = np.stack([*(y / np.linalg.norm(y, axis=-1, keepdims=True) for y in h), 0 * h[0]]).astype(np.float16)
    program = Program(call, jnp.asarray(w), {"a": (jnp.asarray(x), jnp.asarray(less))}, outputs="y")
    run = trace_program(program, tmp_path / "run").folder
    errors = [e for e in compare_program(run, program) if (e.kind, e.point) == ("local", "normed")]
    assert [farthest_token(e)[0] > 0.5 for e in errors] == [True] * 3
    assert {(v.point, v.layer) for v in gate(run).verdicts if v.metric == "overflow"} == {("normed", 2)}
