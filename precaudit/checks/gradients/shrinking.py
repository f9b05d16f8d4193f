"""The smallest inputs that still fail, by hypothesis: sizes first, then values."""

import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.keys import is_numbers

EXAMPLES, SECONDS = 60, 30.0


def shrunk(inputs: tuple[Any, ...], fails: Callable[[tuple[Any, ...]], bool]) -> tuple[Any, ...]:
    """Return inputs cut along axes of one size at once, float arrays set to 0 or rounded, for which ``fails`` holds.

    Indices stay within the sizes. The inputs themselves where nothing smaller was found in EXAMPLES tries or SECONDS.
    Raises ImportError without hypothesis.
    """
    from hypothesis import HealthCheck, Phase, find, settings
    from hypothesis import strategies as st
    from hypothesis.errors import NoSuchExample

    sizes = sorted({n for x in inputs if is_numbers(x) for n in x.shape if n > 1})
    floats = [i for i, x in enumerate(inputs) if is_numbers(x) and jnp.issubdtype(x.dtype, jnp.floating)]
    end = time.monotonic() + SECONDS
    known: dict[str, bool] = {}

    def change(drawn: tuple[dict[int, int], dict[int, int]]) -> tuple[Any, ...]:
        lengths, kept = drawn
        return tuple(_smaller(x, lengths, kept.get(i, 2)) for i, x in enumerate(inputs))

    def failing(drawn: tuple[dict[int, int], dict[int, int]]) -> bool:
        key = repr(drawn)
        if key not in known:
            try:
                known[key] = time.monotonic() < end and fails(change(drawn))
            except UserError:
                known[key] = False
        return known[key]

    lengths = st.fixed_dictionaries({n: st.sampled_from(_lengths(n)) for n in sizes})
    kept = st.fixed_dictionaries({i: st.sampled_from((0, 1, 2)) for i in floats})
    how = settings(
        max_examples=EXAMPLES,
        database=None,
        derandomize=True,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    try:
        return change(find(st.tuples(lengths, kept), failing, settings=how))
    except NoSuchExample:
        return inputs


def _lengths(n: int) -> list[int]:
    return [*(1 << k for k in range(n.bit_length()) if 1 << k < n), n]


def _smaller(x: ArrayLike, lengths: dict[int, int], kept: int) -> Any:
    """Return an array cut; ``kept``: 0 nothing of its values, 1 halves, 2 all."""
    if not is_numbers(x):
        return x
    array = np.asarray(x)[tuple(slice(0, lengths.get(n, n)) for n in x.shape)]
    if array.dtype.kind in "iu":
        return np.minimum(array, np.asarray(min(lengths.values(), default=2) - 1, array.dtype)) if array.ndim else array
    if not jnp.issubdtype(array.dtype, jnp.floating) or kept == 2:
        return array
    wide = array.astype(np.float32)
    return (np.zeros_like(wide) if kept == 0 else np.round(wide * 2) / 2).astype(array.dtype)
