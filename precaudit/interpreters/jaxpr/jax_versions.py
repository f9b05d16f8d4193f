"""What differs between JAX 0.8.2 and the newest: the shape of jaxpr parameters and how an equation is bound again."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import islice
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax
from jax.extend import source_info_util
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def open_jaxpr(jaxpr: jex.Jaxpr | jex.ClosedJaxpr, consts: Sequence[Any] = ()) -> tuple[Any, Sequence[Any]]:
    """Return (open jaxpr, constants) of a closed or an open jaxpr."""
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, jex.ClosedJaxpr) else (jaxpr, consts)


def bodies(value: object) -> Iterator[Any]:
    """Yield the open jaxprs inside one equation parameter."""
    if isinstance(value, jex.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, jex.Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from bodies(item)


def with_bodies(value: object, change: Callable[[Any], Any]) -> Any:
    """Return one equation parameter with the open jaxprs inside it changed."""
    if isinstance(value, jex.ClosedJaxpr):
        return jex.ClosedJaxpr(change(value.jaxpr), value.consts)
    if isinstance(value, jex.Jaxpr):
        return change(value)
    if isinstance(value, tuple) and any(True for _ in bodies(value)):
        return tuple(with_bodies(x, change) for x in value)
    return value


def walk_equations(jaxpr: jex.Jaxpr) -> Iterator[Any]:
    """Yield the equations of an open jaxpr, each before those of the bodies in it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for body in bodies(value):
                yield from walk_equations(body)


def bind(
    equation: jex.JaxprEqn, arguments: Sequence[Any], params: Mapping[str, Any] | None = None, mesh: Any = None
) -> list[Any]:
    """Apply an equation's primitive to new arguments; up to JAX 0.9 bind parameters come with sub-functions.

    ``params``, ``mesh``: other parameters than the equation's own, and another abstract mesh.
    """
    found = equation.primitive.get_bind_params(equation.params if params is None else params)
    functions, known = found if isinstance(found, tuple) else ((), found)
    other = nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)
    with equation.ctx.manager, other:
        result = equation.primitive.bind(*functions, *arguments, **known)
    return list(result) if equation.primitive.multiple_results else [result]


def source_context(equation: jex.JaxprEqn) -> AbstractContextManager[Any]:
    """Return the context in which what is bound is of the user's line and the named scopes of an equation.

    The scopes come after those that are open; a compiled program names its instructions by them.
    """
    names = source_info_util.current_name_stack() + equation.source_info.name_stack
    return source_info_util.user_context(equation.source_info.traceback, name_stack=names)


def source(equation: jex.JaxprEqn) -> str:
    """Return the user's line an equation was written in, ``file.py:12 (function)``; empty where JAX kept none."""
    try:
        return str(source_info_util.summarize(equation.source_info))
    except (AttributeError, TypeError):
        return ""


def frames(equation: jex.JaxprEqn) -> tuple[tuple[str, int, int, str], ...]:
    """Return (file, line, column, function) an equation was made in, innermost first; empty where JAX kept none."""
    trace = getattr(getattr(equation, "source_info", None), "traceback", None)
    if trace is None:
        return ()
    codes, at = trace.raw_frames()
    return tuple((c.co_filename, *_position(c, i), c.co_name) for c, i in zip(codes, at, strict=True))


@cache
def _position(code: Any, instruction: int) -> tuple[int, int]:
    """Return line and column of an instruction; two on a line are told by their columns (PEP 657)."""
    line, _, column, _ = next(islice(code.co_positions(), max(instruction, 0) // 2, None), (0, 0, 0, 0))
    return line or code.co_firstlineno, column or 0


def body_of_call(params: Mapping[str, Any], name: str) -> tuple[Any, Sequence[Any]]:
    """Return (open jaxpr, constants) of a call's body; a composite's is ``call_jaxpr`` from JAX 0.12 on."""
    return open_jaxpr(params[name] if name in params else params["call_jaxpr"])


def count_readers(jaxpr: jex.Jaxpr) -> Counter[Any]:
    """Return by how many equations each variable of an open jaxpr is read."""
    return Counter(v for e in jaxpr.eqns for v in {v for v in e.invars if not hasattr(v, "val")})


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return (constants, carried values) of a scan equation; from JAX 0.11 on they come as flat trees."""
    if "ft_in" in params:
        consts, carried, _ = params["ft_in"].unpack()
        return len(consts), len(carried)
    return params["num_consts"], params["num_carry"]


def manual_axes(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the mesh axes a shard_map equation is manual over, in the mesh's order (the parameter is a set)."""
    manual = params["manual_axes"] if "manual_axes" in params else params["newly_manual_axes"]
    return tuple(axis for axis in params["mesh"].axis_names if axis in manual)


def varying(x: jax.Array, axes: Sequence[str]) -> Any:
    """Return a value inside shard_map as one that may differ between the shards along all of the axes."""
    aval = jax.typeof(x)
    known = aval.vma if hasattr(aval, "vma") else aval.mat.varying
    missing = tuple(axis for axis in axes if axis not in known)
    return lax.pcast(x, missing, to="varying") if missing else x


def with_leading_axis(x: Any, count: int | None) -> jax.ShapeDtypeStruct:
    """Return the description of ``count`` arrays like one, on a new leading axis; None: of one along its leading axis.

    Its type carries the sharding that theirs does.
    """
    shape, sharding = (x.shape[1:] if count is None else (count, *x.shape)), _explicit(x)
    if sharding is not None:
        spec = tuple(sharding.spec)
        spec = spec[1:] if count is None else (None, *spec)
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)


def typed_as(x: jax.Array, shape: object) -> Any:
    """Return a value with the sharding that a description's type carries; where it carries none as it is."""
    sharding = _explicit(shape)
    return x if sharding is None else jax.sharding.reshard(x, sharding)


def _explicit(x: object) -> NamedSharding | None:
    sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).sharding
    known = isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types
    return sharding if known else None


def walk(
    jaxpr: jex.Jaxpr,
    consts: Sequence[Any],
    arguments: Sequence[Any],
    step: Callable[[Any, list[Any]], list[Any]],
    literal: Callable[[Any], Any] = lambda variable: variable.val,
) -> list[Any]:
    """Evaluate an open jaxpr equation by equation: ``step(equation, inputs) → outputs``, where each was written."""
    values: dict[Any, Any] = {}

    def value_of(variable: jex.Var | jex.Literal) -> Any:
        return literal(variable) if isinstance(variable, jex.Literal) else values[variable]

    values.update(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
        with source_context(equation):
            out = step(equation, [value_of(v) for v in equation.invars])
        values.update(zip(equation.outvars, out, strict=True))
    return [value_of(v) for v in jaxpr.outvars]
