"""The FP64 shadow of a JAX program: ``shadow(f)(*args)`` evaluates f's own jaxpr with every float in FP64.

Casts between float formats and roundings to them vanish, products and sums are FP64. What is left of the program is its
formula: candidate − shadow is rounding, shadow − an independent reference is a formula that differs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.transforms.jax_versions import BODY_KEYS, CALLS, REMATS, bind, bodies, closed

F64 = np.dtype("float64")
DTYPES = ("preferred_element_type", "dtype", "new_dtype", "accum_dtype")  # parameters that name a result's format
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
SCATTERS = {
    "scatter": lax.scatter, "scatter-add": lax.scatter_add, "scatter_add": lax.scatter_add,
    "scatter-mul": lax.scatter_mul, "scatter_mul": lax.scatter_mul, "scatter-min": lax.scatter_min,
    "scatter_min": lax.scatter_min, "scatter-max": lax.scatter_max, "scatter_max": lax.scatter_max,
}  # fmt: skip
# Primitives whose meaning is a matter of bits or lies outside the jaxpr.
OPAQUE = frozenset(
    [
        "bitcast_convert_type", "pallas_call", "pure_callback", "io_callback", "ffi_call", "custom_call",
        "tpu_custom_call", "nextafter",
    ]
)  # fmt: skip

Lift = Callable[..., Any]


class CannotLift(Exception):
    """A primitive that has no FP64 meaning of its own; ``name`` is what ``lift`` may name it by."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} cannot be lifted to FP64; give its meaning with --lift {name}=module:function")
        self.name = name


def shadow(function: Callable[..., Any], lift: Mapping[str, Lift] | None = None) -> Callable[..., Any]:
    """Return a function that evaluates ``function``'s jaxpr in FP64 and returns its outputs, floats in FP64.

    The jaxpr is traced with the arguments' own formats, FP64 as float32. Arguments stay narrow until they are read:
    parameters scanned over layers are lifted one layer at a time. ``lift`` maps a primitive's or a Pallas kernel's name
    to a function on FP64 arrays. Raises CannotLift for a primitive without FP64 meaning. Float8 casts vanish as all
    casts do; integers stay integers. Must be called, and its results used, under ``jax.enable_x64(True)``.
    """
    known = dict(lift or {})

    def lifted(*args: Any) -> Any:
        jaxpr, structure = traced(function, args)
        with jax.enable_x64(True):
            out = _Shadow(known).run(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(args))
            return jax.tree.unflatten(structure, [_up(x) for x in out])

    return lifted


def traced(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Return the jaxpr of a function on arguments of 32 bits or less, and the structure of its output."""
    with jax.enable_x64(False):
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*jax.tree.map(_traced_as, tuple(args)))
    return jaxpr, jax.tree.structure(shape)


def _traced_as(x: Any) -> jax.ShapeDtypeStruct:
    """Return the format a program sees where 64-bit types are off."""
    dtype = np.dtype(jnp.asarray(x).dtype if not hasattr(x, "dtype") else x.dtype)
    return jax.ShapeDtypeStruct(np.shape(x), {"float64": np.float32, "int64": np.int32}.get(dtype.name, dtype))


def _floating(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _up(x: Any) -> Any:
    """Lift a float to FP64; bfloat16 and float8 through float32, which holds them exactly."""
    return x.astype(F64) if hasattr(x, "dtype") and _floating(x.dtype) and x.dtype != F64 else x


class _Shadow:
    """Evaluates jaxprs in FP64."""

    def __init__(self, lift: Mapping[str, Lift]) -> None:
        self.lift = lift

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values: dict[Any, Any] = {}

        def read(variable: Any) -> Any:
            return (
                np.asarray(variable.val, variable.aval.dtype) if isinstance(variable, jex.Literal) else values[variable]
            )

        values.update(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))
        for equation in jaxpr.eqns:
            out = self.equation(equation, [read(v) for v in equation.invars])
            values.update(zip(equation.outvars, out, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, equation: Any, inputs: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        named = str(params.get("name") or params.get("name_and_src_info") or "") if name == "pallas_call" else name
        for key, meaning in self.lift.items():
            if key == name or (name == "pallas_call" and key in named):
                found = meaning(*map(_up, inputs))
                return [_up(x) for x in (found if isinstance(found, list | tuple) else [found])]
        if name in ("scan", "while", "cond"):
            return getattr(self, name if name != "while" else "while_loop")(params, inputs)
        if name in CALLS or name in REMATS:
            return self.run(*closed(params["jaxpr"]), inputs)
        if name in OPAQUE or name == "shard_map":
            raise CannotLift(named or name)
        for key in BODY_KEYS:
            if key in params and any(True for _ in bodies(params[key])):
                return self.run(*closed(params[key]), inputs)
        return self.operation(equation, name, [_up(x) for x in inputs])

    def operation(self, equation: Any, name: str, inputs: list[Any]) -> list[Any]:
        params = dict(equation.params)
        if name == "convert_element_type":
            wide = _floating(params["new_dtype"])
            return [lax.convert_element_type(inputs[0], F64 if wide else params["new_dtype"])]
        if name == "reduce_precision":
            return inputs
        if name in SCATTERS:
            keys = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            return [SCATTERS[name](*inputs, **{k: params[k] for k in keys})]
        if any(True for v in params.values() for _ in bodies(v)):
            raise CannotLift(name)
        for key in DTYPES:
            if params.get(key) is not None and _floating(params[key]):
                params[key] = F64
        if name in PRODUCTS:
            params["precision"] = None
        return bind(_Rebound(equation, params), inputs)

    def scan(self, params: Any, inputs: list[Any]) -> list[Any]:
        jaxpr, consts = closed(params["jaxpr"])
        n_consts, n_carry = params["num_consts"], params["num_carry"]
        shared, stacked = inputs[:n_consts], inputs[n_consts + n_carry :]

        def body(carry: Any, xs: Any) -> tuple[list[Any], list[Any]]:
            out = [_up(x) for x in self.run(jaxpr, consts, [*shared, *carry, *xs])]
            return out[:n_carry], out[n_carry:]

        first = [_up(jnp.asarray(x)) for x in inputs[n_consts : n_consts + n_carry]]
        carry, ys = lax.scan(
            body, first, stacked, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
        )
        return [*carry, *ys]

    def while_loop(self, params: Any, inputs: list[Any]) -> list[Any]:
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        cond, body = closed(params["cond_jaxpr"]), closed(params["body_jaxpr"])
        for_cond, for_body, first = inputs[:n_cond], inputs[n_cond : n_cond + n_body], inputs[n_cond + n_body :]
        return list(
            lax.while_loop(
                lambda state: self.run(*cond, [*for_cond, *state])[0],
                lambda state: [_up(x) for x in self.run(*body, [*for_body, *state])],
                [_up(jnp.asarray(x)) for x in first],
            )
        )

    def cond(self, params: Any, inputs: list[Any]) -> list[Any]:
        branches = [lambda *a, b=b: [_up(x) for x in self.run(*closed(b), a)] for b in params["branches"]]
        return list(lax.switch(inputs[0].astype(np.int32), branches, *inputs[1:]))


class _Rebound:
    """An equation with other parameters."""

    def __init__(self, equation: Any, params: dict[str, Any]) -> None:
        self.primitive, self.ctx, self.params = equation.primitive, equation.ctx, params
