"""Float32 products made of narrower ones: an operand is up to three narrow parts, and some of their products count.

bfloat16 is what a TPU's matrix unit does at the precisions ``default`` (one), ``high`` (three) and ``highest`` (six
passes), and what the presets BF16_BF16_F32, _X3 and _X6 ask of any device (XLA's dot algorithms); TF32 is a GPU's
``default``.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np

from precaudit.numbers.arrays import Array, rounder
from precaudit.numbers.formats import FORMATS

Dot = Callable[[Array, Array], Array]
# Parts of the left and the right operand that are multiplied, the smallest products first.
PAIRS = {
    1: ((0, 0),),
    3: ((0, 1), (1, 0), (0, 0)),
    6: ((0, 2), (1, 1), (2, 0), (0, 1), (1, 0), (0, 0)),
}
DROPPED = 13  # of float32's 24 significant bits TF32 keeps 11


def to_tf32(x: Array) -> Array:
    """Return x to the nearest TF32 number, ties away from zero, in FP64: 8 bits of exponent, 11 significant ones.

    PTX ISA, cvt.rna.tf32.f32, as tensor cores' operands are made; of float32 values, subnormal ones too.
    """
    bits = np.asarray(x, np.float32).view(np.uint32)
    kept = (bits + np.uint32(1 << (DROPPED - 1))) & np.uint32(0xFFFFFFFF << DROPPED & 0xFFFFFFFF)
    return np.where(np.isfinite(x), kept.view(np.float32), x).astype(np.float64)


BF16 = rounder("bfloat16")
# Preset: the passes, and the format of their parts.
PRESETS: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "BF16_BF16_F32": (1, BF16),
    "BF16_BF16_F32_X3": (3, BF16),
    "BF16_BF16_F32_X6": (6, BF16),
    "TF32_TF32_F32": (1, to_tf32),
    "TF32_TF32_F32_X3": (3, to_tf32),
}


def operand_roundoff(matmul: str) -> float:
    """Return the unit roundoff of what a resolved ``matmul`` setting keeps of a float32 operand; 0: all of it."""
    if matmul not in PRESETS:
        return 0.0
    passes, narrow = PRESETS[matmul]
    part = FORMATS["bfloat16"].unit_roundoff if narrow is BF16 else 2.0 ** (DROPPED - 24)
    return float(part ** _parts_of(passes))


@cache
def matmul_products(matmul: str) -> Dot:
    """Return the matrix product a resolved ``matmul`` setting makes, its sums exact; one function a setting."""
    if matmul not in PRESETS:
        return np.matmul
    passes, narrow = PRESETS[matmul]
    return partial(matmul_in_passes, passes, np.matmul, narrow=narrow)


@cache
def with_sums(product: Dot, dot: Dot) -> Dot:
    """Return a product with its sums made by ``dot``."""
    if isinstance(product, partial) and product.func is matmul_in_passes:
        return partial(matmul_in_passes, product.args[0], dot, **product.keywords)
    return dot


def matmul_in_passes(passes: int, dot: Dot, a: Array, b: Array, narrow: Callable[[Array], Array] = BF16) -> Array:
    """Return a · b as the products of narrow parts of both, each summed by ``dot``, added in FP64."""
    count = _parts_of(passes)
    left, right = _parts(a, count, narrow), _parts(b, count, narrow)
    total = np.zeros((a.shape[0], b.shape[1]))
    for i, j in PAIRS[passes]:
        if left[i].any() and right[j].any():
            total += dot(left[i], right[j])
    return total


def _parts_of(passes: int) -> int:
    return 1 + max(i for i, _ in PAIRS[passes])


def _parts(x: Array, count: int, narrow: Callable[[Array], Array]) -> list[Array]:
    """Return x as a sum of narrow values, the largest first."""
    found, rest = [], x
    for _ in range(count):
        found.append(narrow(rest))
        rest = rest - found[-1]
    return found
