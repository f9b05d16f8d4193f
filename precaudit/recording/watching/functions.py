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
    inner = f
    while True:
        if isinstance(inner, functools.partial):
            inner = inner.func
        elif hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        elif inspect.ismethod(inner):
            inner = inner.__func__
        else:
            break
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__name__", type(inner).__name__)
    return name, "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
