"""JAX's splash attention for a TPU, causal, with segments: ``jax.experimental.pallas.ops.tpu.splash_attention``.

Formula: softmax(q kᵀ) v over the keys of a query's segment that do not come after it; queries come scaled. The mask is
known before the kernel is made, and blocks that it hides are skipped. The kernel is JAX's own (Apache-2.0), wrapped:
nothing of it is written here.
"""

from typing import Any

import jax

from precaudit.checks.kernels import flash
from precaudit.checks.kernels.attention import causal, float32_attention, same_segment, with_interpreter

ARGNUMS = (0, 1, 2)


def splash_attention(q: jax.Array, k: jax.Array, v: jax.Array, q_segments: jax.Array, kv_segments: jax.Array) -> Any:
    """Return attention [H, T, D] of ``q`` (scaled), ``k``, ``v`` [H, T, D], as a TPU compiles it.

    ``q_segments``, ``kv_segments``: int32 [T]. T: a multiple of the blocks, 128 each.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    mask = splash.MultiHeadMask([splash.CausalMask((q.shape[1], k.shape[1]))] * q.shape[0])
    made = splash.make_splash_mha_single_device(mask)
    return made(q, k, v, segment_ids=splash.SegmentIds(q_segments, kv_segments))


kernel = with_interpreter(splash_attention)


def reference(q: jax.Array, k: jax.Array, v: jax.Array, q_segments: jax.Array, kv_segments: jax.Array) -> Any:
    """Return the same by the formula, in float32."""
    return float32_attention(q, k, v, same_segment(q_segments, kv_segments) & causal(q.shape[1], k.shape[1]))


def inputs(seed: int, dtype: str = "float32", size: tuple[int, int, int] = (1, 256, 16)) -> dict[str, Any]:
    """Return what ``flash.inputs`` does, of one sequence, queries scaled by 1 / √D."""

    def scale_queries(q: jax.Array, k: jax.Array, v: jax.Array, *segments: Any) -> tuple[Any, ...]:
        wide = q[0].astype("float32") * size[-1] ** -0.5
        return wide.astype(dtype), k[0], v[0], *(x[0] for x in segments)

    return {name: scale_queries(*given) for name, given in flash.inputs(seed, dtype, (1, *size)).items()}
