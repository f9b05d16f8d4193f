"""What is kept of a value in place of it, computed inside the program: sums, maxima, hashes, seeded projections (JAX).

The projections of a value x are y = S x, each a sum of some elements under signs S that depend on places alone: ‖y‖²
has the mean ‖x‖², and the difference of two values' projections has that of their difference (Charikar, Chen and
Farach-Colton 2002). Of n projections ‖y‖ is off by 1/√(2n) of ‖x‖, one standard deviation.
"""

from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.sites import unique_names
from precaudit.interpreters.jaxpr.tag import Tagged, capturing
from precaudit.numbers.row_hashes import SEEDS, odd

SIGNS = (0xC2B2AE3D, 0x27D4EB2F)  # seeds: of rows, of channels
LEAST, MOST = 8, 4096
Sketch = dict[str, jax.Array]


def check_projections(n: int) -> None:
    """Raise UserError where ``n`` is no number of projections that can be made; 0: none."""
    if n and (n < LEAST or n > MOST or n & (n - 1)):
        raise UserError(f"--sketch {n}: a power of two from {LEAST} to {MOST:,}")


def sketching(
    made: Tagged, named: Callable[[Any], dict[str, Any]], n: int, layers: Sequence[int] | None = None
) -> Callable[..., Any]:
    """Return a tagged program that gives its outputs and sketches of its taps, each made where the value is.

    So no value is kept that the program itself does not keep. ``named`` gives outputs that are sketched as well;
    ``layers``: as ``reap`` has them. What is stacked over scans has a sketch for each step, in one axis.
    """
    stacked = {name: len(s.stacked) for name, s in zip(unique_names(made.sites), made.sites, strict=True)}
    captured = capturing(made, layers, lambda _name, x: sketch_value(lax.optimization_barrier(x), n))

    def run(*given: Any) -> Any:
        out, taps = captured(*given)
        found = {k: _steps(x, stacked[k]) if k in stacked else x for k, x in taps.items()}
        return out, found | {k: _steps(sketch_value(x, n), 0) for k, x in named(out).items()}

    return run


def _steps(sketch: Sketch, stacked: int) -> Sketch:
    """Return a sketch whose axes in front, so many, are one."""
    return {k: x.reshape(prod(x.shape[:stacked]), *x.shape[stacked:]) for k, x in sketch.items()}


def grid_of(shape: Collection[int]) -> tuple[int, int, int]:
    """Return rows, heads and width of a value: its first axes, its last but one, its last; a batch of one is none."""
    axes = list(shape)[1:] if len(shape) > 2 and next(iter(shape)) == 1 else list(shape)
    if len(axes) < 2:
        return 1, 1, prod(axes)
    return (axes[0], 1, axes[1]) if len(axes) == 2 else (prod(axes[:-2]), axes[-2], axes[-1])


def sketch_value(x: jax.Array, n: int) -> Sketch:
    """Return what is kept of an array; ``n``: projections, 0 for none."""
    rows, heads, width = grid_of(x.shape)
    flat = x.reshape(rows * heads, width)
    bits = lax.bitcast_convert_type(flat, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    wide = flat.astype(jnp.float32)
    held = jnp.where(jnp.isfinite(wide), wide, 0)
    nan, inf = (of(wide).astype(jnp.float32) for of in (jnp.isnan, jnp.isinf))
    parts, zero = (held, held * held, jnp.abs(held), nan, inf), jnp.float32(0)
    # in one pass: XLA:CPU writes what each of several sums reads to memory first
    each = lax.reduce(parts, (zero,) * len(parts), _together, (1,))
    sums, squares, most, nan, inf = (part.reshape(rows, heads) for part in each)

    def over(axis: int) -> jax.Array:
        """Return the sum, the largest size and how many are not finite, of each row or head."""
        return jnp.stack([sums.sum(axis), most.max(axis), (nan + inf).sum(axis)], axis=-1)

    found = {
        "rows": over(1),
        "heads": over(0),
        "hashes": _hashes(bits, rows),
        "size": jnp.stack([jnp.sqrt(squares.sum()), most.max()]),
        "counts": jnp.stack([nan.sum(), inf.sum()]),
    }
    return found | {"projections": _projections(held, n)} if n else found


def _together(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    """Return sums of pairs, and of the third pair the larger."""
    return [jnp.maximum(x, y) if i == 2 else x + y for i, (x, y) in enumerate(zip(a, b, strict=True))]


def _hashes(bits: jax.Array, rows: int) -> jax.Array:
    """Return the hashes [rows, 2], as ``numbers/row_hashes.py`` takes them."""
    every = bits.reshape(rows, -1).astype(jnp.uint32)
    place = jnp.arange(1, every.shape[1] + 1, dtype=jnp.uint32)
    factors = lax.optimization_barrier([odd(place, seed) for seed in SEEDS])  # made once, and not for every row
    terms, zero = tuple(every * factor for factor in factors), jnp.uint32(0)
    sums = lax.reduce(terms, (zero,) * len(terms), lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (1,))
    return jnp.stack(sums, axis=-1)


def _projections(x: jax.Array, n: int) -> jax.Array:
    """Return the projections of rows [rows, width].

    Each block of n channels lies one place further on than the one before, for which it is padded by one; and a row has
    an odd number of blocks, so that one channel of n rows comes to n places.
    """
    rows, width = x.shape
    own, channels = (odd(jnp.arange(1, m + 1, dtype=jnp.uint32), seed) for m, seed in zip(x.shape, SIGNS, strict=True))
    signed = jnp.where(own[:, None] * channels >> 31 == 1, -x, x)
    if (several := n // width) > 1:  # rows that are shorter lie one after another
        signed = jnp.pad(signed, ((0, -rows % several), (0, 0))).reshape(-1, several * width)
        rows, width = signed.shape
    blocks = -(-width // n)
    cut = jnp.pad(signed, ((0, 0), (0, blocks * n - width))).reshape(rows, blocks, n)
    shifted = jnp.pad(cut, ((0, 0), (0, 1 - blocks % 2), (0, 1))).reshape(-1)
    return jnp.pad(shifted, (0, -len(shifted) % n)).reshape(-1, n).sum(0)
