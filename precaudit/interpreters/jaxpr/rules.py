"""FP64 rules of single primitives: ``rule(run, params, inputs) → outputs``, inputs in FP64, ``run`` lifts a body."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from precaudit.interpreters.jaxpr.jax_versions import open_jaxpr
from precaudit.interpreters.jaxpr.wide import wide_dtype

Run = Callable[[Any, Sequence[Any], Sequence[Any]], list[Any]]
Rule = Callable[[Run, Any, list[Any]], list[Any]]

SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}

MONOIDS = {"add": lax.add, "mul": lax.mul, "max": lax.max, "min": lax.min}


def convert(_run: Run, params: Mapping[str, Any], inputs: list[Any]) -> list[Any]:
    """Convert to the format written, FP64 for any float."""
    return [lax.convert_element_type(inputs[0], wide_dtype(params["new_dtype"]))]


def keep_operand(_run: Run, _params: Mapping[str, Any], inputs: list[Any]) -> list[Any]:
    """Leave the operand as it is."""
    return inputs[:1]


def nothing(_run: Run, _params: Mapping[str, Any], _inputs: list[Any]) -> list[Any]:
    """Give no value."""
    return []


def zeros(_run: Run, params: Mapping[str, Any], _inputs: list[Any]) -> list[Any]:
    """Give zeros for what has no value yet."""
    return [jnp.zeros(params.get("shape", ()), wide_dtype(params["dtype"]))]


def read_bits(_run: Run, params: Mapping[str, Any], inputs: list[Any]) -> list[Any]:
    """Read an integer's bits."""
    made = lax.bitcast_convert_type(inputs[0], params["new_dtype"])
    return [made.astype(wide_dtype(made.dtype))]


def monoid_of(params: Mapping[str, Any]) -> str:
    """Return the operation of two elements that a reducer is, such as ``add``; "" of any other function."""
    body = open_jaxpr(params["jaxpr"])[0]
    if len(body.eqns) != 1 or len(body.invars) != 2 or body.eqns[0].invars != body.invars:
        return ""
    name = str(body.eqns[0].primitive.name)
    return name if body.eqns[0].outvars == body.outvars and name in MONOIDS else ""


def _reducer(run: Run, params: Mapping[str, Any], consts: Sequence[Any] = ()) -> Callable[[Any, Any], Any]:
    """Return a reduction's function of two elements each; where it is a single operation, that."""
    if name := monoid_of(params):
        return lambda a, b: (MONOIDS[name](*a, *b),)
    return lambda a, b: tuple(run(*open_jaxpr(params["jaxpr"], consts), [*a, *b]))


def lift_reduce(run: Run, params: Mapping[str, Any], inputs: list[Any]) -> list[Any]:
    """Reduce by the lifted reducer; operands [n arrays] and their initial values."""
    n = len(inputs) // 2
    reducer = _reducer(run, params)
    return list(lax.reduce(tuple(inputs[:n]), tuple(inputs[n:]), reducer, params["dimensions"]))


def lift_reduce_window(run: Run, params: Mapping[str, Any], inputs: list[Any]) -> list[Any]:
    """Reduce windows by the lifted reducer; operands [n arrays] and their initial values."""
    n = len(inputs) // 2
    reducer = _reducer(run, params, params.get("consts", ()))
    keys = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
    return list(lax.reduce_window(tuple(inputs[:n]), tuple(inputs[n:]), reducer, *(params[k] for k in keys)))


def scatter_rule(name: str) -> Rule:
    """Return the rule of a scatter; raises ValueError for an update that is neither its own nor of one element."""

    def rule(run: Run, params: Mapping[str, Any], inputs: list[Any]) -> list[Any]:
        keys = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        how = {k: params[k] for k in keys}
        body, consts = (
            open_jaxpr(params["update_jaxpr"], params["update_consts"]) if params["update_jaxpr"] else (None, ())
        )
        if name != "scatter" or body is None or body.outvars == body.invars[1:]:
            return [SCATTERS[name](*inputs, **how)]
        if _reads(body, body.invars[1]):
            raise ValueError("its update is a function of both elements")
        operand, indices, updates = inputs

        def update(x: object) -> Any:
            return run(body, consts, [x, jnp.zeros((), updates.dtype)])[0]

        return [
            lax.scatter_apply(operand, indices, update, how.pop("dimension_numbers"), update_shape=updates.shape, **how)
        ]

    return rule


def _reads(body: jex.Jaxpr, variable: jex.Var | jex.Literal) -> bool:
    return variable in body.outvars or any(variable is v for e in body.eqns for v in e.invars)


def linear_solve(run: Run, params: Mapping[str, Any], inputs: list[Any]) -> list[Any]:
    """Solve by the lifted solver, derivatives by the lifted operator."""
    jaxprs, lengths = params["jaxprs"], params["const_lengths"]
    rest, parts = list(inputs), {}
    for name, length in lengths._asdict().items():
        parts[name], rest = rest[:length], rest[length:]
    n = len(rest)

    def solver(name: str) -> Callable[..., Any]:
        def solve(_: Any, b: Any) -> Any:
            out = run(*open_jaxpr(getattr(jaxprs, name)), [*parts[name], *b])
            return out[:n], out[n:]

        return solve

    x, others = lax.custom_linear_solve(
        lambda x: run(*open_jaxpr(jaxprs.matvec), [*parts["matvec"], *x]),
        rest,
        solver("solve"),
        None if jaxprs.transpose_solve is None else solver("transpose_solve"),
        has_aux=True,
    )
    return [*x, *others]


def solve_alone(run: Run, params: Mapping[str, Any], inputs: Sequence[Any]) -> list[Any]:
    """Return what the solver of a ``custom_linear_solve`` makes alone: roundings have no transpose, as JAX asks for."""
    lengths = params["const_lengths"]
    skipped = sum(lengths[:2])  # of the operator, and of its transpose
    own, rest = inputs[skipped : skipped + lengths.solve], inputs[sum(lengths) :]
    return run(*open_jaxpr(params["jaxprs"].solve), [*own, *rest])


def select_batched(chosen: jax.Array, new: jax.Array, old: jax.Array) -> Any:
    """Choose elements by a batched predicate, whose axes lead."""
    axes = tuple(range(chosen.ndim, jax.numpy.ndim(new)))
    return jnp.where(jnp.expand_dims(chosen, axes), new, old)


def psum(_run: Run, params: Mapping[str, Any], inputs: list[Any]) -> list[Any]:
    """Sum over the axes of a mesh."""
    return [lax.psum(inputs[0], params["axes"])]


def all_gather(_run: Run, params: Mapping[str, Any], inputs: list[Any]) -> list[Any]:
    """Put the shards along axes of a mesh together."""
    at, tiled = params["all_gather_dimension"], params["tiled"]
    return [lax.all_gather(inputs[0], params["axis_name"], axis=at, tiled=tiled)]


RULES: dict[str, Rule] = {
    "psum_invariant": psum,
    "all_gather_invariant": all_gather,
    "pvary": lambda _run, _params, inputs: inputs,
    "convert_element_type": convert,
    "reduce_precision": keep_operand,
    "layout_constraint": keep_operand,
    "bitcast_convert_type": read_bits,
    "reduce": lift_reduce,
    "reduce_window": lift_reduce_window,
    "custom_linear_solve": linear_solve,
    "debug_callback": nothing,
    "debug_print": nothing,
    "inspect_sharding": nothing,
    "dce_sink": nothing,
    "empty": zeros,
    "empty2": zeros,
} | {name: scatter_rule(name) for name in SCATTERS}
