"""Attention as programs write it: latent, blockwise, biased, linear, and with caches of several kinds."""

import jax
import jax.numpy as jnp
from jax import lax

from exams.styles.shapes import BF, SQUARE, D, H, K, T, X, attend, rms_norm, weight
from precaudit import Program


def mla(p, x):
    c = rms_norm(x @ p["dkv"], p["g"])
    kr = x @ p["kr"]
    pos = jnp.arange(T)[:, None] * (1e4 ** (-jnp.arange(4) / 4))[None]

    def rot(v):
        a, b = v[..., ::2].astype(jnp.float32), v[..., 1::2].astype(jnp.float32)
        s, co = jnp.sin(pos), jnp.cos(pos)
        s, co = (s[:, None], co[:, None]) if v.ndim == 3 else (s, co)
        return jnp.stack([a * co - b * s, a * s + b * co], -1).reshape(v.shape).astype(v.dtype)

    q = (x @ p["q"]).reshape(T, H, 24)
    qn, qr = q[..., :16], rot(q[..., 16:])
    k = (c @ p["uk"]).reshape(T, H, 16)
    v = (c @ p["uv"]).reshape(T, H, 16)
    kr = rot(kr)
    s = (
        jnp.einsum("thk,shk->hts", qn, k, preferred_element_type=jnp.float32)
        + jnp.einsum("thk,sk->hts", qr, kr, preferred_element_type=jnp.float32)
    ) * 24**-0.5
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -jnp.inf)
    o = jnp.einsum("hts,shk->thk", jax.nn.softmax(s).astype(x.dtype), v).reshape(T, -1)
    return x + o @ p["o"]


P_mla = {
    "dkv": weight(D, 32),
    "g": jnp.ones(32, BF),
    "kr": weight(D, 8),
    "q": weight(D, H * 24),
    "uk": weight(32, H * 16),
    "uv": weight(32, H * 16),
    "o": weight(H * 16, D),
}


def linattn(p, x):
    q, k, v = (x @ p[n] for n in "qkv")
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    kv = k[:, :, None].astype(jnp.float32) * v[:, None, :].astype(jnp.float32)
    s = lax.associative_scan(jnp.add, kv)
    z = lax.associative_scan(jnp.add, k.astype(jnp.float32))
    num = jnp.einsum("tk,tkv->tv", q.astype(jnp.float32), s)
    den = jnp.einsum("tk,tk->t", q.astype(jnp.float32), z)
    return x + (num / den[:, None]).astype(x.dtype) @ p["o"]


P_lin = {n: weight(D, D) for n in "qkvo"}


def flash(p, x):
    q, k, v = ((x @ p[n]).reshape(T, H, K) for n in "qkv")
    q = q * jnp.asarray(K**-0.5, q.dtype)
    kb, vb = k.reshape(3, 8, H, K), v.reshape(3, 8, H, K)

    def f(c, t):
        m, l, acc = c
        kk, vv, j = t
        s = jnp.einsum("thk,shk->hts", q, kk, preferred_element_type=jnp.float32)
        s = jnp.where(jnp.arange(T)[:, None] >= j * 8 + jnp.arange(8)[None], s, -1e30)
        n = jnp.maximum(m, s.max(-1))
        e = jnp.exp(s - n[..., None])
        a = jnp.exp(m - n)
        acc = acc * a[..., None] + jnp.einsum("hts,shk->htk", e.astype(v.dtype), vv, preferred_element_type=jnp.float32)
        return (n, l * a + e.sum(-1), acc), None

    (m, l, acc), _ = lax.scan(
        f, (jnp.full((H, T), -1e30), jnp.zeros((H, T)), jnp.zeros((H, T, K))), (kb, vb, jnp.arange(3))
    )
    return x + (acc / l[..., None]).transpose(1, 0, 2).reshape(T, D).astype(x.dtype) @ p["o"]


P_flash = {n: weight(D, D) for n in "qkvo"}


def alibi(p, x):
    q, k, v = ((x @ p[n]).reshape(T, H, K) for n in "qkv")
    s = jnp.einsum("thk,shk->hts", q, k, preferred_element_type=jnp.float32) / jnp.sqrt(16.0)
    s = 30 * jnp.tanh(s / 30)
    i, j = jnp.arange(T)[:, None], jnp.arange(T)[None]
    s = s - (2.0 ** -jnp.arange(1, H + 1))[:, None, None] * (i - j)
    s = jnp.where((j <= i) & (i - j < 9), s, jnp.finfo(jnp.float32).min)
    s = jnp.concatenate([s, jnp.broadcast_to(p["sink"][:, None, None], (H, T, 1))], -1)
    a = jax.nn.softmax(s)[..., :-1].astype(x.dtype)
    return rms_norm(x + jnp.einsum("hts,shk->thk", a, v).reshape(T, D) @ p["o"], p["g"])


P_alibi = {**{n: weight(D, D) for n in "qkvo"}, "sink": jnp.zeros(H, jnp.float32), "g": jnp.ones(D, BF)}


def bnorm(x, g):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + jnp.asarray(1e-5, x.dtype)) * g  # all in bf16


def t5(p, x):
    q, k, v = ((x @ p[n]).reshape(T, H, K) for n in "qkv")
    d = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    b = jnp.where(
        jnp.abs(d) < 4, jnp.abs(d), 4 + (jnp.log(jnp.maximum(jnp.abs(d), 1) / 4) / jnp.log(8) * 4).astype(jnp.int32)
    ).clip(0, 7)
    s = jnp.einsum("thk,shk->hts", q, k) + p["bias"][b].transpose(2, 0, 1)
    return bnorm(
        x + jnp.einsum("hts,shk->thk", jax.nn.softmax(s.astype(jnp.float32), -1).astype(BF), v).reshape(T, D) @ p["o"],
        p["g"],
    )


def retention(p, x):
    q, k, v = ((x @ p[n]).reshape(T, H, K) for n in "qkv")
    g = 1 - 2.0 ** (-5 - jnp.arange(H))
    i = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    m = jnp.where(i >= 0, g[:, None, None] ** jnp.maximum(i, 0), 0.0)
    s = jnp.einsum("thk,shk->hts", q, k).astype(jnp.float32) * m
    s = s / jnp.maximum(jnp.abs(s.sum(-1, keepdims=True)), 1)
    o = jnp.einsum("hts,shk->thk", s.astype(BF), v)
    f = o.astype(jnp.float32)
    o = ((f - f.mean(-1, keepdims=True)) / jnp.sqrt(f.var(-1, keepdims=True) + 1e-5)).astype(BF)
    return jax.nn.silu(x @ p["g"]) * o.reshape(T, D) @ p["o"]


def kvint8(p, x):
    k = x @ p["k"]
    s = jnp.max(jnp.abs(k), -1, keepdims=True) / 127
    ki = jnp.round(k / s).astype(jnp.int8)
    q = x @ p["q"]
    a = jax.nn.softmax((q @ (ki.astype(BF) * s).T).astype(jnp.float32) * D**-0.5)
    return a.astype(BF) @ (x @ p["v"])


Q = {n: weight(D, D) for n in "qkvo"} | {
    "g": jnp.ones(D, BF),
    "u": weight(D, 96),
    "d": weight(96, D),
    "e": weight(60, D, scale=1.0),
}


def ring(p, tok, pos, c):
    x = p["e"][tok]
    n = rms_norm(x, p["g"])
    q, k, v = ((n @ p[m]).reshape(H, K) for m in "qkv")
    i = pos % 8
    ck, cv = c["k"].at[i].set(k), c["v"].at[i].set(v)
    seen = jnp.arange(8) <= pos
    x = x + attend(q, ck, cv, seen).reshape(-1) @ p["o"]
    x = x + jax.nn.silu(rms_norm(x, p["g"]) @ p["u"]) @ p["d"]
    lg = (rms_norm(x, p["g"]) @ p["e"].T).astype(jnp.float32)
    return {"logits": lg, "tok": jnp.argmax(lg), "cache": {"k": ck, "v": cv}}


C0 = {n: jnp.zeros((8, H, K), BF) for n in "kv"}


def kv8(p, tok, pos, c):
    x = p["e"][tok]
    n = rms_norm(x, p["g"])
    q, k, v = ((n @ p[m]).reshape(H, K) for m in "qkv")

    def qz(t):
        s = jnp.max(jnp.abs(t.astype(jnp.float32)), -1, keepdims=True) / 127 + 1e-8
        return jnp.clip(jnp.round(t.astype(jnp.float32) / s), -127, 127).astype(jnp.int8), s

    (ki, ks), (vi, vs) = qz(k), qz(v)
    c = {
        "k": c["k"].at[pos].set(ki),
        "ks": c["ks"].at[pos].set(ks),
        "v": c["v"].at[pos].set(vi),
        "vs": c["vs"].at[pos].set(vs),
    }
    kk, vv = (c["k"].astype(jnp.float32) * c["ks"]).astype(BF), (c["v"].astype(jnp.float32) * c["vs"]).astype(BF)
    x = x + attend(q, kk, vv, jnp.arange(T) <= pos).reshape(-1) @ p["o"]
    lg = (rms_norm(x, p["g"]) @ p["e"].T).astype(jnp.float32)
    return {"logits": lg, "tok": jnp.argmax(lg), "cache": c}


C8 = {
    "k": jnp.zeros((T, H, K), jnp.int8),
    "ks": jnp.zeros((T, H, 1)),
    "v": jnp.zeros((T, H, K), jnp.int8),
    "vs": jnp.zeros((T, H, 1)),
}


def paged(p, x, pages, table, n):
    q = (x @ p["q"]).reshape(H, K)
    k = pages["k"][table].reshape(-1, H, K)
    v = pages["v"][table].reshape(-1, H, K)
    return attend(q, k, v, jnp.arange(k.shape[0]) < n).reshape(-1) @ p["o"]


PG = {n: weight(6, 4, H, K, scale=1.0) for n in "kv"}


def cross(p, x, c):
    def one(a, b):
        q = (a @ p["q"]).reshape(-1, H, K)
        k, v = ((b @ p[n]).reshape(-1, H, K) for n in "kv")
        s = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, k) * jnp.asarray(K**-0.5, BF))
        return a + p["g"] * jnp.asarray(0.1, BF) * (jnp.einsum("hts,shk->thk", s, v).reshape(-1, D) @ p["o"])

    return jax.vmap(one)(x, c)


def next_token(inputs, out):
    return out["tok"], inputs[1] + 1, out["cache"]


PROGRAMS = {
    "latent": Program(mla, P_mla, {"a": (X,)}),
    "blockwise": Program(flash, P_flash, {"a": (X,)}),
    "linear bias": Program(alibi, P_alibi, {"a": (X,)}),
    "relative bias": Program(t5, SQUARE | {"bias": weight(8, H, scale=1.0), "g": jnp.ones(D, BF)}, {"a": (X,)}),
    "linear attention": Program(linattn, P_lin, {"a": (X,)}),
    "retention": Program(retention, SQUARE, {"a": (X,)}),
    "ring cache": Program(ring, Q, {"a": (jnp.int32(3), jnp.int32(0), C0)}, steps=12, advance=next_token, outputs=None),
    "int8 cache": Program(kv8, Q, {"a": (jnp.int32(3), jnp.int32(0), C8)}, steps=7, advance=next_token),
    "paged cache": Program(paged, Q, {"a": (X[0], PG, jnp.asarray([4, 1, 5]), jnp.int32(9))}),
    "cross attention": Program(cross, Q, {"a": (weight(3, T, D, scale=1.0), weight(3, 7, D, scale=1.0))}),
    "int8 keys": Program(kvint8, SQUARE, {"a": (X,)}),
}
