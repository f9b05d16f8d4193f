"""Logits: the head's weights, scale, cap, rows and format."""

from typing import Any

import jax
import jax.numpy as jnp

from exams.cells.cell import Cell
from exams.cells.changes import in_step, in_top
from exams.cells.rounded import integers, narrow
from exams.cells.switched import InLogits


def of_rows(change: Any) -> Any:
    return in_step("logits", lambda honest, params, x, rows: honest(params, change(x), rows))


def head(change: Any) -> Any:
    """Another head than the tied embedding."""
    return in_top("lm_head", change, "embed")


def bias(y: Any) -> Any:
    return y + jnp.where(jnp.arange(y.shape[-1]) % 3 == 0, 0.5, 0.0)


L, NORMED = ("logits",), ("final_norm",)  # whose rows logits are made of
LOGITS = tuple(
    Cell(f"logits: {name}", origin, NORMED if name == "of the row before" else L, names, change, equal, layer=None)
    for name, origin, names, change, equal in (
        ("capped at 30", "soft cap of another family", "cap|tanh", InLogits(lambda y: 30 * jnp.tanh(y / 30)), ""),
        ("capped at 5", "soft cap without need", "cap|tanh", InLogits(lambda y: 5 * jnp.tanh(y / 5)), ""),
        ("temperature 0.7", "temperature applied before recording", "1\\.4[23]|0\\.7|temperature",
         InLogits(lambda y: y / 0.7), ""),
        ("times 1/√D", "scaled head of a tied model", "0\\.088|√|scale", InLogits(lambda y: y * 128**-0.5), ""),
        ("times 1.02", "scale folded in", "1\\.02", InLogits(lambda y: y * 1.02), ""),
        ("log-softmax", "log-probabilities for logits", "log.?softmax|log.?prob|constant|normalis",
         InLogits(lambda y: jax.nn.log_softmax(y, -1)), ""),
        ("less their maximum", "stabilised before recording", "max|constant|shift",
         InLogits(lambda y: y - y.max(-1, keepdims=True)), ""),
        ("bias by token", "logit bias of a request", "bias|added|constant", InLogits(bias), ""),
        ("one token forbidden", "suppressed token", "token 10|− ?1e|-1e|one (token|channel)|channel 10",
         InLogits(lambda y: y.at[..., 10].set(-1e9)), ""),
        ("padding of the vocabulary zero", "vocabulary padded to a multiple", "zero|last|padding|channels|rows",
         InLogits(lambda y: y.at[..., 256:].set(0)), ""),
        ("repeated tokens divided by 1.2", "repetition penalty left on", "1\\.2|penalty|0\\.83",
         InLogits(lambda y: y.at[..., 97:118].multiply(1 / 1.2)), ""),
        ("in bfloat16", "logits not upcast", "bfloat16", InLogits(narrow), ""),
        ("in float16", "logits in half precision", "float16", InLogits(lambda y: narrow(y, "float16")), ""),
        ("in float8", "fp8 head", "float8|e4m3|3 bits", InLogits(lambda y: narrow(y, "e4m3")), ""),
        ("top 10 alone", "top-k filter before recording", "top|largest|filter",
         InLogits(lambda y: jnp.where(y >= jnp.sort(y, -1)[..., -10, None], y, -30.0)), ""),
        ("of the row before", "gathered one row too early", "row|position|token|shift",
         of_rows(lambda x: jnp.roll(x, 1, axis=1)), ""),
        ("head's rows shifted", "special token added in front", "row|shift|another|token|order",
         head(lambda w: jnp.roll(w, 1, axis=0)), ""),
        ("head's channels reversed", "channel order of another layout", "revers|channel|order",
         head(lambda w: w[:, ::-1]), ""),
        ("head in int8 by row", "head quantised on loading", "int8|8 bit|integer", head(integers), ""),
        ("head in int8 by tensor", "head quantised on loading", "int8|8 bit|integer",
         head(lambda w: integers(w, axis=None)), ""),
        ("head in int4 by row", "head quantised on loading", "int4|4 bit|integer", head(lambda w: integers(w, 7)), ""),
        ("head in float8", "head quantised on loading", "float8|e4m3|3 bits", head(lambda w: narrow(w, "e4m3")), ""),
        ("head not trained", "tied weights not tied", "weight|another|head",
         head(lambda w: w + 0.02 * jax.random.normal(jax.random.key(1), w.shape, w.dtype)), ""),
    )
)  # fmt: skip
