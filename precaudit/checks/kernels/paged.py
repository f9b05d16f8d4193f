"""JAX's paged attention for a TPU, keys in pages: ``jax.experimental.pallas.ops.tpu.paged_attention``.

Formula: softmax(q kᵀ) v over the first ``lengths`` keys of a sequence, which lie in pages anywhere (Kwon et al. 2023);
queries come scaled, several heads share keys. Forward only: JAX defines no derivative of this kernel. It is JAX's own
(Apache-2.0), wrapped: nothing of it is written here.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.checks.kernels.attention import NO_KEY, UNSEEN, draws, float32_attention, with_interpreter

ARGNUMS = ()
BLOCK = 4  # pages that are read at once


def paged_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, lengths: jax.Array, page_indices: jax.Array
) -> Any:
    """Return attention [B, H, D] of ``q`` (scaled) [B, H, D], as a TPU compiles it.

    ``k_pages``, ``v_pages`` [G, P, page, D], G a divisor of H; ``lengths`` int32 [B]; ``page_indices`` int32 [B, N], N
    a multiple of BLOCK.
    """
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    return paged_attention(q, k_pages, v_pages, lengths, page_indices, pages_per_compute_block=BLOCK)


kernel = with_interpreter(paged_attention)


def reference(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, lengths: jax.Array, page_indices: jax.Array) -> Any:
    """Return the same by the formula, in float32."""
    (b, h, d), g = q.shape, k_pages.shape[0]
    k, v = (jnp.moveaxis(x[:, page_indices], 0, 1).reshape(b, g, -1, d) for x in (k_pages, v_pages))
    seen = jnp.arange(k.shape[2]) < lengths[:, None, None, None]
    grouped = q.reshape(b, g, h // g, d)
    return float32_attention(grouped, k, v, jnp.broadcast_to(seen, (*grouped.shape[:-1], k.shape[2]))).reshape(b, h, d)


def inputs(
    seed: int, dtype: str = "float32", size: tuple[int, int, int, int] = (3, 8, 2, 64), page: int = 16, pages: int = 8
) -> dict[str, Any]:
    """Return sequences of other lengths in shuffled pages; one of them of no keys; and a NaN behind the last key.

    ``size``: sequences, heads of queries and of keys, D.
    """
    (b, h, g, d), every = size, size[0] * pages
    q, k, v = draws(seed, dtype, (b, h, d), (g, every, page, d), (g, every, page, d))
    q = (q.astype(jnp.float32) * d**-0.5).astype(dtype)
    where = np.random.default_rng(seed).permutation(every).reshape(b, pages).astype(np.int32)
    lengths = (np.arange(b) * 37 + 51).astype(np.int32) % (page * pages) + 1
    none = lengths.copy()
    none[1] = 0
    last = where[0, lengths[0] // page], lengths[0] % page
    return {
        "": (q, k, v, lengths, where),
        NO_KEY: (q, k, v, none, where),
        UNSEEN: (q, k.at[:, *last].set(np.nan), v.at[:, *last].set(np.nan), lengths, where),
    }
