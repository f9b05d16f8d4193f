"""Mixing of tokens without a softmax: chunked delta rules, state spaces, long convolutions, complex states."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular

from exams.styles.shapes import BF, SQUARE, D, H, K, T, X, rms_norm, seed_weights
from precaudit import Program

DRAW, weight = seed_weights(11)
C = 8  # a chunk's tokens


def heads(p, x, names="qkv"):
    """Return the heads [H, T, K] of a few products."""
    return [(x @ p[n]).reshape(-1, H, K).transpose(1, 0, 2) for n in names]


def delta(p, x):
    q, k, v = heads(p, x)
    unit = lambda y: y * lax.rsqrt(jnp.sum(y * y, -1, keepdims=True) + 1e-6)
    q, k, v = unit(q.astype(jnp.float32)), unit(k.astype(jnp.float32)), v.astype(jnp.float32)
    beta = jax.nn.sigmoid((x @ p["beta"]).astype(jnp.float32)).T
    q, k, v, b = (y.reshape(H, T // C, C, -1) for y in (q, k, v, beta))
    kb, vb = k * b, v * b
    low = jnp.tril(jnp.einsum("hnik,hnjk->hnij", kb, k), -1) + jnp.eye(C)
    w = solve_triangular(low, kb, lower=True, unit_diagonal=True)
    u = solve_triangular(low, vb, lower=True, unit_diagonal=True)

    def chunk(s, t):
        qc, kc, wc, uc = t
        new = uc - wc @ s
        o = qc @ s + jnp.tril(qc @ kc.swapaxes(-1, -2)) @ new
        return s + kc.swapaxes(-1, -2) @ new, o

    _, o = lax.scan(chunk, jnp.zeros((H, K, K)), tuple(y.swapaxes(0, 1) for y in (q, k, w, u)))
    return x + o.transpose(0, 2, 1, 3).reshape(T, D).astype(x.dtype) @ p["o"]


def gla(p, x):
    q, k, v = (y.reshape(H, T // C, C, K) for y in heads(p, x))
    g = jax.nn.log_sigmoid((x @ p["a"] @ p["b"]).astype(jnp.float32)) / 16
    g = jnp.cumsum(g.reshape(T // C, C, H, K).transpose(2, 0, 1, 3), 2)

    def chunk(s, t):
        qc, kc, vc, gc = t
        last = gc[:, -1:]
        qg = qc.astype(jnp.float32) * jnp.exp(gc) * K**-0.5
        a = jnp.tril(jnp.einsum("hik,hjk->hij", qg, kc.astype(jnp.float32) * jnp.exp(-gc)))
        o = jnp.einsum("hik,hkv->hiv", qg, s) + jnp.einsum("hij,hjv->hiv", a, vc.astype(jnp.float32))
        kk = kc.astype(jnp.float32) * jnp.exp(last - gc)
        s = s * jnp.exp(last).swapaxes(-1, -2) + jnp.einsum("hik,hiv->hkv", kk, vc.astype(jnp.float32))
        return s, o.astype(x.dtype)

    _, o = lax.scan(chunk, jnp.zeros((H, K, K)), tuple(y.swapaxes(0, 1) for y in (q, k, v, g)))
    o = o.transpose(0, 2, 1, 3).reshape(T, H, K)
    return x + (rms_norm(o, p["n"]).reshape(T, D) * jax.nn.silu(x @ p["g"])) @ p["o"]


def segsum(a):
    """Return the sums of a[j+1 : i+1] at [..., i, j], -inf above the diagonal."""
    n = a.shape[-1]
    a = jnp.where(jnp.tril(jnp.ones((n, n), bool), -1), jnp.repeat(a[..., None], n, -1), 0)
    return jnp.where(jnp.tril(jnp.ones((n, n), bool)), jnp.cumsum(a, -2), -jnp.inf)


def ssd(p, x):
    v = (x @ p["v"]).reshape(T // C, C, H, K)
    dt = jax.nn.softplus((x @ p["dt"]).astype(jnp.float32) + p["bias"]).reshape(T // C, C, H)
    a = (-jnp.exp(p["log_a"]) * dt).transpose(2, 0, 1)
    b, c = ((x @ p[n]).reshape(T // C, C, K) for n in "bc")
    u = (v.astype(jnp.float32) * dt[..., None]).astype(x.dtype)
    inside = jnp.exp(segsum(a))
    sums = jnp.cumsum(a, -1)
    y = jnp.einsum("cin,cjn,hcij,cjhk->cihk", c, b, inside.astype(x.dtype), u, preferred_element_type=jnp.float32)
    decay = jnp.exp(sums[..., -1:] - sums)
    states = jnp.einsum("cjn,hcj,cjhk->chkn", b, decay, u, preferred_element_type=jnp.float32)
    states = jnp.concatenate([jnp.zeros_like(states[:1]), states])
    between = jnp.exp(segsum(jnp.pad(sums[..., -1], ((0, 0), (1, 0)))))
    before = jnp.einsum("hzc,chkn->zhkn", between, states)[:-1]
    y = y + jnp.einsum("cin,chkn,hci->cihk", c, before, jnp.exp(sums))
    y = (y + p["d"][:, None] * v.astype(jnp.float32)).reshape(T, D).astype(x.dtype)
    return x + rms_norm(y * jax.nn.silu(x @ p["g"]), p["norm"]) @ p["o"]


P_ssd = SQUARE | {
    "b": weight(D, K),
    "c": weight(D, K),
    "dt": weight(D, H),
    "bias": jnp.full(H, -1.0),
    "log_a": jnp.log(jnp.arange(1.0, H + 1)),
    "d": jnp.ones(H),
    "norm": jnp.ones(D, BF),
}


def rwkv7(p, x):
    back = jnp.pad(x, ((1, 0), (0, 0)))[:-1]
    mix = lambda n: x + (back - x) * p["mu"][n]
    r, k, v = mix(0) @ p["q"], mix(1) @ p["k"], mix(2) @ p["v"]
    w = jnp.exp(-0.606531 * jax.nn.sigmoid((jnp.tanh(mix(3) @ p["a1"]) @ p["a2"]).astype(jnp.float32)))
    a = jax.nn.sigmoid((mix(4) @ p["a"]).astype(jnp.float32))
    kk = k.reshape(T, H, K).astype(jnp.float32)
    kk = (kk / jnp.maximum(jnp.linalg.norm(kk, axis=-1, keepdims=True), 1e-12)).reshape(T, D)
    k = k.astype(jnp.float32) * (1 + (a - 1) * p["ka"])

    def step(s, t):
        rt, wt, kt, vt, kkt, at = (y.reshape(H, K) for y in t)
        s = s * wt[:, None] - jnp.einsum("hvk,hk->hv", s, kkt)[..., None] * (kkt * at)[:, None]
        s = s + vt[..., None] * kt[:, None]
        return s, jnp.einsum("hvk,hk->hv", s, rt)

    f = jnp.float32
    _, y = lax.scan(step, jnp.zeros((H, K, K)), (r.astype(f), w, k, v.astype(f), kk, a))
    m = y.mean(-1, keepdims=True)
    y = (y - m) * lax.rsqrt(y.var(-1, keepdims=True) + 64e-5)
    return x + y.reshape(T, D).astype(x.dtype) @ p["o"]


P_rwkv7 = SQUARE | {
    "mu": jnp.asarray(DRAW.uniform(size=(5, D)), BF),
    "a1": weight(D, 16),
    "a2": weight(16, D),
    "ka": jnp.asarray(DRAW.uniform(size=D), jnp.float32),
}


def hyena(p, x):
    a, b, v = jnp.split(x @ p["in"], 3, -1)
    t = jnp.linspace(0, 1, T)[:, None]
    z = jnp.concatenate([t, jnp.cos(2 * jnp.pi * t), jnp.sin(2 * jnp.pi * t)], -1)
    k = jnp.sin(z @ p["f1"]) @ p["f2"] * jnp.exp(-t * p["rate"])
    u = b * v
    y = jnp.fft.irfft(jnp.fft.rfft(u, n=2 * T, axis=0) * jnp.fft.rfft(k, n=2 * T, axis=0), n=2 * T, axis=0)[:T]
    return x + (a * (y + u * p["skip"])) @ p["o"]


F32 = jnp.float32
X32 = X.astype(F32)
P_hyena = {
    "in": weight(D, 3 * D, dt=F32),
    "f1": weight(3, 16, scale=3.0, dt=F32),
    "f2": weight(16, D, dt=F32),
    "rate": jnp.asarray(np.linspace(1, 8, D), F32),
    "skip": weight(D, scale=1.0, dt=F32),
    "o": weight(D, D, dt=F32),
}


def lru(p, x):
    lam = jnp.exp(lax.complex(-jnp.exp(p["nu"]), jnp.exp(p["theta"])))
    gamma = jnp.sqrt(1 - jnp.abs(lam) ** 2)
    u = x.astype(F32) @ (p["br"] + 1j * p["bi"]) * gamma
    join = lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1])
    h = lax.associative_scan(join, (jnp.broadcast_to(lam, u.shape), u))[1]
    y = (h @ (p["cr"] + 1j * p["ci"])).real + x * p["d"]
    return x + jax.nn.gelu(y).astype(x.dtype)


P_lru = {
    "nu": jnp.asarray(np.log(-np.log(DRAW.uniform(0.7, 0.95, 32))), F32),
    "theta": jnp.asarray(np.log(DRAW.uniform(0.1, 3, 32)), F32),
    **{n: weight(D, 32, dt=F32) for n in ("br", "bi")},
    **{n: weight(32, D, dt=F32) for n in ("cr", "ci")},
    "d": jnp.ones(D),
}


def mlstm(p, x):
    q, k, v = heads(p, x)
    i, f = ((x @ p[n]).astype(F32).T for n in ("i", "f"))
    f = jnp.cumsum(jax.nn.log_sigmoid(f + 3), -1)
    d = jnp.where(jnp.tril(jnp.ones((T, T), bool)), f[..., :, None] - f[..., None, :] + i[..., None, :], -jnp.inf)
    m = d.max(-1, keepdims=True)
    s = jnp.einsum("htk,hsk->hts", q, k).astype(F32) * K**-0.5 * jnp.exp(d - m)
    n = jnp.maximum(jnp.abs(s.sum(-1, keepdims=True)), jnp.exp(-m))
    o = jnp.einsum("hts,hsk->thk", (s / (n + 1e-6)).astype(x.dtype), v).reshape(T, D)
    return x + (jax.nn.sigmoid(x @ p["g"]) * o) @ p["o"]


PROGRAMS = {
    "chunked delta rule": Program(delta, SQUARE | {"beta": weight(D, H)}, {"a": (X,)}),
    "gated linear attention": Program(
        gla, SQUARE | {"a": weight(D, 16), "b": weight(16, D), "n": jnp.ones(K, BF)}, {"a": (X,)}
    ),
    "chunked state space": Program(ssd, P_ssd, {"a": (X,)}),
    "rwkv 7": Program(rwkv7, P_rwkv7, {"a": (X,)}),
    "long convolution": Program(hyena, P_hyena, {"a": (X32,)}),
    "complex recurrence": Program(lru, P_lru, {"a": (X,)}),
    "matrix lstm": Program(mlstm, SQUARE | {"i": weight(D, H), "f": weight(D, H)}, {"a": (X,)}),
}
