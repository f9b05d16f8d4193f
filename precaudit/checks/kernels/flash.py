"""JAX's flash attention for a TPU, causal, with segments: ``jax.experimental.pallas.ops.tpu.flash_attention``.

Formula: softmax(scale · q kᵀ) v over the keys of a query's segment that do not come after it; scale = 1 / √D. Dao et
al. 2022. The kernel is JAX's own (Apache-2.0), wrapped: nothing of it is written here.
"""

from typing import Any

import jax
import numpy as np

from precaudit.checks.kernels.attention import (
    NO_KEY,
    UNSEEN,
    causal,
    draws,
    float32_attention,
    same_segment,
    with_interpreter,
)

ARGNUMS = (0, 1, 2)


def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array, q_segments: jax.Array, kv_segments: jax.Array) -> Any:
    """Return attention [B, H, T, D] of ``q``, ``k``, ``v`` [B, H, T, D], as a TPU compiles it.

    ``q_segments``, ``kv_segments``: int32 [B, T]. T: a multiple of the blocks, 128 each.
    """
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    segments = flash.SegmentIds(q_segments, kv_segments)
    plain = flash.flash_attention.__wrapped__  # of a function that is jitted by itself JAX forgets the lines inside
    return plain(q, k, v, segment_ids=segments, causal=True, sm_scale=q.shape[-1] ** -0.5)


kernel = with_interpreter(flash_attention)


def reference(q: jax.Array, k: jax.Array, v: jax.Array, q_segments: jax.Array, kv_segments: jax.Array) -> Any:
    """Return the same by the formula, in float32."""
    seen = same_segment(q_segments, kv_segments)[:, None] & causal(q.shape[2], k.shape[2])
    return float32_attention(q, k, v, seen, q.shape[-1] ** -0.5)


def inputs(seed: int, dtype: str = "float32", size: tuple[int, int, int, int] = (1, 1, 256, 16)) -> dict[str, Any]:
    """Return two segments; the same with queries of a segment without keys; and with a NaN where none looks."""
    q, k, v = draws(seed, dtype, size, size, size)
    ids = np.broadcast_to(np.arange(size[2]) >= size[2] // 2 + 5, (size[0], size[2])).astype(np.int32)
    lost = ids.copy()
    lost[:, 3:9] = 2
    unseen = ids.copy()
    unseen[:, 20] = 3
    return {
        "": (q, k, v, ids, ids),
        NO_KEY: (q, k, v, lost, ids),
        UNSEEN: (q, k.at[:, :, 20].set(np.nan), v.at[:, :, 20].set(np.nan), ids, unseen),
    }
