"""JAX's attention by XLA, causal, keys masked: ``jax.nn.dot_product_attention``.

Formula: softmax(q kᵀ / √D) v over the keys that a query sees. The function is JAX's own (Apache-2.0), wrapped. Its
cuDNN kernel (``implementation="cudnn"``) runs on an NVIDIA GPU alone, in bfloat16 and float16.
"""

from typing import Any

import jax
import numpy as np

from precaudit.checks.kernels.attention import NO_KEY, UNSEEN, causal, draws, float32_attention

ARGNUMS = (0, 1, 2)


def kernel(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> Any:
    """Return attention [B, T, H, D] of ``q`` [B, T, H, D] and ``k``, ``v`` [B, S, H, D]; ``mask`` [B, S], of keys."""
    seen = mask[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=seen, is_causal=True, implementation="xla")


def reference(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> Any:
    """Return the same by the formula, in float32."""
    seen = mask[:, None, None, :] & causal(q.shape[1], k.shape[1])
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return float32_attention(q, k, v, seen, q.shape[-1] ** -0.5).swapaxes(1, 2)


def inputs(seed: int, dtype: str = "float32", size: tuple[int, int, int, int] = (1, 48, 2, 16)) -> dict[str, Any]:
    """Return inputs with the last keys masked; the first, too, that first queries see no other; and a masked NaN."""
    q, k, v = draws(seed, dtype, size, size, size)
    mask = np.broadcast_to(np.arange(size[1]) < size[1] - 5, size[:2]).copy()
    late = mask.copy()
    late[:, :3] = False
    return {
        "": (q, k, v, mask),
        NO_KEY: (q, k, v, late),
        UNSEEN: (q, k.at[:, -2].set(np.nan), v.at[:, -2].set(np.nan), mask),
    }
