"""Serving: verified drafts, beams, penalties, caches that roll, experts with a capacity, weights in blocks."""

import jax
import jax.numpy as jnp
from jax import lax

from exams.styles.shapes import BF, SQUARE, D, H, K, T, X, attend, rms_norm, seed_weights
from precaudit import Program

DRAW, weight = seed_weights(14)
F16, F32, V = jnp.float16, jnp.float32, 60
SMALL = {n: weight(D, D, dt=F16) for n in "qkvo"} | {"g": jnp.ones(D, F16), "e": weight(V, D, scale=1.0, dt=F16)}


def verify(p, x, draft, q, key):
    """Return how many drafted tokens stand, and the token after them."""
    a, b = jax.random.split(key)
    pr = jax.nn.softmax((x @ p["head"]).astype(F32) / 0.9)
    at = jnp.arange(len(draft))
    chance = jnp.minimum(1, pr[at, draft] / q[at, draft])
    stand = jnp.cumprod((jax.random.uniform(a, (len(draft),)) < chance).astype(jnp.int32))
    n = stand.sum()
    rest = jnp.maximum(pr - jnp.concatenate([q, jnp.zeros((1, V))]), 0)[n]
    rest = rest / jnp.maximum(rest.sum(), 1e-9)
    return n, chance, rest, jax.random.categorical(b, jnp.log(rest + 1e-9))


def beams(p, tok, score, cache, pos):
    x = p["e"][tok]
    n = rms_norm(x, p["g"])
    q, k, v = ((n @ p[m]).reshape(3, H, K) for m in "qkv")
    ck = lax.dynamic_update_slice(cache["k"], k[:, None], (0, pos, 0, 0))
    cv = lax.dynamic_update_slice(cache["v"], v[:, None], (0, pos, 0, 0))
    s = jnp.einsum("bhk,bshk->bhs", q, ck).astype(F32) * K**-0.5
    a = jax.nn.softmax(jnp.where(jnp.arange(8) <= pos, s, -1e9)).astype(F16)
    x = x + jnp.einsum("bhs,bshk->bhk", a, cv).reshape(3, D) @ p["o"]
    lp = jax.nn.log_softmax((rms_norm(x, p["g"]) @ p["e"].T / 8).astype(F32))
    best, at = lax.top_k((score[:, None] + lp).reshape(-1), 3)
    old, new = at // V, at % V
    return {"logits": lp, "score": best, "tok": new, "cache": {"k": ck[old], "v": cv[old]}}


def penalised(p, x, seen, bias):
    lg = (30 * jnp.tanh((x[-1] @ p["e"].T) / 30)).astype(F32)
    n = jnp.zeros(V).at[seen].add(1.0)
    lg = jnp.where(n > 0, jnp.where(lg > 0, lg / 1.2, lg * 1.2), lg) - 0.5 * (n > 0) - 0.1 * n
    lg = lg.at[bias[0]].add(bias[1].astype(F32))
    kth = lax.top_k(lg, 10)[0][-1]
    lg = jnp.where(lg < kth, -jnp.inf, lg / 0.6)
    order = jnp.argsort(-lg)
    c = jnp.cumsum(jax.nn.softmax(lg)[order])
    cut = jnp.zeros(V, bool).at[order].set(jnp.concatenate([jnp.zeros(1, bool), c[:-1] > 0.95]))
    return jax.nn.softmax(jnp.where(cut, -jnp.inf, lg))


def rolled(p, x, cache, pos):
    n = rms_norm(x, p["g"])
    q, k, v = ((n @ p[m]).reshape(H, K) for m in "qkv")
    ck, cv = jnp.roll(cache["k"], -1, 0).at[-1].set(k), jnp.roll(cache["v"], -1, 0).at[-1].set(v)
    y = attend(q, ck, cv, jnp.arange(8) >= 7 - pos).reshape(-1) @ p["o"]
    return {"y": rms_norm(x + y, p["g"]), "cache": {"k": ck, "v": cv}, "pos": pos + 1}


def capacity(p, x):
    pr = jax.nn.softmax((x @ p["router"]).astype(F32))
    gate, e = pr.max(-1), jnp.argmax(pr, -1)
    place = jnp.take_along_axis(jnp.cumsum(jax.nn.one_hot(e, 4, dtype=jnp.int32), 0), e[:, None], 1)[:, 0] - 1
    slot = jnp.where(place < 5, e * 5 + place, 20)
    buffer = jnp.zeros((20, D), x.dtype).at[slot].set(x, mode="drop").reshape(4, 5, D)
    y = jax.vmap(lambda b, u, d: jax.nn.gelu(b @ u) @ d)(buffer, p["u"], p["d"]).reshape(20, D)
    y = y.at[slot].get(mode="fill", fill_value=0)
    return x + y * gate[:, None].astype(x.dtype)


def blocks(p, x):
    """Weights in four-bit floats, 32 of a block, a scale of each that is a power of two."""
    code = jnp.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], BF)

    def unpacked(w, s):
        mag, sign = code[w & 7], jnp.where(w & 8, -1, 1).astype(BF)
        scale = jnp.exp2(s.astype(F32) - 127).astype(BF)
        return (mag * sign).reshape(-1, 32, w.shape[1]) * scale[:, None]

    w = unpacked(p["w"], p["s"]).reshape(D, D)
    gate, up = jnp.split(x @ w + p["b"], 2, -1)
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    return (up + 1) * (gate * jax.nn.sigmoid(1.702 * gate))


def adapters(p, x, which):
    y = jnp.einsum("btd,dk->btk", x, p["w"])
    z = jnp.einsum("btd,bdr->btr", x, p["a"][which])
    return y + jnp.einsum("btr,brk->btk", z, p["b"][which]) * jnp.asarray(0.5, x.dtype)


def grouped(p, x):
    q, k, v = (x @ p["q"]).reshape(1, T, H, K), (x @ p["k"]).reshape(1, T, 2, K), (x @ p["v"]).reshape(1, T, 2, K)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(9, 0))
    return x + y.reshape(T, D) @ p["o"]


def halting(p, x):
    """Iterate to a fixed point, or for 20 steps."""

    def more(s):
        return (s[0] < 20) & (s[2] > 1e-3)

    def step(s):
        i, z, _ = s
        new = jnp.tanh(z @ p["w"] + x)
        return i + 1, new, jnp.linalg.norm(new - z) / (jnp.linalg.norm(new) + 1e-6)

    return lax.while_loop(more, step, (0, jnp.zeros_like(x), F32(jnp.inf)))


def mel(p, wave):
    """A spectrogram in mels and two convolutions."""
    frames = wave[jnp.arange(30)[:, None] * 64 + jnp.arange(128)] * jnp.hanning(128)
    power = jnp.abs(jnp.fft.rfft(frames)) ** 2
    lg = jnp.log10(jnp.maximum(power @ p["mel"], 1e-10))
    lg = ((jnp.maximum(lg, lg.max() - 8) + 4) / 4).astype(F16)

    def conv(x, w, b, stride):
        y = lax.conv_general_dilated(x[None], w, (stride,), [(1, 1)], dimension_numbers=("NWC", "WIO", "NWC"))[0]
        return jax.nn.gelu(y + b, approximate=False)

    return conv(conv(lg, p["c1"], p["b"], 1), p["c2"], p["b"], 2)


def merged(p, x, parts):
    """Attention over caches in parts, merged by their log-sums."""
    q = (x @ p["q"]).reshape(H, K)

    def part(k, v, n):
        s = jnp.einsum("hk,shk->hs", q, k, preferred_element_type=F32) * K**-0.5
        s = jnp.where(jnp.arange(k.shape[0]) < n, s, -jnp.inf)
        z = jax.nn.logsumexp(s, -1)
        return jnp.einsum("hs,shk->hk", jnp.exp(s - z[:, None]), v.astype(F32)), z

    o, z = jax.vmap(part)(parts["k"], parts["v"], parts["n"])
    w = jnp.exp(z - jax.nn.logsumexp(z, 0))
    return jnp.sum(o * w[..., None], 0).reshape(D).astype(x.dtype) @ p["o"]


DRAFT = jnp.asarray(DRAW.integers(0, V, 5))
GUESS = jax.nn.softmax(weight(5, V, scale=1.0, dt=F32))
CACHE = {n: jnp.zeros((3, 8, H, K), F16) for n in "kv"}

PROGRAMS = {
    "verified draft": Program(verify, {"head": weight(D, V)}, {"a": (X[:6], DRAFT, GUESS, jax.random.key(8))}),
    "beams": Program(
        beams,
        SMALL,
        {"a": (jnp.asarray([3, 9, 21]), jnp.asarray([0.0, -0.3, -0.9]), CACHE, jnp.int32(0))},
        steps=5,
        advance=lambda i, o: (o["tok"], o["score"], o["cache"], i[3] + 1),
    ),
    "penalised logits": Program(
        penalised,
        {"e": weight(V, D, scale=0.5)},
        {"a": (X, jnp.asarray([4, 9, 4, 33]), (jnp.asarray([2, 7]), jnp.asarray([-3.0, 1.5], BF)))},
    ),
    "rolled cache": Program(
        rolled,
        SQUARE | {"g": jnp.ones(D, BF)},
        {"a": (X[0], {n: jnp.zeros((8, H, K), BF) for n in "kv"}, jnp.int32(0))},
        steps=9,
        advance=lambda i, o: (o["y"], o["cache"], o["pos"]),
    ),
    "experts with a capacity": Program(
        capacity,
        {
            "router": weight(D, 4, dt=F16),
            "u": weight(4, D, 48, scale=0.125, dt=F16),
            "d": weight(4, 48, D, scale=0.14, dt=F16),
        },
        {"a": (X.astype(F16),)},
    ),
    "weights in blocks": Program(
        blocks,
        {
            "w": jnp.asarray(DRAW.integers(0, 16, (D, D)), jnp.uint8),
            "s": jnp.asarray(DRAW.integers(121, 125, (D // 32, D)), jnp.uint8),
            "b": weight(D, scale=0.1),
        },
        {"a": (X,)},
    ),
    "gathered adapters": Program(
        adapters,
        {
            "w": weight(D, 40, dt=F16),
            "a": weight(4, D, 8, scale=0.125, dt=F16),
            "b": weight(4, 8, 40, scale=0.3, dt=F16),
        },
        {"a": (weight(3, 5, D, scale=1.0, dt=F16), jnp.asarray([2, 0, 2]))},
    ),
    "grouped window": Program(
        grouped, {"q": weight(D, D), "k": weight(D, 2 * K), "v": weight(D, 2 * K), "o": weight(D, D)}, {"a": (X,)}
    ),
    "fixed point": Program(halting, {"w": weight(D, D, scale=0.06, dt=F32)}, {"a": (X.astype(F32),)}),
    "spectrogram": Program(
        mel,
        {
            "mel": jnp.asarray(DRAW.uniform(size=(65, 20)) * (DRAW.uniform(size=(65, 20)) < 0.2), F32),
            "c1": weight(3, 20, 32, scale=0.13, dt=F16),
            "c2": weight(3, 32, 32, scale=0.1, dt=F16),
            "b": jnp.zeros(32, F16),
        },
        {"a": (jnp.asarray(DRAW.normal(size=2048) * 0.1, F32),)},
    ),
    "merged caches": Program(
        merged,
        SQUARE,
        {
            "a": (
                X[0],
                {"k": weight(3, 7, H, K, scale=1.0), "v": weight(3, 7, H, K, scale=1.0), "n": jnp.asarray([7, 4, 1])},
            )
        },
    ),
}
