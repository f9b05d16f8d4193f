"""Recurrences: selective scans, gates, states in log space, whole and step by step."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from exams.styles.shapes import BF, DRAW, SQUARE, D, T, X, weight
from precaudit import Program


def mamba(p, x):
    z = x @ p["in"]
    u, g = jnp.split(z, 2, -1)
    u = jax.nn.silu(sum(jnp.pad(u, ((i, 0), (0, 0)))[:T] * p["conv"][i] for i in range(4)))
    dt = jax.nn.softplus((u @ p["dt"]).astype(jnp.float32) + p["b"])
    A = -jnp.exp(p["A"])
    B, C = u @ p["B"], u @ p["C"]

    def f(h, t):
        d, uu, bb, cc = t
        h = jnp.exp(d[:, None] * A) * h + (d * uu)[:, None] * bb[None].astype(jnp.float32)
        return h, h @ cc.astype(jnp.float32)

    _, y = lax.scan(f, jnp.zeros((D, 8), jnp.float32), (dt, u.astype(jnp.float32), B, C))
    return x + ((y.astype(x.dtype) + u * p["D"]) * jax.nn.silu(g)) @ p["out"]


P_mamba = {
    "in": weight(D, 2 * D),
    "conv": weight(4, D, scale=0.5),
    "dt": weight(D, D),
    "b": jnp.zeros(D),
    "A": jnp.asarray(np.log(np.tile(np.arange(1, 9), (D, 1))), jnp.float32),
    "B": weight(D, 8),
    "C": weight(D, 8),
    "D": jnp.ones(D, BF),
    "out": weight(D, D),
}


def rwkv(p, x):
    k, v, r = x @ p["k"], x @ p["v"], jax.nn.sigmoid(x @ p["r"])

    def f(c, t):
        a, b, m = c
        kk, vv = t[0].astype(jnp.float32), t[1].astype(jnp.float32)
        q = jnp.maximum(m, p["u"] + kk)
        e1, e2 = jnp.exp(m - q), jnp.exp(p["u"] + kk - q)
        y = (e1 * a + e2 * vv) / (e1 * b + e2)
        q = jnp.maximum(m + p["w"], kk)
        e1, e2 = jnp.exp(m + p["w"] - q), jnp.exp(kk - q)
        return (e1 * a + e2 * vv, e1 * b + e2, q), y

    _, y = lax.scan(f, (jnp.zeros(D), jnp.zeros(D), jnp.full(D, -1e30)), (k, v))
    return x + (r * y.astype(x.dtype)) @ p["o"]


P_rwkv = {
    **{n: weight(D, D) for n in "kvro"},
    "u": jnp.asarray(DRAW.normal(size=D), jnp.float32),
    "w": jnp.asarray(-np.exp(DRAW.normal(size=D)), jnp.float32),
}


def lstm(p, x):
    def f(c, t):
        h, c = c
        i, f, g, o = jnp.split(t @ p["w"] + h @ p["u"] + p["b"], 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(f, (jnp.zeros(D, BF), jnp.zeros(D, BF)), x)[1]


def gru32(p, x):
    def f(h, t):
        z, r = jnp.split(jax.nn.sigmoid((jnp.concatenate([t, h.astype(BF)]) @ p["zr"]).astype(jnp.float32)), 2)
        n = jnp.tanh((jnp.concatenate([t, (r * h).astype(BF)]) @ p["n"]).astype(jnp.float32))
        h = (1 - z) * n + z * h
        return h, h

    return lax.scan(f, jnp.zeros(D), x)[1].astype(BF) @ p["o"]


def ema(p, x):
    a = jax.nn.sigmoid(p["a"])
    c = lax.associative_scan(
        lambda l, r: (l[0] * r[0], l[1] * r[0] + r[1]),
        (jnp.broadcast_to(a, (T, D)), (x @ p["w"]).astype(jnp.float32) * (1 - a)),
    )[1]
    return jax.nn.gelu(c.astype(BF) @ p["o"], approximate=False)


def mstep(p, x, st):
    z = x @ p["in"]
    u, g = jnp.split(z, 2)
    cs = jnp.concatenate([st["c"][1:], u[None]])
    u = jax.nn.silu(jnp.sum(cs * p["cw"], 0))
    dt = jax.nn.softplus((u @ p["dt"]).astype(jnp.float32))
    B, C = u @ p["B"], u @ p["C"]
    h = jnp.exp(-dt[:, None] * p["A"]) * st["h"] + (dt * u.astype(jnp.float32))[:, None] * B.astype(jnp.float32)
    y = (h @ C.astype(jnp.float32)).astype(BF) * jax.nn.silu(g)
    o = y @ p["o"]
    return {"y": o, "state": {"h": h, "c": cs}}


PM = {
    "in": weight(D, 2 * D),
    "cw": weight(4, D, scale=0.5),
    "dt": weight(D, D),
    "A": jnp.asarray(np.tile(np.arange(1.0, 9), (D, 1)), jnp.float32),
    "B": weight(D, 8),
    "C": weight(D, 8),
    "o": weight(D, D),
}


def hmm(p, o):
    A = jax.nn.log_softmax(p["t"])
    B = jax.nn.log_softmax(p["em"])

    def f(a, t):
        a = jax.nn.logsumexp(a[:, None] + A, 0) + B[:, t]
        return a, a

    return jax.nn.logsumexp(lax.scan(f, jnp.full(6, -np.log(6.0), jnp.float32), o)[0])


PROGRAMS = {
    "mamba": Program(mamba, P_mamba, {"a": (X,)}),
    "rwkv": Program(rwkv, P_rwkv, {"a": (X,)}),
    "lstm": Program(lstm, {"w": weight(D, 4 * D), "u": weight(D, 4 * D), "b": jnp.zeros(4 * D, BF)}, {"a": (X,)}),
    "gru": Program(gru32, {"zr": weight(2 * D, 2 * D), "n": weight(2 * D, D), "o": weight(D, D)}, {"a": (X,)}),
    "moving average": Program(ema, SQUARE | {"a": jnp.asarray(DRAW.normal(size=D) + 2, jnp.float32)}, {"a": (X,)}),
    "mamba step": Program(
        mstep,
        PM,
        {"a": (X[0], {"h": jnp.zeros((D, 8)), "c": jnp.zeros((4, D), BF)})},
        steps=6,
        advance=lambda i, o: (o["y"], o["state"]),
    ),
    "hidden markov": Program(
        hmm,
        {"t": weight(6, 6, scale=1.0, dt=jnp.float32), "em": weight(6, 9, scale=1.0, dt=jnp.float32)},
        {"a": (jnp.asarray(DRAW.integers(0, 9, 30)),)},
    ),
}
