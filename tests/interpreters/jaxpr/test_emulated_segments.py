"""Automatic taps of programs, and their segments made again as their equations say: bit for bit what XLA:CPU makes."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from precaudit.interpreters.jaxpr import reap
from precaudit.interpreters.jaxpr.emulate import emulate_program, emulate_segments, exactly
from precaudit.interpreters.jaxpr.emulator import Emulator
from precaudit.interpreters.jaxpr.plant import WantedSteps
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.interpreters.jaxpr.rounding import holds, round_once
from precaudit.interpreters.jaxpr.sites import unique_names
from precaudit.interpreters.jaxpr.statements import assigned_variable
from precaudit.interpreters.jaxpr.sums import sums_narrow
from precaudit.interpreters.jaxpr.tag import TapChoice, tag_program
from precaudit.numbers.arrays import rounder
from precaudit.references.traced import judged
from precaudit.references.traced.remade import DRAWS, UNSHARED, Tapped, restore, segments_at_once, upper
from precaudit.schema.records.errors import LocalError

BF = jnp.bfloat16
DRAW = np.random.default_rng(11)


def drawn(*shape):
    return jnp.asarray(DRAW.standard_normal(shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1), BF)


WEIGHTS = {"embed": drawn(40, 16), "layers": {n: drawn(3, *s) for n, s in (
    ("query", (16, 16)), ("key", (16, 16)), ("value", (16, 16)), ("gate", (16, 32)), ("up", (16, 32)),
    ("down", (32, 16)))}}  # fmt: skip
TOKENS = jnp.asarray(DRAW.integers(0, 40, 9), jnp.int32)


def norm(x):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def block(x, w):
    normed = norm(x)
    queries = normed @ w["query"]
    keys, values = normed @ w["key"], normed @ w["value"]
    scores = jnp.einsum("td,sd->ts", queries, keys, preferred_element_type=jnp.float32) / 4
    mask = jnp.tril(jnp.ones(scores.shape, bool))
    probs = jax.nn.softmax(jnp.where(mask, scores, -1e9)).astype(x.dtype)
    x = x + probs @ values
    second = norm(x)
    act = jax.nn.silu(second @ w["gate"]) * (second @ w["up"])
    return x + act @ w["down"]


def scanned(w, tokens):
    x, _ = lax.scan(lambda x, layer: (block(x, layer), None), w["embed"][tokens], w["layers"])
    final = norm(x)
    return final @ w["embed"].T


def unrolled(w, tokens):
    x = w["embed"][tokens]
    for i in range(3):
        x = block(x, jax.tree.map(lambda a, i=i: a[i], w["layers"]))
    final = norm(x)
    return final @ w["embed"].T


def rematerialised(w, tokens):
    x, _ = lax.scan(lambda x, layer: (jax.checkpoint(block)(x, layer), None), w["embed"][tokens], w["layers"])
    final = norm(x)
    return final @ w["embed"].T


def loss(w, tokens):
    logits = scanned(w, tokens).astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), (tokens[:, None] + 1) % 40, 1))


@pytest.mark.parametrize("program", [scanned, rematerialised])
def test_points_are_named_by_the_users_variables(program):
    made = tag_program(program, WEIGHTS, TOKENS)
    names = unique_names(made.sites)
    assert {"normed", "queries", "keys", "scores", "probs", "act", "second", "final"} <= set(names)
    assert {s.stacked for s in made.sites if s.name not in ("final", "scanned", "rematerialised")} == {(3,)}
    assert all(t.source.startswith("test_emulated_segments.py:") for t in made.tags.values())
    assert made.automatic


def test_an_unrolled_loop_has_an_occurrence_for_every_layer():
    names = unique_names(tag_program(unrolled, WEIGHTS, TOKENS).sites)
    assert {"queries", "queries#1", "queries#2", "final"} <= set(names)
    assert "queries#3" not in names


def test_names_do_not_depend_on_lines_above(tmp_path):
    """The same source further down has the same names."""
    source = "import jax.numpy as jnp\n\ndef f(w, x):\n    hidden = jnp.tanh(x @ w)\n    return hidden @ w\n"

    def named(text, path):
        path.write_text(text)
        space: dict = {}
        exec(compile(text, str(path), "exec"), space)  # the text is this test's
        return unique_names(tag_program(space["f"], jnp.eye(4), jnp.ones((2, 4))).sites)

    first = named(source, tmp_path / "a.py")
    assert named("# more\n\n\n" + source, tmp_path / "b.py") == first
    assert first == ["hidden", "hidden~1", "f"]


def test_a_programs_own_taps_are_points_alone_or_beside_others():
    def call(w, x):
        return checkpoint_name(x @ w, "mine") @ w

    made = tag_program(call, jnp.eye(4), jnp.ones((2, 4)), choice=TapChoice("own"))
    assert not made.automatic
    assert [s.name for s in made.sites] == ["mine"]
    assert [s.name for s in tag_program(call, jnp.eye(4), jnp.ones((2, 4)), choice=TapChoice("both")).sites] == [
        "mine",
        "call",
    ]


@pytest.mark.turn  # 8 s
@pytest.mark.parametrize("program", [scanned, unrolled, rematerialised, jax.grad(loss)])
def test_tagging_changes_no_value(program):
    made = tag_program(program, WEIGHTS, TOKENS)
    strict = {"xla_allow_excess_precision": False}  # what is fused is another matter
    a = jax.jit(made.call, compiler_options=strict)(WEIGHTS, TOKENS)
    b = jax.jit(program, compiler_options=strict)(WEIGHTS, TOKENS)
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def segments(program, *hows):
    made = tag_program(program, WEIGHTS, TOKENS)
    taps = {k: np.asarray(v) for k, v in jax.jit(reap(made.call))(WEIGHTS, TOKENS)[1].items()}
    with jax.enable_x64(True):
        found = [exactly(made.call)] + [emulate_segments(made.call, how) for how in hows]
        made = [jax.jit(f)(taps, WEIGHTS, TOKENS) for f in found]
        return taps, [{k: np.asarray(v[0] if isinstance(v, tuple) else v) for k, v in m.items()} for m in made]


@pytest.mark.turn  # 8 s
def test_every_bfloat16_segment_is_made_again_bit_for_bit():
    taps, (exact, strict, converted) = segments(scanned, Realisation(), Realisation("converted"))
    narrow = {k: v.astype(np.float64) for k, v in taps.items() if v.dtype == ml_dtypes.bfloat16}
    assert len(narrow) >= 12
    left = {k: min(np.abs(v - e[k]).max() for e in (strict, converted)) for k, v in narrow.items()}
    assert left == dict.fromkeys(narrow, 0.0)
    errors = {k: np.abs(v - exact[k]).max() for k, v in narrow.items()}
    assert all(e > 0 for e in errors.values())


def test_no_stack_of_a_scan_holds_more_than_is_kept():
    """Temporaries are below one FP64 stack of the points; each way had one, whose upper half was taken afterwards."""
    weights, x = jnp.ones((64, 32, 32), jnp.bfloat16), jnp.ones((128, 32), jnp.bfloat16)

    def program(w, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w) * x, None), x, w)[0]

    made = tag_program(program, weights, x)
    shapes = {s.name: jax.ShapeDtypeStruct((*s.stacked, *s.shape), s.dtype) for s in made.sites}
    elements = sum(int(np.prod(s.shape)) for s in shapes.values())
    hows = (Realisation(), Realisation("converted"), Realisation(seed=1, sums="single"))
    with jax.enable_x64(True):
        compiled = jax.jit(segments_at_once(Tapped(made, None), hows)).lower(shapes, weights, x).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 8 * elements
    assert memory.output_size_in_bytes == pytest.approx((8 + 4 * len(hows)) * elements, rel=0.01)


@pytest.mark.turn  # 19 s
@pytest.mark.parametrize("program", [lambda w, t: scanned(w, t), lambda w, t: jax.checkpoint(scanned)(w, t)])
def test_interpreters_in_step_make_what_each_makes_alone(program):
    hows = (
        Realisation(),
        Realisation("converted"),
        Realisation(seed=1, sums="single"),
        Realisation(seed=2, sums="reversed"),
        Realisation("unshared"),
    )
    taps, (exact, *rounded) = segments(program, *hows)
    made = tag_program(program, WEIGHTS, TOKENS)
    with jax.enable_x64(True):
        together = [
            {k: np.asarray(x) for k, x in each.items()}
            for each in jax.jit(segments_at_once(Tapped(made, None), hows))(taps, WEIGHTS, TOKENS)
        ]
    assert [set(each) for each in together] == [set(exact)] * 6
    for k in exact:
        np.testing.assert_allclose(together[0][k], exact[k], rtol=1e-13, atol=1e-13)
        dtype = taps[k].dtype.name
        for how, mine, alone in zip(hows, together[1:], rounded, strict=True):
            if how.seed and dtype == "bfloat16":  # on grids of their own, kept to 21 bits
                np.testing.assert_allclose(restore(mine[k], dtype), alone[k], rtol=2.0**-21)
            else:
                assert np.array_equal(restore(mine[k], dtype), alone[k]), k


@partial(jax.jit, static_argnums=1)
def moved(x, dtype):
    """Move values about, shared by two calls: what the second reads is not what the first read."""
    y = jnp.concatenate([x[1:], x[:1]]).reshape(-1, 4).T
    z = jnp.where(y > 0, jnp.maximum(y, jnp.asarray(0.3, x.dtype)), -y)
    return jnp.sort(z, axis=0).astype(dtype).astype(jnp.float32) + lax.reduce_max(z, (0,)).astype(jnp.float32)


def moving(x, w):
    y = checkpoint_name(moved(x @ w, BF) * 0.7, "first")
    z = checkpoint_name(moved((y.ravel() / 3).astype(jnp.float16), jnp.float8_e5m2), "second")
    part = (x @ w).reshape(8, 8)[:4].astype(jnp.float8_e4m3fn).astype(jnp.float16).reshape(-1)
    third = checkpoint_name(moved(part, BF) + z.ravel()[:8].sum(), "third")
    fourth = checkpoint_name((w / 3).astype(jnp.float32) * 1.1, "fourth")
    counted = lax.convert_element_type(jnp.arange(1000, 1016), BF) + lax.convert_element_type(0.1, BF)
    return third, fourth, checkpoint_name(counted, "fifth")


NARROW = ("bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu")


@pytest.mark.parametrize("wide", ["float32", *NARROW])
@pytest.mark.parametrize("narrow", NARROW)
def test_which_format_has_all_values_of_another(narrow, wide):
    dtype = np.dtype(narrow)
    with np.errstate(invalid="ignore", over="ignore"):
        every = np.arange(1 << 8 * dtype.itemsize, dtype=f"uint{8 * dtype.itemsize}").view(dtype).astype(np.float64)
        every = every[np.isfinite(every)]
        same = every.astype(wide).astype(np.float64) == every
    assert holds(np.dtype(wide), dtype) == bool(same.all())


@pytest.mark.parametrize("wrapped", [jax.jit, jax.checkpoint])
def test_a_conversion_reads_what_was_not_rounded_across_calls(wrapped):
    """Compilers put a jitted function's body in the place of its call."""
    square, widened = wrapped(lambda x: x * x), wrapped(lambda x: x.astype(jnp.float32) + 1)

    def call(x):
        y = checkpoint_name(square(x), "y")
        return y, checkpoint_name(widened(square(x) * x), "z")

    x = drawn(4, 8)
    taps = dict(zip(("y", "z"), jax.jit(call)(x), strict=True))
    wide = np.asarray(x, np.float64)
    once = rounder("bfloat16")(wide**2)
    for unrounded, cube in (("none", rounder("bfloat16")(once * wide)), ("converted", once * wide)):
        with jax.enable_x64(True):
            found = jax.jit(emulate_segments(call, Realisation(unrounded)))(taps, x)
        assert np.array_equal(found["y"][0], once)
        assert np.array_equal(found["y"][1], wide**2)
        assert np.array_equal(found["z"][0], rounder("float32")(cube + 1))


@pytest.mark.parametrize("wrapped", [jax.jit, jax.checkpoint, partial(jax.checkpoint, prevent_cse=False)])
def test_a_gradient_that_recomputes_behind_a_barrier_reads_what_was_rounded(wrapped):
    """As XLA:CPU makes it: what jax.checkpoint recomputes reads a rounded input, but where it may be merged."""

    def loss(x):
        return jnp.sum(wrapped(lambda y: jnp.sum(y.astype(jnp.float32) ** 3))(x * x))

    def call(x):
        return checkpoint_name(jax.grad(loss)(x), "g")

    x = drawn(16, 16)
    made = jax.jit(call)(x)
    with jax.enable_x64(True):
        found = jax.jit(emulate_segments(call, Realisation("converted")))({"g": made}, x)
    assert np.array_equal(found["g"][0], np.asarray(made, np.float64))


@pytest.mark.parametrize("unrounded", ["none", "converted", "unshared", "all", "single"])
def test_a_rounding_that_changes_nothing_is_left_out(monkeypatch, unrounded):
    """Of moved values; every tap is what it is with all roundings made, in less of a program."""
    args = jnp.asarray(DRAW.standard_normal((64, 16)), BF), jnp.asarray(DRAW.standard_normal(16), BF)
    call = lambda x, w: moving(x, w)  # noqa: E731
    found, sizes = [], []
    with jax.enable_x64(True):
        values = reap(call)(*args)[1]
        for never in (False, True):
            if never:
                monkeypatch.setattr(Emulator, "rounds_nothing", lambda *_: False)
            run = jax.jit(emulate_segments(call, Realisation(unrounded)))
            found.append(jax.tree.leaves(run(values, *args)))
            sizes.append(run.lower(values, *args).as_text().count("reduce_precision"))
    assert [x.tobytes() for x in found[0]] == [x.tobytes() for x in map(np.asarray, found[1])]
    assert sizes[0] < sizes[1] or unrounded == "all"


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_of_a_double_holds_every_narrow_value(dtype):
    """All 65,536, subnormals, infinities and NaN among them; of others, what is nearest in 21 bits."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"), jax.enable_x64(True):
        wide = every.astype(np.float64)
        kept = np.asarray(jax.jit(upper)(wide))
        assert kept.dtype == np.uint32
        found = restore(kept, np.dtype(dtype).name)
        np.testing.assert_array_equal(found, wide)
        assert np.array_equal(np.signbit(found[wide == 0]), np.signbit(wide[wide == 0]))
        near = restore(np.asarray(upper(np.asarray([1 + 2.0**-20 + 2.0**-22, 1 + 2.0**-20 - 2.0**-22]))), "bfloat16")
    assert near.tolist() == [1 + 2.0**-20] * 2


@pytest.mark.parametrize("how", [Realisation(), *DRAWS], ids=lambda how: f"seed {how.seed}")
def test_a_tap_is_made_at_the_steps_that_it_is_asked_for_as_at_all(how):
    """Steps 1 and 4 of 5, of a loop in a loop; part of what is carried on is recorded, part is made."""
    draw = np.random.default_rng(2)
    w, x = (draw.standard_normal(s).astype(np.float32) for s in ((5, 2, 6, 6), (3, 6)))

    def inner(carry, w):
        x, scale = carry
        x = checkpoint_name(jnp.tanh(x @ w).astype(jnp.bfloat16), "x").astype(jnp.float32)
        return (x, jnp.sin(scale)), checkpoint_name((x @ w * scale).astype(jnp.bfloat16), "y")

    def program(w, x):
        first = checkpoint_name(x + 1, "first"), jnp.float32(1)
        (x, _), ys = lax.scan(lambda carry, w: lax.scan(inner, carry, w), first, w)
        return checkpoint_name(x @ w[0, 0], "last"), ys

    with jax.enable_x64(True):
        taps = {"x": draw.standard_normal((5, 2, 3, 6)).astype(jnp.bfloat16), "first": x}
        values = taps | {"y": taps["x"], "last": x}
        every = emulate_segments(program, how)(values, w, x)["y"]
        slots = np.array([2, 0, 2, 2, 1], np.int32)
        made = jax.jit(lambda slots: emulate_segments(program, how, wanted=WantedSteps("y", slots, 2))(values, w, x))(
            slots
        )
        assert set(made) == {"y", "first", "last"}
        for all_steps, some in zip(every, made["y"], strict=True):
            np.testing.assert_array_equal(np.asarray(some)[:2], np.asarray(all_steps)[[1, 4]])
            assert some.shape == (3, 2, 3, 6)


@pytest.mark.turn  # 3 s
def test_what_interpreters_make_alike_is_one_product():
    """In FP64 and as the equations round a product of recorded values is the same: no more than in FP64 alone."""
    made = tag_program(scanned, WEIGHTS, TOKENS)
    taps = {k: np.asarray(v) for k, v in jax.jit(reap(made.call))(WEIGHTS, TOKENS)[1].items()}

    def products(function):
        return jax.jit(function).lower(taps, WEIGHTS, TOKENS).compile().as_text().count(" dot(")

    with jax.enable_x64(True):
        alone = products(exactly(made.call))
        assert alone >= 9
        assert products(segments_at_once(Tapped(made, None), (Realisation(), Realisation("converted")))) == alone


def test_a_fault_inside_a_segment_is_in_no_emulation(monkeypatch):
    """A norm that is 2 % too large, run in place of the one that is emulated."""
    good = tag_program(scanned, WEIGHTS, TOKENS)
    with monkeypatch.context() as m:
        good_norm = norm
        m.setitem(globals(), "norm", lambda x: good_norm(x) * jnp.asarray(1.02, x.dtype))
        bad = tag_program(lambda w, t: scanned(w, t), WEIGHTS, TOKENS)  # traced anew
        taps = {k: np.asarray(v) for k, v in jax.jit(reap(bad.call))(WEIGHTS, TOKENS)[1].items()}
    with jax.enable_x64(True):
        made = jax.jit(emulate_segments(good.call, Realisation("converted")))(taps, WEIGHTS, TOKENS)
    off = np.linalg.norm(taps["second"].astype(np.float64) - np.asarray(made["second"][0]))
    assert off > 2.0**-9 * np.linalg.norm(np.asarray(made["second"][0]))


ROUNDED = jax.jit(round_once, static_argnums=1)  # a compiler may leave out what is added and taken away again


@settings(max_examples=200)
@given(st.floats(-1e30, 1e30) | st.floats(-1e-4, 1e-4), st.sampled_from(["float32", "bfloat16", "float16"]))
@example(2.5e-7, "float16")
@example(3.3e-8, "float16")
@example(3e-40, "bfloat16")
def test_rounding_is_that_of_the_format(x, name):
    with jax.enable_x64(True):
        got = np.asarray(ROUNDED(jnp.asarray([x], np.float64), np.dtype(name if name != "bfloat16" else BF)))
    assert np.array_equal(got, rounder(name)(np.array([x])))


def test_statements_are_found_by_line_and_column(tmp_path):
    path = tmp_path / "m.py"
    path.write_text(
        "a = f(1); b, c = g(2)\nself.d = (\n    h(3)\n)\nreturn_value = {}\nreturn_value['e'] = k(4)\nm(5)\n"
    )
    places = [(1, 4), (1, 17), (3, 4), (6, 20), (7, 0)]
    assert [assigned_variable(str(path), *at) for at in places] == ["a", "b", "d", "e", ""]
    assert assigned_variable(str(tmp_path / "none.py"), 1, 0) == ""


SUMMED = [
    ((512, 8), (0,)), ((8, 64, 8), (0, 1)), ((3, 45, 8), (0, 1)), ((6, 70), (1,)), ((2000, 3), (0,)), ((4, 5), (0,)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "axes"), SUMMED, ids=str)
def test_sums_of_a_narrow_format_are_those_of_the_machine(shape, axes):
    """A ``reduce_sum`` in bfloat16, as gradients of broadcasts are: every partial sum rounded, bit for bit."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal(shape) + 1, jnp.bfloat16)

    def call(x):
        return checkpoint_name(lax.reduce(x, np.zeros((), x.dtype), lax.add, axes), "total")

    assert sums_narrow(jax.make_jaxpr(call)(x).jaxpr)
    with jax.enable_x64(True):
        how = Realisation(sums="own")
        made = emulate_segments(call, how)({"total": np.zeros(np.asarray(call(x)).shape)}, x)["total"][0]
    assert np.array_equal(np.asarray(made), np.asarray(jax.jit(call)(x), np.float64))


def test_every_seed_is_another_rounding_of_the_same_size():
    """Eight realisations of one function: none is another's, each off by what one rounding of a grid may be."""
    x = jnp.asarray(np.random.default_rng(2).standard_normal(4096), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda x: (x * 1.5).astype(jnp.bfloat16))(x)
    exact = 1.5 * np.asarray(x, np.float64)
    with jax.enable_x64(True):
        run = jax.jit(emulate_program(jaxpr, Realisation()))
        made = [np.asarray(run(np.uint64(seed), x)[0]) for seed in range(1, 9)]
        wide = np.asarray(jax.jit(emulate_program(jaxpr, None))(np.uint64(0), x)[0])
    assert np.array_equal(wide, exact)
    assert len({y.tobytes() for y in made}) == 8
    for y in made:
        off = np.abs(y - exact) / np.abs(exact)
        assert off.max() <= 1.01 * 2.0**-8
        assert 0.15 < np.sqrt(np.mean(off**2)) * 2.0**8 < 0.6


def test_the_memory_of_fp64_does_not_grow_with_the_layers_of_a_scan():
    """What is scanned over, recorded values and weights, is lifted a step at a time (XLA's own plan)."""

    def layer(x, w):
        return x + jax.nn.silu(x @ w) @ w, None

    def planned(layers):
        weights, x = np.ones((layers, 64, 64), np.float32), np.ones((32, 64), np.float32)
        made = tag_program(lambda w, x: lax.scan(layer, x, w)[0], weights, x)
        shapes = {s.name: jax.ShapeDtypeStruct((*s.stacked, *s.shape), s.dtype) for s in made.sites}
        with jax.enable_x64(True):
            compiled = jax.jit(exactly(made.call)).lower(shapes, weights, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert planned(32) <= 1.05 * planned(8)


def parts(x):
    """A float32 array as two of bfloat16's values: rounded, and what is left rounded."""
    first = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    return first, (x - first).astype(ml_dtypes.bfloat16).astype(np.float64)


@pytest.mark.parametrize("precision", ["default", "high", "highest", "BF16_BF16_F32_X3"])
def test_a_matrix_unit_multiplies_parts_in_bfloat16(precision):
    x, y = (DRAW.standard_normal((5, 5)).astype(np.float32) for _ in range(2))
    jaxpr = jax.make_jaxpr(lambda x, y: jnp.matmul(x, y, precision=precision))(x, y)
    with jax.enable_x64(True):
        (made,) = Emulator({}, (), Realisation(unit="matrix")).run(jaxpr.jaxpr, (), (x, y))
    (x0, x1), (y0, y1) = parts(x), parts(y)
    expected = {"default": x0 @ y0, "highest": x.astype(np.float64) @ y}.get(precision, x0 @ y0 + x0 @ y1 + x1 @ y0)
    np.testing.assert_array_equal(made, expected.astype(np.float32))


def test_a_vector_unit_adds_rounded_terms():
    x, y = (DRAW.standard_normal(s).astype(BF) for s in ((2, 3, 7), (2, 7, 4)))
    jaxpr = jax.make_jaxpr(lambda x, y: jnp.einsum("bik,bkj->bij", x, y))(x, y)
    with jax.enable_x64(True):
        (made,) = Emulator({}, (), Realisation(unit="vector")).run(jaxpr.jaxpr, (), (x, y))
    terms = (x[:, :, None, :].astype(np.float32) * y.transpose(0, 2, 1)[:, None].astype(np.float32)).astype(BF)
    np.testing.assert_array_equal(made, terms.astype(np.float64).sum(-1).astype(BF).astype(np.float64))


@pytest.mark.parametrize(("moved", "elides"), [
    (lambda y: y, True), (lambda y: y.T, True), (lambda y: y.T.T, True), (lambda y: y.T.reshape(-1), False),
])  # fmt: skip
def test_a_pair_of_conversions_goes_through_transpositions_alone(moved, elides):
    """A reshape after a transposition copies: what it reads was rounded."""

    def call(x):
        return moved((x * 1.001).astype(BF)).astype(jnp.float32)

    x = jnp.asarray(DRAW.standard_normal((3, 5)), jnp.float32)
    jaxpr = jax.make_jaxpr(call)(x)
    with jax.enable_x64(True):
        wide = np.asarray(x, np.float64)
        made, strict = (
            np.asarray(Emulator({}, (), how).run(jaxpr.jaxpr, (), (jnp.asarray(wide),))[0])
            for how in (Realisation("converted"), Realisation())
        )
    factor = np.float64(np.float32(1.001))
    assert np.allclose(made, moved(wide * factor), rtol=2.0**-22) == elides
    assert np.allclose(strict, moved(wide * factor), rtol=2.0**-8)
    assert not np.allclose(strict, moved(wide * factor), rtol=2.0**-22)


def test_readers_are_counted_where_ways_run_in_step():
    """``wide`` is read by three equations and rounded; ``out``, which one reads, is not: in a scan as outside."""

    def program(x):
        def part(x):
            wide = x * jnp.bfloat16(1.1)
            out = wide * wide + wide
            return out * jnp.bfloat16(0.7) - jnp.tanh(wide)

        def step(x, _):
            return checkpoint_name(part(x), "inside"), None

        return checkpoint_name(part(lax.scan(step, x, None, 2)[0]), "outside")

    x = jnp.asarray(np.random.default_rng(9).standard_normal((4, 8)), jnp.bfloat16)
    made = tag_program(program, x)
    taps = {k: np.asarray(v) for k, v in jax.jit(reap(made.call))(x)[1].items()}
    hows = (Realisation("unshared"), Realisation("all"))
    with jax.enable_x64(True):
        _, unshared, everything = jax.jit(segments_at_once(Tapped(made, None), hows))(taps, x)
        alone = jax.jit(emulate_segments(made.call, hows[0]))(taps, x)
    for name in ("inside", "outside"):
        assert np.array_equal(restore(np.asarray(unshared[name]), "bfloat16"), np.asarray(alone[name][0]))
        assert not np.array_equal(unshared[name], everything[name])


def test_a_way_that_limits_were_not_made_with_is_in_no_noise():
    """It may be the best there is; a record of which it is not has the numbers that it has without it."""
    draw = np.random.default_rng(8)
    exact = draw.standard_normal((6, 40))
    stored = exact.astype(ml_dtypes.bfloat16)
    near, *drawn = (exact * (1 + 2.0**-10 * draw.standard_normal(exact.shape)) for _ in range(4))
    without = judged.local_numbers(stored, judged.PlaceRows(exact, {(): near}, drawn))
    nowhere = exact * (1 + 2.0**-20)
    other = judged.PlaceRows(exact, {(): near, UNSHARED: nowhere * 2}, drawn)
    assert judged.local_numbers(stored, other) == without
    same = judged.PlaceRows(exact, {(): near, UNSHARED: stored.astype(np.float64)}, drawn)
    best = judged.local_numbers(stored, same)
    assert best["unexplained"].rel_l2 == 0.0
    assert best["elided"] == {"policy:equations": UNSHARED}


@pytest.mark.parametrize(("off", "passes"), [(8e-8, True), (-8e-8, True), (1e-5, False), (-1e-5, False)])
def test_a_tie_that_float32_crosses_is_no_error_of_a_row_of_few_terms(off, passes):
    """A row of probabilities that two equal keys have most of: both fall the other way than the emulation, at a tie."""
    exact = np.abs(np.random.default_rng(2).standard_normal((512, 8)))
    tie = 0.3154296875  # between 0.314453125 and 0.31640625
    exact[3] = [tie * (1 + off), tie * (1 + off), *(1e-4 * exact[3, 2:])]
    emulated = exact.astype(ml_dtypes.bfloat16).astype(np.float64)
    stored = emulated.copy()
    stored[3, :2] = 0.314453125 if off > 0 else 0.31640625
    assert (stored != emulated).sum() == 2
    rows = judged.PlaceRows(exact, {(): emulated}, [emulated] * 3)
    found = judged.local_numbers(stored.astype(ml_dtypes.bfloat16), rows)
    made = LocalError(
        prompt="a", phase="call", step=0, layer=0, point="probs", candidate="r", reference="fp64",
        **found,
    )  # fmt: skip
    assert judged.closes(made) == passes


@pytest.mark.parametrize("wide", [False, True])
def test_what_moves_a_planted_value_rounds_it_unless_it_is_recorded_in_its_format(wide):
    """A value as it was before it was rounded is none of its format: a transposition of it is stored, and rounds."""

    def program(x):
        return checkpoint_name(checkpoint_name(x * 2, "read").T.astype(jnp.float32), "moved")

    exact = np.asarray(DRAW.standard_normal((3, 4)))
    stored = exact.astype(BF)
    with jax.enable_x64(True):
        made = emulate_segments(program, Realisation())(
            {"read": exact if wide else stored, "moved": np.zeros((4, 3), np.float32)}, stored
        )
    assert np.array_equal(made["moved"][0], stored.T.astype(np.float64))
