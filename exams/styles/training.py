"""Losses, their gradients, and optimisers."""

import jax
import jax.numpy as jnp
from jax import lax

from exams.styles.shapes import BF, DRAW, SQUARE, D, T, X, rms_norm, weight
from precaudit import Program


def dpo(p, x, y):
    def logp(a, b, ids):
        h = x @ (p["w"] + (a @ b))
        lg = (h @ p["head"]).astype(jnp.float32)
        return jnp.take_along_axis(jax.nn.log_softmax(lg), ids[:, None], -1).sum()

    def loss(ab):
        a, b = ab
        d = (logp(a, b, y[0]) - logp(jnp.zeros_like(a), b, y[0])) - (
            logp(a, b, y[1]) - logp(jnp.zeros_like(a), b, y[1])
        )
        return -jax.nn.log_sigmoid(0.1 * d)

    l, g = jax.value_and_grad(loss)((p["a"], p["b"]))
    return l, g


P_dpo = {"w": weight(D, D), "a": weight(D, 8), "b": weight(8, D, scale=0.05), "head": weight(D, 50)}

Y = jnp.asarray(DRAW.integers(0, 50, (2, T)))


def adam(p, s, x, t):
    def loss(q):
        q = {k: v.astype(BF) for k, v in q.items()}
        return jnp.mean((jnp.tanh(x @ q["a"]) @ q["b"] - t).astype(jnp.float32) ** 2)

    l, g = jax.value_and_grad(loss)(p["m"])
    gn = jnp.sqrt(sum(jnp.sum(v * v) for v in g.values()))
    c = jnp.minimum(1, 1 / gn)
    g = {k: v * c for k, v in g.items()}
    mu = {k: 0.9 * s["mu"][k] + 0.1 * g[k] for k in g}
    nu = {k: 0.95 * s["nu"][k] + 0.05 * g[k] ** 2 for k in g}
    n = s["n"] + 1
    new = {k: p["m"][k] - 1e-3 * (mu[k] / (1 - 0.9**n)) / (jnp.sqrt(nu[k] / (1 - 0.95**n)) + 1e-8) for k in g}
    return l, new, {"mu": mu, "nu": nu, "n": n}


P_adam = {"m": {"a": weight(D, 32, dt=jnp.float32), "b": weight(32, 4, dt=jnp.float32)}}

S_adam = {
    "mu": {k: jnp.zeros_like(v) for k, v in P_adam["m"].items()},
    "nu": {k: jnp.zeros_like(v) for k, v in P_adam["m"].items()},
    "n": jnp.asarray(0.0, jnp.float32),
}


def ce16(p, x, y):
    h = jax.nn.relu(x.astype(jnp.float16) @ p["a"].astype(jnp.float16)) ** 2

    def one(c, i):
        xs, ys = i
        lg = (xs @ p["b"].astype(jnp.float16)).astype(jnp.float32)
        return c + (jax.nn.logsumexp(lg, -1) - jnp.take_along_axis(lg, ys[:, None], -1)[:, 0]).sum(), None

    return lax.scan(one, jnp.float32(0), (h.reshape(3, 8, -1), y.reshape(3, 8)))[0] / T


P_ce = {"a": weight(D, 64, dt=jnp.float32), "b": weight(64, 100, dt=jnp.float32)}


def clip(p, a, b):
    n = lambda v: v / jnp.linalg.norm(v.astype(jnp.float32), axis=-1, keepdims=True).astype(v.dtype)
    l = (n(a @ p["a"]) @ n(b @ p["b"]).T).astype(jnp.float32) * jnp.exp(p["t"])
    return -(jnp.diag(jax.nn.log_softmax(l, 0)) + jnp.diag(jax.nn.log_softmax(l, 1))).mean() / 2


clipg = lambda p, a, b: jax.value_and_grad(lambda q: clip(q, a, b))(p)


def muon(p, g):
    x = g.astype(BF)
    x = x / (jnp.linalg.norm(x.astype(jnp.float32)) + 1e-7).astype(BF)
    for _ in range(4):
        a = x @ x.T
        b = -4.775 * a + 2.0315 * (a @ a)
        x = 3.4445 * x + b @ x
    return p["w"] - 0.02 * x.astype(jnp.float32)


def adafactor(p, g, r, c):
    g2 = g * g + 1e-30
    r = 0.99 * r + 0.01 * g2.mean(-1)
    c = 0.99 * c + 0.01 * g2.mean(0)
    u = g * lax.rsqrt(r / r.mean())[:, None] * lax.rsqrt(c)[None]
    u = u / jnp.maximum(1.0, jnp.sqrt(jnp.mean(u * u)))
    return (p["w"].astype(jnp.float32) - 1e-2 * u).astype(BF), r, c


def half_biases(p, x, t):
    """Biases under a batch of two: their gradients are sums over examples and tokens, in float16."""

    def loss(p):
        h = jax.nn.gelu(x @ p["w"] + p["b"]) @ p["v"] + p["c"]
        return jnp.mean((h - t).astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss)(p)


HALF = jnp.float16
P_half = {"w": weight(D, 32, dt=HALF), "b": weight(32, dt=HALF), "v": weight(32, 8, dt=HALF), "c": weight(8, dt=HALF)}
X_half = weight(2, T, D, scale=1.0, dt=HALF)


def gradattn(p, x):
    def f(q):
        h = jax.nn.gelu(x @ q["a"])
        a = jax.nn.softmax((h @ h.T).astype(jnp.float32) / 7).astype(BF)
        return jnp.mean(((a @ h) @ q["b"]).astype(jnp.float32) ** 2)

    return jax.grad(f)(p)


def rematgrad(p, x):
    def layer(h, q):
        n = h.astype(jnp.float32)
        n = (n * lax.rsqrt(jnp.mean(n * n, -1, keepdims=True) + 1e-6)).astype(BF)
        return h + jax.nn.silu(n @ q["a"]) @ q["b"], None

    def f(q):
        return jnp.sum(lax.scan(jax.checkpoint(layer), x, q)[0].astype(jnp.float32) ** 2) / T

    return jax.grad(f)(p)


@jax.custom_vjp
def swiglu(a, b):
    return jax.nn.silu(a) * b


swiglu.defvjp(
    lambda a, b: (swiglu(a, b), (a, b)),
    lambda r, g: (
        (g * r[1] * (jax.nn.sigmoid(r[0]) * (1 + r[0] * (1 - jax.nn.sigmoid(r[0])))).astype(BF)),
        g * jax.nn.silu(r[0]),
    ),
)


def custom(p, x):
    return jax.value_and_grad(lambda q: jnp.mean((swiglu(x @ q["a"], x @ q["b"]) @ q["c"]).astype(jnp.float32) ** 2))(p)


G = weight(32, 40, scale=0.1, dt=jnp.float32)

Q = {n: weight(D, D) for n in "qkvo"} | {
    "g": jnp.ones(D, BF),
    "u": weight(D, 96),
    "d": weight(96, D),
    "e": weight(60, D, scale=1.0),
}


def ppo(p, x, old, act, rew, val):
    def gae(c, t):
        d = t[0] + 0.99 * t[2] - t[1]
        c = d + 0.99 * 0.95 * c
        return c, c

    adv = lax.scan(gae, 0.0, (rew, val[:-1], val[1:]), reverse=True)[1]
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)

    def loss(q):
        lp = jnp.take_along_axis(
            jax.nn.log_softmax((jnp.tanh(x @ q["a"]) @ q["b"]).astype(jnp.float32)), act[:, None], 1
        )[:, 0]
        r = jnp.exp(lp - old)
        return -jnp.minimum(r * adv, jnp.clip(r, 0.8, 1.2) * adv).mean() + 0.01 * jnp.mean((lp - old) ** 2)

    return jax.value_and_grad(loss)(p)


def accum(p, x, y):
    def loss(q, xb, yb):
        return jnp.mean((rms_norm(jnp.tanh(xb @ q["u"]) @ q["d"], q["g"]).astype(jnp.float32) - yb) ** 2)

    def f(g, b):
        l, d = jax.value_and_grad(loss)(p, *b)
        return jax.tree.map(lambda a, c: a + c.astype(jnp.float32) / 4, g, d), l

    g, l = lax.scan(
        f, jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), p), (x.reshape(4, 6, D), y.reshape(4, 6, D))
    )
    return g, l.mean()


PROGRAMS = {
    "dpo": Program(dpo, P_dpo, {"a": (X, Y)}),
    "adam": Program(adam, P_adam, {"a": (S_adam, X, weight(T, 4, scale=1.0))}),
    "muon": Program(muon, {"w": G}, {"a": (weight(32, 40, dt=jnp.float32),)}),
    "adafactor": Program(adafactor, {"w": weight(32, 40)}, {"a": (G, jnp.ones(32), jnp.ones(40))}),
    "contrastive": Program(
        clipg, {"a": weight(D, 24), "b": weight(D, 24), "t": jnp.float32(2.0)}, {"a": (X, weight(T, D, scale=1.0))}
    ),
    "attention gradient": Program(gradattn, SQUARE, {"a": (X,)}),
    "rematerialised gradient": Program(
        rematgrad, {"a": weight(3, D, 64, scale=0.15), "b": weight(3, 64, D, scale=0.12)}, {"a": (X,)}
    ),
    "custom gradient": Program(custom, SQUARE, {"a": (X,)}),
    "ppo": Program(
        ppo,
        {"a": weight(D, 32), "b": weight(32, 8)},
        {
            "a": (
                X,
                jnp.asarray(-2 + 0.1 * DRAW.normal(size=T), jnp.float32),
                jnp.asarray(DRAW.integers(0, 8, T)),
                jnp.asarray(DRAW.normal(size=T), jnp.float32),
                jnp.asarray(DRAW.normal(size=T + 1), jnp.float32),
            )
        },
    ),
    "accumulated gradient": Program(
        accum, {n: Q[n] for n in "udg"}, {"a": (X, jnp.asarray(DRAW.normal(size=(T, D)), jnp.float32))}
    ),
    "gradients of biases in float16": Program(half_biases, P_half, {"a": (X_half, X_half[..., :8] * 2)}),
    "chunked cross entropy": Program(ce16, P_ce, {"a": (X, Y[0])}),
}
