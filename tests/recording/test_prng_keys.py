"""Programs with typed PRNG keys: closed over, given, carried and returned; they are recorded as their bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name as tap

from precaudit import Program, gate
from precaudit.checks.gradients.awkward import awkward
from precaudit.checks.gradients.check import gradcheck
from precaudit.diagnosis.programs import diagnose_program
from precaudit.errors import UserError
from precaudit.interpreters.tpu.target import parse_target
from precaudit.recording.programs.planning import ProgramSelection
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.tracing.predicting import EmulatedTarget
from precaudit.references.comparison.programs import compare_program
from tests.helpers.selected import few

KEY = jax.random.key(7)
W = jax.random.normal(jax.random.key(1), (3, 8, 8), jnp.bfloat16)
X = jax.random.normal(jax.random.key(2), (2, 8), jnp.bfloat16)


def drop(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.75, x.shape), x / 0.75, 0)


def carried(w, x, key):
    """A scan that carries a key on, and returns it."""

    def step(state, w):
        h, k = state
        k, own = jax.random.split(k)
        return (jnp.tanh(drop(h @ w, own)), k), None

    return lax.scan(step, (x, key), w)[0]


def scanned(w, x, key):
    """A scan over keys."""
    return lax.scan(lambda h, each: (jnp.tanh(drop(h @ each[0], each[1])), None), x, (w, jax.random.split(key, 3)))[0]


def looped(w, x, key):
    """A while loop whose state holds a key."""

    def step(state):
        i, h, k = state
        k, own = jax.random.split(k)
        return i + 1, jnp.tanh(drop(h @ w[i], own)), k

    return lax.while_loop(lambda state: state[0] < 3, step, (0, x, key))[1]


def branched(w, x, key):
    """A branch that gives a key."""
    h = x @ w[0]
    chosen = lax.cond(h.sum() > 0, lambda k: jax.random.fold_in(k, 1), lambda k: jax.random.fold_in(k, 2), key)
    return drop(h, chosen) @ w[1]


def tapped(w, x, key):
    """A program with taps of its own, one of a key."""
    return tap(drop(x @ w[0], tap(jax.random.fold_in(key, 3), "key")), "h") @ w[1]


def generated(w, x, key):
    """A step of a loop outside: the next call's key is this one's output."""
    key, own = jax.random.split(key)
    return jnp.tanh(x @ w[0]) + jax.random.normal(own, x.shape, x.dtype) / 8, key


PROGRAMS = {
    "calls": Program(
        generated, W, {"a": (X, KEY), "b": (X, jax.random.key(8))}, 1, lambda _inputs, out: out, outputs=("h", "key")
    ),
    "carried": Program(carried, W, {"a": (X, KEY)}, outputs=("h", "key")),
    "looped": Program(looped, W, {"a": (X, KEY)}, outputs="h"),
    "scanned": Program(scanned, W, {"a": (X, KEY)}, outputs="h"),
    "branched": Program(branched, W, {"a": (X, KEY)}, outputs="h"),
    "tapped": Program(tapped, W, {"a": (X, KEY)}, outputs="h"),
    "a key a row": Program(
        lambda w, x, keys: jax.vmap(drop)(x, keys) @ w[0], W, {"a": (X, jax.random.split(KEY, 2))}, outputs="h"
    ),
    "another generator": Program(
        lambda w, x, key: drop(x, key) @ w[0], W, {"a": (X, jax.random.key(7, impl="rbg"))}, outputs="h"
    ),
    "gradient": Program(
        lambda w, x, key: jax.grad(lambda v: (drop(x @ v[0], key) ** 2).sum())(w), W, {"a": (X, KEY)}, outputs="g"
    ),
}


@pytest.mark.turn  # 6 s
@pytest.mark.parametrize("name", few(PROGRAMS, "calls", "carried"))
def test_a_program_with_keys_is_judged(name, tmp_path):
    program = PROGRAMS[name]
    opened = trace_program(program, tmp_path / "run")
    errors = compare_program(opened, program)
    assert gate(errors).exit_code == 0
    assert {e.kind for e in errors} == {"local", "forward"}
    assert not [e for e in errors if e.numberless]
    assert not diagnose_program(opened, program).findings


def test_a_key_is_recorded_as_its_bits(tmp_path):
    program = PROGRAMS["calls"]
    opened = trace_program(program, tmp_path / "run")
    key = jax.random.key(8)
    for call in range(2):
        np.testing.assert_array_equal(opened.tensors("b", call, "inputs")["1"], jax.random.key_data(key))
        key = jax.random.split(key)[0]


def test_a_run_of_another_key_is_not_this_program_s(tmp_path):
    def made(key):
        return Program(lambda w, x: drop(x, key) @ w[0], W, {"a": (X,)})

    opened = trace_program(made(KEY), tmp_path / "run")
    with pytest.raises(UserError, match="parameters are not those that were traced"):
        compare_program(opened, made(jax.random.key(8)))


def test_some_layers_of_a_scan_that_carries_a_key(tmp_path):
    program = PROGRAMS["carried"]
    errors = compare_program(trace_program(program, tmp_path / "run", ProgramSelection(layers=[1])), program)
    assert gate(errors).exit_code == 0
    assert {e.layer for e in errors if e.kind == "local"} == {1}


@pytest.mark.turn  # 4 s
def test_keys_on_a_tpu_that_is_not_here(tmp_path):
    at = parse_target("v5e", "--device")
    program = PROGRAMS["calls"]
    opened = trace_program(
        program, tmp_path / "run", options=ProgramTraceOptions(target=EmulatedTarget(at.generation, at.topology))
    )
    assert gate(compare_program(opened, program)).exit_code == 0


@pytest.mark.turn  # 4 s
def test_a_kernel_that_is_given_a_key():
    def inputs(seed):
        return jax.random.normal(jax.random.key(seed), (4, 32)), jax.random.key(seed)

    def reference(x, key):
        return drop(x, key).sum(axis=-1)

    assert gradcheck(reference, reference, inputs, seeds=1, hostile=False).exit_code == 0
    assert not [name for name, _ in awkward(inputs(0)) if name.startswith("input 1")]
    wrong = gradcheck(lambda x, key: reference(x, key) * 1.01, reference, inputs, seeds=1, hostile=False)
    assert wrong.exit_code == 1
