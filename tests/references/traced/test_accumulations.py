"""Accum records of programs: what NumPy's own sums in a format, step by step, make of the recorded inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precaudit.judging.gate import gate
from precaudit.models.numpy_decoder.accumulation import accumulating
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import trace_program
from precaudit.references.comparison.programs import compare_program
from precaudit.schema.records.base import value

FORMATS = ("float16", "bfloat16", "float32", "float16/128", "bfloat16/32")
DRAW = np.random.default_rng(3)
W = jnp.asarray(DRAW.standard_normal((200, 24)), jnp.bfloat16)
X = jnp.asarray(DRAW.standard_normal((5, 200)), jnp.bfloat16)


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    def call(w, x):
        h = jnp.tanh(x)
        product = h @ w
        return 3 * product

    program = Program(call, W, {"a": (X,)}, outputs="out")
    opened = trace_program(program, tmp_path_factory.mktemp("runs") / "run")
    return opened, compare_program(opened, program, accum=FORMATS)


@pytest.mark.parametrize("text", FORMATS)
def test_the_sums_are_those_of_the_format(errors, text):
    opened, records = errors
    (e,) = (e for e in records if e.kind == "accum" and e.candidate == f"accum:{text}" and e.point == "product")
    h = opened.tensors("a", 0, "taps")["h"].astype(np.float64)
    w = np.asarray(W).astype(np.float64)
    exact, made = h @ w, accumulating(text)(h, w)
    expected = np.linalg.norm(made - exact) / np.linalg.norm(exact)
    assert value(e.rel_l2) == pytest.approx(expected, rel=1e-2 if text == "bfloat16/32" else 1e-6)
    assert value(e.max_diff) == pytest.approx(np.abs(made - exact).max(), rel=2e-2)


def test_only_what_multiplies_has_them(errors):
    _, records = errors
    assert {e.point for e in records if e.kind == "accum"} == {"product"}
    assert all(e.phase == "call" and e.reference == "fp64" for e in records if e.kind == "accum")


def test_none_is_made_where_none_is_asked_for(tmp_path):
    program = Program(lambda w, x: x @ w, W, {"a": (X,)}, outputs="out")
    assert not [e for e in compare_program(trace_program(program, tmp_path / "run"), program) if e.kind == "accum"]


def test_products_in_scans_and_batches(tmp_path):
    w = jnp.asarray(DRAW.standard_normal((3, 16, 16)) / 4, jnp.bfloat16)
    x = jnp.asarray(DRAW.standard_normal((2, 4, 16)), jnp.bfloat16)

    def call(w, x):
        def one(x, w):
            y = jnp.einsum("btd,de->bte", x, w)
            return y, None

        return jax.lax.scan(one, x, w)[0]

    program = Program(call, w, {"a": (x,)}, outputs="out")
    opened = trace_program(program, tmp_path / "run")
    found = {
        e.layer: e for e in compare_program(opened, program, accum=("float16",)) if e.kind == "accum" and e.point == "y"
    }
    assert sorted(found) == [0, 1, 2]
    y = opened.tensors("a", 0, "taps")["y"].astype(np.float64)
    for i, e in found.items():
        before = (np.asarray(x) if i == 0 else y[i - 1]).astype(np.float64).reshape(-1, 16)
        exact, made = (dot(before, np.asarray(w[i]).astype(np.float64)) for dot in (np.matmul, accumulating("float16")))
        assert value(e.rel_l2) == pytest.approx(np.linalg.norm(made - exact) / np.linalg.norm(exact), rel=1e-6)


def test_a_system_that_is_solved_in_a_scan_has_those_of_its_products(tmp_path):
    """Sums that are rounded have no transpose, which JAX asks for of the operator of a solve."""
    gain, seen = (jnp.asarray(DRAW.standard_normal(n) / 3, jnp.float32) for n in ((3, 6), (5, 3)))

    def filtered(gain, seen):
        def step(state, y):
            mean, spread = state
            innovation = gain @ spread @ gain.T + jnp.eye(3)
            weight = jnp.linalg.solve(innovation, gain @ spread).T
            return (mean + weight @ (y - gain @ mean), spread - weight @ (gain @ spread) + 0.1 * jnp.eye(6)), mean

        return jax.lax.scan(step, (jnp.zeros(6), jnp.eye(6)), seen)[1]

    program = Program(filtered, gain, {"a": (seen,)}, outputs="means")
    found = compare_program(trace_program(program, tmp_path / "run"), program, accum=("bfloat16",))
    assert {e.layer for e in found if e.kind == "accum" and e.point.startswith("innovation")} == set(range(5))
    assert gate(found).exit_code == 0
