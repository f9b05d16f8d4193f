"""What segments read, and that segments made again one by one are what all of them together are."""

from itertools import groupby

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name as tap

from precaudit.interpreters.jaxpr.reads import reads
from precaudit.recording.programs.preparing import prepare_program
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import trace_program
from precaudit.references.traced import remade, search, unrounded
from precaudit.references.traced.judged import closes
from precaudit.references.traced.local import Emulations
from precaudit.references.traced.unrounded import Unrounded
from precaudit.schema.metrics.sizes import half_ulp, smallest_normal

DRAW = np.random.default_rng(5)


def read_of(function, *args):
    return {name: set(found) for name, found in reads(jax.make_jaxpr(function)(*args).jaxpr)[0].items()}


def test_a_segment_reads_the_taps_before_it_and_none_behind_those():
    def program(x):
        a, b = tap(x * 2, "a"), tap(x * 3, "b")
        c = tap(jax.jit(lambda y: y + a)(b), "c")
        return tap(c * 2, "d") + tap(jnp.sin(b), "e")

    assert read_of(program, 1.0) == {"a": set(), "b": set(), "c": {"a", "b"}, "d": {"c"}, "e": {"b"}}


def test_a_step_of_a_scan_reads_what_any_step_before_it_made():
    def program(x):
        start = tap(x * 2, "start")

        def step(carry, _):
            one, two = carry
            return (tap(two + 1.0, "step"), one), two

        (one, two), ys = lax.scan(step, (start, start), None, length=3)
        return tap(one, "one"), tap(two, "two"), tap(ys, "ys")

    both = {"start", "step"}
    assert read_of(program, 1.0) == {"start": set(), "step": both, "one": both, "two": both, "ys": both}


def test_branches_are_read_and_what_chose_them():
    def program(x):
        a, b, c = tap(x * 2, "a"), tap(x * 3, "b"), tap(x * 4, "c")
        return tap(lax.cond(c > 0, lambda: tap(a + 1, "then"), lambda: b), "end")

    found = read_of(program, 1.0)
    assert found["then"] == {"a"}
    assert found["end"] == {"then", "b", "c"}


def test_a_while_loop_reads_all_that_it_is_given():
    def program(x):
        a, b = tap(x * 2, "a"), tap(x * 3, "b")
        out = lax.while_loop(lambda s: s[0] < 9, lambda s: (tap(s[0] + 1, "inner"), s[1] * 2), (a, b))
        return tap(out[1], "end")

    found = read_of(program, 1.0)
    assert found["inner"] >= {"a", "b"}
    assert found["end"] >= {"a", "b", "inner"}


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    """An activation made of a gate as it was before it was rounded to bfloat16, and of up as it was stored."""
    w1, w2, x = (
        DRAW.standard_normal(s).astype(np.float32).astype(ml_dtypes.bfloat16) for s in ((32, 48),) * 2 + ((40, 32),)
    )

    def call(params, x):
        gate, up = tap(x @ params[0], "gate"), tap(x @ params[1], "up")
        other = tap(jnp.sin(up), "other")
        act = tap(gate.astype(jnp.float32) * up.astype(jnp.float32), "act")
        more = tap(-other, "more") + tap(other * other, "square")
        return act, tap((more * gate).astype(jnp.bfloat16), "end")

    program = Program(call, (w1, w2), {"a": (x,)}, outputs=None)
    opened = trace_program(program, tmp_path_factory.mktemp("gated") / "run")
    taps = opened.tensors("a", 0, "taps")
    wide = [np.asarray(y, np.float64) for y in (x, w1)]
    act = (wide[0] @ wide[1]) * np.asarray(taps["up"], np.float64)
    return program, opened, taps | {"act": act.astype(np.float32)}


def records(gated, monkeypatch, small):
    program, opened, taps = gated
    monkeypatch.setattr(remade, "small", lambda _: small)
    emulations = Emulations(prepare_program(program))
    return emulations.records(opened, "a", 0, taps, (program.params, *program.cases["a"]))


@pytest.mark.turn  # 4 s
def test_segments_made_one_by_one_give_the_same_records(gated, monkeypatch):
    together, apart = (records(gated, monkeypatch, small) for small in (True, False))
    assert together == apart
    (act,) = [e for e in apart if e.point == "act"]
    assert "some inputs" in act.elided["policy:equations"]
    assert closes(act)


@pytest.mark.parametrize("small", [True, False])
def test_every_layer_of_a_scan_is_made_again_by_itself(tmp_path, monkeypatch, small):
    """Activations of three layers, each made of its own gate before it was rounded, close at each layer."""
    shapes = ((3, 32, 48), (3, 32, 48), (3, 40, 32))
    w1, w2, x = (DRAW.standard_normal(s).astype(np.float32).astype(ml_dtypes.bfloat16) for s in shapes)

    def layer(carry, each):
        gate, up = tap(each[2] @ each[0], "gate"), tap(each[2] @ each[1], "up")
        return carry, tap(gate.astype(jnp.float32) * up.astype(jnp.float32), "act")

    monkeypatch.setattr(remade, "small", lambda _: small)
    program = Program(lambda w, x: lax.scan(layer, 0, (*w, x))[1], (w1, w2), {"a": (x,)}, outputs=None)
    opened = trace_program(program, tmp_path / "run")
    taps = opened.tensors("a", 0, "taps")
    gate = x.astype(np.float64) @ w1.astype(np.float64)
    act = (gate * np.asarray(taps["up"], np.float64)).astype(np.float32)
    given = taps | {"act": act.reshape(taps["act"].shape)}
    found = Emulations(prepare_program(program)).records(opened, "a", 0, given, (program.params, x))
    acts = {e.layer: e for e in found if e.point == "act"}
    assert sorted(acts) == [0, 1, 2]
    assert all(closes(e) and "some inputs" in e.elided["policy:equations"] for e in acts.values())


@pytest.mark.parametrize("small", [True, False])
def test_a_layer_that_is_left_open_is_made_again_alone(tmp_path, monkeypatch, small):
    """Of three layers whose activations are carried on the second was made of its gate before that was rounded."""
    w, x = (DRAW.standard_normal(s).astype(np.float32).astype(ml_dtypes.bfloat16) for s in ((3, 2, 32, 32), (40, 32)))

    def layer(x, w):
        gate, up = tap(x @ w[0], "gate"), tap(x @ w[1], "up")
        act = tap(gate.astype(jnp.float32) * up.astype(jnp.float32), "act")
        return tap(jnp.tanh(act).astype(jnp.bfloat16), "out"), None

    monkeypatch.setattr(remade, "small", lambda _: small)
    program = Program(lambda w, x: lax.scan(layer, x, w)[0], w, {"a": (x,)}, outputs=None)
    opened = trace_program(program, tmp_path / "run")
    taps = opened.tensors("a", 0, "taps")
    wide = {name: np.asarray(values, np.float64) for name, values in taps.items()}
    act = (wide["gate"] * wide["up"]).astype(np.float32)
    act[1] = ((wide["out"][0] @ w[1, 0].astype(np.float64)) * wide["up"][1]).astype(np.float32)
    found = Emulations(prepare_program(program)).records(opened, "a", 0, taps | {"act": act}, (program.params, x))
    acts = {e.layer: e for e in found if e.point == "act"}
    assert all(closes(e) for e in acts.values())
    assert ["some inputs" in (e.elided or {}).get("policy:equations", ()) for _, e in sorted(acts.items())] == [
        False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("stepped", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("same", [True, False])
def test_what_closes_one_layer_is_tried_of_the_others_first(tmp_path, monkeypatch, same, stepped):
    """Of four layers each activation was made of its gate before that was rounded; or, from the third on, of its up."""
    w, x = (
        DRAW.standard_normal(s).astype(np.float32).astype(ml_dtypes.bfloat16) for s in ((4, 2, 32, 32), (4, 40, 32))
    )

    def layer(carry, each):
        gate, up = tap(each[1] @ each[0][0], "gate"), tap(each[1] @ each[0][1], "up")
        return carry, tap(gate.astype(jnp.float32) * up.astype(jnp.float32), "act")

    monkeypatch.setattr(remade, "small", lambda _: False)
    if not stepped:
        monkeypatch.setattr(remade, "scan_steps", lambda *_: [])
    program = Program(lambda w, x: lax.scan(layer, 0, (w, x))[1], w, {"a": (x,)}, outputs=None)
    opened = trace_program(program, tmp_path / "run")
    taps = opened.tensors("a", 0, "taps")
    gate, up = (np.asarray(taps[name], np.float64) for name in ("gate", "up"))
    wide_gate, wide_up = (x.astype(np.float64) @ w[:, i].astype(np.float64) for i in (0, 1))
    act = wide_gate * up
    if not same:
        act[2:] = (gate * wide_up)[2:]
    made = []
    some = remade.Remade.some

    def counted(self, left, *args):
        made.append([len(layers) for layers in left.values()] if not stepped else next(iter(left.values())))
        return some(self, left, *args)

    monkeypatch.setattr(remade.Remade, "some", counted)
    found = Emulations(prepare_program(program)).records(
        opened, "a", 0, taps | {"act": act.astype(np.float32)}, (program.params, x)
    )
    acts = [e for e in found if e.point == "act"]
    assert len(acts) == 4
    assert all(closes(e) for e in acts)
    names = {e.layer: e.elided["policy:equations"] for e in acts}
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert (names[0] == names[2]) == same
    if not stepped:
        assert [3] in made
        assert ([2] in made) != same
        return
    tried = [len(list(group)) for _, group in groupby(made)]  # how often a layer was made again
    assert [n > 1 for n in tried] == [True, False, not same, False]


def test_of_choices_that_a_segment_reads_alike_one_is_tried(gated, monkeypatch):
    """Six narrow points have three bits, 0 and 1; the activation reads two of them, which makes four choices."""
    asked = []
    monkeypatch.setattr(remade.Remade, "some", counting(remade.Remade.some, asked))
    records(gated, monkeypatch, False)
    ways = len(remade.HONEST)
    assert sum(points == ["act"] for points in asked) == ways + 4 * ways  # with all inputs or another way, then some


@pytest.mark.parametrize("small", [True, False])
def test_noise_is_drawn_of_what_the_least_does_not_close_and_changes_no_verdict(tmp_path, monkeypatch, small):
    """A bfloat16 product closes by itself; float32 sums of many terms need the noise of other orders."""
    x, w = (DRAW.standard_normal(s).astype(np.float32) for s in ((16, 4000), (4000, 64)))

    def call(w, x):
        long = tap(x @ w, "long")
        return long, tap(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), "narrow")

    def verdicts():
        found = Emulations(prepare_program(program)).records(opened, "a", 0, taps, (program.params, x))
        return {e.point: e for e in found}

    monkeypatch.setattr(remade, "small", lambda _: small)
    program = Program(call, w, {"a": (x,)}, outputs=None)
    opened = trace_program(program, tmp_path / "run")
    taps = opened.tensors("a", 0, "taps")
    asked = []
    drawn = Unrounded.drawn
    monkeypatch.setattr(
        Unrounded, "drawn", lambda self, draws, left: asked.append(set(left)) or drawn(self, draws, left)
    )
    lazily = verdicts()
    assert asked == [{"long"}]
    monkeypatch.setattr(search, "CLEARLY", -1.0)
    always = verdicts()
    assert asked[1:] == [{"long", "narrow"}]
    assert lazily["long"] == always["long"]
    assert closes(lazily["narrow"])
    assert lazily["narrow"].unexplained.excess >= always["narrow"].unexplained.excess


def counting(function, asked):
    def some(self, points, taps, args):
        asked.append(list(points))
        return function(self, points, taps, args)

    return some


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_value_before_it_was_rounded_is_held_to_what_rounds_to_it(dtype):
    """Less than half an ulp from what was recorded, so that it rounds to that.

    Below the smallest normal number less than that number, since XLA flushes.
    """
    exact = DRAW.standard_normal(64)
    recorded = exact.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    recorded[0] = 0
    far = recorded.astype(np.float64) + np.where(np.arange(64) % 2, 3.0, -3.0)
    with jax.enable_x64(True):
        near, clipped = (np.asarray(unrounded._rounding_to(recorded, x)) for x in (exact, far))
    half = half_ulp(recorded.astype(np.float64), dtype)
    np.testing.assert_array_equal(near[1:], exact[1:])
    away = np.abs(clipped - recorded.astype(np.float64))
    np.testing.assert_allclose(away, half, rtol=1e-8)
    assert (away < half).all()
    assert half[0] == smallest_normal(dtype)
