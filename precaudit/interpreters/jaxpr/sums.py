"""Sums of an emulated program: in float32, in any order, or rounded to their own format after every term."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from precaudit.interpreters.jaxpr.inaccuracy import mixed_bits
from precaudit.interpreters.jaxpr.jax_versions import bind, walk_equations
from precaudit.interpreters.jaxpr.primitives import PRODUCTS
from precaudit.interpreters.jaxpr.rules import RULES, monoid_of
from precaudit.interpreters.jaxpr.wide import wide_dtype

Ordered = Callable[..., Any]  # order(x, axis, n=n): an array with one of its axes, a sum's n-th, in another order
WINDOW = 32  # terms of a sum that XLA:CPU adds up before it adds up the parts
LANES = 16  # sums that it makes beside each other in a register, at most
# Their results are linear in the operands that are named here.
LINEAR: dict[str, tuple[int, ...]] = dict.fromkeys(
    (*PRODUCTS.split(), "reduce_sum", "cumsum", "reduce_window_sum", "fft"), (0,)
)
LINEAR |= {"scatter-add": (0, 2), "scatter-sub": (0, 2)}
# Formulas and factorisations of the platform's own: their error is no rounding of their result.
LIBRARY = {
    "bessel_i0e",
    "bessel_i1e",
    "cholesky",
    "cholesky_update",
    "cumlogsumexp",
    "cumprod",
    "digamma",
    "eig",
    "eigh",
    "erf_inv",
    "hessenberg",
    "householder_product",
    "igamma",
    "igamma_grad_a",
    "igammac",
    "lgamma",
    "lu",
    "ormqr",
    "polygamma",
    "qr",
    "reduce_prod",
    "regularized_incomplete_beta",
    "schur",
    "svd",
    "symmetric_product",
    "triangular_solve",
    "tridiagonal",
    "tridiagonal_solve",
    "zeta",
}
OVER_DEVICES = {"psum", "psum_invariant", "reduce_scatter"}
OWN = OVER_DEVICES | {
    "cumlogsumexp",
    "cumprod",
    "cumsum",
    "reduce_prod",
    "reduce_sum",
    "reduce_window_sum",
    "scatter-add",
    "scatter-sub",
}


def float_bits(dtype: DTypeLike) -> int:
    """Return the width of a float format; 0 of others, and of None."""
    if dtype is None:
        return 0
    return int(jnp.finfo(dtype).bits) if jnp.issubdtype(dtype, jnp.floating) else 0


def sums_narrow(jaxpr: jex.Jaxpr) -> bool:
    """Whether a jaxpr, or a body in it, sums in a narrow format what it does not convert before."""
    return any(map(narrow_sum, walk_equations(jaxpr)))


def narrow_sum(equation: jex.JaxprEqn) -> bool:
    """Whether an equation adds or multiplies up terms, and its format has less than 32 bits."""
    adds = equation.primitive.name in OWN or monoid(equation) in ("add", "mul")
    return adds and 8 < float_bits(equation.outvars[0].aval.dtype) < 32


def monoid(equation: jex.JaxprEqn) -> str:
    """Return the operation that a reduction is of, such as ``add``; "" where it is none, or of several arrays."""
    if equation.primitive.name not in ("reduce", "reduce_window") or len(equation.outvars) > 1:
        return ""
    return monoid_of(equation.params)


def sums_in_single(equation: jex.JaxprEqn) -> bool:
    """Whether an equation sums floats of 32 bits or less, or is a formula of the platform's own."""
    if equation.primitive.name not in LINEAR.keys() | LIBRARY and monoid(equation) != "add":
        return False
    dtype = equation.outvars[0].aval.dtype
    return 0 < float_bits(dtype) <= 32 or bool(dtype == np.complex64)


def sum_in_single(equation: jex.JaxprEqn, inputs: Sequence[Any], factor: ArrayLike, order: Ordered | None) -> list[Any]:
    """Return what an equation gives in float32, lifted; of what is linear times ``factor`` inside.

    ``order``: what puts the terms of a sum into another order, axis by axis (None: as they are). Of terms that are
    equal every addition rounds the same way; which way, the factor draws.
    """
    name, params = equation.primitive.name, dict(equation.params)
    linear = (0, 1) if monoid(equation) == "add" else LINEAR.get(name, ())
    narrow = [_narrow(x * factor if i in linear else x) for i, x in enumerate(inputs)]
    if name in PRODUCTS.split():
        params |= {"preferred_element_type": _single(equation.outvars[0].aval.dtype)}
        params |= {"precision": lax.Precision.HIGHEST}
    if order is not None:
        for i, axes in enumerate(_axes(equation)):
            for n, (axis, groups) in enumerate(axes):
                narrow[i] = _in_groups(narrow[i], axis, groups, partial(order, n=n))
    made = RULES[name](None, params, narrow) if name in RULES else bind(equation, narrow, params)  # type: ignore[arg-type]
    return [_lift_array(x) / factor if linear else _lift_array(x) for x in made]


def _axes(equation: jex.JaxprEqn) -> Iterable[Sequence[tuple[int, int]]]:
    """Return the axes that each operand is summed over, with how many groups of them are summed each by itself."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return [[(axis, 1) for axis in axes] for axes in params["dimension_numbers"][0]]
    if name == "conv_general_dilated" and params["batch_group_count"] == 1:
        numbers = params["dimension_numbers"]
        return [(numbers.lhs_spec[1], params["feature_group_count"])], [(numbers.rhs_spec[1], 1)]
    if name == "reduce_sum":
        return [[(axis, 1) for axis in params["axes"]]]
    return []


def sums_in_lanes(jaxpr: jex.Jaxpr) -> bool:
    """Whether a jaxpr, or a body in it, sums float16 over two axes and more, of which one is even."""
    sums = (e for e in walk_equations(jaxpr) if e.primitive.name == "reduce_sum" and narrow_sum(e))
    sums = (e for e in sums if e.outvars[0].aval.dtype == np.float16 and len(e.params["axes"]) > 1)
    return any(e.invars[0].aval.shape[a] % 2 == 0 for e in sums for a in e.params["axes"])


def own(equation: jex.JaxprEqn, inputs: Sequence[Any], stored: Callable[[Any], Any], lanes: bool) -> list[Any]:
    """Return a sum rounded to its own format after every term, lifted.

    ``reduce_sum`` as XLA:CPU adds; over devices in the order of their ranks; others as the platform makes them in that
    format. ``lanes``: float16 in several sums beside each other, as ``own_sum`` has them.
    """
    if equation.primitive.name in OVER_DEVICES and all(isinstance(a, str) for a in _mesh_axes(equation)):
        return [_over_devices(equation, x, stored) for x in inputs]
    if equation.primitive.name == "reduce_sum":
        several = LANES if lanes and equation.outvars[0].aval.dtype == np.float16 else 1
        return [own_sum(inputs[0], equation.params["axes"], stored, several)]
    dtype = equation.outvars[0].aval.dtype
    narrow = [stored(x).astype(dtype) if float_bits(x.dtype) else x for x in inputs]
    name = equation.primitive.name
    made = RULES[name](None, equation.params, narrow) if name in RULES else bind(equation, narrow)  # type: ignore[arg-type]
    return [_lift_array(x) for x in made]


def own_sum(x: jax.Array, axes: Sequence[int], stored: Callable[[Any], Any], lanes: int = 1) -> Any:
    """Return the sum over axes rounded after every term, as XLA:CPU adds: by windows of 32 while an axis is longer.

    Windows are padded on both sides as ``lax.reduce_window`` does for SAME (XLA's tree reduction; bit for bit).
    ``lanes``: into how many sums, a power of two at most, the terms of the last axis but one go in turn. They are added
    at the end, halves to halves: LLVM's loop vectoriser does so with float16, where windows need no padding.
    """
    axes = sorted(axes)
    while any(x.shape[a] > WINDOW for a in axes):
        size = [min(WINDOW, n) if i in axes else 1 for i, n in enumerate(x.shape)]
        lacks = [-n % w for n, w in zip(x.shape, size, strict=True)]
        x = jnp.pad(x, [(n // 2, n - n // 2) for n in lacks])
        padded = x.shape
        split = x.reshape([k for n, w in zip(x.shape, size, strict=True) for k in (n // w, w)])
        x = _term_by_term(split, [2 * a + 1 for a in axes], stored, 1 if any(lacks) else lanes)
        x = x.reshape([n // w for n, w in zip(padded, size, strict=True)])
    return _term_by_term(x, axes, stored, lanes)


def _mesh_axes(equation: jex.JaxprEqn) -> Any:
    """Return the axes that a collective sums over: names of a mesh's, or numbers of an array's that JAX maps."""
    params = equation.params
    return params["axes"] if "axes" in params else params["axis_name"]


def _over_devices(equation: jex.JaxprEqn, x: jax.Array, stored: Callable[[Any], Any]) -> Any:
    """Return a sum over axes of a mesh, rounded after every device's term; of a ``reduce_scatter`` a device's part."""
    params = equation.params
    groups = {"axis_index_groups": params.get("axis_index_groups")}
    if equation.primitive.name != "reduce_scatter":
        terms = lax.all_gather(x, _mesh_axes(equation), **groups)
    else:
        size, at = params["axis_size"], params["scatter_dimension"]
        apart = x.reshape(*x.shape[:at], size, -1, *x.shape[at + 1 :]) if params["tiled"] else x
        terms = lax.all_to_all(jnp.moveaxis(apart, at, 0), params["axis_name"], 0, 0, **groups)
    return reduce(lambda total, term: stored(total + term), terms)


def _term_by_term(x: jax.Array, axes: Sequence[int], stored: Callable[[Any], Any], lanes: int) -> Any:
    """Return the sum over axes, rounded after every term, in the order in which they lie, or in several sums."""
    axes, kept = sorted(axes, key=lambda a: x.shape[a] > 1), [i for i in range(x.ndim) if i not in axes]
    terms, rest = jnp.transpose(x, (*axes, *kept)), [x.shape[i] for i in kept]
    each = math.gcd(terms.shape[len(axes) - 2], lanes) if len(axes) > 1 else 1

    def add_up(first: Any, terms: Any) -> Any:
        return lax.scan(lambda total, term: (stored(total + term), None), first, terms)[0]

    if each == 1:
        return add_up(jnp.zeros(rest), terms.reshape(-1, *rest))
    last = terms.shape[len(axes) - 1]

    def add_block(total: Any, block: Any) -> tuple[Any, None]:
        first = jnp.concatenate([total[None], jnp.zeros((each - 1, *rest))])
        turns = block.reshape(-1, each, last, *rest).swapaxes(1, 2).reshape(-1, each, *rest)
        sums = add_up(first, turns)
        while len(sums) > 1:
            half = len(sums) // 2
            sums = stored(sums[:half] + sums[half:])
        return sums[0], None

    blocks = terms.reshape(-1, terms.shape[len(axes) - 2], last, *rest)
    return lax.scan(add_block, jnp.zeros(rest), blocks)[0]


def _in_groups(x: jax.Array, axis: int, groups: int, order: Callable[[Any, int], Any]) -> Any:
    """Return an array with an axis in another order, the same in each of its groups."""
    split = x.reshape(*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])
    return order(split, axis + 1).reshape(x.shape)


def _single(dtype: DTypeLike) -> Any:
    return np.dtype(np.complex64 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float32)


def _narrow(x: jax.Array) -> Any:
    return x.astype(_single(x.dtype)) if x.dtype in (np.float64, np.complex128) else x


def _lift_array(x: jax.Array) -> Any:
    return x.astype(wide_dtype(x.dtype))


def order_of_terms(sums: str, mark: Callable[[int], Any]) -> Ordered | None:
    """Return what puts the terms of a sum, by an axis and which of the sum's it is, into an order; None: as they are.

    ``sums``: as a realisation has them, reversed or shuffled; ``mark``: what an order is drawn from, of the n-th axis.
    """

    def reverse(x: jax.Array, axis: int, n: int) -> Any:  # noqa: ARG001 - given by name, as to ``shuffle``
        return lax.rev(x, (axis,))

    def shuffle(x: jax.Array, axis: int, n: int) -> Any:
        marks = mixed_bits(jnp.arange(x.shape[axis], dtype=np.uint64), mark(n))
        return jnp.take(x, jnp.argsort(marks), axis=axis)

    return {"reversed": reverse, "shuffled": shuffle}.get(sums)
