"""A program whose arrays lie in another order of axes: products with their operands swapped, elements reversed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit import Program
from precaudit.interpreters.jaxpr.evaluated import Evaluated
from precaudit.interpreters.jaxpr.jax_versions import bind, bodies
from tests.helpers.audited_cases import program as case
from tests.helpers.gpu_programs import PROGRAMS

ELEMENTWISE = {
    "add", "convert_element_type", "cos", "div", "exp", "integer_pow", "logistic", "max", "min", "mul", "neg", "rsqrt",
    "select_n", "sin", "sub", "tanh",
}  # fmt: skip


class Permuted(Evaluated):
    """Evaluates a jaxpr with products as (B · A)ᵀ, and what is element by element with its axes reversed."""

    def equation(self, e, inputs):
        if e.primitive.name == "dot_general":
            return [swapped(e.params, *inputs)]
        shapes = {jnp.shape(x) for x in inputs}
        if e.primitive.name in ELEMENTWISE and len(shapes) == 1 and len(*shapes) > 1:
            return [jnp.transpose(x) for x in bind(e, [jnp.transpose(x) for x in inputs])]
        return super().equation(e, inputs)

    def within(self, e):
        return any(True for value in e.params.values() for _ in bodies(value))


def swapped(params, a, b):
    """Return a product made with its operands the other way round."""
    (ca, cb), (ba, bb) = params["dimension_numbers"]
    how = {k: params[k] for k in ("precision", "preferred_element_type")}
    out = lax.dot_general(b, a, ((cb, ca), (bb, ba)), **how)
    batch, first = len(ba), b.ndim - len(cb) - len(bb)
    order = [*range(batch), *range(batch + first, out.ndim), *range(batch, batch + first)]
    return jnp.transpose(out, order)


def permuted(program):
    """Return a Program with its axes in another order."""

    def call(*given):
        closed, shape = jax.make_jaxpr(program.call, return_shape=True)(*given)
        out = Permuted().run(closed.jaxpr, closed.consts, jax.tree.leaves(given))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return replace(program, call=call)


def grouped(tokens=300):
    """Scores of grouped queries, which einsum makes with the two queries of a group along the last axis."""
    draw = np.random.default_rng(5)
    q, k = (jnp.asarray(draw.standard_normal((1, tokens, *rest, 16)), jnp.bfloat16) for rest in ((2, 2), (2,)))

    def call(w, q, k):
        return jnp.einsum("btgrk,bsgk->bgrts", q, k, preferred_element_type=jnp.float32) * w

    return Program(call, jnp.float32(0.25), {"a": (q, k)}, outputs="scores")


SUITE = {"grouped queries": grouped, **{name: lambda p=p: p for name, p in PROGRAMS.items() if "x3" not in name}}
SUITE |= {name: lambda name=name: case(name) for name in ("row_mask.py:ok", "positions.py:ok", "flushed.py:p5")}
