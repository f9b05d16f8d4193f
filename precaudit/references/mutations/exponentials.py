"""Approximations of exp that kernels use."""

import math
from collections.abc import Callable

import numpy as np

from precaudit.numbers.arrays import Array

LOG2E = math.log2(math.e)
# 2^f on [0, 1): minimax of relative error in FlashAttention-4's kernel, and Taylor's
POLYNOMIALS = {
    "a minimax polynomial of degree 3": (
        1.0,
        0.695146143436431884765625,
        0.227564394474029541015625,
        0.077119089663028717041015625,
    ),
    "Taylor's polynomial of degree 3": (1.0, np.log(2), np.log(2) ** 2 / 2, np.log(2) ** 3 / 6),
    "Taylor's polynomial of degree 2": (1.0, np.log(2), np.log(2) ** 2 / 2),
}
SCHRAUDOLPH = {"least rms error": 486411, "no shift": 0, "least maximum error": 366393}


def by_polynomial(coefficients: tuple[float, ...]) -> Callable[[Array], Array]:
    """Return exp(x) = 2^n · p(f), n + f = x log₂ e (as in FlashAttention-4)."""

    def exp(x: Array) -> Array:
        n, f = _split_exponent(x)
        return np.asarray(np.ldexp(np.polynomial.polynomial.polyval(f, coefficients), n))

    return exp


def by_bits(shift: int) -> Callable[[Array], Array]:
    """Return exp as float32 bits (x log₂ e + 127) · 2²³ − shift: 2^n · (1 + f) (Schraudolph 1999)."""

    def exp(x: Array) -> Array:
        with np.errstate(invalid="ignore"):
            bits = np.clip(np.nan_to_num(x, neginf=-1e3) * LOG2E + 127.0, 0.0, 254.0) * 2.0**23 - shift
        return np.maximum(bits, 0.0).astype(np.int32).view(np.float32).astype(np.float64)

    return exp


def _split_exponent(x: Array) -> tuple[Array, Array]:
    y = np.maximum(np.nan_to_num(x * LOG2E, neginf=-1e4), -1e4)
    n = np.floor(y)
    return n.astype(np.int32), y - n


def replace_exponential(exp: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return what a place that is given exp(x) does for another exp of x."""

    def place(e: Array) -> Array:
        with np.errstate(divide="ignore"):
            return np.where(e > 0, exp(np.log(e)), 0.0)

    return place
