"""The residual stream and the embedding: what is added, read and handed on."""

from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as tap

from benchmarks.cells.cell import MIDDLE, Cell
from benchmarks.cells.changes import in_step, in_top
from benchmarks.cells.rounded import at_random, f32, integers, narrow, toward_zero
from precaudit.jax_decoder import Decoder


def usual(before: Any, added: Any, came: Any) -> Any:
    return before + added.astype(before.dtype)


def layer_with(mid: Any = usual, out: Any = usual, reads: Any = lambda x, came: x, came_as: Any = lambda x: x) -> Any:
    """Make the middle layer's sums otherwise: of (stream before, what is added, stream that came in)."""

    def made(honest: Any, x: Any, cache: Any, w: Any, layer: Any, step: Any) -> Any:
        self: Decoder = honest.__self__

        def chosen(wrong: Any, right: Any) -> Any:
            return jnp.where(layer == MIDDLE, wrong, right)

        x = came = tap(chosen(came_as(x), x), "resid_in")
        h = tap(self._norm(x, w, "attn_norm"), "attn_norm")
        got, cache = self._attention(h, cache, w, layer, step)
        proj = tap(self.parts.project(got.reshape(*x.shape[:2], -1), w["wo"], None, self.arithmetic), "attn_proj")
        x = tap(chosen(mid(x, proj, came), usual(x, proj, came)).astype(x.dtype), "resid_mid")
        h = tap(self._norm(chosen(reads(x, came), x).astype(x.dtype), w, "mlp_norm"), "mlp_norm")
        mlp = tap(self._dense(h, w), "mlp_out")
        return tap(chosen(out(x, mlp, came), usual(x, mlp, came)).astype(x.dtype), "resid_out"), cache

    return in_step("layer", made)


def wide(how: Any) -> Any:
    """A sum in float32 that is rounded otherwise."""
    return lambda before, added, came: how(before.astype(f32) + added.astype(f32))


def times(stream: float, added: float) -> Any:
    return lambda x, y, came: x.astype(f32) * stream + y.astype(f32) * added


def token_left(before: Any, added: Any, came: Any) -> Any:
    return usual(before, added.at[:, 3].set(0), came)


def embedded(change: Any) -> Any:
    """What the embedding hands the first layer, otherwise; the head stays."""

    def made(honest: Any, params: Any, tokens: Any, step: Any, cache: Any) -> Any:
        return honest(params | {"embed": change(params["embed"])}, tokens, step, cache)

    return in_step("layers", made)


MID, OUT, IN = ("resid_mid",), ("resid_out",), ("resid_in",)
STREAM = (
    Cell("stream: counted twice", "residual added in block and model", MID, "twice|× 2|double",
         layer_with(mid=lambda x, y, c: x + y + x)),
    Cell("stream: left out before the MLP", "residual not added", MID, "left out|not added|without|dropped",
         layer_with(mid=lambda x, y, c: y)),
    Cell("stream: left out after the MLP", "residual not added", OUT, "left out|not added|without|dropped",
         layer_with(out=lambda x, y, c: y)),
    Cell("stream: attention left out", "pruned sublayer", MID, "left out|not added|dropped",
         layer_with(mid=lambda x, y, c: x)),
    Cell("stream: MLP twice", "MLP added again", OUT, "twice|× 2", layer_with(out=lambda x, y, c: x + y + y)),
    Cell("stream: attention subtracted", "sign of a sum", MID, "sign|subtract|negat|[-−] ?1",
         layer_with(mid=lambda x, y, c: x - y)),
    Cell("stream: MLP added to what came in", "parallel residual of GPT-J", OUT,
         "resid_in|parallel|attention.*left out|came in", layer_with(out=lambda x, y, c: c + y)),
    Cell("stream: MLP's norm reads what came in", "parallel block of GPT-J", ("mlp_norm",),
         "resid_in|parallel|before|came in", layer_with(reads=lambda x, c: c)),
    Cell("stream: MLP's output times 1/√2", "scaled residual", OUT, "0\\.7|√2|0\\.707",
         layer_with(out=times(1, 0.70710678))),
    Cell("stream: times 1.0078", "stream rescaled", MID, "1\\.007|1\\.008", layer_with(mid=times(1.0078125, 1))),
    Cell("stream: halved", "mean of branch and stream", OUT, "0\\.5|half|halved|mean", layer_with(out=times(0.5, 0.5))),
    Cell("stream: a token's attention left out", "padding mask off by one", MID, "token 3|position 3|left out",
         layer_with(mid=token_left)),
    Cell("stream: in float8", "residual kept in fp8", OUT, "float8|e4m3|3 bits",
         layer_with(out=wide(lambda y: narrow(y, "e4m3")))),
    Cell("stream: in int8", "residual quantised by token", MID, "int8|8 bit|integer", layer_with(mid=wide(integers))),
    Cell("stream: in float16", "residual cast to half", MID, "float16",
         layer_with(mid=wide(lambda y: narrow(y, "float16"))), policies=("fp32-highest",)),
    Cell("stream: in bfloat16", "residual not kept in float32", OUT, "bfloat16", layer_with(out=wide(narrow)),
         policies=("fp32-highest",)),
    Cell("stream: toward zero", "truncating store", OUT, "toward zero|trunc|cut", layer_with(out=wide(toward_zero))),
    Cell("stream: rounded at random", "stochastic rounding left on", MID, "random|stochastic",
         layer_with(mid=wide(at_random))),
    Cell("stream: clipped at 3", "clamped against overflow", OUT, "clip|clamp|largest|at 3",
         layer_with(out=wide(lambda y: jnp.clip(y, -3, 3)))),
    Cell("stream: handed on times 0.98", "stream rescaled between layers", IN, "0\\.98",
         layer_with(came_as=lambda x: (x.astype(f32) * 0.98).astype(x.dtype))),
    Cell("stream: handed on in float8", "pipeline stage sends fp8", IN, "float8|e4m3|3 bits",
         layer_with(came_as=lambda x: narrow(x, "e4m3"))),
    Cell("embedding: times √D", "Gemma's factor in a Llama", IN, "11\\.3|√|scale|factor",
         embedded(lambda e: (e.astype(f32) * 128**0.5).astype(e.dtype)), layer=0),
    Cell("embedding: rows shifted by one", "special token added in front", IN, "row|token|shift|another",
         embedded(lambda e: jnp.roll(e, 1, axis=0)), layer=0),
    Cell("embedding: normalised", "norm of embeddings of another family", IN, "norm",
         embedded(lambda e: (e / jnp.sqrt(jnp.mean(jnp.square(e.astype(f32)), -1, keepdims=True))).astype(e.dtype)),
         layer=0),
    Cell("embedding: int8 by row", "embedding quantised on loading", IN, "int8|8 bit|integer", embedded(integers),
         layer=0),
    Cell("final norm of another layer's weight", "names exchanged while loading", ("final_norm",), "weight|another",
         in_top("final_norm", lambda w: w[::-1]), layer=None),
)  # fmt: skip
