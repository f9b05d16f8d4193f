"""The residual stream and the embedding: what is added, read and handed on."""

from typing import Any

import jax.numpy as jnp

from exams.cells.cell import Cell, Change
from exams.cells.changes import in_top
from exams.cells.rounded import at_random, f32, integers, narrow, toward_zero
from exams.cells.switched import InStream, added
from precaudit.recording.tracing.subject import Subject


def wide(how: Any) -> Any:
    """A sum in float32 that is rounded otherwise."""
    return lambda before, more, _came: how(before.astype(f32) + more.astype(f32))


def times(stream: float, added: float) -> Any:
    return lambda x, y, _came: x.astype(f32) * stream + y.astype(f32) * added


def token_left(before: Any, more: Any, came: Any) -> Any:
    return added(before, more.at[:, 3].set(0), came)


def embedded(change: Any) -> Change:
    """What the embedding hands the first layer, otherwise; the head stays."""

    def made(subject: Subject, _beside: Any) -> Subject:
        held = subject.parameters
        vars(subject)["parameters"] = held | {"embed": change(held["embed"]), "lm_head": held["embed"]}
        return subject

    return made


MID, OUT, IN = ("resid_mid",), ("resid_out",), ("resid_in",)
STREAM = (
    Cell("stream: counted twice", "residual added in block and model", MID, "twice|× 2|double",
         InStream(mid=lambda x, y, _c: x + y + x)),
    Cell("stream: omitted before the MLP", "residual not added", MID, "omitted|not added|without|dropped",
         InStream(mid=lambda _x, y, _c: y)),
    Cell("stream: omitted after the MLP", "residual not added", OUT, "omitted|not added|without|dropped",
         InStream(out=lambda _x, y, _c: y)),
    Cell("stream: attention omitted", "pruned sublayer", MID, "omitted|not added|dropped",
         InStream(mid=lambda x, *_: x)),
    Cell("stream: MLP twice", "MLP added again", OUT, "twice|× 2", InStream(out=lambda x, y, _c: x + y + y)),
    Cell("stream: attention subtracted", "sign of a sum", MID, "sign|subtract|negat|[-−] ?1",
         InStream(mid=lambda x, y, _c: x - y)),
    Cell("stream: MLP added to what came in", "parallel residual of GPT-J", OUT,
         "resid_in|parallel|attention.*omitted|came in", InStream(out=lambda _x, y, c: c + y)),
    Cell("stream: MLP's norm reads what came in", "parallel block of GPT-J", ("mlp_norm",),
         "resid_in|parallel|before|came in", InStream(reads=lambda _x, c: c)),
    Cell("stream: MLP's output times 1/√2", "scaled residual", OUT, "0\\.7|√2|0\\.707",
         InStream(out=times(1, 0.70710678))),
    Cell("stream: times 1.0078", "stream rescaled", MID, "1\\.007|1\\.008", InStream(mid=times(1.0078125, 1))),
    Cell("stream: halved", "mean of branch and stream", OUT, "0\\.5|half|halved|mean", InStream(out=times(0.5, 0.5))),
    Cell("stream: a token's attention omitted", "padding mask off by one", MID, "token 3|position 3|omitted",
         InStream(mid=token_left)),
    Cell("stream: in float8", "residual kept in fp8", OUT, "float8|e4m3|3 bits",
         InStream(out=wide(lambda y: narrow(y, "e4m3")))),
    Cell("stream: in int8", "residual quantised by token", MID, "int8|8 bit|integer", InStream(mid=wide(integers))),
    Cell("stream: in float16", "residual cast to half", MID, "float16",
         InStream(mid=wide(lambda y: narrow(y, "float16"))), policies=("fp32-highest",)),
    Cell("stream: in bfloat16", "residual not kept in float32", OUT, "bfloat16", InStream(out=wide(narrow)),
         policies=("fp32-highest",)),
    Cell("stream: toward zero", "truncating store", OUT, "toward zero|trunc|cut",
         InStream(out=wide(toward_zero), bits=True)),
    Cell("stream: rounded at random", "stochastic rounding left on", MID, "random|stochastic",
         InStream(mid=wide(at_random), bits=True)),
    Cell("stream: clipped at 3", "clamped against overflow", OUT, "clip|clamp|largest|at 3",
         InStream(out=wide(lambda y: jnp.clip(y, -3, 3)))),
    Cell("stream: handed on times 0.98", "stream rescaled between layers", IN, "0\\.98",
         InStream(came=lambda x: (x.astype(f32) * 0.98).astype(x.dtype))),
    Cell("stream: handed on in float8", "pipeline stage sends fp8", IN, "float8|e4m3|3 bits",
         InStream(came=lambda x: narrow(x, "e4m3"))),
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
