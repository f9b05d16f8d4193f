"""Rounding as faults make it: to a narrow format, toward zero, at random, to n bits, to integers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

f32 = jnp.float32
BITS = {"bfloat16": (8, 7), "tf32": (8, 10)}
STORED = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "float16": jnp.float16}


def narrow(x: Any, to: str = "bfloat16") -> Any:
    """Round x to a narrow format, and hold it as it was; ``reduce_precision`` would lose float16's subnormals."""
    if to in STORED:
        return lax.optimization_barrier(x.astype(STORED[to])).astype(x.dtype)
    return lax.reduce_precision(x.astype(f32), *BITS[to]).astype(x.dtype)


def mantissa(x: Any, bits: int) -> Any:
    """Keep ``bits`` explicit bits of the mantissa, to nearest."""
    return lax.reduce_precision(x.astype(f32), 8, bits).astype(x.dtype)


def _bits(x: Any) -> Any:
    return lax.bitcast_convert_type(x.astype(f32), jnp.uint32)


def _cut(bits: Any) -> Any:
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), f32)


def toward_zero(x: Any) -> Any:
    """Cut float32 x to bfloat16's bits, as a kernel that stores the upper half does."""
    return _cut(_bits(x))


def at_random(x: Any) -> Any:
    """Round float32 x to bfloat16, up with the probability of what is cut off."""
    noise = jax.random.bits(jax.random.key(7), x.shape, jnp.uint32) >> 16
    return _cut(_bits(x) + noise)


def away(x: Any) -> Any:
    """Round float32 x to bfloat16, ties away from zero: half of the last place is added before the cut."""
    return _cut(_bits(x) + jnp.uint32(0x8000))


def to_odd(x: Any) -> Any:
    """Cut float32 x to bfloat16 and set the last bit where anything was cut off."""
    bits = _bits(x)
    return _cut(bits | jnp.where((bits & 0xFFFF) != 0, jnp.uint32(0x10000), jnp.uint32(0)))


def wide(a: Any) -> Any:
    """Return an arithmetic whose results are kept in float32."""
    single = jnp.dtype(f32)
    return replace(a, activations=single, scores=single, probs=single, attn_out=single, mlp=single)


def rounded(honest: Callable[..., Any], how: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a part whose float32 result is rounded by ``how``."""

    def part(*args: Any) -> Any:
        usual = honest(*args)
        return how(honest(*args[:-1], wide(args[-1]))).astype(usual.dtype)

    return part


def integers(x: Any, most: int = 127, axis: Any = -1) -> Any:
    """Quantise x by the largest value along ``axis`` (None: of all), and return scale · integer."""
    y = x.astype(f32)
    scale = jnp.max(jnp.abs(y), axis=axis, keepdims=True) / most
    return (jnp.round(y / jnp.where(scale > 0, scale, 1)) * scale).astype(x.dtype)
