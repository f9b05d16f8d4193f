"""Custom calls of predicted programs: Pallas kernels run in interpret mode, others end it with their name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from precaudit.checks.kernels import grpo
from precaudit.errors import UserError
from precaudit.interpreters.tpu.target import parse_target
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.tracing.predicting import PredictedProgram
from tests.helpers.tpus import needs_libtpu

V5E = parse_target("v5e")
DRAW = np.random.default_rng(0)
X, W = (jnp.asarray(DRAW.standard_normal((128, 128)) / 8, jnp.float32) for _ in "xw")


def exponential(x, w):
    """A kernel over two blocks of rows, between operations of the compiler's own."""

    def body(x_ref, w_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...]) + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    rows, whole = pl.BlockSpec((64, 128), lambda i: (i, 0)), pl.BlockSpec((128, 128), lambda _: (0, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jnp.tanh(pl.pallas_call(body, grid=(2,), in_specs=[rows, whole], out_specs=rows, out_shape=shape)(2 * x, w))


def scaled(x, by):
    def body(a, b):
        b[...] = a[...] * by

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@needs_libtpu
def test_a_kernel_runs_as_it_was_written():
    made = PredictedProgram(V5E, exponential)
    exact = np.tanh(np.exp(2 * np.float64(X)) + 2 * np.float64(X) @ np.float64(W))
    assert np.max(np.abs(np.asarray(made(X, W)) - exact)) < 1e-6
    (name,) = made.made(X, W).kernels
    assert name.startswith(__file__)


@pytest.mark.turn  # 4 s
@needs_libtpu
def test_a_kernel_that_streams_and_its_gradient_run():
    """The GRPO kernel, forward and backward, against its plain reference on this CPU."""
    given = grpo.inputs(0, size=(16, 300))
    made = PredictedProgram(V5E, jax.grad(grpo.kernel))(*given)
    plain = jax.grad(grpo.reference)(*given)
    assert np.max(np.abs(made - plain)) <= 1e-5 * np.max(np.abs(plain))


@needs_libtpu
def test_of_kernels_that_may_be_a_call_the_line_decides_or_none_does():
    def lines(x, w):
        a = scaled(x, 2.0)
        b = scaled(w, 3.0)
        return a - b

    with pytest.raises(UserError, match="2 Pallas kernels may be the custom call"):
        PredictedProgram(V5E, lines)(X, W)

    def shapes(x, w):
        return scaled(x, 2.0)[:64] - scaled(w[:64], 3.0)

    assert np.max(np.abs(PredictedProgram(V5E, shapes)(X, W) - (2 * X - 3 * W)[:64])) < 1e-6


@needs_libtpu
def test_another_custom_call_ends_the_prediction_with_its_name():
    with pytest.raises(UserError, match=r"what the custom call '\w+' computes is not known"):
        PredictedProgram(V5E, lambda x: lax.approx_max_k(x, 4)[0])(jnp.zeros((64, 4096)))


@needs_libtpu
def test_a_run_of_a_program_with_a_kernel_says_so(tmp_path):
    run = trace_program(
        Program(call=exponential, params=X, cases={"a": (W,)}),
        tmp_path / "run",
        options=ProgramTraceOptions(target=V5E),
    )
    (told,) = run.record.neutrality
    assert len(told.predicted.kernels) == 1
