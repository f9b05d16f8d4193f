"""The ways JAX offers to make a product of scores, and the arithmetic that each of them names."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from precaudit.checks.probing.emulations import PASSES
from precaudit.schema.policies import PRECISIONS

DIMENSIONS = (((3,), (3,)), ((0, 1), (0, 1)))
# What a setting names, by the names of emulations.py. DEFAULT, default and high leave it to the device.
NAMED = {
    **PASSES,
    "highest": "float32",
    "F32_F32_F32": "float32",
    "F64_F64_F64": "float64",
    "BF16_BF16_F32_X9": "float32",
    "F16_F16_F32": "1 float16 pass",
    "F16_F16_F16": "sums in float16",
    "BF16_BF16_BF16": "sums in bfloat16",
}


class ProductWay(NamedTuple):
    """``call``: scores [B, H, Q, S] of queries [B, H, Q, D] and keys [B, H, S, D].

    ``asked``: the emulation whose arithmetic the way names; None where it leaves that to the device.
    """

    name: str
    call: Callable[[Any, Any], Any]
    asked: str | None = None


def product_ways(form: str) -> tuple[ProductWay, ...]:
    """Return every way of operands of a format, ``@`` first; presets are those of the JAX that is installed."""
    wide = "int32" if form == "int8" else "float32"
    exact = None if form == "float32" else wide
    found = [
        ProductWay("@", lambda q, k: q @ jnp.swapaxes(k, -1, -2)),
        ProductWay(f"preferred_element_type={wide}", _dot(preferred_element_type=jnp.dtype(wide)), exact),
        *(ProductWay(p, _dot(precision=p), _asked_setting(p, form)) for p in PRECISIONS),
    ]
    for name, preset in lax.DotAlgorithmPreset.__members__.items():
        found.append(ProductWay(name, _dot(precision=preset), _asked_setting(name, form)))
    return tuple(found)


def _asked_setting(name: str, form: str) -> str | None:
    """Return what a setting names of operands of a format; of integers none does."""
    return None if form == "int8" else NAMED.get(name)


def _dot(**how: Any) -> Callable[[Any, Any], Any]:
    return lambda q, k: lax.dot_general(q, k, DIMENSIONS, **how)


REFUSALS = (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError)


def first_line(error: BaseException) -> str:
    """Return what a device or JAX said when it refused, in one line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text[:200]
