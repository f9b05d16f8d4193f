"""Mistakes of programs on several devices, each with the name that ``same`` must give it beside the correct program."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from exams.mesh_programs import Layer, attention, down_gradient, layer, mesh_of, norm, program, to_train
from precaudit import Program


def summed(x: Any) -> Any:
    return lax.psum(x, "model")


def part_left_out(y: Any) -> Any:
    return summed(jnp.where(lax.axis_index("model") == 0, 0, y).astype(y.dtype))


def of_another_rank(y: Any) -> Any:
    n = lax.axis_size("model")
    return lax.ppermute(y, "model", [(i, (i + 1) % n) for i in range(n)])


def own_columns(x: Any) -> Any:
    """Return the columns that a device would hold of a stream cut by columns."""
    size = x.shape[-1] // lax.axis_size("model")
    return lax.dynamic_slice_in_dim(x, lax.axis_index("model") * size, size, axis=-1)


def own_statistics(x: Any) -> Any:
    """Return a norm whose mean square is of a device's columns."""
    wide = x.astype(jnp.float32)
    own = own_columns(wide)
    return (wide * lax.rsqrt(jnp.mean(own * own, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def by_maximum(x: Any, of: Callable[[Any], Any] = lambda x: x) -> Any:
    """Return rows over their largest element, as a row is scaled for integers; ``of``: what the largest is of."""
    wide = x.astype(jnp.float32)
    return (wide / jnp.max(jnp.abs(of(wide)), -1, keepdims=True)).astype(x.dtype)


def round_the_ring(y: Any) -> Any:
    """Return a sum that goes round the ranks, without the last part."""
    n, total, part = lax.axis_size("model"), y, y
    for _ in range(n - 2):
        part = lax.ppermute(part, "model", [(i, (i + 1) % n) for i in range(n)])
        total = total + part
    return total


def biased(y: Any) -> Any:
    return y + jnp.asarray(0.1, y.dtype)


def attended(x: Any, w: Mapping[str, Any]) -> Any:
    return x + summed(attention(x, w) @ w["o"])


def fed(
    x: Any, w: Mapping[str, Any], normed: Callable[[Any], Any] = norm, summed: Callable[[Any], Any] = summed
) -> Any:
    return x + summed(jax.nn.silu(normed(x) @ w["up"]) @ w["down"])


def with_weight_of_another(name: str, x: Any, w: Mapping[str, Any]) -> Any:
    return fed(attended(x, other := {**w, name: of_another_rank(w[name])}), other)


def scaled(x: Any, w: Mapping[str, Any]) -> Any:
    """Return a layer whose MLP reads rows over their largest element."""
    return fed(layer_of_attention(x, w), w, by_maximum, lambda y: y)


def layer_of_attention(x: Any, w: Mapping[str, Any]) -> Any:
    return x + attention(x, w) @ w["o"]


class Mistake(NamedTuple):
    """A layer with a mistake, the name of its cause, and the layer that is meant."""

    body: Layer
    name: str
    meant: Layer = layer


MISTAKES: dict[str, Mistake] = {
    "no sum": Mistake(partial(layer, out=lambda y: y), "sum missing"),
    "no sum after the MLP": Mistake(lambda x, w: fed(attended(x, w), w, summed=lambda y: y), "sum missing"),
    "summed twice": Mistake(partial(layer, out=lambda y: summed(y) + summed(y)), "added twice"),
    "a sum summed": Mistake(partial(layer, out=lambda y: summed(summed(y))), "summed again"),
    "own part once more": Mistake(partial(layer, out=lambda y: summed(y) + y), "added twice"),
    "mean for sum": Mistake(partial(layer, out=lambda y: lax.pmean(y, "model")), "mean for sum"),
    "over the other axis": Mistake(partial(layer, out=lambda y: lax.psum(y, "data")), "sum over another axis"),
    "a shard omitted": Mistake(partial(layer, out=part_left_out), "shard omitted"),
    "a ring too short": Mistake(lambda x, w: fed(attended(x, w), w, summed=round_the_ring), "shard omitted"),
    "bias on each shard": Mistake(
        partial(layer, out=lambda y: summed(biased(y))), "term on each shard", partial(layer, out=biased)
    ),
    "stream on each shard": Mistake(lambda x, w: fed(summed(x + attention(x, w) @ w["o"]), w), "term on each shard"),
    "heads of another rank": Mistake(
        lambda x, w: fed(x + summed(of_another_rank(attention(x, w)) @ w["o"]), w), "shard of another rank"
    ),
    "keys of another rank": Mistake(partial(with_weight_of_another, "k"), "shard of another rank"),
    "up of another rank": Mistake(partial(with_weight_of_another, "up"), "shard of another rank"),
    "statistics of one shard": Mistake(lambda x, w: fed(attended(x, w), w, own_statistics), "statistics of one shard"),
    "scale of one shard": Mistake(
        lambda x, w: fed(attended(x, w), w, partial(by_maximum, of=own_columns)), "statistics of one shard", scaled
    ),
}


def gradient_of_rows(mesh: str, averaged: bool) -> Program:
    """Return a gradient of tokens that devices share, averaged over them or each device's own."""
    m, (params, x) = mesh_of(mesh), to_train("bfloat16", attends=False)

    def call(params: Any, x: Any) -> Any:
        found = down_gradient(params, x)
        return lax.pmean(found, "model") if averaged else found

    how = {"mesh": m, "in_specs": (P(), P("model")), "out_specs": P(), "check_vma": False}
    return program(jax.shard_map(call, **how), params, x)
