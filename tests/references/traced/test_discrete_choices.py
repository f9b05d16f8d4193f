"""Choices and whole numbers of a program: shared by all that is made again, and judged by themselves."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from precaudit import Program, gate
from precaudit.diagnosis.programs import diagnose_program
from precaudit.interpreters.jaxpr.emulate import emulate_segments, exactly
from precaudit.judging.rules import judge
from precaudit.recording.programs.preparing import prepare_program
from precaudit.recording.programs.tracing import trace_program
from precaudit.references.comparison.programs import compare_program
from precaudit.references.traced.chosen import Choices
from precaudit.references.traced.judged import closes
from precaudit.references.traced.local import Emulations
from precaudit.references.traced.remade import DRAWS
from precaudit.reports.headline import headline
from precaudit.schema.limits import default_limits

TOKENS, WIDTH, EXPERTS, CHOSEN = 24, 32, 8, 2
DRAW = np.random.default_rng(0)
PARAMS = {
    "router": jnp.asarray(DRAW.standard_normal((WIDTH, EXPERTS)) / 6, jnp.bfloat16),
    "w": jnp.asarray(DRAW.standard_normal((EXPERTS, WIDTH, WIDTH)) / 6, jnp.bfloat16),
}
X = jnp.asarray(DRAW.standard_normal((TOKENS, WIDTH)), jnp.bfloat16)


def mixture(p, x):
    """Experts behind a dispatch by sorting."""
    router = jax.nn.softmax((x @ p["router"]).astype(jnp.float32), -1)
    top, experts = jax.lax.top_k(router, CHOSEN)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    rows = jnp.repeat(jnp.arange(TOKENS), CHOSEN)[order]
    mixed = jnp.einsum("td,tdf->tf", x[rows], p["w"][flat[order]])
    weighted = mixed * top.reshape(-1)[order][:, None].astype(jnp.bfloat16)
    return jnp.zeros_like(x).at[rows].add(weighted)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    program = Program(mixture, PARAMS, {"a": (X,)}, outputs="y")
    opened = trace_program(program, tmp_path_factory.mktemp("mixed") / "run")
    made = prepare_program(program)
    return program, made, opened, opened.tensors("a", 0, "taps")


def test_what_is_chosen_by_is_a_point_and_the_choice_a_state(mixed):
    _, made, opened, taps = mixed
    assert [s.name for s in made.states] == ["@router"] or [s.name for s in made.states] == ["@top"]
    (name,) = (s.name for s in made.states)
    assert taps[name].shape == (TOKENS, CHOSEN)
    by = next(p for p in opened.record.points if p.primitive == "div")
    own = np.argsort(-np.asarray(taps[by.name]), axis=-1, kind="stable")[:, :CHOSEN]
    np.testing.assert_array_equal(taps[name], own)
    assert name.removeprefix("@") not in {p.name for p in opened.record.points if p.primitive == "top_k"}


def records_of(mixed, **altered):
    program, made, opened, taps = mixed
    given = taps | altered
    (e,) = Choices(made).records(opened, "a", 0, given, (program.params, X))
    return e


@pytest.fixture
def names(mixed):
    _, made, opened, _ = mixed
    (state,) = (s.name for s in made.states)
    return state, next(p.name for p in opened.record.points if p.primitive == "div")


def test_an_honest_choice_passes(mixed):
    e = records_of(mixed)
    assert (e.kind, e.mismatched, e.n) == ("state", 0, TOKENS * CHOSEN)
    assert judge(e, default_limits()).status == "pass"


def test_a_routing_that_the_recorded_values_do_not_make_fails(mixed, names):
    state, _ = names
    taps = mixed[3]
    other = np.array(taps[state])
    other[5, 1] = next(i for i in range(EXPERTS) if i not in other[5])
    e = records_of(mixed, **{state: other})
    assert (e.mismatched, e.rows) == (1, ((5 * CHOSEN + 1, 5 * CHOSEN + 2),))
    assert judge(e, default_limits()).status == "fail"


@pytest.mark.parametrize(("ulps", "off"), [(1, 0), (100, 2)])
def test_a_choice_between_values_that_rounding_turns_passes(mixed, names, ulps, off):
    """Two experts whose probabilities are so many units in the last place apart, taken the other way round."""
    state, by = names
    probs, chosen = np.array(mixed[3][by]), np.array(mixed[3][state])
    first, second = chosen[3]
    probs[3, second] = probs[3, first] * (1 - ulps * np.float32(2.0**-23))
    chosen[3] = second, first
    assert records_of(mixed, **{state: chosen, by: probs}).mismatched == off


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.02, False)])
def test_experts_that_are_off_behind_a_dispatch_fail_at_the_result(mixed, factor, passes):
    program, made, opened, taps = mixed
    name = next(p.name for p in opened.record.points if p.primitive == "scatter-add")
    off = (np.asarray(taps[name]).astype(np.float64) * factor).astype(ml_dtypes.bfloat16)
    found = Emulations(made).records(opened, "a", 0, taps | {name: off}, (program.params, X))
    assert [closes(e) for e in found if e.point == name] == [passes]


@pytest.mark.turn  # 7 s
def test_draws_and_fp64_go_on_with_the_recorded_choice(mixed, names):
    """A draw whose own probabilities would turn the choice multiplies the recorded experts all the same."""
    _, by = names
    _, made, _, taps = mixed
    probs = np.array(taps[by])
    probs[7] = probs[7][::-1]  # another choice than was recorded
    product = next(n for n, x in taps.items() if x.shape == (TOKENS * CHOSEN, WIDTH))
    with jax.enable_x64(True):
        for run in (exactly(made.call), *(emulate_segments(made.call, how) for how in DRAWS)):
            found = run(taps | {by: probs}, PARAMS, X)[product]
            value = np.asarray(found[0] if isinstance(found, tuple) else found)
            np.testing.assert_allclose(value, taps[product].astype(np.float64), rtol=2e-2, atol=2e-2)


def turned(dtype):
    """Angles of positions that are counted in a format."""

    def call(w, start):
        pos = start.astype(dtype)[:, None] + jnp.cumsum(jnp.ones((1, 300), dtype), axis=1) - jnp.ones((), dtype)
        return jnp.cos(pos.astype(jnp.float32)[..., None] * w)

    return Program(call, jnp.float32(0.1) * jnp.ones(4, jnp.float32), {"a": (jnp.zeros(1, jnp.int32),)}, outputs="y")


def test_positions_that_a_format_does_not_have_are_a_finding(tmp_path):
    program = turned(jnp.bfloat16)
    opened = trace_program(program, tmp_path / "run")
    (point,) = (p for p in opened.record.points if p.whole)
    assert (point.name, point.shape) == ("pos", (1, 300))
    found = gate(compare_program(opened, program))
    (v,) = (v for v in found.verdicts if v.kind == "local" and v.status == "fail")
    held = np.asarray(opened.tensors("a", 0, "taps")["pos"], np.float64)
    assert (v.point, v.metric, v.value) == ("pos", "lost", np.count_nonzero(held != np.arange(300)))
    assert "whole numbers are stored as others" in headline(found, "run").sentence
    (told,) = diagnose_program(opened, program).findings
    assert (told.kind, told.cause, told.point) == ("format", "whole numbers in bfloat16", "pos")
    off = held.reshape(-1) != np.arange(300)
    low, high = np.arange(300)[off][[0, -1]]
    same = np.array([(held == x).sum() > 1 for x in held.reshape(-1)]).sum()
    assert f"{int(v.value)} of 300 whole numbers are stored as others, {low} to {high}" in told.says
    assert f"by up to {np.abs(held - np.arange(300)).max():g}, and {same} collide: bfloat16 does not" in told.says
    assert same > 1
    assert "test_discrete_choices.py:" in told.says


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_positions_that_a_format_has_pass(dtype, tmp_path):
    program = turned(dtype)
    opened = trace_program(program, tmp_path / "run")
    assert [p.whole for p in opened.record.points if p.name == "pos"] == ([True] if dtype == jnp.float16 else [])
    assert gate(compare_program(opened, program)).exit_code == 0


SPEED = 0.1 * np.ones(4, np.float32)


def turned_by(count):
    """Angles of the positions that an input makes."""
    return lambda w, x: jnp.cos(count(x)[:, None].astype(jnp.float32) * w)


ONES, POSITIONS = np.ones(300), np.arange(300)
COUNTED = {
    "a sum of ones": (lambda x: jnp.cumsum(x), ONES.astype(ml_dtypes.bfloat16), POSITIONS + 1),
    "a sum of a mask": (lambda x: jnp.cumsum(x.astype(jnp.bfloat16)), ONES.astype(np.float32), POSITIONS + 1),
    "positions of floats": (lambda x: x.astype(jnp.bfloat16), POSITIONS.astype(np.float32), POSITIONS),
    "positions made in float32": (
        lambda x: jnp.arange(len(x), dtype=jnp.float32).astype(jnp.bfloat16) + x.astype(jnp.bfloat16),
        np.zeros(300, np.int32), POSITIONS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_whole_numbers_of_inputs_are_looked_at_whatever_holds_them(name, tmp_path):
    count, given, exact = COUNTED[name]
    program = Program(turned_by(count), SPEED, {"a": (jnp.asarray(given),)}, outputs="y")
    opened = trace_program(program, tmp_path / "run")
    (point,) = (p for p in opened.record.points if p.whole)
    held = np.asarray(opened.tensors("a", 0, "taps")[point.name], np.float64).reshape(-1)
    found = gate(compare_program(opened, program))
    (v,) = (v for v in found.verdicts if v.kind == "local" and v.status == "fail")
    assert (v.metric, v.value) == ("lost", np.count_nonzero(held != exact))
    assert found.exit_code == 1
    (told,) = diagnose_program(opened, program).findings
    assert "whole numbers are stored as others" in told.says


@pytest.mark.parametrize(
    ("count", "given"),
    [
        (lambda x: jnp.cumsum(x), np.ones(300, np.float32)),
        (lambda x: jnp.cumsum(x), np.ones(256).astype(ml_dtypes.bfloat16)),  # which it has
        (lambda x: jnp.cumsum(x), np.linspace(0, 1, 300).astype(ml_dtypes.bfloat16)),
        (lambda x: x.astype(jnp.bfloat16), np.zeros((300,), np.float32)),
    ],
)
def test_what_is_held_or_no_whole_number_passes(count, given, tmp_path):
    program = Program(turned_by(count), SPEED, {"a": (jnp.asarray(given),)}, outputs="y")
    opened = trace_program(program, tmp_path / "run")
    assert not any(p.whole for p in opened.record.points)
    assert gate(compare_program(opened, program)).exit_code == 0


def test_a_number_that_rounding_quantises_to_its_neighbour_is_not_lost(tmp_path):
    """Where a quotient in bfloat16 is rounded to another whole number than FP64's, bfloat16 has both."""
    keys = jnp.asarray(np.random.default_rng(1).standard_normal((20, 16)), jnp.bfloat16)

    def call(_, x):
        scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
        stored = jnp.round(x / scale).astype(jnp.int8)
        return stored.astype(jnp.bfloat16) * scale

    program = Program(call, (), {"a": (keys,)}, outputs="y")
    opened = trace_program(program, tmp_path / "run")
    assert any(p.whole for p in opened.record.points)
    assert gate(compare_program(opened, program)).exit_code == 0


def points(call, *given):
    return [(s.name, prepare_program(Program(call, (), {"a": given})).tags[s.name].whole) for s in
            prepare_program(Program(call, (), {"a": given})).sites]  # fmt: skip


def test_what_is_no_count_is_no_whole_number():
    """Masks, one-hots, integers of 8 bits and their products are left alone."""
    x = jnp.ones((4, 8), jnp.bfloat16)
    i = jnp.arange(4, dtype=jnp.int8)

    def call(_p, x, i):
        one_hot = (i[:, None] == jnp.arange(8, dtype=jnp.int8)).astype(jnp.bfloat16)
        scaled = i.astype(jnp.bfloat16)[:, None] * jnp.bfloat16(0.25)
        return x * one_hot + scaled

    assert not any(whole for _, whole in points(call, x, i))


def test_products_of_quantised_integers_measure_and_those_of_wide_ones_count():
    """Of int8 weights and activations their result in bfloat16 is rounded, as a float's is; positions are lost."""

    def call(_p, a, b):
        made = jax.jit(jax.lax.dot, static_argnames="preferred_element_type")(a, b, preferred_element_type=jnp.int32)
        return ((made + 1).astype(jnp.bfloat16) * jnp.bfloat16(0.01)).sum()

    a, b = (np.random.default_rng(0).integers(-100, 100, s) for s in ((4, 64), (64, 8)))
    assert not any(whole for _, whole in points(call, jnp.asarray(a, jnp.int8), jnp.asarray(b, jnp.int8)))
    assert any(whole for _, whole in points(call, jnp.asarray(a), jnp.asarray(b)))


def test_a_correct_product_of_int8_in_bfloat16_passes(tmp_path):
    draw = np.random.default_rng(0)
    params = {"w": jnp.asarray(draw.integers(-127, 127, (64, 32)), jnp.int8), "scale": jnp.full(32, 0.02, jnp.bfloat16)}

    def call(p, x):
        scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
        made = jax.lax.dot(jnp.round(x / scale).astype(jnp.int8), p["w"], preferred_element_type=jnp.int32)
        return made.astype(jnp.bfloat16) * scale * p["scale"]

    x = jnp.asarray(draw.standard_normal((16, 64)), jnp.bfloat16)
    program = Program(call, params, {"a": (x,)}, outputs="y")
    assert set(gate(compare_program(trace_program(program, tmp_path / "run"), program)).counts) == {"pass"}


def carried(step, n):
    """Return a program that scans from ``n`` zeros over values with a half in them, and over what is kept of them."""
    draw = np.random.default_rng(0)
    x, keep = jnp.asarray(draw.integers(0, 64, 12) * 16 + 0.5, jnp.bfloat16), jnp.asarray(draw.random(12) > 0.4)

    def call(_, x, keep):
        return jax.lax.scan(step, (jnp.zeros((), jnp.bfloat16),) * n, (x, keep))[1]

    return Program(call, {}, {"a": (x, keep)}, outputs="y")


CARRIES = {
    "a sum": (lambda c, xs: ((xs[0] + c[0] / 2 + xs[1] * c[0],), xs[1] * c[0]), 1, False),
    "a sum of another": (lambda c, xs: ((c[0] + c[1], c[1] + xs[0]), xs[1] * c[0]), 2, False),
    "a count": (lambda c, xs: ((c[0] + jnp.where(xs[1], 1, 0).astype(jnp.bfloat16),), xs[1] * c[0]), 1, True),
    "a count of an inner scan": (
        lambda c, xs: (
            (jax.lax.scan(lambda n, _: (n + 1, n), c[0], None, 3)[0],),
            xs[1] * c[0],
        ),
        1,
        True,
    ),
    "a sum of an inner scan": (
        lambda c, xs: (
            (jax.lax.scan(lambda n, x: (n + x, n), c[0], xs[0][None])[0],),
            xs[1] * c[0],
        ),
        1,
        False,
    ),
    "a count in a call": (lambda c, xs: ((jax.jit(jnp.add)(c[0], jnp.bfloat16(1)),), xs[1] * c[0]), 1, True),
}


@pytest.mark.parametrize("name", CARRIES)
def test_what_begins_at_zero_is_a_count_where_each_step_leaves_it_whole(name, tmp_path):
    step, n, whole = CARRIES[name]
    with jax.numpy_dtype_promotion("standard"):
        program = carried(step, n)
        opened = trace_program(program, tmp_path / "run")
        found = gate(compare_program(opened, program))
    assert any(p.whole for p in opened.record.points) == whole
    assert whole or {*found.counts} == {"pass"}
