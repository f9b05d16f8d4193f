"""Projections: weights loaded otherwise than they were saved."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from exams.cells.cell import MIDDLE, Cell
from exams.cells.changes import after, in_part, in_weight, in_weights
from exams.cells.rounded import f32, integers, mantissa, narrow
from precaudit.models.jax_decoder.arithmetic import dot
from precaudit.models.jax_decoder.parts import project

V, PROJ, DOWN = 2, 3, 6  # a layer's projections, in their order


def from_layer(name: str, other: int) -> Any:
    """Load a layer's tensor from another layer."""
    return in_weights(lambda w: {name: w[name].at[MIDDLE].set(w[name][other])})


def exchanged(one: str, two: str) -> Any:
    """Load two of a layer's tensors in place of each other."""

    def change(w: dict[str, Any]) -> dict[str, Any]:
        return {a: w[a].at[MIDDLE].set(w[b][MIDDLE]) for a, b in ((one, two), (two, one))}

    return in_weights(change)


def low_rank(w: Any) -> Any:
    """A LoRA adapter of rank one merged in."""
    a, b = (jnp.asarray(np.random.default_rng(i).standard_normal(n), f32) for i, n in enumerate(w.shape))
    return w + 0.01 * jnp.outer(a, b)


def halves(w: Any, axis: int) -> Any:
    return jnp.roll(w, w.shape[axis] // 2, axis=axis)


def in_shards(x: Any, w: Any, _bias: Any, a: Any) -> Any:
    """Two shards of the contraction, each rounded to bfloat16 before they are added."""
    n = x.shape[-1] // 2
    parts = [dot(x[..., s], w[:, s], (x.ndim - 1, 1), jnp.dtype(f32), a) for s in (slice(None, n), slice(n, None))]
    return (narrow(parts[0]) + narrow(parts[1])).astype(a.activations)


def with_inputs(change: Any) -> Any:
    return lambda x, w, b, a: project(change(x), w, b, a)


def by_heads(w: Any) -> Any:
    """Rows as [K, H] in place of [H, K]."""
    return w.reshape(32, -1, w.shape[-1]).swapaxes(0, 1).reshape(w.shape)


def flipped(w: Any) -> Any:
    """One weight with a bit of its exponent flipped."""
    return w.at[3, 5].multiply(2.0**6)


Q, K, KV, P, A, D = ("q",), ("k",), ("k", "v"), ("attn_proj",), ("gate_out", "mlp_act"), ("mlp_out",)
VS = ("v",)
WEIGHTS = (
    Cell("wq transposed", "Conv1D layout of GPT-2", Q, "transpos", in_weight("wq", jnp.transpose)),
    Cell("wo transposed", "Conv1D layout of GPT-2", P, "transpos", in_weight("wo", jnp.transpose)),
    Cell("k and v exchanged", "fused QKV cut as q, v, k", KV,
         "exchanged|swapped|wv|wk|v_proj|k_proj|another tensor", exchanged("wk", "wv")),
    Cell("gate and up exchanged", "fused gate and up in the other order", A, "exchanged|swapped|gate.*up|up.*gate",
         exchanged("gate", "up")),
    Cell("wq of the next layer", "layer index off by one", Q, "layer 3|next layer|another layer", from_layer("wq", 3)),
    Cell("wk of the layer before", "layer index off by one", K, "layer 1|layer before|another layer",
         from_layer("wk", 1)),
    Cell("down of the first layer", "stacked weights not indexed", D, "layer 0|first layer|another layer",
         from_layer("down", 0)),
    Cell("wo of the last layer", "layers loaded in reverse", P, "layer 4|last layer|another layer",
         from_layer("wo", 4)),
    Cell("wq: head rows in halves exchanged", "shards concatenated in the wrong order", Q,
         "heads|halves|exchanged|order", in_weight("wq", lambda w: halves(w, 0))),
    Cell("wo: column halves exchanged", "shards concatenated in the wrong order", P,
         "halves|heads|exchanged|order|columns", in_weight("wo", lambda w: halves(w, 1))),
    Cell("wq: rows as [K, H]", "view before transpose", Q, "order|transpos|heads|interleav|permut",
         in_weight("wq", by_heads)),
    Cell("wv: heads exchanged", "KV heads sorted otherwise", VS, "heads|halves of rows exchanged",
         in_weight("wv", lambda w: halves(w, 0))),
    Cell("wo: half the sum", "all-reduce omitted", P, "half|part of the sum|shard|columns|heads",
         in_weight("wo", lambda w: w.at[:, 64:].set(0))),
    Cell("down: half the sum", "all-reduce omitted", D, "half|part of the sum|shard|columns",
         in_weight("down", lambda w: w.at[:, 192:].set(0))),
    Cell("wo: summed twice", "all-reduce made twice", P, "× 2|twice|factor.*2", in_weight("wo", lambda w: w * 2)),
    Cell("down times 1.02", "adapter's scale left in", D, "1\\.02",
         in_weight("down", lambda w: (w.astype(f32) * 1.02))),
    Cell("v times 1.02", "dequantisation scale a little off", VS, "1\\.02",
         in_part("project", after(project, lambda y: (y.astype(f32) * 1.02).astype(y.dtype)), V)),
    Cell("wk: adapter merged", "LoRA merged into the base", K, "low rank|rank|adapter|weight",
         in_weight("wk", low_rank)),
    Cell("wq: an output row zero", "row lost while slicing", Q, "channel 7|zero|dead",
         in_weight("wq", lambda w: w.at[7].set(0))),
    Cell("down: an input column zero", "column lost while slicing", D, "column|input 9|zero",
         in_weight("down", lambda w: w.at[:, 9].set(0))),
    Cell("wv: a bit flipped", "memory error", VS, "one (weight|element|channel)|channel 3|bit",
         in_weight("wv", flipped)),
    Cell("wo: sign", "sign lost in a conversion", P, "sign|negat|× ?[-−]1", in_weight("wo", lambda w: -w)),
    Cell("wq: int8 by tensor", "weights quantised on loading", Q, "int8|8 bit|integer",
         in_weight("wq", lambda w: integers(w, axis=None))),
    Cell("wv: int8 by row", "weights quantised on loading", VS, "int8|8 bit|integer", in_weight("wv", integers)),
    Cell("down: int4 by row", "weights quantised on loading", D, "int4|4 bit|integer",
         in_weight("down", lambda w: integers(w, 7))),
    Cell("wo: int8 by input column", "scale along the wrong axis", P, "int8|8 bit|integer",
         in_weight("wo", lambda w: integers(w, axis=0))),
    Cell("wk: in float8", "fp8 checkpoint for a bfloat16 one", K, "float8|e4m3|3 bits",
         in_weight("wk", lambda w: narrow(w, "e4m3"))),
    Cell("down: in float8 e5m2", "fp8 in the gradient's format", D, "e5m2|float8|2 bits",
         in_weight("down", lambda w: narrow(w, "e5m2"))),
    Cell("wo: cut to 4 bits of mantissa", "block floating point", P, "4 bits|bits",
         in_weight("wo", lambda w: mantissa(w, 4))),
    Cell("wo: bias of 0.05 added", "bias of another family", P, "bias|constant|0\\.05|added",
         in_part("project", after(project, lambda y: (y.astype(f32) + 0.05).astype(y.dtype)), PROJ)),
    Cell("wo: sums of two shards in bfloat16", "all-reduce in a narrow format", P, "bfloat16|sums|parts|blocks",
         in_part("project", in_shards, PROJ)),
    Cell("down: inputs in int8 by row", "dynamic quantisation left on", D, "int8|8 bit|integer",
         in_part("project", with_inputs(integers), DOWN)),
    Cell("down: inputs in int8 by tensor", "static quantisation left on", D, "int8|8 bit|integer",
         in_part("project", with_inputs(lambda x: integers(x, axis=None)), DOWN)),
    Cell("wo: inputs in float8", "fp8 linear without being asked", P, "float8|e4m3|3 bits",
         in_part("project", with_inputs(lambda x: narrow(x, "e4m3")), PROJ)),
    Cell("v: of the row before", "token shift of another family", VS, "token|position|shift|row",
         in_part("project", with_inputs(lambda x: jnp.roll(x, 1, axis=1)), V, ("prefill",))),
    Cell("down: inputs clipped at 1", "clipping range of a calibration", D, "clip|clamp|at 1|largest",
         in_part("project", with_inputs(lambda x: jnp.clip(x, -1, 1)), DOWN)),
)  # fmt: skip
