"""Products of a jaxpr as a TPU's matrix unit makes them: what can be said of a TPU without its compiler.

Not seen so: which products the vector unit makes, what is stored as bfloat16 between fusions, which roundings a
compiler leaves out.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from precaudit.interpreters.jaxpr.jax_versions import bind, body_of_call, walk
from precaudit.interpreters.jaxpr.loops import LOOPS
from precaudit.interpreters.jaxpr.primitives import CALLS
from precaudit.interpreters.jaxpr.products import PRODUCTS
from precaudit.interpreters.tpu.products import ALGORITHMS, PASSES, product_in_passes


def emulate_passes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with products of floats in the bfloat16 passes that their precision asks for."""

    @wraps(function)
    def run(*args: Any) -> Any:
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        out = _run(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return run


def asked_passes(precision: object) -> int:
    """Return how many passes an equation's precision asks for: a precision, one of each operand, or a preset."""
    names = [getattr(p, "name", "DEFAULT") for p in (precision if isinstance(precision, tuple) else (precision,))]
    return max(PASSES.get(x.lower(), ALGORITHMS.get(f"dot_{x.lower()}", 1)) for x in names)


def _run(jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return walk(jaxpr, consts, args, _step)


def _step(equation: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    if name in LOOPS:
        return LOOPS[name](_run, lambda x: x, params, inputs)
    if name in CALLS:
        return _run(*body_of_call(params, CALLS[name]), inputs)
    if name in PRODUCTS and all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in equation.invars):
        return [_product(equation, *inputs)]
    return bind(equation, inputs)


def _product(equation: jex.JaxprEqn, x: jax.Array, y: jax.Array) -> Any:
    """Return a product with float32 sums, rounded once to the format that it declares."""
    how = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": np.dtype(np.float32)}

    def once(a: jax.Array, b: jax.Array) -> Any:
        return bind(equation, [a, b], {**equation.params, **how})[0]

    made = product_in_passes(asked_passes(equation.params.get("precision")), once, x, y)
    return made.astype(equation.outvars[0].aval.dtype)
