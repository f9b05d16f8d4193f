"""Integers and eight-bit floats, and what loops and solvers compute in float32."""

import jax
import jax.numpy as jnp
from jax import lax

from exams.styles.shapes import BF, DRAW, D, T, X, weight
from precaudit import Program


def int8(p, x):
    f = x.astype(jnp.float32)
    s = jnp.max(jnp.abs(f), -1, keepdims=True) / 127
    xi = jnp.round(f / s).astype(jnp.int8)
    y = lax.dot_general(xi, p["w"], (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
    return (y.astype(jnp.float32) * s * p["s"]).astype(x.dtype) + x


P_int8 = {
    "w": jnp.asarray(DRAW.integers(-127, 128, (D, D)), jnp.int8),
    "s": jnp.asarray(DRAW.uniform(0.5, 1.5, D) * 1e-3, jnp.float32),
}


def fp8(p, x):
    s = jnp.max(jnp.abs(x)).astype(jnp.float32) / 448
    q = (x.astype(jnp.float32) / s).astype(jnp.float8_e4m3fn)
    return (
        lax.dot_general(q, p["w"], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32) * (s * p["s"])
    ).astype(BF) + x


P_fp8 = {"w": jnp.asarray(DRAW.normal(size=(D, D)) * 40, jnp.float8_e4m3fn), "s": jnp.asarray(0.003, jnp.float32)}


def power(p, v):
    def f(s):
        i, v, o = s
        u = p["a"] @ (p["a"].T @ v)
        n = jnp.linalg.norm(u)
        return i + 1, u / n, n

    _, v, n = lax.while_loop(lambda s: s[0] < 5, f, (0, v, jnp.float32(0)))
    return v, lax.fori_loop(0, 4, lambda i, y: y * (1.5 - 0.5 * (n * 1e-3) * y * y), jnp.float32(1.0))


def ridge(p, x, y):
    f = x.astype(jnp.float32)
    a = f.T @ f + 1.0 * jnp.eye(D)
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), f.T @ y)


PROGRAMS = {
    "int8 product": Program(int8, P_int8, {"a": (X,)}),
    "float8 product": Program(fp8, P_fp8, {"a": (X,)}),
    "power iteration": Program(power, {"a": weight(D, D, dt=jnp.float32)}, {"a": (jnp.ones(D, jnp.float32),)}),
    "ridge": Program(ridge, {}, {"a": (X, jnp.asarray(DRAW.normal(size=(T, 3)), jnp.float32))}),
}
