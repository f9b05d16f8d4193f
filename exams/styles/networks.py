"""Networks: patches, convolutions, experts, graphs, codes, samplers."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from exams.styles.shapes import BF, DRAW, SQUARE, D, H, K, T, X, weight
from precaudit import Program


def vit(p, img):
    h = (
        lax.conv_general_dilated(img, p["patch"], (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")).reshape(
            -1, D
        )
        + p["pos"]
    )

    def ln(x, g, b):
        f = x.astype(jnp.float32)
        m = f.mean(-1, keepdims=True)
        v = ((f - m) ** 2).mean(-1, keepdims=True)
        return ((f - m) * lax.rsqrt(v + 1e-6)).astype(x.dtype) * g + b

    y = ln(h, p["g"], p["b"])
    q, k, v = jnp.split((y @ p["qkv"]).reshape(-1, H, 3 * K), 3, -1)
    a = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, k).astype(jnp.float32) * K**-0.5).astype(h.dtype)
    h = h + jnp.einsum("hts,shk->thk", a, v).reshape(-1, D) @ p["o"]
    return (h + jax.nn.gelu(ln(h, p["g"], p["b"]) @ p["up"]) @ p["down"]).mean(0) @ p["head"]


P_vit = {
    "patch": weight(4, 4, 3, D, scale=0.15),
    "pos": weight(16, D, scale=0.02),
    "g": jnp.ones(D, BF),
    "b": jnp.zeros(D, BF),
    "qkv": weight(D, 3 * D),
    "o": weight(D, D),
    "up": weight(D, 4 * D),
    "down": weight(4 * D, D),
    "head": weight(D, 10),
}


def moe(p, x):
    lg = (x @ p["router"]).astype(jnp.float32)
    top, idx = lax.top_k(jax.nn.softmax(lg), 2)
    top = (top / top.sum(-1, keepdims=True)).astype(x.dtype)
    flat = idx.reshape(-1)
    order = jnp.argsort(flat)
    xs = x[order // 2]
    n = jnp.bincount(flat, length=4)
    h = jax.nn.silu(lax.ragged_dot(xs, p["g"], n)) * lax.ragged_dot(xs, p["u"], n)
    y = lax.ragged_dot(h, p["d"], n)
    back = jnp.zeros_like(y).at[order].set(y).reshape(T, 2, D)
    return x + jnp.einsum("tkd,tk->td", back, top)


P_moe = {
    "router": weight(D, 4),
    "g": weight(4, D, 96, scale=0.125),
    "u": weight(4, D, 96, scale=0.125),
    "d": weight(4, 96, D, scale=0.1),
}


def unet(p, x, t):
    e = jnp.exp(-np.log(1e4) * jnp.arange(16) / 16) * t
    e = jnp.concatenate([jnp.sin(e), jnp.cos(e)]).astype(x.dtype) @ p["t"]

    def gn(h):
        f = h.astype(jnp.float32).reshape(8, 8, 4, -1)
        m = f.mean((0, 1, 3), keepdims=True)
        v = f.var((0, 1, 3), keepdims=True)
        return ((f - m) / jnp.sqrt(v + 1e-5)).reshape(h.shape).astype(h.dtype)

    def conv(h, k):
        return lax.conv_general_dilated(h[None], k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))[0]

    h = conv(x, p["c1"])
    h = jax.nn.swish(gn(h)) + e
    h = conv(h, p["c2"])
    h = jax.image.resize(h, (16, 16, 32), "nearest")
    return lax.reduce_window(h, -jnp.inf, lax.max, (2, 2, 1), (2, 2, 1), "VALID") + jnp.fft.fft(
        h[:8, :8].astype(jnp.float32), axis=0
    ).real.astype(h.dtype)


P_unet = {"t": weight(32, 32), "c1": weight(3, 3, 3, 32, scale=0.2), "c2": weight(3, 3, 32, 32, scale=0.06)}

I = jnp.asarray(DRAW.normal(size=(1, 16, 16, 3)), BF)


def resnet(p, x):
    def bn(h, s):
        f = h.astype(jnp.float32)
        m = f.mean((0, 1, 2))
        v = jnp.maximum((f * f).mean((0, 1, 2)) - m * m, 0)
        return ((f - m) * lax.rsqrt(v + 1e-5) * s).astype(h.dtype)

    cv = lambda h, k, s=1: lax.conv_general_dilated(h, k, (s, s), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    h = jax.nn.relu(bn(cv(x, p["a"]), p["s"]))
    h = jax.nn.relu(h + bn(cv(jax.nn.relu(bn(cv(h, p["b"]), p["s"])), p["c"]), p["s"]))
    return lax.reduce_window(h.astype(jnp.float32), 0.0, lax.add, (1, 4, 4, 1), (1, 4, 4, 1), "VALID") / 16


def gnn(p, x, e):
    for i in range(2):
        m = jax.nn.relu(x[e[0]] @ p["m"] + x[e[1]] @ p["n"])
        s = jax.ops.segment_sum(m, e[1], T)
        d = jax.ops.segment_sum(jnp.ones(e.shape[1], BF), e[1], T)
        a = jax.ops.segment_max(m, e[1], T)
        a = jnp.where(jnp.isfinite(a), a, 0)
        x = jnp.tanh(x + s / jnp.maximum(d, 1)[:, None] + a @ p["a"])
    return x


def vq(p, x):
    d = (
        jnp.sum(x.astype(jnp.float32) ** 2, -1)[:, None]
        - 2 * (x @ p["c"].T).astype(jnp.float32)
        + jnp.sum(p["c"].astype(jnp.float32) ** 2, -1)[None]
    )
    q = p["c"][jnp.argmin(d, -1)]
    return x + lax.stop_gradient(q - x)


def nucleus(p, x):
    l = (x @ p["h"]).astype(jnp.float32) / 0.8
    i = jnp.argsort(-l, -1)
    s = jnp.take_along_axis(l, i, -1)
    c = jnp.cumsum(jax.nn.softmax(s), -1)
    s = jnp.where(c - jax.nn.softmax(s) < 0.9, s, -jnp.inf)
    return jax.nn.log_softmax(s), i


E_ = jnp.asarray(DRAW.integers(0, T, (2, 60)))

Q = {n: weight(D, D) for n in "qkvo"} | {
    "g": jnp.ones(D, BF),
    "u": weight(D, 96),
    "d": weight(96, D),
    "e": weight(60, D, scale=1.0),
}


def sample(p, x, key):
    l = (x @ p["e"].T).astype(jnp.float32) / 0.7
    pr = jax.nn.softmax(l)
    l = jnp.where(pr < 0.05 * pr.max(-1, keepdims=True), -jnp.inf, l)
    return jnp.argmax(l + jax.random.gumbel(key, l.shape), -1), l


def vae(p, x, key):
    h = jax.nn.relu(x @ p["u"])
    m, s = jnp.split((h @ p["d"]).astype(jnp.float32), 2, -1)
    z = m + jnp.exp(0.5 * s) * jax.random.normal(key, m.shape)
    r = jax.nn.sigmoid(z.astype(BF) @ p["q"][: D // 2])
    return jnp.mean(jnp.sum((r - x).astype(jnp.float32) ** 2, -1)) - 0.5 * jnp.mean(
        jnp.sum(1 + s - m * m - jnp.exp(s), -1)
    )


PROGRAMS = {
    "vit": Program(vit, P_vit, {"a": (I,)}),
    "diffusion": Program(unet, P_unet, {"a": (jnp.asarray(DRAW.normal(size=(8, 8, 3)), BF), jnp.float32(37.0))}),
    "resnet": Program(
        resnet,
        {
            "a": weight(3, 3, 3, 16, scale=0.2),
            "b": weight(3, 3, 16, 16, scale=0.1),
            "c": weight(3, 3, 16, 16, scale=0.1),
            "s": jnp.ones(16),
        },
        {"a": (weight(2, 12, 12, 3, scale=1.0),)},
    ),
    "experts": Program(moe, P_moe, {"a": (X,)}),
    "graph": Program(gnn, SQUARE, {"a": (X, E_)}),
    "vector quantiser": Program(vq, {"c": weight(16, D, scale=1.0)}, {"a": (X,)}),
    "vae": Program(vae, Q, {"a": (X, jax.random.key(4))}),
    "nucleus sampling": Program(nucleus, {"h": weight(D, 60)}, {"a": (X,)}),
    "min p sampling": Program(sample, Q, {"a": (X, jax.random.key(3))}),
}
