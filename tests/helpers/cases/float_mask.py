import int_mask as sdpa
import jax
import jax.numpy as jnp

from precaudit import Program

T = sdpa.T


def call(p, x):
    query = jnp.einsum("btd,dhk->bthk", x, p["q"])
    key = jnp.einsum("btd,dhk->bthk", x, p["k"])
    value = jnp.einsum("btd,dhk->bthk", x, p["v"])
    i = jnp.arange(T, dtype="float32")[:, None] + jnp.float32(0)
    mask = (i >= jnp.arange(T, dtype="float32"))[None, None]
    att = jax.nn.dot_product_attention(query, key, value, mask=mask, scale=0.25)
    return jnp.einsum("bthk,hkd->btd", att, p["o"])


program = Program(call, sdpa.w, {"a": (sdpa.x,)}, outputs="out")
