"""Sums rounded to their own format after every term: bit for bit as XLA:CPU makes them, in the order that it takes."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from precaudit import Program, gate
from precaudit.interpreters.jaxpr.rounding import round_once
from precaudit.interpreters.jaxpr.sums import LANES, own_sum, sums_in_lanes
from precaudit.recording.programs.tracing import trace_program
from precaudit.references.comparison.programs import compare_program

SHAPES = [
    ((24, 16), (0,)),
    ((2, 12, 16), (0, 1)),
    ((4, 12, 16), (0, 1)),
    ((8, 2, 16), (0, 1)),
    ((5, 4, 16), (0, 1)),
    ((2, 2, 5, 16), (0, 1, 2)),
    ((2, 1, 12, 16), (0, 1, 2)),
    ((16, 4, 8), (1, 2)),
    ((2, 16, 5), (0, 2)),
    ((2, 40, 16), (0, 1)),  # windows, padded
    ((2, 128, 16), (0, 1)),  # windows that need no padding
    ((4, 64, 4, 8), (0, 1)),
]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("shape", "axes"), SHAPES)
def test_sums_are_those_of_the_machine(shape, axes, dtype):
    """In float16 of two axes and more in several sums beside each other, by the processor; in bfloat16 one by one."""
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    made = np.asarray(jax.jit(lambda x: lax.reduce(x, np.zeros((), dtype), lax.add, axes))(x)).astype(np.float64)
    with jax.enable_x64(True):
        stored, wide = partial(round_once, dtype=dtype), x.astype(np.float64)
        ways = [1, LANES] if dtype == np.float16 else [1]
        emulated = [np.asarray(jax.jit(lambda x, n=n: own_sum(x, axes, stored, n))(wide)) for n in ways]
    assert any((made == y).all() for y in emulated)
    if len(ways) == 2 and 40 in shape:  # in windows that are padded there is one sum
        assert (emulated[0] == emulated[1]).all()


def test_where_lanes_are_tried():
    def traced(shape, axes, dtype):
        def total(x):
            return lax.reduce_sum_p.bind(x, axes=axes, out_sharding=None)

        return sums_in_lanes(jax.make_jaxpr(total)(jnp.ones(shape, dtype)).jaxpr)

    assert traced((2, 3, 4), (0, 1), jnp.float16)
    assert not traced((2, 3, 4), (0, 1), jnp.bfloat16)
    assert not traced((2, 3, 4), (0,), jnp.float16)
    assert not traced((5, 3, 4), (0, 1), jnp.float16)


@pytest.mark.parametrize("batch", [2, 4])
def test_a_correct_gradient_of_biases_in_float16_passes(batch, tmp_path):
    """Of a batch of two the sums over examples and tokens failed: no order of theirs was as the compiler's."""
    draw = np.random.default_rng(1)

    def values(*shape, scale=1.0):
        return jnp.asarray(draw.standard_normal(shape) * scale, jnp.float16)

    params = {"w": values(32, 64, scale=0.2), "b": values(64, scale=0.1), "v": values(64, 32, scale=0.2)}
    x, target = values(batch, 12, 32), values(batch, 12, 32)

    def loss(params, x, target):
        y = jax.nn.gelu(x @ params["w"] + params["b"]) @ params["v"]
        return jnp.mean(jnp.square(y.astype(jnp.float32) - target.astype(jnp.float32)))

    program = Program(jax.grad(loss), params, {"a": (x, target)}, outputs="grads")
    opened = trace_program(program, tmp_path / "run")
    assert any(p.primitive == "reduce_sum" and p.dtype == "float16" for p in opened.record.points)
    compare_program(opened, program)
    assert set(gate(opened).counts) == {"pass"}
