"""reap collects what the program computes, through every construct, and costs nothing for what is not selected."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name as tap

from precaudit.interpreters.jaxpr import reap
from tests.helpers.paths import ROOT


@jax.custom_vjp
def times_five(x):
    return tap(x * 5, "vjp")


times_five.defvjp(lambda x: (times_five(x), x), lambda _x, g: (g * 5,))


@jax.custom_jvp
def times_seven(x):
    return tap(x * 7, "jvp")


times_seven.defjvp(lambda p, t: (times_seven(p[0]), t[0] * 7))


def program(x):
    y = jax.jit(lambda x: tap(jnp.sin(x), "jit"))(x)
    y, _ = lax.scan(lambda c, _: (tap(c * 2, "scan"), None), y, None, length=3)
    y = lax.cond(y.sum() > 0, lambda y: tap(y + 1, "yes"), lambda y: tap(y - 1, "no"), y)
    y = jax.checkpoint(lambda y: tap(jnp.cos(y), "remat"))(y)
    y = times_five(times_seven(jax.nn.relu(y)))
    y = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, tap(c[1] * 2, "while")), (0, y))[1]
    return {"y": tap(y, "twice") + tap(y, "twice")}


def test_values_are_the_program_s_own():
    x = jnp.arange(4.0)
    out, taps = jax.jit(reap(program))(x)
    assert (out["y"] == program(x)["y"]).all()
    s = np.sin(np.arange(4.0, dtype=np.float32))
    np.testing.assert_allclose(taps["jit"], s, rtol=1e-6)
    np.testing.assert_allclose(taps["scan"], np.stack([2 * s, 4 * s, 8 * s]), rtol=1e-6)
    np.testing.assert_allclose(taps["yes"], 8 * s + 1, rtol=1e-6)
    assert bool(taps["yes@taken"])
    assert not bool(taps["no@taken"])
    c = np.cos(8 * s + 1)
    np.testing.assert_allclose(taps["remat"], c, rtol=1e-5)
    np.testing.assert_allclose(taps["jvp"], 7 * np.maximum(c, 0), rtol=1e-5)
    np.testing.assert_allclose(taps["vjp"], 35 * np.maximum(c, 0), rtol=1e-5)
    np.testing.assert_allclose(taps["while"], 35 * 8 * np.maximum(c, 0), rtol=1e-5)
    assert {"twice", "twice#1"} <= set(taps)


def test_inside_shard_map():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    f = jax.shard_map(lambda y: tap(y * 3, "shard"), mesh=mesh, in_specs=spec, out_specs=spec)
    out, taps = jax.jit(reap(f))(jnp.arange(4.0))
    assert taps["shard"].shape == (1, 4)
    assert (taps["shard"][0] == out).all()


def layers(params, x):
    def body(c, w):
        return tap(jnp.tanh(tap(c @ w, "pre")), "post"), None

    return lax.scan(body, x, params)[0]


PARAMS = jnp.asarray(np.random.default_rng(0).normal(size=(30, 64, 64)) / 8, jnp.float32)
X = jnp.ones((256, 64), jnp.float32)


def test_a_layer_filter_keeps_those_layers_only():
    out, every = jax.jit(reap(layers))(PARAMS, X)
    again, some = jax.jit(reap(layers, ["post"], [29, 3]))(PARAMS, X)
    assert set(some) == {"post"}
    assert (some["post"] == every["post"][jnp.asarray([3, 29])]).all()
    assert (out == again).all()


def temporary(f):
    stats = jax.jit(f).lower(PARAMS, X).compile().memory_analysis()
    return stats.temp_size_in_bytes + stats.output_size_in_bytes


def test_one_layer_of_thirty_does_not_hold_thirty():
    one = X.size * 4
    bare = temporary(layers)
    assert temporary(reap(layers, ["pre"])) >= bare + 30 * one  # the measure sees what it should
    assert temporary(reap(layers, ["pre"], [7])) <= bare + 5 * one


def test_unselected_taps_compile_to_the_same_program():
    def operations(f):
        text = jax.jit(f).lower(PARAMS, X).compile().as_text()
        return sorted(line.split(" = ")[1].split("(")[0].split(" ")[-1] for line in text.splitlines() if " = " in line)

    assert operations(reap(layers, [])) == operations(layers)


def test_transform_is_applied_where_the_value_is_made():
    _, taps = jax.jit(reap(layers, ["post"], [1], lambda _name, x: x[:2]))(PARAMS, X)
    assert taps["post"].shape == (1, 2, 64)


def test_gradients_are_reaped_from_outside():
    loss = jax.grad(lambda p, x: layers(p, x).sum())
    _, taps = jax.jit(reap(loss, ["post"]))(PARAMS, X)
    assert taps["post"].shape == (30, 256, 64)


def test_a_tap_it_cannot_reach_is_an_error():
    def f(x):
        return lax.custom_linear_solve(lambda y: tap(2 * y, "inside"), x, lambda _matvec, b: b / 2)

    with pytest.raises(NotImplementedError, match="a selected tap lies inside custom_linear_solve, which reap cannot"):
        reap(f)(jnp.ones(3))


@pytest.fixture(scope="module")
def four():
    """What reap gives on four devices, under four hash seeds."""
    found = []
    for seed in range(4):
        given = {"PYTHONHASHSEED": str(seed), "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
        call = [sys.executable, "-m", "tests.helpers.on_four_devices"]
        root = ROOT
        out = subprocess.run(call, env=os.environ | given, cwd=root, capture_output=True, text=True, check=True)
        found.append(json.loads(out.stdout.splitlines()[-1]))
    return found


def test_shards_are_in_the_order_of_the_mesh(four):
    grid = np.arange(16.0).reshape(4, 4)
    wanted = [grid[i : i + 2, j : j + 2].tolist() for i in (0, 2) for j in (0, 2)]
    assert [f["shards"] for f in four] == [wanted] * 4


def test_a_branch_and_a_loop_inside_shard_map(four):
    taken, values = four[0]["in_a_branch"]
    assert taken == [False, False, True, True]
    assert values[2] == [[16.0, 18.0], [24.0, 26.0]]
    assert values[0] == [[0.0, 0.0], [0.0, 0.0]]
    scanned, taken = four[0]["in_loops"]
    assert np.shape(scanned) == (4, 2, 2, 2)
    assert taken == [True, True, False, False]  # the sums of the others are 40 or more at the start


def test_an_inner_jit_keeps_its_shardings(four):
    reaped, bare, told, wanted = four[0]["shardings"]
    assert (reaped, bare) == (True, True)
    assert told == wanted > 0


def test_an_inner_jit_keeps_its_name():
    (equation,) = jax.make_jaxpr(reap(jax.jit(lambda x: tap(x * 2, "inner"))))(jnp.ones(3)).eqns
    assert (equation.primitive.name, equation.params["name"]) == ("jit", "<lambda>")


def doubling(x, below):
    """Double x until it is below no more; a tap in the condition and one in the body."""
    return lax.while_loop(lambda c: tap(c, "tested").sum() < below, lambda c: tap(c * 2, "made"), x)


def test_a_tap_in_a_loop_s_condition_is_its_last_evaluation():
    out, taps = jax.jit(reap(doubling))(jnp.ones(2), 20.0)
    assert (out == 16).all()
    assert (taps["tested"] == 16).all()
    assert (taps["made"] == 16).all()
    assert bool(taps["made@taken"])
    assert "tested@taken" not in taps  # a condition is always evaluated


def test_a_loop_that_never_ran_says_so():
    out, taps = jax.jit(reap(doubling))(jnp.ones(2), 1.0)
    assert (out == 1).all()
    assert (taps["tested"] == 1).all()
    assert (taps["made"] == 0).all()
    assert not bool(taps["made@taken"])


def test_a_loop_under_vmap():
    x, below = jnp.array([[1.0], [5.0], [100.0]]), jnp.array([8.0, 8.0, 8.0])
    out, taps = reap(jax.vmap(doubling))(x, below)
    assert (out == jnp.array([[8.0], [10.0], [100.0]])).all()
    assert (taps["tested"] == out).all()
    apart = jax.vmap(reap(doubling))(x, below)[1]
    assert (apart["made"] == jnp.array([[8.0], [10.0], [0.0]])).all()
    assert apart["made@taken"].tolist() == [True, True, False]


def nested(x, n=4):
    def outer(c, i):
        inner, _ = lax.scan(lambda d, j: (tap(d + j, "inner"), None), c + i, jnp.arange(3.0))
        return tap(inner, "outer"), None

    return lax.scan(outer, x, jnp.arange(float(n)))[0]


def test_a_layer_filter_is_of_the_scan_met_first_and_keeps_all_of_those_inside():
    _, every = jax.jit(reap(nested))(0.0)
    _, some = jax.jit(reap(nested, layers=[3, 1]))(0.0)
    assert every["inner"].shape == (4, 3)
    assert (some["outer"] == every["outer"][jnp.array([1, 3])]).all()
    assert (some["inner"] == every["inner"][jnp.array([1, 3])]).all()


def test_a_layer_filter_holds_where_the_scan_lies_in_a_call():
    _, some = reap(jax.jit(jax.checkpoint(nested)), ["inner"], [2])(0.0)
    assert some["inner"].shape == (1, 3)


def test_negative_layers_are_refused():
    with pytest.raises(ValueError, match="count from 0"):
        reap(nested, layers=[-1])


def two_shapes(x):
    def other(x):
        return tap(tap(x[:1], "value") * 3, "value").sum() + tap(x, "both").sum()

    return lax.cond(x.sum() > 0, lambda x: tap(x * 2, "value").sum() + tap(x, "both").sum(), other, x)


@pytest.mark.parametrize("sign", [1, -1])
def test_branches_that_tap_a_name_in_two_shapes(sign):
    x = sign * jnp.arange(1.0, 4)
    out, taps = jax.jit(reap(two_shapes))(x)
    assert float(out) == float(two_shapes(x))
    taken = {k.removesuffix("@taken"): bool(v) for k, v in taps.items() if k.endswith("@taken")}
    first = sign > 0
    assert taken == {"value": not first, "value#1": not first, "value#2": first, "both": True}
    assert (taps["both"] == x).all()
    assert (taps["value#2"] == (2 * x if first else 0)).all()
    assert (taps["value#1"] == (0 if first else 3 * x[:1])).all()


def test_branches_that_tap_a_name_in_two_formats():
    def f(x):
        return lax.cond(x > 0, lambda x: tap(x, "y"), lambda x: tap(x.astype(jnp.bfloat16), "y").astype(x.dtype), x)

    _, taps = reap(f)(jnp.float32(-2))
    assert (taps["y"].dtype, float(taps["y"]), bool(taps["y#1@taken"])) == (jnp.bfloat16, -2.0, False)


def test_a_name_met_in_a_scan_and_outside_is_numbered_in_program_order():
    def f(x):
        def body(c, _):
            return tap(tap(c, "y") + 1, "y"), None

        return tap(lax.scan(body, tap(x, "y") + 10, None, length=2)[0], "y")

    _, taps = reap(f)(jnp.float32(0))
    assert {k: np.asarray(v).tolist() for k, v in taps.items()} == {
        "y": 0.0, "y#1": [10.0, 11.0], "y#2": [11.0, 12.0], "y#3": 12.0,
    }  # fmt: skip


def test_a_misspelt_name_is_an_error_that_names_the_likely_one():
    with pytest.raises(ValueError, match=r"no tap is named 'pots': did you mean post.*this program has post, pre"):
        reap(layers, ["pots"])(PARAMS, X)
    _, taps = reap(layers, ["post", "pots"], missing="ignore")(PARAMS, X)
    assert set(taps) == {"post"}


def test_keyword_arguments_and_trees():
    def f(x, *, scale, shift=None):
        return tap(x["a"] * scale, "y") + (0 if shift is None else shift)

    out, taps = jax.jit(reap(f))({"a": jnp.float32(3)}, scale=jnp.float32(2), shift=jnp.float32(1))
    assert (float(out), float(taps["y"])) == (7.0, 6.0)
