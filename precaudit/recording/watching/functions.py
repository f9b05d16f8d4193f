"""What a jitted function is of: its name and place, and which of its arguments JAX traces."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any


def dynamic_arguments(
    jitted: Any, f: Any, how: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return ((positional), {by name}) arguments without the static ones, as JAX flattens them.

    ``f``, ``how``: what was jitted, and with which options, where the jitted function does not say.
    """
    info = getattr(jitted, "_jit_info", None)
    said = {n: getattr(info, n, how.get(n)) for n in ("static_argnums", "static_argnames")}
    numbers, names = (_several(said[n]) for n in ("static_argnums", "static_argnames"))
    places = {n % len(args) if n < 0 else n for n in numbers}
    try:
        order = list(inspect.signature(f).parameters)
    except (TypeError, ValueError):
        order = []
    places |= {order.index(n) for n in names if n in order}
    static = {*names, *(order[n] for n in places if n < len(order))}
    return tuple(x for i, x in enumerate(args) if i not in places), {k: x for k, x in kwargs.items() if k not in static}


def _several(x: Any) -> tuple[Any, ...]:
    return () if x is None else (x,) if isinstance(x, int | str) else tuple(x)


def name_and_place(f: Any) -> tuple[str, str]:
    """Return what a function is called and FILE:LINE where it is defined, through what wraps it."""
    inner = _innermost(f)
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__name__", type(inner).__name__)
    return name, "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def is_renamed(f: Any) -> bool:
    """Whether a function goes by another name than its ``def`` gives it: that of what it calls."""
    inner = _innermost(f)
    code = getattr(inner, "__code__", None)
    return code is not None and code.co_name != inner.__name__


def called_place(name: str, jaxpr: Any) -> str | None:
    """Return FILE:LINE where the function of a name is defined in which a jaxpr's equations were made; None: in none.

    Of several the outermost, which calls the others.
    """
    for equation in jaxpr.eqns:
        trace = getattr(equation.source_info, "traceback", None)
        codes = [] if trace is None else [c for c in trace.raw_frames()[0] if c.co_name == name]
        if codes:
            return f"{codes[-1].co_filename}:{codes[-1].co_firstlineno}"
    return None


def _innermost(f: Any) -> Any:
    """Return what a function is of, through partials, wrappers that say so, and methods."""
    while True:
        if isinstance(f, functools.partial):
            f = f.func
        elif hasattr(f, "__wrapped__"):
            f = f.__wrapped__
        elif inspect.ismethod(f):
            f = f.__func__
        else:
            return f


def host_copy(x: object) -> Any:
    """Return a copy of a leaf that stays when the call takes its buffer over: an array of the host, a key of JAX's."""
    import jax
    import numpy as np

    if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(np.array(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return np.array(x) if hasattr(x, "dtype") or isinstance(x, bool | int | float | complex) else x


def count_equations(jaxpr: object, formats: dict[str, None]) -> int:
    """Return how many equations a jaxpr has, with its bodies; collect the formats of their floats."""
    from precaudit.interpreters.jaxpr.jax_versions import walk_equations

    n = 0
    for e in walk_equations(jaxpr):
        n += 1
        for v in e.outvars:
            dtype = getattr(v.aval, "dtype", None)
            if dtype is not None and "float" in str(dtype):
                formats.setdefault(str(dtype))
    return n
