"""Training steps: parameters in bfloat16, scaled losses, adapters, dropout, averages, microbatches, eight bits."""

import jax
import jax.numpy as jnp
from jax import lax

from exams.styles.shapes import BF, D, T, X, rms_norm, seed_weights
from precaudit import Program

DRAW, weight = seed_weights(13)
F16, F32 = jnp.float16, jnp.float32
TARGET = weight(T, 4, scale=1.0, dt=F32)


def mse(q, x, t):
    """Return the error of two layers."""
    return jnp.mean(((jax.nn.silu(x @ q["a"]) @ q["b"]).astype(F32) - t) ** 2)


def lion(p, m, x, t):
    l, g = jax.value_and_grad(mse)(p, x, t)
    g32 = jax.tree.map(lambda v: v.astype(F32), g)
    u = jax.tree.map(lambda m, g: jnp.sign(0.9 * m + 0.1 * g), m, g32)
    new = jax.tree.map(lambda w, u: (w.astype(F32) * (1 - 3e-4) - 3e-3 * u).astype(w.dtype), p, u)
    return l, new, jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g, m, g32)


def scaled_loss(p, s, x, t):
    def loss(q):
        h = jax.tree.map(lambda v: v.astype(F16), q)
        return mse(h, x, t) * s["scale"]

    l, g = jax.value_and_grad(loss)(p)
    g = jax.tree.map(lambda v: v / s["scale"], g)
    fine = jnp.all(jnp.asarray([jnp.all(jnp.isfinite(v)) for v in jax.tree.leaves(g)]))
    n = jnp.sqrt(sum(jnp.vdot(v, v) for v in jax.tree.leaves(g)))
    new = lax.cond(
        fine,
        lambda: jax.tree.map(lambda w, d: w - 0.1 * d * jnp.minimum(1, 0.5 / (n + 1e-6)), p, g),
        lambda: p,
    )
    good = jnp.where(fine, s["good"] + 1, 0)
    scale = jnp.where(fine, jnp.where(good == 2, s["scale"] * 2, s["scale"]), jnp.maximum(s["scale"] / 2, 1))
    return l / s["scale"], new, {"scale": scale, "good": good % 2}


def qlora(p, x, t):
    code = jnp.asarray([-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379,
                        0.4407, 0.5626, 0.723, 1.0], BF)  # fmt: skip
    pair = jnp.stack([p["packed"] >> 4, p["packed"] & 15], -1).reshape(D, D)
    w = (code[pair].reshape(D, D // 16, 16) * p["scale"][..., None].astype(BF)).reshape(D, D)

    def loss(ab):
        y = x @ w + (x @ ab["a"].astype(BF) @ ab["b"].astype(BF)) * 2
        return jnp.mean((rms_norm(y, p["g"])[:, :4].astype(F32) - t) ** 2)

    return jax.value_and_grad(loss)(p["lora"])


P_qlora = {
    "packed": jnp.asarray(DRAW.integers(0, 256, (D, D // 2)), jnp.uint8),
    "scale": jnp.asarray(DRAW.uniform(0.1, 0.3, (D, D // 16)), F32),
    "g": jnp.ones(D, BF),
    "lora": {"a": weight(D, 8, dt=F32), "b": weight(8, D, scale=0.02, dt=F32)},
}


def dropped(p, key, x, t):
    def loss(q, k):
        a, b = jax.random.split(k)
        h = rms_norm(x, q["g"])
        h = jax.nn.gelu(h @ q["u"])
        h = jnp.where(jax.random.bernoulli(a, 0.9, h.shape), h / 0.9, 0)
        y = h @ q["d"]
        y = jnp.where(jax.random.bernoulli(b, 0.8, (T, 1)), y / 0.8, 0).astype(x.dtype)
        return jnp.mean(((x + y).astype(F32)[:, :4] - t) ** 2)

    l, g = jax.value_and_grad(loss)(p, key)
    return l, jax.tree.map(lambda w, d: w - jnp.asarray(0.05, w.dtype) * d, p, g)


def averaged(p, s, x, t):
    def loss(q):
        y = jnp.tanh(x @ q["a"]) @ q["b"]
        return jnp.mean(jnp.where(jnp.abs(y - t) < 1, 0.5 * (y - t) ** 2, jnp.abs(y - t) - 0.5))

    n = s["n"] + 1.0
    rate = 1e-2 * jnp.where(n < 10, n / 10, 0.5 * (1 + jnp.cos(jnp.pi * (n - 10) / 90)))
    l, g = jax.value_and_grad(loss)(p)
    clipped = jax.tree.map(lambda v: v / jnp.maximum(1, jnp.linalg.norm(v)), g)
    new = jax.tree.map(lambda w, d: w - rate * (d + 0.1 * w), p, clipped)
    keep = jnp.minimum(0.999, (1 + n) / (10 + n))
    return l, new, {"n": n, "ema": jax.tree.map(lambda e, w: keep * e + (1 - keep) * w, s["ema"], new)}


def sharpness(p, x, t):
    g = jax.grad(mse)(p, x, t)
    n = jnp.sqrt(sum(jnp.sum(v.astype(F32) ** 2) for v in jax.tree.leaves(g)))
    far = jax.tree.map(lambda w, d: w + (0.05 * d.astype(F32) / (n + 1e-12)).astype(w.dtype), p, g)
    return jax.tree.map(lambda w, d: w - 0.1 * d, p, jax.grad(mse)(far, x, t))


def shampoo(p, s, g):
    left = 0.95 * s["l"] + 0.05 * g @ g.T
    right = 0.95 * s["r"] + 0.05 * g.T @ g

    def inverse_root(a):
        eye = jnp.eye(len(a))
        a = a + 1e-3 * jnp.trace(a) / len(a) * eye
        z = (1 + 4) / (2 * jnp.linalg.norm(a))

        def step(_, mh):
            m, h = mh
            c = 1.25 * eye - 0.25 * m
            c2 = c @ c
            return c2 @ c2 @ m, h @ c

        return lax.fori_loop(0, 12, step, (a * z, z**0.25 * eye))[1]

    u = inverse_root(left) @ g @ inverse_root(right)
    u = u * jnp.linalg.norm(g) / (jnp.linalg.norm(u) + 1e-12)
    return (p["w"].astype(F32) - 1e-2 * u).astype(p["w"].dtype), {"l": left, "r": right}


def microbatches(p, x, t):
    def step(i, c):
        total, g = c
        xb = lax.dynamic_slice_in_dim(x, i * 6, 6)
        l, d = jax.value_and_grad(mse)(p, xb, lax.dynamic_slice_in_dim(t, i * 6, 6))
        return total + l, jax.tree.map(lambda a, b: a + b, g, d)

    total, g = lax.fori_loop(0, 4, step, (F32(0), jax.tree.map(jnp.zeros_like, p)))
    return total / 4, jax.tree.map(lambda w, d: w - 0.1 * (d / 4), p, g)


def to_eight(x, kind):
    """Return x in eight bits and the scale that it was divided by."""
    most = float(jnp.finfo(kind).max)
    s = jnp.maximum(jnp.max(jnp.abs(x)).astype(F32), 1e-12) / most
    return jnp.clip(x.astype(F32) / s, -most, most).astype(kind), s


@jax.custom_vjp
def dot8(x, w):
    return dot8_forward(x, w)[0]


def product8(a, b):
    (a, sa), (b, sb) = a, b
    return (jnp.matmul(a, b, preferred_element_type=F32) * (sa * sb)).astype(BF)


def dot8_forward(x, w):
    xq, wq = to_eight(x, jnp.float8_e4m3fn), to_eight(w, jnp.float8_e4m3fn)
    return product8(xq, wq), (xq, wq)


def dot8_backward(r, g):
    (xq, xs), (wq, ws) = r
    gq, gs = to_eight(g, jnp.float8_e5m2)
    return product8((gq, gs), (wq.T, ws)), product8((xq.T, xs), (gq, gs))


dot8.defvjp(dot8_forward, dot8_backward)


def eight_bits(p, x, t):
    return jax.value_and_grad(lambda q: jnp.mean((dot8(jax.nn.relu(dot8(x, q["a"])), q["b"]).astype(F32) - t) ** 2))(p)


def norm_gradient(_, h):
    """Return the gradient of a layer norm with a relu, whose root a quotient and its derivative read."""
    return jax.grad(
        lambda h: jnp.mean(jax.nn.relu((h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True))))
    )(h)


def root_read_twice(v, h, c):
    """Return a row's sum of quotients beside the quotients: one root of float16 below both."""
    s = jnp.sqrt(v)
    return c * lax.reduce(h / s, h.dtype.type(0), lax.add, (1,))[:, None] + h / s


def two(dt=BF):
    return {"a": weight(D, 32, dt=dt), "b": weight(32, 4, dt=dt)}


def zeros(p):
    return jax.tree.map(lambda v: jnp.zeros(v.shape, F32), p)


P_lion, P_scaled, P_averaged = two(), two(F32), two(F32)
P_dropped = {"g": jnp.ones(D, BF), "u": weight(D, 96), "d": weight(96, D)}
GRADIENT = weight(24, 32, scale=0.1, dt=F32)

PROGRAMS = {
    "lion": Program(lion, P_lion, {"a": (zeros(P_lion), X, TARGET)}),
    "scaled loss": Program(
        scaled_loss, P_scaled, {"a": ({"scale": F32(1024), "good": jnp.int32(1)}, X.astype(F16), TARGET)}
    ),
    "four-bit adapter": Program(qlora, P_qlora, {"a": (X, TARGET)}),
    "dropout": Program(dropped, P_dropped, {"a": (jax.random.key(6), X, TARGET)}),
    "averaged parameters": Program(
        averaged, P_averaged, {"a": ({"n": F32(3), "ema": P_averaged}, X.astype(F32), TARGET)}
    ),
    "sharpness": Program(sharpness, two(F16), {"a": (X.astype(F16), TARGET)}),
    "shampoo": Program(shampoo, {"w": weight(24, 32)}, {"a": ({"l": jnp.eye(24), "r": jnp.eye(32)}, GRADIENT)}),
    "microbatches": Program(microbatches, two(F16), {"a": (X.astype(F16), TARGET)}),
    "eight-bit gradient": Program(eight_bits, two(), {"a": (X, TARGET)}),
    "norm's gradient": Program(norm_gradient, {}, {"a": (weight(24, 96, scale=1.0, dt=F16),)}),
    "root read twice": Program(
        root_read_twice,
        jnp.abs(weight(24, 1, scale=1.0, dt=F16)) + F16(0.5),
        {"a": (weight(24, 96, scale=1.0, dt=F16), weight(24, 96, scale=1.0, dt=F16))},
    ),
}
