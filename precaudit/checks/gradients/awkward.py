"""Inputs that kernels fail on, made from honest ones by their shapes and kinds."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from precaudit.interpreters.jaxpr.keys import is_numbers

LARGE, TINY, SUBNORMAL, PEAK = 2.0**4, 2.0**-20, 2.0**-140, 32.0
HUGE = 2.0**40  # the largest element: squares stay in float32's range, fourth powers and exponentials leave it
ORDINARY, CUT = "ordinary", "a size cut by one"


def awkward(inputs: tuple[Any, ...]) -> Iterator[tuple[str, Callable[[], tuple[Any, ...]]]]:
    """Yield (what is done, what makes the inputs): one array changed at a time, then all cut to other sizes.

    Floats: large, huge, tiny, subnormal, constant, zero, a row of zeros, with ties, one-hot, a NaN, a −∞ as masks have,
    column-major.
    Integers and truth values: all the smallest, all the largest. Inputs that are no arrays of numbers stay.
    """
    for i, x in enumerate(inputs):
        if not is_numbers(x) or not np.size(x):
            continue
        kinds = FLOATS if jnp.issubdtype(x.dtype, jnp.floating) else WHOLE
        for name, change in kinds.items():
            if x.ndim >= AXES.get(name, 0):
                yield f"input {i} {name}", partial(_replace_input, inputs, i, change)
    sizes = sorted({n for x in inputs if is_numbers(x) for n in x.shape if n > 2})
    for n in sizes:
        yield f"size {n} cut to {n - 1}", partial(_all_cut, inputs, n)


def _replace_input(inputs: tuple[Any, ...], i: int, change: Callable[[Any], Any]) -> tuple[Any, ...]:
    return (*inputs[:i], change(np.asarray(inputs[i])), *inputs[i + 1 :])


def _all_cut(inputs: tuple[Any, ...], n: int) -> tuple[Any, ...]:
    return tuple(_cut(x, n) for x in inputs)


def _cut(x: ArrayLike, n: int) -> Any:
    """Return an array with axes of ``n`` one shorter; indices into such an axis stay within it."""
    if not is_numbers(x):
        return x
    array = np.asarray(x)[tuple(slice(0, n - 1) if m == n else slice(None) for m in x.shape)]
    return np.minimum(array, np.asarray(n - 2, array.dtype)) if array.dtype.kind in "iu" and array.size else array


def _scale_by(factor: float) -> Callable[[Any], Any]:
    return lambda x: (x.astype(np.float32) * np.float32(factor)).astype(x.dtype)


def _huge(x: ArrayLike) -> Any:
    """Scale so that the largest element is HUGE, or a fourth of the largest number of a format that ends before."""
    wide = x.astype(np.float32)
    largest = float(np.max(np.abs(wide))) or 1.0
    return (wide / largest * min(HUGE, float(jnp.finfo(x.dtype).max) / 4)).astype(x.dtype)


def _zero_row(x: ArrayLike) -> Any:
    made = x.copy()
    made[len(made) // 2] = 0
    return made


def kind_of(case: str) -> str:
    """Return what was done to the inputs of a case: a key of FLOATS or WHOLE, CUT, or ORDINARY."""
    _, made, rest = case.partition("input ")
    if made:
        return rest.partition(" ")[2]
    return CUT if case.partition("size ")[1] else ORDINARY


def _fill_with(value: float) -> Callable[[Any], Any]:
    return lambda x: np.full(x.shape, value, x.dtype)


def _at(value: float) -> Callable[[Any], Any]:
    """Put a value in the middle."""

    def change(x: ArrayLike) -> Any:
        made = x.copy()
        made.reshape(-1)[made.size // 2] = value
        return made

    return change


def _ties(x: ArrayLike) -> Any:
    """Keep a significant bit or two: most values are there several times."""
    return np.round(x.astype(np.float32) * 2).astype(x.dtype) / x.dtype.type(2)


def _peaks(x: ArrayLike) -> Any:
    """One large value a row, at another place in each."""
    made = np.zeros(x.shape, x.dtype)
    rows = made.reshape(-1, x.shape[-1])
    rows[np.arange(len(rows)), np.arange(len(rows)) % x.shape[-1]] = PEAK
    return made


FLOATS: dict[str, Callable[[Any], Any]] = {
    "large": _scale_by(LARGE),
    "huge": _huge,
    "tiny": _scale_by(TINY),
    "subnormal": _scale_by(SUBNORMAL),
    "zero": _fill_with(0.0),
    "with a row of zeros": _zero_row,
    "constant": lambda x: np.full(x.shape, x.reshape(-1)[0], x.dtype),
    "with ties": _ties,
    "one-hot": _peaks,
    "with a NaN": _at(np.nan),
    "with a −∞": _at(-np.inf),
    "column-major": np.asfortranarray,
}
AXES = {"one-hot": 1, "column-major": 2, "with a row of zeros": 2}  # that an array needs for it
WHOLE: dict[str, Callable[[Any], Any]] = {
    "all the smallest": lambda x: np.full(x.shape, x.min(), x.dtype),
    "all the largest": lambda x: np.full(x.shape, x.max(), x.dtype),
}
