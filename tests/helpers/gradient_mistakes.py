"""Kernels with one mistake each, most in a gradient, and correct ones of another algorithm."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

ROWS, WIDTH = 16, 48
EPSILON = 1e-5

Function = Callable[..., jax.Array]


def rms(x: jax.Array, w: jax.Array, epsilon: float = EPSILON) -> jax.Array:
    """RMSNorm in float32, rounded once to the format of ``x``."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + epsilon) * w.astype(jnp.float32)).astype(x.dtype)


def mean_loss(x: jax.Array, w: jax.Array) -> jax.Array:
    """The mean over rows of squared outputs of a linear layer."""
    y = x.astype(jnp.float32) @ w.astype(jnp.float32)
    return jnp.mean(jnp.sum(y * y, -1))


def decayed(a: jax.Array, x: jax.Array) -> jax.Array:
    """h_t = a_t h_{t−1} + x_t, every h."""

    def step(h: jax.Array, each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h = each[0] * h + each[1]
        return h, h

    out = jax.lax.scan(step, jnp.zeros(x.shape[1], jnp.float32), (a.astype(jnp.float32), x.astype(jnp.float32)))[1]
    return out.astype(x.dtype)


def with_gradient(function: Function, backward: Callable[..., tuple[jax.Array, ...]]) -> Function:
    """Return a function with ``backward(cotangent, *inputs)`` for its gradients, cast to the inputs' formats."""

    @jax.custom_vjp
    def kernel(*inputs: jax.Array) -> jax.Array:
        return function(*inputs)

    def back(inputs: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(d.astype(x.dtype) for d, x in zip(backward(g, *inputs), inputs, strict=True))

    kernel.defvjp(lambda *x: (function(*x), x), back)
    return kernel


def scaled(function: Function, *factors: float) -> Function:
    """Return a function with each input's gradient times a factor."""

    def backward(g: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        found = jax.vjp(function, *inputs)[1](g)
        return tuple(d * factor for d, factor in zip(found, factors, strict=True))

    return with_gradient(function, backward)


def rms_gradient(g: jax.Array, x: jax.Array, w: jax.Array, summed: bool = True) -> tuple[jax.Array, jax.Array]:
    """RMSNorm's gradients by hand, in float32; without ``summed`` that of the weight is its first row's."""
    g, x, w = (v.astype(jnp.float32) for v in (g, x, w))
    r = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPSILON)
    gw = g * w
    dx = r * (gw - x * r * r * jnp.mean(gw * x, -1, keepdims=True))
    each = g * x * r
    return dx, each.sum(0) if summed else each[0]


def decayed_gradient(g: jax.Array, a: jax.Array, x: jax.Array, late: int = 0) -> tuple[jax.Array, jax.Array]:
    """The gradients of ``decayed``: dh_t = g_t + a_{t+1} dh_{t+1}; ``late``: of how many steps before a is taken."""
    g, a, x = (v.astype(jnp.float32) for v in (g, a, x))
    h = decayed(a, x)
    before = jnp.concatenate([jnp.zeros_like(h[:1]), h[:-1]])
    follows = a if late else jnp.concatenate([a[1:], jnp.zeros_like(a[:1])])

    def step(dh: jax.Array, each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dh = each[0] + each[1] * dh
        return dh, dh

    dh = jax.lax.scan(step, jnp.zeros(x.shape[1], jnp.float32), (g, follows), reverse=True)[1]
    return dh * before, dh


def held(x: jax.Array, w: jax.Array) -> jax.Array:
    """RMSNorm whose scale is held in the backward pass."""
    y = x.astype(jnp.float32)
    r = jax.lax.stop_gradient(jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + EPSILON))
    return (y * r * w.astype(jnp.float32)).astype(x.dtype)


def in_float16(x: jax.Array, w: jax.Array) -> jax.Array:
    """``mean_loss`` with its product added up and stored in float16."""
    y = (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)
    return jnp.mean(jnp.sum(y * y, -1))


def rough(x: jax.Array, w: jax.Array, epsilon: float = EPSILON) -> jax.Array:
    """RMSNorm that rounds inside to bfloat16, twice: larger errors than a wrong epsilon makes."""
    y = x.astype(jnp.bfloat16).astype(jnp.float32)
    r = jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + epsilon)
    return ((y * r).astype(jnp.bfloat16).astype(jnp.float32) * w.astype(jnp.float32)).astype(x.dtype)


def normals(seed: int, form: str, *sizes: tuple[tuple[int, ...], float]) -> tuple[jax.Array, ...]:
    """Return normal arrays of shapes and scales."""
    random = np.random.default_rng(seed)
    return tuple(jnp.asarray(scale * random.standard_normal(shape), form) for shape, scale in sizes)


def norm_inputs(seed: int, form: str) -> tuple[jax.Array, ...]:
    """Inputs of RMSNorm whose mean square is 250 times epsilon."""
    return normals(seed, form, ((ROWS, WIDTH), 0.05), ((WIDTH,), 1.0))


def linear_inputs(seed: int, form: str) -> tuple[jax.Array, ...]:
    """Inputs of ``mean_loss``."""
    return normals(seed, form, ((ROWS, WIDTH), 1.0), ((WIDTH, 8), 0.15))


def scan_inputs(seed: int, form: str) -> tuple[jax.Array, ...]:
    """Inputs of ``decayed``: decays below 1, and what is added."""
    a, x = normals(seed, form, ((12, 8), 1.0), ((12, 8), 1.0))
    return jax.nn.sigmoid(a), x


@dataclass(frozen=True)
class Planted:
    """A kernel beside its reference; ``told``: what explains each array that fails, none for a correct one."""

    kernel: Function
    reference: Function
    inputs: Callable[[int, str], tuple[jax.Array, ...]]
    told: dict[str, str]


def _epsilon(kernel: Function) -> Planted:
    return Planted(kernel, rms, norm_inputs, dict.fromkeys(("out", "dx", "dw"), "stands for 1e-5"))


LATE = "reads the row before in place of each row"
BY_ROUNDING = "rounding explains it"
MISTAKES = {
    "another epsilon": _epsilon(partial(rms, epsilon=4e-5)),
    "another epsilon behind rounding to bfloat16": _epsilon(partial(rough, epsilon=4e-5)),
    "another epsilon in the backward pass": Planted(
        with_gradient(rms, lambda g, *x: jax.vjp(partial(rms, epsilon=4e-5), *x)[1](g)),
        rms, norm_inputs, dict.fromkeys(("dx", "dw"), "stands for 1e-5"),
    ),
    "no factor of 2": Planted(
        scaled(mean_loss, 0.5, 0.5), mean_loss, linear_inputs, dict.fromkeys(("dx", "dw"), "a factor of 0.5")
    ),
    "not summed over the batch": Planted(
        with_gradient(rms, partial(rms_gradient, summed=False)), rms, norm_inputs, {"dw": "only the first is used"}
    ),
    "a stop_gradient": Planted(held, rms, norm_inputs, {"dx": "is omitted, as by a stop_gradient"}),
    "a product in float16": Planted(
        in_float16, mean_loss, linear_inputs, dict.fromkeys(("out", "dx", "dw"), BY_ROUNDING)
    ),
    "the wrong sign": Planted(scaled(mean_loss, 1.0, -1.0), mean_loss, linear_inputs, {"dw": "its sign is wrong"}),
    "a scan late by one": Planted(
        with_gradient(decayed, partial(decayed_gradient, late=1)), decayed, scan_inputs, {"da": LATE, "dx": LATE}
    ),
    "a mean of the wrong count": Planted(
        scaled(mean_loss, ROWS / (ROWS - 1), ROWS / (ROWS - 1)), mean_loss, linear_inputs,
        dict.fromkeys(("dx", "dw"), "16 / 15, with 16 the size of an axis"),
    ),
    "a sum for a mean": Planted(
        scaled(mean_loss, ROWS, ROWS), mean_loss, linear_inputs,
        dict.fromkeys(("dx", "dw"), "16: a sum in place of a mean"),
    ),
}  # fmt: skip
CORRECT = {
    "gradients by hand": Planted(with_gradient(rms, rms_gradient), rms, norm_inputs, {}),
    "rows in another order": Planted(lambda x, w: mean_loss(x[::-1], w), mean_loss, linear_inputs, {}),
    "a scan by hand": Planted(with_gradient(decayed, decayed_gradient), decayed, scan_inputs, {}),
}
