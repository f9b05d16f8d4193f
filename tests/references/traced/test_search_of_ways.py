"""What is tried of a program's places that do not close, in which order, and of which layers."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name as tap

from precaudit.recording.programs.preparing import prepare_program
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.programs import EQUATIONS
from precaudit.references.traced import remade
from precaudit.references.traced.judged import closes
from precaudit.references.traced.local import Emulations
from precaudit.references.traced.unrounded import Unrounded

DRAW = np.random.default_rng(5)
LAYERS = [0, 1, 2]
TRIES = ("all_inputs", "other_ways", "some_inputs", "made_as", "differences", "redrawn")


def bf16(x):
    return np.asarray(x).astype(np.float32).astype(ml_dtypes.bfloat16)


def layer(carry, each):
    (one, two), x = each
    gate, up = tap(x @ one, "gate"), tap(x @ two, "up")
    both = tap(gate.astype(jnp.float32) * up.astype(jnp.float32), "both")
    half = tap(gate.astype(jnp.float32) - jnp.sin(up.astype(jnp.float32)), "half")
    inside = tap((up * up - up) * (up * up - up), "inside")
    return carry, (both, half, inside, tap(x @ (one + two), "wrong"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a program of three layers, its run, and tensors of it that a compiler made in other ways, or a fault.

    ``both`` was made of gate and up before they were rounded, ``half`` of such a gate alone, ``inside`` without
    roundings on its way; ``wrong`` is half as large again. ``gate`` and ``up`` are as the equations say.
    """
    w, x = bf16(DRAW.standard_normal((2, 3, 32, 32))), bf16(DRAW.standard_normal((3, 40, 32)))
    program = Program(lambda w, x: lax.scan(layer, 0, ((w[0], w[1]), x))[1], w, {"a": (x,)}, outputs=None)
    opened = trace_program(program, tmp_path_factory.mktemp("ways") / "run")
    taps = opened.tensors("a", 0, "taps")
    up = np.asarray(taps["up"], np.float64)
    wide_gate, wide_up = (x.astype(np.float64) @ y.astype(np.float64) for y in w)
    made = {
        "both": (wide_gate * wide_up).astype(np.float32),
        "half": (wide_gate - np.sin(up)).astype(np.float32),
        "inside": bf16((up * up - up) ** 2),
        "wrong": bf16(1.5 * np.asarray(taps["wrong"], np.float64)),
    }
    return program, opened, taps | made


@pytest.fixture
def searched(recorded, monkeypatch):
    """Return a function that searches and gives {point: its records}, and what was tried: (try, {point: layers})."""
    program, opened, taps = recorded

    def search(small):
        tried = []
        for name in TRIES:
            monkeypatch.setattr(Unrounded, name, noting(getattr(Unrounded, name), tried))
        monkeypatch.setattr(remade, "small", lambda _: small)
        monkeypatch.setattr(remade, "scan_steps", lambda *_: [])  # layers as one scan, not step by step
        found = Emulations(prepare_program(program)).records(
            opened, "a", 0, taps, (program.params, *program.cases["a"])
        )
        return {name: [e for e in found if e.point == name] for name in taps}, tried

    return search


def noting(function, tried):
    """Return a method of Unrounded that notes which layers of which points it is asked for."""

    def noted(self, *given):
        left = next(x for x in given if isinstance(x, dict) and isinstance(next(iter(x)), str))
        tried.append((function.__name__, {point: list(layers) for point, layers in left.items()}))
        return function(self, *given)

    return noted


@pytest.mark.turn  # 6 s
@pytest.mark.parametrize("small", [True, False])
def test_every_place_closes_by_the_way_that_made_it_and_a_fault_by_none(searched, small):
    points, _ = searched(small)
    assert all([e.layer for e in each] == LAYERS for each in points.values())
    for name, each in points.items():
        assert [closes(e) for e in each] == [name != "wrong"] * 3, name
    ways = {name: {(e.elided or {}).get(EQUATIONS, ())[:1] for e in each} for name, each in points.items()}
    del ways["wrong"]
    assert ways == {
        "gate": {()}, "up": {()}, "both": {("inputs",)}, "half": {("some inputs",)}, "inside": {("results inside",)},
    }  # fmt: skip


@pytest.mark.turn  # 4 s
def test_what_is_open_of_a_small_program_is_tried_in_all_layers_and_what_closes_no_more(searched):
    _, tried = searched(True)
    left = dict.fromkeys(("both", "half", "inside", "wrong"), LAYERS)
    for (name, asked), closed in zip(tried, ("both", "inside", "half", None, None), strict=True):
        assert asked == left, name
        left.pop(closed, None)
    assert [name for name, _ in tried] == ["all_inputs", "other_ways", "some_inputs", "differences", "redrawn"]


@pytest.mark.turn
def test_one_layer_is_tried_first_and_what_closes_it_of_the_others(searched):
    _, tried = searched(False)
    left = [("both", "half", "inside", "wrong"), ("half", "inside", "wrong"), ("half", "wrong")]
    assert [asked for _, asked in tried[:3]] == [{point: [0] for point in points} for points in left]
    assert {point: layers for name, asked in tried if name == "made_as" for point, layers in asked.items()} == {
        "both": [1, 2], "half": [1, 2], "inside": [1, 2],
    }  # fmt: skip
    assert all(asked == {"wrong": LAYERS} for name, asked in tried[3:] if name != "made_as")
