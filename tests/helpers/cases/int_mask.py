import jax
import jax.numpy as jnp
import numpy as np

from precaudit import Program

D = np.random.default_rng(0)
T = 16
w = {n: jnp.asarray(D.standard_normal((64, h, 16)) / 16, jnp.bfloat16) for n, h in (("q", 4), ("k", 2), ("v", 2))}
w["o"] = jnp.asarray(D.standard_normal((4, 16, 64)) / 8, jnp.bfloat16)


def call(p, x):
    query = jnp.einsum("btd,dhk->bthk", x, p["q"])
    key = jnp.einsum("btd,dhk->bthk", x, p["k"])
    value = jnp.einsum("btd,dhk->bthk", x, p["v"])
    mask = jnp.tril(jnp.ones((1, 1, T, T), bool))
    att = jax.nn.dot_product_attention(query, key, value, mask=mask, scale=0.25)
    return jnp.einsum("bthk,hkd->btd", att, p["o"])


x = jnp.asarray(D.standard_normal((1, T, 64)), jnp.bfloat16)
program = Program(call, w, {"a": (x,)}, outputs="out")
