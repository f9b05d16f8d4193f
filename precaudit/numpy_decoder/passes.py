"""Float32 products made of bfloat16 ones: an operand is up to three bfloat16 parts, and some of their products count.

What a TPU's matrix unit does at the precisions ``default`` (one), ``high`` (three) and ``highest`` (six passes), and
what the presets BF16_BF16_F32, _X3 and _X6 ask of any device (XLA's dot algorithms).
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np

from precaudit.formats import Array, rounder

Dot = Callable[[Array, Array], Array]
# Parts of the left and the right operand that are multiplied, the smallest products first.
PAIRS = {
    1: ((0, 0),),
    3: ((0, 1), (1, 0), (0, 0)),
    6: ((0, 2), (1, 1), (2, 0), (0, 1), (1, 0), (0, 0)),
}
PRESETS = {"BF16_BF16_F32": 1, "BF16_BF16_F32_X3": 3, "BF16_BF16_F32_X6": 6}


@cache
def products(matmul: str) -> Dot:
    """Return the matrix product a resolved ``matmul`` setting makes, its sums exact; one function a setting."""
    return partial(in_passes, PRESETS[matmul], np.matmul) if matmul in PRESETS else np.matmul


@cache
def summed(product: Dot, dot: Dot) -> Dot:
    """Return a product with its sums made by ``dot``."""
    if isinstance(product, partial) and product.func is in_passes:
        return partial(in_passes, product.args[0], dot)
    return dot


def in_passes(passes: int, dot: Dot, a: Array, b: Array) -> Array:
    """Return a · b as the products of bfloat16 parts of both, each summed by ``dot``, added in FP64."""
    count = 1 + max(i for i, _ in PAIRS[passes])
    left, right = _parts(a, count), _parts(b, count)
    total = np.zeros((a.shape[0], b.shape[1]))
    for i, j in PAIRS[passes]:
        if left[i].any() and right[j].any():
            total += dot(left[i], right[j])
    return total


def _parts(x: Array, count: int) -> list[Array]:
    """Return x as a sum of bfloat16 values, the largest first."""
    narrow, found, rest = rounder("bfloat16"), [], x
    for _ in range(count):
        found.append(narrow(rest))
        rest = rest - found[-1]
    return found
