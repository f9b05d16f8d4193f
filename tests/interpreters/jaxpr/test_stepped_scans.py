"""One step of a scan as a program of its own makes what the scan makes in that step."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name as tap

from precaudit.interpreters.jaxpr import reap
from precaudit.interpreters.jaxpr.emulate import emulate_segments, exactly
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.interpreters.jaxpr.sites import sites, unique_names
from precaudit.interpreters.jaxpr.stepped import BEFORE, scan_steps
from precaudit.recording.programs.preparing import prepare_program
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import trace_program
from precaudit.references.traced import remade
from precaudit.references.traced.judged import closes
from precaudit.references.traced.local import Emulations
from tests.helpers.selected import few

DRAW = np.random.default_rng(3)
WEIGHTS, X = (DRAW.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((4, 16, 16), (8, 16)))


def layer(x, w):
    x = tap(x, "in")
    made = tap(jnp.tanh(x @ w), "made")
    return tap(x + made * jnp.bfloat16(0.5), "out"), None


def plain(w, x):
    return tap(lax.scan(layer, tap(x * 2, "start"), w)[0] * 3, "end")


def backwards(w, x):
    return lax.scan(layer, x, w, reverse=True)[0]


def called(w, x):
    return jax.jit(lambda x: jax.checkpoint(plain)(w, x * x))(x) * 2


def branched(w, x):
    def step(x, w):
        x = tap(x, "in")
        y = lax.cond(jnp.sum(w) > 0, lambda: tap(jnp.sin(x), "then"), lambda: tap(x @ w, "else"))
        return tap(y + x, "out"), y

    return lax.scan(step, x, w)[0]


def swapped(w, x):
    """Two states, one of which a step only hands on."""

    def step(state, w):
        x, y = tap(state[0], "first"), tap(state[1], "second")
        return (tap(x @ w, "next"), x), y

    return lax.scan(step, (x, x + 1), w)[0][0]


def segments(function, values, *args):
    """What each segment makes of recorded values, in FP64 and as its equations round."""
    with jax.enable_x64(True):
        exact = exactly(function)(values, *args)
        rounded = emulate_segments(function, Realisation())(values, *args)
        return {n: (np.asarray(exact[n]), np.asarray(rounded[n][0])) for n in exact}


@pytest.mark.parametrize("program", [plain, backwards, called, branched])
def test_a_step_makes_what_its_scan_makes_in_it(program):
    _, found = jax.jit(reap(program))(WEIGHTS, X)
    taps = {n: np.asarray(x) for n, x in found.items() if not n.endswith("@taken")}
    taps = {n: (x + DRAW.standard_normal(x.shape) / 8).astype(x.dtype) for n, x in taps.items()}  # no chain of values
    (step,) = scan_steps(program, (WEIGHTS, X))
    assert step.length == 4
    whole = segments(program, taps, WEIGHTS, X)
    assert {*step.names} <= {*whole}
    for index in range(4):
        one = segments(step.call, step.values(taps, index), np.int32(index), WEIGHTS, X)
        for name in step.names:
            for mine, all_steps in zip(one[name], whole[name], strict=True):
                np.testing.assert_allclose(mine, all_steps[index], rtol=1e-13, atol=1e-13, err_msg=f"{name} {index}")


def test_taps_of_the_step_before_have_names_of_their_own():
    (step,) = scan_steps(plain, (WEIGHTS, X))
    assert step.outside == ("start",)
    assert step.names == ("in", "made", "out")
    found = unique_names(sites(jax.make_jaxpr(step.call)(np.int32(0), WEIGHTS, X).jaxpr))
    assert found == ["start", *(BEFORE + name for name in step.names), *step.names]
    taps = {name: np.arange(4) for name in ("start", "end", *step.names)}
    assert step.values(taps, 2)["in"] == 2
    assert step.values(taps, 2)["<in"] == 1
    assert "end" not in step.values(taps, 2)
    (back,) = scan_steps(backwards, (WEIGHTS, X))
    assert [back.values(taps, i)["<in"] for i in range(4)] == [1, 2, 3, 3]


def two_scans(w, x):
    first = lax.scan(layer, x, w)[0]
    return lax.scan(lambda x, w: (tap(tap(x, "begin") @ w, "more"), None), first, w)[0]


def counted(w, x):
    def step(state, w):
        x, i = tap(state[0], "in"), state[1]
        return (tap(x @ w + i, "out"), i + 1.0), None

    return lax.scan(step, (x, jnp.bfloat16(0)), w)[0]


def untapped(w, x):
    return lax.scan(lambda x, w: (tap(jnp.tanh(x @ w), "made") + x, None), x, w)[0]


def taps_that_read_a_state(w, x):
    return lax.scan(lambda x, w: (tap(jnp.tanh(x @ w), "made"), None), x, w)[0]


def nested(w, x):
    def step(x, w):
        x = tap(x, "begin")
        inner = lax.scan(lambda y, v: (tap(tap(y, "in") + v, "inner"), None), x, w[None, :8])[0]
        return tap(inner, "out"), None

    return lax.scan(step, x, w)[0]


def twice(w, x):
    def step(x, w):
        return tap(tap(tap(x, "in") @ w, "made") @ w, "made"), None

    return lax.scan(step, x, w)[0]


@pytest.mark.parametrize("program", [counted, untapped, taps_that_read_a_state, nested, twice, swapped])
def test_scans_whose_steps_are_not_made_of_recorded_values_are_left_whole(program):
    assert scan_steps(program, (WEIGHTS, X)) == []


def test_of_two_scans_the_one_that_starts_with_the_others_end_is_left_whole():
    (step,) = scan_steps(two_scans, (WEIGHTS, X))
    assert step.names == ("in", "made", "out")


@pytest.mark.parametrize("program", few([plain, backwards, called, branched, swapped, two_scans], plain, swapped))
@pytest.mark.parametrize("fault", few([None, "made", "out", "next"], None, "made"))  # 8 s each
def test_records_made_step_by_step_are_those_of_the_whole(tmp_path, monkeypatch, program, fault):
    """The same numbers, and a fault in one step is found in that step alone."""
    found = Program(program, WEIGHTS, {"a": (X,)}, outputs=None)
    opened = trace_program(found, tmp_path / "run")
    taps = dict(opened.tensors("a", 0, "taps"))
    if fault in taps:
        off = np.array(taps[fault])
        off[2] = (off[2].astype(np.float32) * 1.05).astype(off.dtype)
        taps[fault] = off
    monkeypatch.setattr(remade, "small", lambda _: False)
    asked = []
    monkeypatch.setattr(remade, "scan_steps", lambda *args: asked.append(args) or scan_steps(*args))
    stepped = Emulations(prepare_program(found)).records(opened, "a", 0, taps, (WEIGHTS, X))
    assert asked
    monkeypatch.setattr(remade, "scan_steps", lambda *_: [])
    whole = Emulations(prepare_program(found)).records(opened, "a", 0, taps, (WEIGHTS, X))
    verdicts = [[(e.point, e.layer, closes(e), closes(e) and e.elided) for e in made] for made in (stepped, whole)]
    assert verdicts[0] == verdicts[1]
    if fault in taps:
        assert {(e.point, e.layer) for e in stepped if not closes(e)} >= {(fault, 2)}
    for mine, other in zip(stepped, whole, strict=True):
        if mine.rel_l2 is not None:
            assert mine.rel_l2 == pytest.approx(other.rel_l2, rel=1e-9)


def test_where_a_tap_of_a_scan_was_not_recorded_its_steps_are_made_as_a_whole(tmp_path, monkeypatch):
    found = Program(plain, WEIGHTS, {"a": (X,)}, outputs=None)
    opened = trace_program(found, tmp_path / "run")
    monkeypatch.setattr(remade, "small", lambda _: False)
    taps = {n: x for n, x in opened.tensors("a", 0, "taps").items() if n != "made"}
    records = Emulations(prepare_program(found)).records(opened, "a", 0, taps, (WEIGHTS, X))
    assert {e.missing is not None for e in records if e.point == "made"} == {True}
    assert all(closes(e) for e in records if e.point != "made")


def heads(w, x):
    """Products of what is cut out of weights, and of what is laid out by heads."""

    def step(x, w):
        x = tap(x, "in")
        q = tap((x @ w).reshape(8, 4, 4), "q")
        scores = tap(jnp.einsum("thk,shk->hts", q, q), "scores")
        return tap(jnp.einsum("hts,shk->thk", scores, q).reshape(8, 16), "out"), None

    return lax.scan(step, x, w)[0]


def test_what_ways_make_alike_in_a_step_is_one_product(monkeypatch):
    """No roundings of values that their format has stand between FP64's operands and a way's."""
    _, found = jax.jit(reap(heads))(WEIGHTS, X)
    (step,) = scan_steps(heads, (WEIGHTS, X))
    monkeypatch.setattr(remade, "small", lambda _: False)
    whole = remade.Tapped(prepare_program(Program(heads, WEIGHTS, {"a": (X,)}, outputs=None)), None)
    ((_, tapped),) = whole.scans_by_step((WEIGHTS, X))
    values = step.values({n: np.asarray(x) for n, x in found.items()}, 1)

    def products(function):
        return jax.jit(function).lower(values, np.int32(1), WEIGHTS, X).compile().as_text().count(" dot(")

    with jax.enable_x64(True):
        alone = products(lambda *args: {n: exactly(step.call)(*args)[n] for n in step.names})
        both = products(remade.segments_at_once(tapped, (Realisation(), Realisation("converted")), step.names))
    assert both == alone > 2
