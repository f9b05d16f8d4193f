"""A small GQA decoder: bfloat16, RoPE, RMSNorm, SwiGLU, layers in a scan, one function for prefill and decode.

`Options` hold the mistakes of public bug reports; the default has none.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

PAGE_SCALE = 0.0625
LAYERS, WIDTH, HEADS, GROUPS, HEAD, HIDDEN, VOCAB = 3, 64, 4, 2, 16, 128, 256
BF16, F32 = jnp.bfloat16, jnp.float32


@dataclass(frozen=True)
class Options:
    slots: int = 12
    theta: float = 10000.0
    positions: str = "int"  # "bf16": cumsum in the compute format
    past: int = 0  # decode's past length is this much too large
    mask_from_row0: bool = False
    advance_before_query: bool = False
    bad_v: bool = False
    eps: float = 1e-5
    norm: str = "after"  # weight times after casting back; "before": in float32
    act: object = BF16
    rope_out: object = None  # format that RoPE returns; None: its input's
    cache: object = None  # format of the cache; None: of activations
    page: int = 0  # > 0: fp8 cache with a scale a page
    wrong_page: int = 10**6  # from this page on the scale read is another one
    alibi: str = ""  # "keys": right; "query": built over the query length
    left: bool = False  # start holds minus the pad of each row
    see_pads: bool = False
    cut_small: float = 0.0  # fused QKV: V smaller than this is not written
    attended: float = 1.0  # times attention's product, as it is added to the stream
    fed: float = 1.0  # times the MLP's
    bent: float = 0.0  # times the MLP's product and its size: a formula that nobody knows


def rmsnorm(x, weight, o):
    wide = x.astype(F32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + o.eps)
    if o.norm == "before":
        return (wide * weight.astype(F32)).astype(o.act)
    return wide.astype(o.act) * weight


def rope(x, pos, o):
    half = HEAD // 2
    inv = o.theta ** (-jnp.arange(half, dtype=F32) / half)
    angle = pos.astype(F32)[..., None, None] * inv
    a, b = x[..., :half].astype(F32), x[..., half:].astype(F32)
    turned = jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)
    return turned.astype(o.rope_out or x.dtype)


def attention(normed, w, kc, vc, start, lengths, o):
    """normed [B, T, D]; caches [B, S, G, K]; start [B]: slot of the first row; lengths [B]: real rows of this call."""
    b, t = normed.shape[:2]
    if o.alibi:
        pos = jnp.zeros((b, t), jnp.int32)  # no RoPE
    elif o.positions == "bf16":
        pos = start.astype(BF16)[:, None] + jnp.cumsum(jnp.ones((b, t), BF16), axis=1) - 1
    else:
        pos = start[:, None] + jnp.arange(t)
    q = (normed @ w["q"]).reshape(b, t, HEADS, HEAD)
    k = (normed @ w["k"]).reshape(b, t, GROUPS, HEAD)
    v = (normed @ w["v"]).reshape(b, t, GROUPS, HEAD)
    q_pos = pos + t if o.advance_before_query else pos
    q_rot = rope(q, q_pos, o)
    k_rot = rope(k, pos, o)
    put = jax.vmap(lambda cache, new, at: lax.dynamic_update_slice(cache, new, (at, 0, 0)))
    if o.cut_small:
        v = jnp.where(jnp.max(jnp.abs(v), axis=-1, keepdims=True) < o.cut_small, 0, v)
    keys = put(kc, (k_rot / PAGE_SCALE if o.page else k_rot).astype(kc.dtype), start)
    values = put(vc, (v / PAGE_SCALE if o.page else v).astype(vc.dtype), start)
    if o.page:  # what attention reads: fp8 times the scale of its page
        pages = jnp.arange(o.slots) // o.page
        scale = jnp.where(pages >= o.wrong_page, 1.25 * PAGE_SCALE, PAGE_SCALE).astype(BF16)[:, None, None]
        read_k = keys.astype(BF16) * scale
        read_v = values.astype(BF16) * scale
    else:
        read_k, read_v = keys, values
    slot = jnp.arange(o.slots)
    row = start[:, None] + jnp.arange(t)
    seen = slot <= row[..., None]  # [B, T, S]
    seen &= slot < (start + lengths)[:, None, None]
    if o.mask_from_row0:
        seen = jnp.broadcast_to(seen[:1], seen.shape)
    grouped = q_rot.reshape(b, t, GROUPS, HEADS // GROUPS, HEAD)
    scores = jnp.einsum("btgrk,bsgk->bgrts", grouped, read_k, preferred_element_type=F32) * HEAD**-0.5
    if o.alibi:
        slopes = 2.0 ** -(2.0 * jnp.arange(1, HEADS + 1, dtype=F32)).reshape(GROUPS, HEADS // GROUPS)
        far = jnp.arange(t)[:, None] - jnp.arange(o.slots) if o.alibi == "query" else row[..., None] - slot
        far = jnp.broadcast_to(far, seen.shape)
        if o.alibi == "query" and t == 1:
            far = jnp.zeros(seen.shape)  # built over a query of length 1: 0 everywhere
        scores = scores - slopes[None, :, :, None, None] * far[:, None, None]
    probs = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1).astype(o.act)
    attended = jnp.einsum("bgrts,bsgk->btgrk", probs, read_v.astype(o.act)).reshape(b, t, HEADS * HEAD)
    return attended @ w["o"], keys, values


def block(x, w, kc, vc, start, lengths, o):
    normed = rmsnorm(x, w["attn_norm"], o)
    mixed, keys, values = attention(normed, w, kc, vc, start, lengths, o)
    x = x + (mixed if o.attended == 1.0 else mixed * o.attended)
    h2 = rmsnorm(x, w["mlp_norm"], o)
    act = jax.nn.silu(h2 @ w["gate"]) * (h2 @ w["up"])
    down = act @ w["down"]
    added = down if o.fed == 1.0 else down * o.fed
    return x + (added if o.bent == 0.0 else added + o.bent * added * jnp.abs(added)), keys, values


def forward(params, tokens, start, lengths, cache, o=Options()):
    x = params["embed"][tokens]

    def one(x, given):
        w, kc, vc = given
        x, keys, values = block(x, w, kc, vc, start, lengths, o)
        return x, (keys, values)

    x, cache = lax.scan(one, x, (params["layers"], *cache))
    final = rmsnorm(x, params["norm"], o)
    logits = jnp.einsum("btd,vd->btv", final, params["embed"], preferred_element_type=F32)
    return logits, cache


def weights(seed=0, dtype=BF16):
    rng = np.random.default_rng(seed)

    def draw(*shape, scale=None):
        scale = scale if scale is not None else shape[-2] ** -0.5
        return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

    n = LAYERS
    return {
        "embed": draw(VOCAB, WIDTH, scale=0.1),
        "norm": 1 + draw(WIDTH, scale=0.1),
        "layers": {
            "attn_norm": 1 + draw(n, WIDTH, scale=0.1), "mlp_norm": 1 + draw(n, WIDTH, scale=0.1),
            "q": draw(n, WIDTH, HEADS * HEAD), "k": draw(n, WIDTH, GROUPS * HEAD), "v": draw(n, WIDTH, GROUPS * HEAD),
            "o": draw(n, HEADS * HEAD, WIDTH), "gate": draw(n, WIDTH, HIDDEN), "up": draw(n, WIDTH, HIDDEN),
            "down": draw(n, HIDDEN, WIDTH),
        },
    }  # fmt: skip


def empty(b, o):
    kind = jnp.float8_e4m3fn if o.page else o.cache or o.act
    return tuple(jnp.zeros((LAYERS, b, o.slots, GROUPS, HEAD), kind) for _ in range(2))


def greedy(inputs, outputs):
    _token, start, lengths, _ = inputs
    logits, cache = outputs
    return jnp.argmax(logits[:, -1:], -1).astype(jnp.int32), start + 1, lengths, cache


def from_nothing(o, p, steps=7, b=1, cases=("a",), advance=greedy):
    """Decode, one row a call, from an empty cache on."""
    made = {
        n: (prompt(b, 1, i + 1), jnp.zeros(b, jnp.int32), jnp.ones(b, jnp.int32), empty(b, o))
        for i, n in enumerate(cases)
    }
    return {
        "call": partial(forward, o=o),
        "params": p,
        "cases": made,
        "steps": steps,
        "advance": advance,
        "outputs": ("logits", "cache"),
    }


def after_prefill(o, p, n=4, steps=3, b=1, first=None):
    """Decode after a prefill of n rows, which runs outside."""
    given = prompt(b, n)
    logits, cache = jax.jit(partial(forward, o=first or o))(
        p, given, jnp.zeros(b, jnp.int32), jnp.full(b, n, jnp.int32), empty(b, o)
    )
    token = jnp.argmax(logits[:, -1:], -1).astype(jnp.int32)
    at = jnp.full(b, n + o.past, jnp.int32)
    made = {"a": (token, at, jnp.ones(b, jnp.int32), cache)}
    return {
        "call": partial(forward, o=o),
        "params": p,
        "cases": made,
        "steps": steps,
        "advance": greedy,
        "outputs": ("logits", "cache"),
    }


def whole(params, buffer, n, o):
    """No cache: the whole sequence again; logits of the last real row."""
    b, t = buffer.shape
    o2 = Options(**{**o.__dict__, "slots": t, "cache": o.rope_out or o.act, "page": 0})
    logits, _ = forward(params, buffer, jnp.zeros(b, jnp.int32), jnp.full(b, t, jnp.int32), empty(b, o2), o2)
    return logits[jnp.arange(b), n - 1][:, None]


def recomputed(o, p, n=4, steps=3, b=1):
    """The same tokens as after_prefill, without a cache."""
    given = prompt(b, n)
    first = jax.jit(partial(whole, o=o))(p, given, jnp.full(b, n, jnp.int32))
    buffer = jnp.zeros((b, n + steps + 1), jnp.int32).at[:, :n].set(given).at[:, n].set(jnp.argmax(first[:, 0], -1))

    def advance(inputs, logits):
        buffer, n = inputs
        return jnp.asarray(buffer).at[jnp.arange(b), n].set(jnp.argmax(logits[:, 0], -1).astype(jnp.int32)), n + 1

    made = {"a": (buffer, jnp.full(b, n + 1, jnp.int32))}
    return {
        "call": partial(whole, o=o),
        "params": p,
        "cases": made,
        "steps": steps,
        "advance": advance,
        "outputs": ("logits",),
    }


def prompt(b, t, seed=1):
    return jnp.asarray(np.random.default_rng(seed).integers(1, VOCAB, (b, t)), jnp.int32)
