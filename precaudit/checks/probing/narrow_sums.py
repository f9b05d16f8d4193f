"""Which products of 16-bit floats a device sums in 16 bits, by sums that are known before they are made.

Half of the terms of a sum are 1/2, the others B and -B in equal number, in an order that was drawn once: the sum is a
quarter of the number of terms. In float32 every part of it is exact, whatever is added first, and so is the result. In
the operands' format 1/2 is less than half a unit in the last place of B and is lost wherever a part is as large.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.schema.digits import digits

LARGE = {"bfloat16": 256.0, "float16": 2048.0}  # B: half a unit in the last place there is 1
TERMS = 512
ROWS = (1, 16)  # a compiler may make a product with one row otherwise
COLUMNS = 8


@dataclass(frozen=True)
class ProductKind:
    """A kind of product: its name, the equation of it as ``einsum`` takes it, and the sizes of what it does not sum.

    ``rows``: the letter of the axis of the first operand that has the rows. The letter summed over is ``f``.
    """

    kind: str
    equation: str
    sizes: tuple[tuple[str, int], ...]
    rows: str


PRODUCTS = (
    ProductKind("plain", "mf,fn->mn", (("n", COLUMNS),), "m"),
    ProductKind("batched", "bmf,bfn->bmn", (("b", 3), ("n", COLUMNS)), "m"),
    ProductKind("of two batch axes", "abmf,abfn->abmn", (("a", 2), ("b", 3), ("n", COLUMNS)), "m"),
    ProductKind("of experts", "bsef,efd->bsed", (("b", 1), ("e", 4), ("d", COLUMNS)), "s"),
    ProductKind("of grouped queries", "btgrf,bsgf->bgrts", (("b", 1), ("g", 2), ("r", 2), ("s", COLUMNS)), "t"),
)


@dataclass(frozen=True)
class NarrowSum:
    """Products that a device does not sum in float32: their kind, equation and format; what 128 came out as."""

    kind: str
    equation: str
    dtype: str
    made: float

    def text(self, device: str) -> str:
        """Return it as a sentence without its full stop; ``device``: such as ``cpu``."""
        name = self.kind if self.kind == "convolution" else f"product `{self.equation}` ({self.kind})"
        what = f"{self.dtype} {name}"
        return (
            f"XLA sums a {what} in {self.dtype} on this {device}: {TERMS // 4} came out as {digits(self.made, 6)}; "
            "preferred_element_type=float32 is there for that"
        )


@cache
def narrow_sums(device: jax.Device | None = None) -> tuple[NarrowSum, ...]:
    """Return the products, of default preferred type, that a device sums in the format of their operands.

    ``device``: of JAX, None its default. One of each kind and format, the one that is farthest off. A format that the
    device refuses is left out.
    """
    found: list[NarrowSum] = []
    with jax.default_device(device):
        for dtype in LARGE:
            try:
                found += _of_format(dtype)
            except (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError):
                continue
    return tuple(found)


def _of_format(dtype: str) -> list[NarrowSum]:
    terms = known_terms(LARGE[dtype])
    calls: list[tuple[str, str, Callable[..., Any], tuple[Array, Array]]] = [
        (p.kind, p.equation, partial(jnp.einsum, p.equation), _operands(p, rows, terms))
        for p in PRODUCTS
        for rows in ROWS
    ]
    calls += [("convolution", "", _convolve, _images(rows, terms)) for rows in ROWS]
    given = [tuple(jnp.asarray(x, dtype) for x in operands) for *_, operands in calls]
    functions = [f for *_, f, _ in calls]
    made = jax.jit(partial(_every, functions))(given)
    worst: dict[tuple[str, str], float] = {}
    for (kind, equation, _, _), y in zip(calls, made, strict=True):
        off = _farthest(np.asarray(y).astype(np.float64))
        if off != TERMS / 4 and not abs(worst.get((kind, equation), TERMS / 4) - TERMS / 4) >= abs(off - TERMS / 4):
            worst[kind, equation] = off
    return [NarrowSum(kind, equation, dtype, off) for (kind, equation), off in worst.items()]


def _every(functions: Sequence[Callable[..., Any]], given: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [f(*operands) for f, operands in zip(functions, given, strict=True)]


def known_terms(large: float) -> Array:
    """Return terms [512] that add up to 128, in an order that was drawn: 1/2 and both signs of ``large``."""
    quarter = TERMS // 4
    terms = np.repeat([0.5, 0.5, large, -large], quarter)
    return np.random.default_rng(0).permutation(terms)


def _operands(p: ProductKind, rows: int, terms: Array) -> tuple[Array, Array]:
    """Return the terms along ``f`` of the first operand, everywhere alike, and ones."""
    left, right = p.equation.partition("->")[0].split(",")
    sizes = dict(p.sizes) | {p.rows: rows, "f": TERMS}
    at = [TERMS if letter == "f" else 1 for letter in left]
    first = np.broadcast_to(terms.reshape(at), [sizes[letter] for letter in left])
    return first, np.ones([sizes[letter] for letter in right])


def _images(rows: int, terms: Array) -> tuple[Array, Array]:
    """Return images [1, rows + 7, 64], of which 8 steps of any window are the terms, and ones [8, 64, 8]."""
    window, channels = 8, TERMS // 8
    steps = terms.reshape(window, channels)
    return np.tile(steps, (-(-(rows + window) // window), 1))[None, : rows + window - 1], np.ones(
        (window, channels, COLUMNS)
    )


def _convolve(x: jax.Array, w: jax.Array) -> Any:
    return jax.lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))


def _farthest(y: Array) -> float:
    """Return the element that is farthest from what all should be; what is not finite is."""
    flat = y.reshape(-1)
    return float(flat[np.argmax(np.where(np.isfinite(flat), np.abs(flat - TERMS / 4), np.inf))])
