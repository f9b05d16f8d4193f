"""plant overwrites a shadow's taps wherever they are, and what it gives for recorded values is nothing."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name as tap

from precaudit.diagnosis.diagnose import diagnose
from precaudit.diagnosis.evidence.shares import shares
from precaudit.interpreters.jaxpr import plant, reap
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.subject import load
from precaudit.schema.selection import Selection
from tests.helpers.runs import record


@jax.custom_vjp
def times_five(x):
    return tap(x * 5, "vjp")


@jax.custom_jvp
def times_seven(x):
    return tap(x * 7, "jvp")


times_five.defvjp(lambda x: (times_five(x), x), lambda _x, g: (g * 5,))
times_seven.defjvp(lambda p, t: (times_seven(p[0]), t[0] * 7))


def step(c, i):
    c = jax.jit(lambda v: tap(v + i, "jit"))(c)
    c = jax.checkpoint(lambda v: tap(v * 2, "remat"))(c)
    c = times_five(times_seven(c))
    c = lax.cond(i > 0, lambda v: tap(v - 1, "yes"), lambda v: tap(v * 1, "no"), c)
    c, ys = lax.scan(lambda d, j: (tap(d + j, "inner"), d), c, jnp.arange(3.0))
    return tap(c / 64, "scan"), ys.sum()


def program(x):
    x = jax.jit(lambda v: tap(v, "in"))(x)
    return tap(lax.scan(step, x, jnp.arange(2.0))[0], "in")


X = np.array([1.0, -3.0], np.float32)


def recorded():
    return reap(program)(X)


def test_recorded_values_have_no_errors():
    out, taps = recorded()
    assert taps["inner"].shape == (2, 3, 2)
    with jax.enable_x64(True):
        again, errors = plant(program, "force")(taps, X)
    np.testing.assert_array_equal(np.asarray(again), np.asarray(out))
    assert set(errors) == {n for n in taps if not n.endswith("@taken")}
    for name, e in errors.items():
        assert (e.shape, e.dtype) == (taps[name].shape, np.float64)
        assert not np.asarray(e).any()


@pytest.mark.parametrize("name", ["jit", "remat", "jvp", "vjp", "yes", "inner", "scan", "in", "in#1"])
def test_a_change_is_an_error_where_it_was_made_alone(name):
    """A value of 1 more at one tap: an error of 1 there, and what follows is computed from it."""
    _, taps = recorded()
    at = (1,) * (taps[name].ndim - 1)
    changed = taps | {name: taps[name].at[at].add(1)}
    with jax.enable_x64(True):
        _, errors = plant(program, "force")({name: changed[name]}, X)
        _, every = plant(program, "force")(changed, X)
    assert set(errors) == {name}
    assert float(np.asarray(errors[name])[at].sum()) == X.size
    assert float(np.asarray(every[name])[at].sum()) == X.size


def test_an_error_of_a_branch_that_was_not_taken_is_nothing():
    _, taps = recorded()
    assert taps["yes@taken"].tolist() == [False, True]
    with jax.enable_x64(True):
        _, errors = plant(program, "force")({"yes": taps["yes"] + 1}, X)
    assert np.asarray(errors["yes"]).tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_what_is_added_has_a_gradient_everywhere():
    _, taps = recorded()
    with jax.enable_x64(True):
        zeros = {n: jnp.zeros(v.shape, jnp.float64) for n, v in taps.items() if not n.endswith("@taken")}
        found = jax.grad(lambda z: plant(program, "add")(z, X)[0].sum())(zeros)
    last = np.ones(2)
    assert np.asarray(found["in#1"]).tolist() == [1.0, 1.0]
    np.testing.assert_array_equal(np.asarray(found["inner"])[1], np.stack([last / 64] * 3))
    np.testing.assert_array_equal(np.asarray(found["jvp"])[1], 5 * last / 64)
    np.testing.assert_array_equal(np.asarray(found["in"]), (70 / 64) ** 2 * last)
    assert np.asarray(found["no"]).tolist()[1] == [0.0, 0.0]


def test_a_name_the_program_lacks_is_an_error():
    with jax.enable_x64(True), pytest.raises(ValueError, match="no tap is named 'iner': did you mean inner"):
        plant(program, "force")({"iner": np.zeros(3)}, X)


def test_a_value_of_another_shape_is_an_error():
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"tap scan has shape \[2, 2\], its value \[2\]"):
        plant(program, "force")({"scan": np.zeros(2)}, X)


def test_a_tap_in_a_while_loop_is_refused_by_name():
    def f(x):
        return lax.while_loop(lambda v: v < 3, lambda v: tap(v + 1, "loop"), tap(x, "before"))

    with jax.enable_x64(True):
        with pytest.raises(NotImplementedError, match="tap loop lies inside while"):
            plant(f, "force")({"loop": np.zeros(())}, np.float32(0))
        out, errors = plant(f, "force")({"before": np.full((), 0.5)}, np.float32(0))
    assert (float(out), {n: float(e) for n, e in errors.items()}) == (3.5, {"before": 0.5})


def test_a_tap_met_before_and_inside_a_loop_is_planted_before_it():
    def f(x):
        return lax.while_loop(lambda v: v < 3, lambda v: tap(v + 1, "y"), tap(x, "y"))

    with jax.enable_x64(True):
        out, errors = plant(f, "force")({"y": np.full((), 0.5)}, np.float32(0))
    assert (float(out), {n: float(e) for n, e in errors.items()}) == (3.5, {"y": 0.5})


def test_keyword_arguments():
    with jax.enable_x64(True):
        out, errors = plant(lambda x, *, y: tap(x + y, "sum"), "force")({"sum": np.float64(4)}, np.float32(1), y=X[0])
    assert (float(out), float(errors["sum"])) == (4.0, 2.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with every point of prefill."""
    return record(tmp_path_factory.mktemp("run"), select=Selection.parse(points="all", phases="prefill"))


def rematerialised():
    return replace(load("tiny", "bf16", None, "cpu"), remat=True)


@pytest.mark.turn  # 9 s
def test_shares_of_a_program_that_rematerialises_its_layers(run):
    """The same shares as of the program that does not."""
    recorded = Recorded.of(run)
    bare, again = (shares(recorded, s, "p0") for s in (load("tiny", "bf16", None, "cpu"), rematerialised()))
    assert again.unknown is None
    found = {(s.point, s.layer): float(s.share) for s in again.shares}
    assert found == pytest.approx({(s.point, s.layer): float(s.share) for s in bare.shares}, rel=1e-9, abs=1e-12)
    assert len(found) > 20


@pytest.mark.slow
def test_diagnosis_of_a_program_that_rematerialises_its_layers(run):
    (found,) = diagnose(run.folder, subject=rematerialised()).shares
    assert found.unknown is None
