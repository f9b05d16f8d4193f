"""fp16: attention logits over 65504 -> inf; inf - inf / inf*0 = NaN. Which op is first?"""

import jax
import jax.numpy as jnp
import numpy as np

from precaudit import Program

T, H, D = 16, 2, 64
HALF = jnp.float16


def attend(params, x, scale_first):
    q = jnp.einsum("td,dhk->thk", x, params["wq"])
    k = jnp.einsum("td,dhk->thk", x, params["wk"])
    v = jnp.einsum("td,dhk->thk", x, params["wv"])
    if scale_first:
        q = q * HALF(D**-0.5)
        scores = jnp.einsum("thk,shk->hts", q, k)
    else:
        raw = jnp.einsum("thk,shk->hts", q, k)
        scores = raw * HALF(D**-0.5)
    mask = jnp.tril(jnp.ones((T, T), bool))
    masked = jnp.where(mask, scores, HALF(-65504))
    probs = jax.nn.softmax(masked.astype(jnp.float32), -1).astype(HALF)
    mixed = jnp.einsum("hts,shk->thk", probs, v)
    return jnp.einsum("thk,hkd->td", mixed, params["wo"])


def program_of(scale_first, size=9.0):
    r = np.random.default_rng(0)

    def w(*s):
        return jnp.asarray(r.standard_normal(s) / np.sqrt(64), HALF)

    p = {"wq": w(64, H, D), "wk": w(64, H, D), "wv": w(64, H, D), "wo": w(H, D, 64)}
    x = jnp.asarray(r.standard_normal((T, 64)) * 1.0, HALF)
    p["wq"] = p["wq"] * HALF(size)
    p["wk"] = p["wk"] * HALF(size * 4)
    p["wq"] = p["wq"] + p["wk"] / HALF(4)

    def call(params, x):
        return attend(params, x, scale_first)

    return Program(call=call, params=p, cases={"a": (x,)})


buggy = program_of(False, size=13.0)
fixed = program_of(True, size=13.0)


# gradient of a softplus-like gate: exp overflows in fp16, where() keeps the value finite but inf * 0 = NaN backward
def gate_loss(params, x):
    z = x @ params["w"]
    safe = jnp.where(z > 10, z, jnp.log1p(jnp.exp(z)))
    return (safe.astype(jnp.float32) ** 2).mean()


def gate_fixed(params, x):
    z = x @ params["w"]
    low = jnp.minimum(z, HALF(10))
    safe = jnp.where(z > 10, z, jnp.log1p(jnp.exp(low)))
    return (safe.astype(jnp.float32) ** 2).mean()


def gate_program(loss):
    r = np.random.default_rng(1)
    p = {"w": jnp.asarray(r.standard_normal((32, 32)), HALF)}
    x = jnp.asarray(r.standard_normal((24, 32)), HALF)
    return Program(call=jax.grad(loss), params=p, cases={"a": (x,)})


gbuggy = gate_program(gate_loss)
gfixed = gate_program(gate_fixed)
