"""Losses as post-training writes them, and their gradients: in parts, distilled, of groups, of routers."""

import jax
import jax.numpy as jnp
from jax import lax

from exams.styles.shapes import BF, D, T, X, rms_norm, seed_weights
from precaudit import Program

DRAW, weight = seed_weights(12)
F16, F32, V = jnp.float16, jnp.float32, 96
Y = jnp.asarray(DRAW.integers(0, V, T))
MASK = jnp.asarray(DRAW.uniform(size=T) < 0.8, F32)
X16 = X.astype(F16)


def zloss(p, x, y):
    def loss(q):
        h = rms_norm(x @ q["a"], q["g"])

        @jax.checkpoint
        def part(total, t):
            lg = jnp.matmul(t[0], q["e"].T, preferred_element_type=F32)
            z = jax.nn.logsumexp(lg, -1)
            return total + jnp.sum(z - jnp.take_along_axis(lg, t[1][:, None], -1)[:, 0] + 1e-4 * z**2), None

        return lax.scan(part, F32(0), (h.reshape(4, 6, D), y.reshape(4, 6)))[0] / T

    return jax.value_and_grad(loss)(p)


@jax.custom_vjp
def fused_entropy(h, w, y):
    return fused_forward(h, w, y)[0]


def fused_forward(h, w, y):
    lg = jnp.matmul(h, w, preferred_element_type=F32)
    z = jax.nn.logsumexp(lg, -1, keepdims=True)
    g = (jnp.exp(lg - z) - jax.nn.one_hot(y, V)).astype(h.dtype)
    loss = jnp.mean(z[:, 0] - jnp.take_along_axis(lg, y[:, None], -1)[:, 0])
    return loss, (g @ w.T / len(y), h.T @ g / len(y))


fused_entropy.defvjp(fused_forward, lambda r, c: (r[0] * c.astype(r[0].dtype), r[1] * c.astype(r[1].dtype), None))


def fused(p, x, y):
    return jax.value_and_grad(lambda q: fused_entropy(jax.nn.relu(x @ q["a"]) ** 2, q["head"], y))(p)


def grpo(p, x, old, ref, act, reward, mask):
    adv = (reward - reward.mean(-1, keepdims=True)) / (reward.std(-1, keepdims=True) + 1e-4)

    def loss(q):
        lg = (rms_norm(x + jax.nn.silu(x @ q["a"]) @ q["b"], q["g"]) @ q["head"]).astype(F32)
        lp = jnp.take_along_axis(jax.nn.log_softmax(lg), act[..., None], -1)[..., 0]
        ratio = jnp.exp(lp - old)
        gain = jnp.minimum(ratio * adv[..., None], jnp.clip(ratio, 0.8, 1.28) * adv[..., None])
        kl = jnp.exp(ref - lp) - (ref - lp) - 1
        return -jnp.sum((gain - 0.04 * kl) * mask) / jnp.maximum(mask.sum(), 1)

    return jax.value_and_grad(loss)(p)


def near(x):
    return jnp.asarray(-4.5 + 0.3 * DRAW.normal(size=x), F32)


def distil(p, x, teacher):
    def loss(q):
        s = (jnp.tanh(x @ q["a"]) @ q["head"]).astype(F32) / 2
        t = jax.nn.log_softmax((x @ teacher).astype(F32) / 2)
        return 4 * jnp.mean(jnp.sum(jnp.exp(t) * (t - jax.nn.log_softmax(s)), -1)) * 128

    l, g = jax.value_and_grad(loss)(p)
    return l / 128, jax.tree.map(lambda v: v.astype(F32) / 128, g)


def smoothed(p, ids, y, mask):
    def loss(q):
        x = q["e"][ids] * jnp.sqrt(float(D)).astype(q["e"].dtype)
        x = rms_norm(x + jax.nn.gelu(x @ q["a"]) @ q["b"], q["g"])
        lg = 30 * jnp.tanh(x @ q["e"].T / 30)
        t = jax.nn.one_hot(y, V) * 0.9 + 0.1 / V
        return -jnp.sum(jnp.sum(t * jax.nn.log_softmax(lg), -1) * mask) / mask.sum()

    return jax.value_and_grad(loss)(p)


def sinkhorn(p, a, b):
    def loss(q):
        u = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        c = 1 - u(a @ q["a"]) @ u(b @ q["a"]).T

        def step(_, fg):
            f, g = fg
            f = -0.1 * jax.nn.logsumexp((g[None] - c) / 0.1 - jnp.log(float(len(b))), 1)
            return f, -0.1 * jax.nn.logsumexp((f[:, None] - c) / 0.1 - jnp.log(float(len(a))), 0)

        f, g = lax.fori_loop(0, 8, step, (jnp.zeros(len(a)), jnp.zeros(len(b))))
        plan = jnp.exp((f[:, None] + g[None] - c) / 0.1) / (len(a) * len(b))
        return jnp.sum(plan * c)

    return jax.value_and_grad(loss)(p)


def ctc(p, x, labels):
    lp = jax.nn.log_softmax((x @ p["head"]).astype(F32))
    ext = jnp.zeros(2 * len(labels) + 1, jnp.int32).at[1::2].set(labels)
    skip = jnp.concatenate([jnp.zeros(2, bool), (ext[2:] != 0) & (ext[2:] != ext[:-2])])
    first = jnp.full(len(ext), -1e5).at[:2].set(lp[0, ext[:2]])

    def step(a, row):
        one = jnp.concatenate([jnp.full(1, -1e5), a[:-1]])
        two = jnp.where(skip, jnp.concatenate([jnp.full(2, -1e5), a[:-2]]), -1e5)
        return jnp.logaddexp(jnp.logaddexp(a, one), two) + row[ext], None

    a, _ = lax.scan(step, first, lp[1:])
    return -jnp.logaddexp(a[-1], a[-2])


def ctc_gradient(p, x, labels):
    return jax.value_and_grad(ctc)(p, x, labels)


def balance(p, x):
    def loss(q):
        lg = x.astype(F32) @ q["router"]
        pr = jax.nn.softmax(lg)
        gate, at = lax.top_k(pr, 2)
        gate = gate / gate.sum(-1, keepdims=True)
        hot = jax.nn.one_hot(at, 4, dtype=jnp.int32)
        place = (jnp.cumsum(hot.swapaxes(0, 1).reshape(2 * T, 4), 0) - 1).reshape(2, T, 4).swapaxes(0, 1)
        kept = hot * (place < 14)
        where = jax.nn.one_hot(jnp.sum(place * hot, -1), 14, dtype=x.dtype)
        send = jnp.einsum("tke,tkc->tec", kept.astype(x.dtype), where)
        back = jnp.einsum("tk,tke,tkc->tec", gate.astype(x.dtype), kept.astype(x.dtype), where)
        xs = jnp.einsum("tec,td->ecd", send, x)
        ys = jnp.einsum("ecf,efd->ecd", jax.nn.silu(jnp.einsum("ecd,edf->ecf", xs, q["u"])), q["d"])
        y = x + jnp.einsum("tec,ecd->td", back, ys)
        aux = 4 * jnp.sum(jnp.mean(hot[:, 0].astype(F32), 0) * pr.mean(0))
        return jnp.mean(y.astype(F32) ** 2) + 0.01 * aux + 1e-3 * jnp.mean(jax.nn.logsumexp(lg, -1) ** 2)

    return jax.value_and_grad(loss)(p)


def reward(p, a, b):
    def score(q, x):
        h = jnp.where(jnp.arange(T)[:, None] < T - 3, x @ q["a"], 0)
        h = jax.nn.gelu(h, approximate=True)
        return (h[T - 4] @ q["v"]).astype(F32)

    def loss(q):
        sa, sb = (jax.vmap(lambda x: score(q, x))(v) for v in (a, b))
        return jnp.mean(jax.nn.softplus(sb - sa - 0.1)) + 1e-2 * jnp.mean((sa + sb) ** 2)

    return jax.value_and_grad(loss)(p)


def siglip(p, a, b):
    def loss(q):
        u = lambda v: v * lax.rsqrt(jnp.sum(jnp.square(v), -1, keepdims=True) + jnp.asarray(1e-3, v.dtype))
        lg = u(a @ q["a"]) @ u(b @ q["b"]).T * jnp.exp(q["t"]).astype(a.dtype) + q["bias"].astype(a.dtype)
        z = 2 * jnp.eye(T, dtype=a.dtype) - 1
        return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(z * lg), -1))

    return jax.value_and_grad(loss)(p)


PROGRAMS = {
    "cross entropy with z loss": Program(
        zloss, {"a": weight(D, D), "g": jnp.ones(D, BF), "e": weight(V, D, scale=D**-0.5)}, {"a": (X, Y)}
    ),
    "fused cross entropy": Program(fused, {"a": weight(D, D), "head": weight(D, V)}, {"a": (X, Y)}),
    "grpo": Program(
        grpo,
        {"a": weight(D, 96), "b": weight(96, D), "g": jnp.ones(D, BF), "head": weight(D, V)},
        {
            "a": (
                weight(4, T, D, scale=1.0),
                near((4, T)),
                near((4, T)),
                jnp.asarray(DRAW.integers(0, V, (4, T))),
                jnp.asarray(DRAW.normal(size=4), F32),
                jnp.broadcast_to(MASK, (4, T)),
            )
        },
    ),
    "distillation": Program(
        distil, {"a": weight(D, D, dt=F16), "head": weight(D, V, dt=F16)}, {"a": (X16, weight(D, V, dt=F16))}
    ),
    "smoothed labels": Program(
        smoothed,
        {
            "e": weight(V, D, scale=0.1, dt=F32),
            "a": weight(D, 96, dt=F32),
            "b": weight(96, D, dt=F32),
            "g": jnp.ones(D),
        },
        {"a": (jnp.asarray(DRAW.integers(0, V, T)), Y, MASK)},
    ),
    "sinkhorn": Program(
        sinkhorn, {"a": weight(D, 16, dt=F32)}, {"a": (X.astype(F32), weight(12, D, scale=1.0, dt=F32))}
    ),
    "alignment": Program(ctc_gradient, {"head": weight(D, 20)}, {"a": (X, jnp.asarray([3, 7, 7, 2, 11, 5]))}),
    "balanced experts": Program(
        balance,
        {"router": weight(D, 4, dt=F32), "u": weight(4, D, 48, scale=0.125), "d": weight(4, 48, D, scale=0.14)},
        {"a": (X,)},
    ),
    "reward": Program(
        reward,
        {"a": weight(D, D, dt=F16), "v": weight(D, dt=F16)},
        {"a": tuple(weight(5, T, D, scale=1.0, dt=F16) for _ in "ab")},
    ),
    "sigmoid contrast": Program(
        siglip,
        {"a": weight(D, 24), "b": weight(D, 24), "t": F32(2.3), "bias": F32(-3.0)},
        {"a": (X, weight(T, D, scale=1.0))},
    ),
}
