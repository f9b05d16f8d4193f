"""reap collects what the program computes, through every construct, and costs nothing for what is not selected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name as tap

from precaudit.transforms import reap


@jax.custom_vjp
def times_five(x):
    return tap(x * 5, "vjp")


times_five.defvjp(lambda x: (times_five(x), x), lambda x, g: (g * 5,))


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
    _, taps = jax.jit(reap(layers, ["post"], [1], lambda name, x: x[:2]))(PARAMS, X)
    assert taps["post"].shape == (1, 2, 64)


def test_gradients_are_reaped_from_outside():
    loss = jax.grad(lambda p, x: layers(p, x).sum())
    _, taps = jax.jit(reap(loss, ["post"]))(PARAMS, X)
    assert taps["post"].shape == (30, 256, 64)


def test_a_tap_it_cannot_reach_is_an_error():
    def f(x):
        return lax.custom_linear_solve(lambda y: tap(2 * y, "inside"), x, lambda matvec, b: b / 2)

    with pytest.raises(NotImplementedError, match="custom_linear_solve"):
        reap(f)(jnp.ones(3))
