"""Attention kernels: scores, softmax and P · v in one operation, of which only the result is seen.

Shapes: B batch, T new positions, S keys, H query heads, G key/value heads, K head dimension.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from precaudit.errors import UserError
from precaudit.models.configs import DecoderConfig
from precaudit.models.jax_decoder.arithmetic import Arithmetic, batched_product
from precaudit.schema.policies import FLASH_BLOCK, Policy


def sdpa(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scale: float, cap: float | None, a: Arithmetic
) -> jax.Array:
    """``jax.nn.dot_product_attention``: q [B, T, H, K], k and v [B, S, G, K], mask [B, 1, T, S] → [B, T, H, K].

    Scores and softmax in float32, P cast to the operands' format, the result of that. It takes no precision and no cap:
    float32 products are made as the policy says through JAX's default, and ``check_config`` refuses a cap.
    """
    assert cap is None
    with jax.default_matmul_precision(a.matmul.name.lower()), jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, implementation="xla")
    return out.astype(a.attn_out)


def flash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    scale: float,
    cap: float | None,
    a: Arithmetic,
    block: int = FLASH_BLOCK,
) -> jax.Array:
    """Attention over blocks of keys under a running maximum (Dao et al. 2022, algorithm 1), as ``sdpa`` takes it.

    Scores, exponentials, their sum and the running output in float32; P is rounded to its format before its block's
    product, and divided by the whole sum at the end. Blocks begin at slot 0, ``block`` keys each.
    """
    b, t, h, d = q.shape
    keys, groups = k.shape[1], k.shape[2]
    block = min(block, keys)
    short = -keys % block
    k, v = (jnp.pad(x, ((0, 0), (0, short), (0, 0), (0, 0))) for x in (k, v))
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 0), (0, short)))[:, :, None]
    grouped, single = q.reshape(b, t, groups, h // groups, d), jnp.dtype(jnp.float32)

    def step(carry: Any, first: jax.Array) -> tuple[Any, None]:
        top, mass, out = carry
        rows, values = (lax.dynamic_slice_in_dim(x, first, block, axis=1) for x in (k, v))
        s = batched_product("btgrk,bsgk->bgrts", grouped, rows, single, a) * jnp.float32(scale)
        s = s if cap is None else jnp.float32(cap) * jnp.tanh(s / jnp.float32(cap))
        s = jnp.where(lax.dynamic_slice_in_dim(mask, first, block, axis=4), s, -jnp.inf)
        new = jnp.maximum(top, jnp.max(s, axis=-1, keepdims=True))
        base = jnp.where(new == -jnp.inf, 0.0, new)  # a row that has seen no key yet
        shrink, e = jnp.exp(top - base), jnp.exp(s - base)
        mass = mass * shrink + jnp.sum(e, axis=-1, keepdims=True)
        part = batched_product("bgrts,bsgk->bgrtk", e.astype(a.probs), values, single, a)
        return (new, mass, out * shrink + part), None

    rows = (b, groups, h // groups, t)
    none = jnp.full((*rows, 1), -jnp.inf, single), jnp.zeros((*rows, 1), single), jnp.zeros((*rows, d), single)
    (_, mass, out), _ = lax.scan(step, none, jnp.arange(0, keys + short, block, dtype=jnp.int32))
    return jnp.moveaxis(out / mass, 3, 1).reshape(b, t, h, d).astype(a.attn_out)


def check_config(policy: Policy, config: DecoderConfig) -> None:
    """Raise UserError where a policy's attention kernel cannot do what a configuration asks."""
    if policy.attention == "sdpa" and config.score_cap is not None:
        raise UserError(
            f"policy {policy.name}: attention = sdpa cannot cap scores, and this model caps them at "
            f"{config.score_cap:g} (attn_logit_softcapping); use attention = flash or naive"
        )
