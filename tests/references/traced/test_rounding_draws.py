"""Draws of rounding errors: what is exact is no noise, and what a device flushes to zero is emulated."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from precaudit import Program
from precaudit.interpreters.jaxpr.emulate import emulate_segments
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.interpreters.jaxpr.subnormals import SMALLEST, device_flushes, flush_subnormals
from precaudit.judging.rules import judge
from precaudit.numbers.formats import FORMATS
from precaudit.recording.programs.preparing import prepare_program
from precaudit.recording.programs.tracing import trace_program
from precaudit.references.comparison.programs import compare_program
from precaudit.references.traced import judged
from precaudit.references.traced.judged import PlaceRows, closes, local_numbers
from precaudit.references.traced.local import Emulations
from precaudit.references.traced.remade import DRAWS
from precaudit.schema.limits import default_limits
from precaudit.schema.records.errors import LocalError
from tests.helpers.audited_cases import program as case
from tests.helpers.permuted_axes import SUITE

SEEN = "att~1"  # the probabilities of both mask cases, bfloat16 [2, B, G, R, T, S]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_draw_leaves_alone_what_its_format_holds(dtype):
    """Whole numbers, powers of two, comparisons of such and what they choose."""

    def call(x):
        at = jnp.arange(40, dtype=dtype) + x
        seen = at[:, None] >= at
        return {"at": jnp.cumsum(jnp.ones(40, dtype)), "half": at * 0.5, "seen": jnp.where(seen, at, -at)}

    def tapped(x):
        return {name: checkpoint_name(y, name) for name, y in call(x).items()}

    x = jnp.zeros((), dtype)
    given = call(x)
    exact = {name: np.asarray(y, np.float64) for name, y in given.items()}
    with jax.enable_x64(True):
        for how in DRAWS:
            made = emulate_segments(tapped, how)(given, x)
            for name, y in exact.items():
                np.testing.assert_array_equal(np.asarray(made[name][0], np.float64), y)


def test_a_draw_moves_what_is_rounded():
    def call(x):
        return checkpoint_name(x * x, "square")

    x = jnp.asarray(np.random.default_rng(0).standard_normal(1000), jnp.float32)
    exact = np.asarray(x, np.float64) ** 2
    with jax.enable_x64(True):
        apart = [np.asarray(emulate_segments(call, how)({"square": x}, x)["square"][0]) / exact - 1 for how in DRAWS]
    for each in apart:
        assert 0.2 * 2.0**-24 < np.sqrt(np.mean(each**2)) < 2.0**-24


@pytest.fixture(scope="module", params=["int_mask.py:program", "float_mask.py:program"])
def masked(request, tmp_path_factory):
    with jax.numpy_dtype_promotion("standard"):
        program = case(request.param)
        opened = trace_program(program, tmp_path_factory.mktemp("masked") / "run")
        return program, Emulations(prepare_program(program)), opened


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.02, False)])
def test_a_mask_of_floats_hides_no_fault(masked, factor, passes):
    """Draws had it flip on its diagonal, where both sides are the same whole number: noise of 0.448 for 0.0018."""
    program, emulations, opened = masked
    taps = opened.tensors("a", 0, "taps")
    with jax.numpy_dtype_promotion("standard"):
        off = (taps[SEEN].astype(np.float64) * factor).astype(ml_dtypes.bfloat16)
        found = emulations.records(opened, "a", 0, taps | {SEEN: off}, (program.params, *program.cases["a"]))
    assert [closes(e) for e in found if e.point == SEEN] == [passes]


def test_a_device_that_flushes_is_asked_once():
    """XLA:CPU sets both modes; the values are those that it makes here."""
    small, tiny = jnp.float32(1e-20), jnp.float32(3e-39)
    made = jax.jit(lambda x, y: (x * x, y * 4096, -y))(small, tiny)
    assert device_flushes() == (float(made[0]) == 0 and float(made[1]) == 0)
    assert float(made[2]) == -np.float32(3e-39)  # moved, not computed


def test_flushed_values_are_those_below_the_smallest_normal_number():
    x = np.array([SMALLEST, 0.99 * SMALLEST, -1e-40, 1.0])
    np.testing.assert_array_equal(flush_subnormals(jnp.asarray(x), np.float32), [SMALLEST, 0, 0, 1])
    np.testing.assert_array_equal(flush_subnormals(jnp.asarray(x), np.float16), jnp.asarray(x))


@pytest.mark.skipif(not device_flushes(), reason="this device keeps subnormals")
def test_an_emulation_flushes_as_the_device_does():
    """Operands, results and comparisons; what is moved keeps its bits there, and is off by no more than noise here."""

    def call(x):
        made = {"product": x * 0.5, "scaled": x * 4096.0, "moved": -x, "chosen": jnp.where(x > 0, x, 7.0)}
        return {name: checkpoint_name(y, name) for name, y in made.items()}

    x = jnp.asarray([3e-39, 2e-38, 1.5, 1e-44], jnp.float32)
    device = {name: np.asarray(y, np.float64) for name, y in jax.jit(call)(x).items()}
    with jax.enable_x64(True):
        made = emulate_segments(call, Realisation(flush=True))(dict.fromkeys(device, x), x)
    for name, y in device.items():
        lost = SMALLEST if name == "moved" else 0.0
        np.testing.assert_allclose(np.asarray(made[name][0]), y, rtol=0, atol=lost, err_msg=name)


@pytest.mark.turn  # 8 s
@pytest.mark.parametrize("name", ["flushed.py:p0", "flushed.py:p4", "flushed.py:p5"])
def test_columns_of_underflowed_probabilities_pass(name, tmp_path):
    """exp(z − lse) underflows to 0 where FP64 has 5e-40."""
    with jax.numpy_dtype_promotion("standard"):
        program = case(name)
        opened = trace_program(program, tmp_path / "run")
        assert opened.record.flushes is device_flushes()
        taps = opened.tensors("a", 0, "taps")
        emulations = Emulations(prepare_program(program), flush=device_flushes())
        found = emulations.records(opened, "a", 0, taps, (program.params, *program.cases["a"]))
    assert all(closes(e) for e in found)


def test_a_program_of_small_numbers_that_is_off_fails(tmp_path):
    """What no device flushes is judged as ever."""
    x = np.random.default_rng(1).uniform(1, 2, (8, 16)).astype(np.float32) * np.float32(1e-36)
    program = Program(lambda w, x: x * w, jnp.float32(0.7), {"a": (x,)}, outputs="y")
    opened = trace_program(program, tmp_path / "run")
    (name,) = (p.name for p in opened.record.points)
    taps = opened.tensors("a", 0, "taps")
    emulations = Emulations(prepare_program(program), flush=device_flushes())
    args = (program.params, *program.cases["a"])
    assert all(closes(e) for e in emulations.records(opened, "a", 0, taps, args))
    off = taps | {name: taps[name] * np.float32(1.0001)}
    assert not any(closes(e) for e in emulations.records(opened, "a", 0, off, args))
    assert {judge(e, default_limits()).status for e in compare_program(opened, program)} == {"pass"}


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 8.0), ("float32", 100.0)])
@pytest.mark.parametrize("times", [0.5, 2.0])
def test_a_draw_many_times_as_far_off_as_the_emulation_is_no_noise(dtype, most, times):
    """A comparison that turned in it: a fault of that size would pass as noise."""
    u = FORMATS[dtype].unit_roundoff
    exact = np.random.default_rng(2).standard_normal((40, 64))
    stored = exact.astype(FORMATS[dtype].dtype)
    near = stored.astype(np.float64)
    size = np.linalg.norm(near - exact)
    least = max(size, u / 3**0.5 * np.linalg.norm(exact))
    turned = exact.copy()
    turned[3] += times * most * least / 8.0  # 64 elements
    draws = [near, turned, exact * (1 + u / 3**0.5)]
    found = local_numbers(stored, PlaceRows(exact, {(): near}, draws))
    assert found.get("unsteady", 0) == (times > 1)
    fault = near.copy()
    fault[3] += times * most * least / 8.0
    e = LocalError(
        prompt="a", phase="call", step=0, layer=None, point="x", candidate="r", reference="fp64",
        **local_numbers(fault.astype(stored.dtype), PlaceRows(exact, {(): near}, draws)),
    )  # fmt: skip
    assert times < 1 or not closes(e)


@pytest.mark.parametrize(
    ("count", "times", "unsteady"), [(1, 1e4, 0), (1, 1e7, 2), (2, 500, 0), (2, 1e4, 2), (3, 500, 2)]
)
def test_an_emulation_of_few_elements_may_be_near_fp64_by_chance(count, times, unsteady):
    """Other draws are noise, though 1e4 or 500 times as far off; a result that turned is farther still."""
    exact = np.full((1, count), 0.02)
    near = exact * (1 + 1e-9)  # of a difference that cancels to 1e-4 of its terms
    off = 2.0**-24 / 3**0.5 * times
    draws = [near, exact * (1 + off), exact * (1 - 1.1 * off)]
    found = local_numbers((exact * (1 - 0.7 * off)).astype(np.float32), PlaceRows(exact, {(): near}, draws))
    assert found.get("unsteady", 0) == unsteady
    e = LocalError(prompt="a", phase="call", step=0, layer=None, point="x", candidate="r", reference="fp64", **found)
    assert closes(e) == (not unsteady)


def bias_gradient(p, x, y):
    """Return the gradient of a bias that a norm over the batch takes away: 0 in exact arithmetic."""

    def loss(p):
        h = x @ p["w"] + p["b"]
        mean = h.mean(0)
        h = (h - mean) * jax.lax.rsqrt(jnp.mean(h * h, 0) - mean * mean + 1e-5)
        return -(y * jax.nn.log_softmax(jax.nn.relu(h) @ p["v"])).sum(-1).mean()

    return jax.grad(loss)(p)["b"]


def test_draws_as_far_off_as_a_rounding_of_their_terms_are_noise(tmp_path):
    """Where terms cancel to nothing the emulation may be as good as exact, and every honest draw is far off."""
    exact = np.zeros((4, 8))
    off = 2.0**-25 * np.random.default_rng(1).choice([-1.0, 1.0], (3, 4, 8))  # half a rounding of 1
    stored = off[0].astype(np.float32)
    rows = PlaceRows(exact, {(): exact}, [*off[1:], exact], terms=np.ones((4, 8)))
    assert "unsteady" not in local_numbers(stored, rows)
    assert local_numbers(stored, replace(rows, terms=np.full((4, 8), 0.1)))["unsteady"] == 2
    draw = np.random.default_rng(4).standard_normal
    params = {"w": draw((8, 32)) * 0.3, "b": np.zeros(32), "v": draw((32, 4)) * 0.2}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    given = jnp.asarray(draw((16, 8)), jnp.float32), jax.nn.one_hot(jnp.arange(16) % 4, 4)
    program = Program(bias_gradient, params, {"a": given}, outputs="y")
    errors = compare_program(trace_program(program, tmp_path / "run"), program)
    assert {judge(e, default_limits()).status for e in errors} == {"pass"}


@pytest.mark.slow  # a minute: what the limits of judged._steady come from
def test_honest_draws_are_as_far_off_as_the_emulation(tmp_path, monkeypatch):
    sizes = {True: [0.0], False: [0.0]}
    kept = judged._steady

    def seen(members, emulated, reference, most):
        _, u, _ = most
        with np.errstate(invalid="ignore"):
            off = [np.linalg.norm(np.nan_to_num(y - reference, posinf=0, neginf=0)) for y in (emulated, *members)]
        least = max(off[0], u / 3**0.5 * np.linalg.norm(np.nan_to_num(reference, posinf=0, neginf=0)))
        sizes[u < 2.0**-20].append(max(off[1:]) / least if least else 0.0)
        return kept(members, emulated, reference, most)

    monkeypatch.setattr(judged, "_steady", seen)
    for name, make in SUITE.items():
        with jax.numpy_dtype_promotion("standard"):
            compare_program(trace_program(make(), tmp_path / name.replace(":", "-")), make())
    narrow, single = max(sizes[False]), max(sizes[True])
    assert 1 < narrow < judged.MOST_NARROW / 4
    assert 5 < single < judged.MOST_SINGLE / 2
