"""What differs between JAX 0.8.2 and the newest: the shape of jaxpr parameters and how an equation is bound again."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex

CALLS = ("jit", "pjit")
REMATS = ("checkpoint", "remat", "remat2")
# custom_jvp_call, custom_vjp_call, closed_call: where the body lies.
BODY_KEYS = ("call_jaxpr", "jaxpr", "fun_jaxpr")


def closed(jaxpr: Any, consts: Sequence[Any] = ()) -> tuple[Any, Sequence[Any]]:
    """Return (open jaxpr, constants) of a closed or an open jaxpr."""
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, jex.ClosedJaxpr) else (jaxpr, consts)


def bodies(value: Any) -> Iterator[Any]:
    """Yield the open jaxprs inside one equation parameter."""
    if isinstance(value, jex.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, jex.Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from bodies(item)


def bind(equation: Any, arguments: Sequence[Any]) -> list[Any]:
    """Apply an equation's primitive to new arguments; up to JAX 0.9 bind parameters come with sub-functions."""
    found = equation.primitive.get_bind_params(equation.params)
    functions, params = found if isinstance(found, tuple) else ((), found)
    with equation.ctx.manager:
        result = equation.primitive.bind(*functions, *arguments, **params)
    return list(result) if equation.primitive.multiple_results else [result]


def manual_axes(params: dict[str, Any]) -> tuple[str, ...]:
    """Return the mesh axes a shard_map equation is manual over."""
    return tuple(params["manual_axes"] if "manual_axes" in params else params["newly_manual_axes"])


def evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr as it stands."""
    return jax.core.eval_jaxpr(jaxpr, consts, *arguments)
