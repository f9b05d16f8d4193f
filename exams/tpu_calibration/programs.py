"""A dozen small programs, one question each, on inputs that every machine makes alike."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

F32, BF16 = np.dtype(np.float32), np.dtype(jnp.bfloat16)


class Small(NamedTuple):
    """A function, the shapes and formats of its arguments, and what it answers."""

    function: Callable[..., Any]
    arguments: tuple[tuple[tuple[int, ...], Any], ...]
    asks: str

    def inputs(self) -> tuple[Any, ...]:
        """Return standard normal arguments, the same everywhere (PCG64)."""
        draw = np.random.default_rng(20260101)
        return tuple(draw.standard_normal(shape).astype(np.float32).astype(dtype) for shape, dtype in self.arguments)


def _product(precision: Any, out: Any = None) -> Callable[..., Any]:
    def product(x: Any, y: Any) -> Any:
        return lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=out)

    return product


def _norm(x: Any, y: Any, weight: Any) -> Any:
    total = (x + y).astype(BF16)
    wide = total.astype(F32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(BF16) * weight


def _layers(x: Any, weights: Any) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return x + jnp.tanh(x @ w), None

    return lax.scan(layer, x, weights)[0]


WIDE, NARROW = (((64, 256), F32), ((256, 128), F32)), (((64, 256), BF16), ((256, 128), BF16))
ROW = (((1, 256), F32), ((256, 128), F32))
NARROW_ROW = (((1, 256), BF16), ((256, 128), BF16))
PROGRAMS = {
    "f32 default": Small(_product("default"), WIDE, "one bfloat16 pass?"),
    "f32 high": Small(_product("high"), WIDE, "three passes?"),
    "f32 highest": Small(_product("highest"), WIDE, "six passes, and how far from float32?"),
    "bf16": Small(_product(None), NARROW, "a float32 sum, rounded once?"),
    "bf16 to f32": Small(_product(None, np.float32), NARROW, "a float32 sum, in which order?"),
    "f32 row": Small(_product("default"), ROW, "float32 on the vector unit?"),
    "bf16 row": Small(_product(None), NARROW_ROW, "are products of pairs rounded inside a fusion?"),
    "bf16 softmax": Small(lambda x: jax.nn.softmax(x, -1), (((32, 256), BF16),), "are exponentials rounded inside?"),
    "bf16 sum": Small(lambda x: jnp.sum(x, -1), (((32, 256), BF16),), "float32 adds, rounded once?"),
    "norm of a sum": Small(
        _norm, (((8, 256), BF16), ((8, 256), BF16), ((256,), BF16)), "statistics before the sum is rounded?"
    ),
    "bf16 silu": Small(lambda x, y: jax.nn.silu(x) * y, (((32, 256), BF16),) * 2, "is silu rounded inside a fusion?"),
    "exp, tanh, rsqrt": Small(
        lambda x: jnp.stack([jnp.exp(x), jnp.tanh(x), lax.rsqrt(jnp.abs(x) + 1)]), (((8, 256), F32),),
        "how far are the chip's own functions off?",
    ),
    "layers": Small(_layers, (((4, 128), BF16), ((3, 128, 128), BF16)), "a scan: what is handed on unrounded?"),
}  # fmt: skip
