"""Thresholds that rounding crosses: FP64 goes on with what the recorded values decide, and with nothing else."""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax import lax
from safetensors.numpy import load_file, save_file

from precaudit import Entry, Program
from precaudit.interpreters.jaxpr.decisions import DECISION, decisions, tag_decisions
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.interpreters.jaxpr.tag import tag_program
from precaudit.judging.gate import gate
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import write_manifest
from precaudit.recording.runs.programs import file_name, open_program_run
from precaudit.references.comparison.programs import compare_program


def threshold(p, x):
    h = x @ p["w"]
    y = jnp.where(h > 0.5, h, 0)
    return y @ p["v"]


def looked_up(p, x):
    h = x @ p["w"]
    at = jnp.clip(jnp.floor(h * 2) + 8, 0, 15).astype(jnp.int32)
    return p["table"][at].sum(1) @ p["u"]


def of_layers(p, x):
    def layer(h, w):
        y = h @ w
        y = jnp.where(jnp.abs(y) > 0.5, y, 0)
        return y + h * jnp.asarray(0.5, h.dtype), None

    return lax.scan(layer, x[:, :24], p["layers"])[0] @ p["v"]


def in_a_branch(p, x):
    """Both branches decide; one is taken."""
    h = x @ p["w"]
    return lax.cond(x[0, 0] > -9, lambda h: jnp.sign(h - 0.5), lambda h: jnp.round(h), h) @ p["v"]


def in_one_branch(p, x):
    """One branch decides, and is taken; what the other would have has no value."""
    h = x @ p["w"]
    return lax.cond(x[0, 0] > -9, lambda h: jnp.sign(h - 0.5), lambda h: h * 2, h) @ p["v"]


def parameters(seed, dtype=jnp.bfloat16):
    draw = np.random.default_rng(seed).normal
    shapes = {"w": (32, 24), "v": (24, 16), "u": (16, 8), "table": (16, 16), "layers": (3, 24, 24)}
    return {n: jnp.asarray(draw(size=s) / s[-2] ** 0.5, dtype) for n, s in shapes.items()}


def program_of(call, seed, **how):
    x = jnp.asarray(np.random.default_rng(seed + 100).normal(size=(5, 32)), jnp.bfloat16)
    return Program(call, parameters(seed), {"a": (x,)}, outputs="y", **how)


def spiking(p, x):
    """A neuron that fires where its potential is over 1: one spike more or less changes all that follow."""

    def step(v, xt):
        v = v * jnp.asarray(0.9, v.dtype) + xt @ p["w"]
        s = (v > 1).astype(v.dtype)
        return v - s, s @ p["v"]

    return lax.scan(step, jnp.zeros(24, x.dtype), jnp.tile(x, (4, 1)))[1]


def pooled_gradient(p, x):
    """The gradient of a maximum over four goes to the place that is largest."""

    def loss(w):
        h = (x @ w).reshape(1, 5, 24, 1)
        pooled = lax.reduce_window(h, -np.inf, lax.max, (1, 1, 4, 1), (1, 1, 4, 1), "VALID")
        return jnp.sum(jnp.square((pooled.reshape(5, 6) @ p["v"][:6]).astype(jnp.float32)))

    return jax.grad(loss)(p["w"])


CROSSING = {
    of_layers: (1, 5, 6),
    spiking: (2, 6),
    threshold: (23, 30),
    pooled_gradient: (13,),
    in_a_branch: (23, 30),
    in_one_branch: (23, 30),
    looked_up: (0,),
}


@pytest.mark.parametrize("call", CROSSING)
def test_values_at_a_threshold_are_rounding(call, tmp_path):
    """With these seeds of all but the last the run and FP64 decide otherwise, and draws of rounding do as FP64."""
    for seed in CROSSING[call]:
        program = program_of(call, seed)
        found = compare_program(trace_program(program, tmp_path / f"{seed}"), program)
        assert {*gate(found).counts} - {"unknown"} == {"pass"}, seed


def decided_by(program, taps):
    made = tag_program(program.call, program.params, *program.cases["a"])
    tagged = tag_decisions(made, program.params, *program.cases["a"])
    with jax.enable_x64(True):
        found = decisions(tagged, Realisation())({n: jnp.asarray(x) for n, x in taps.items()}, program.params, X)
    return {n: np.asarray(x) for n, x in found.items()}


X = jnp.asarray(np.random.default_rng(100).normal(size=(5, 32)), jnp.bfloat16)


def test_decisions_are_those_of_recorded_values(tmp_path):
    program = program_of(threshold, 0)
    taps = trace_program(program, tmp_path / "run").tensors("a", 0, "taps")
    (found,) = decided_by(program, taps).values()
    assert np.array_equal(found, taps["h"] > 0.5)
    turned = taps | {"h": -taps["h"]}
    (found,) = decided_by(program, turned).values()
    assert np.array_equal(found, turned["h"] > 0.5)


def test_decisions_between_points_are_made_as_the_program_rounds(tmp_path):
    """In bfloat16 a sigmoid of 1e-3 is 0.5, and not larger than it; in FP64 it is."""

    def call(p, x):
        h = x @ p["w"]
        return (jax.nn.sigmoid(h) > 0.5).astype(h.dtype) @ p["v"]

    program = program_of(call, 0)
    taps = trace_program(program, tmp_path / "run").tensors("a", 0, "taps")
    h = np.full_like(taps["h"], 1e-3)
    found = decided_by(program, taps | {"h": h})
    assert not found[DECISION].any()


def test_decisions_of_layers_are_stacked(tmp_path):
    program = program_of(of_layers, 1)
    taps = trace_program(program, tmp_path / "run").tensors("a", 0, "taps")
    (found,) = decided_by(program, taps).values()
    assert np.array_equal(found, np.abs(taps["y"].astype(np.float32)) > 0.5)


def test_a_program_that_decides_nothing_has_none():
    """Whole numbers may be compared as they like."""
    made = tag_program(lambda p, x: jnp.where(jnp.arange(24) > 3, x @ p["w"], 0) @ p["v"], parameters(0), X)
    assert tag_decisions(made, parameters(0), X) is None


def test_an_output_that_decided_otherwise_than_its_values_fails(tmp_path):
    """Gates that are turned where no rounding turns them are no rounding."""
    program = program_of(threshold, 0)
    opened = trace_program(program, tmp_path / "run")
    p, h = program.params, opened.tensors("a", 0, "taps")["h"]
    gates = np.array(h > 0.5)
    far = np.abs(h.astype(np.float32) - 0.5) > 0.2
    turned = np.argwhere(far & gates)[:2]
    gates[tuple(turned.T)] = False
    y = jnp.where(jnp.asarray(gates), h, 0)
    changed = {"taps": {"y": y, "threshold": y @ p["v"]}, "outputs": {"outputs.y": y @ p["v"]}}
    hashes = dict(opened.record.hashes)
    for kind, values in changed.items():
        name = file_name(opened.record, "a", 0, kind)
        path = opened.folder / name
        held = load_file(path)
        assert held.keys() >= values.keys()
        save_file(held | {n: np.asarray(x) for n, x in values.items()}, path)
        hashes[name] = file_hash(path)
    write_manifest(opened.folder, msgspec.structs.replace(opened.record, hashes=hashes))
    found = compare_program(open_program_run(opened.folder), program)
    failing = {(v.point, v.kind) for v in gate(found).verdicts if v.status == "fail"}
    assert ("outputs.y", "forward") in failing


def test_a_later_entry_point_goes_on_with_what_the_first_decided(tmp_path):
    """The state that decode begins with is of the decisions of prefill."""

    def again(_inputs, outputs):
        return (outputs,)

    def begin(p, x):
        return of_layers(p, x) @ p["v"].T

    def go_on(p, h):
        return jnp.where(h > 0.2, h, 0) @ p["v"]

    entry = Entry(go_on, again, outputs="z")
    for seed in (1, 5, 6):
        x = jnp.asarray(np.random.default_rng(seed + 100).normal(size=(5, 32)), jnp.bfloat16)
        program = Program(begin, parameters(seed), {"a": (x,)}, outputs="y", then={"then": entry})
        found = compare_program(trace_program(program, tmp_path / f"{seed}"), program)
        assert {*gate(found).counts} == {"pass"}
