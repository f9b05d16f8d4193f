"""RoPE made another way: at other positions, in another layout, with other frequencies."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.operators import rope, rope_frequencies
from precaudit.models.numpy_decoder.rounding import Rounding
from precaudit.numbers.arrays import Array
from precaudit.references.mutations.forms import (
    Form,
    Inputs,
    Weight,
    at_positions,
    constant,
    usual_form,
    with_config,
    with_tensors,
)
from precaudit.schema.configuration import RopeScaling


def local(config: DecoderConfig, layer: int | None) -> bool:
    """Whether a layer's RoPE has the base of windowed layers."""
    return config.local_rope_theta is not None and config.window_of(layer) is not None


def base_of(config: DecoderConfig, layer: int | None) -> float:
    """Return RoPE's base in a layer."""
    found = config.local_rope_theta if local(config, layer) else config.rope_theta
    assert found is not None
    return found


def with_base(config: DecoderConfig, layer: int | None, base: float) -> dict[str, Any]:
    """Return what changes in a configuration for another base in a layer."""
    return {"local_rope_theta" if local(config, layer) else "rope_theta": base}


def with_frequencies(change: Callable[[Array], Array]) -> Form:
    """Return q or k with RoPE's radians per position changed."""

    def change_fields(config: DecoderConfig, layer: int | None) -> dict[str, Any]:
        found, factor = rope_frequencies(config, layer)
        plain_ones, _ = rope_frequencies(msgspec.structs.replace(config, rope_scaling=None, local_rope_theta=None), 0)
        divisors = tuple(float(x) for x in plain_ones / change(found))
        return {
            "local_rope_theta": None,
            "rope_scaling": RopeScaling(kind="longrope", divisors=divisors, attention=factor),
        }

    return with_config(change_fields)


def no_rope() -> Form:
    """Return q or k as they are before RoPE."""
    return at_positions(np.zeros_like, constant(rope_scaling=None, local_rope_theta=None))


def interleave(form: Form = usual_form, replaced: bool = True) -> Form:
    """Return q or k with RoPE turning pairs (2i, 2i + 1): the usual one on dimensions in another order.

    ``replaced``: what was turned is put back in that order; otherwise first and second of all pairs stay apart.
    """

    def change(o: Inputs, r: Rounding) -> Array:
        half, size = o.config.rotary_size // 2, o.config.head_dim
        order = np.concatenate([np.arange(half) * 2, np.arange(half) * 2 + 1, np.arange(2 * half, size)])
        turned = with_tensors(lambda weight: _reorder(weight, o, order), form)(o, r)
        if not replaced:
            return turned
        out = np.empty_like(turned)
        out[..., order] = turned
        return out

    return change


def as_for_pairs(o: Inputs, r: Rounding) -> Array:
    """Return q or k with rows of weights in the order of pairs, turned in halves: (i, i + R/2) lie at 2i and 2i + 1."""
    half, size = o.config.rotary_size // 2, o.config.head_dim
    order = np.concatenate([np.arange(2 * half).reshape(2, half).T.reshape(-1), np.arange(2 * half, size)])
    return with_tensors(lambda weight: _reorder(weight, o, order))(o, r)


def _reorder(weight: Weight, o: Inputs, order: Array) -> Weight:
    """Return the tensors that make a head's dimensions with these in another order."""
    names = {f"self_attn.{o.point}_{name}" for name in ("proj.weight", "proj.bias", "norm.weight")}

    def lookup(name: str) -> Array | None:
        x = weight(name)
        if x is None or name not in names:
            return x
        heads = x.reshape(-1, o.config.head_dim, *x.shape[1:])
        return heads[:, order].reshape(x.shape)

    return lookup


def shift_positions(by: int, floor: int | None = None) -> Form:
    """Return q or k at positions off by a number, at least ``floor``."""
    return at_positions(lambda at: at + by if floor is None else np.maximum(at + by, floor))


def positions_in(narrow: Callable[[Array], Array]) -> Form:
    """Return q or k at positions rounded to a narrower format."""
    return at_positions(lambda at: narrow(np.asarray(at, np.float64)))


def tables_in(narrow: Callable[[Array], Array]) -> Callable[[Rounding], Rounding]:
    """Round RoPE's tables."""
    return lambda r: replace(r, rope_table=narrow)


def sines_in(narrow: Callable[[Array], Array]) -> Callable[[Rounding], Rounding]:
    """Round RoPE's sines, and its cosines as the policy says."""
    return lambda r: replace(r, rope_sine=narrow)


def cosines_in(narrow: Callable[[Array], Array]) -> Callable[[Rounding], Rounding]:
    """Round RoPE's cosines, and its sines as the policy says."""
    return lambda r: replace(r, rope_table=narrow, rope_sine=r.rope_table)


Angles = Callable[[Array, Array], tuple[Array, Array]]  # positions [T, 1], radians each [R/2] to cos, sin [T, R'/2]


def with_tables(made: Angles) -> Form:
    """Return q or k turned by other cosines and sines; fewer of them turn the first dimensions alone."""

    def form(o: Inputs, r: Rounding) -> Array:
        each, factor = rope_frequencies(o.config, o.layer, o.lengths)
        cos, sin = made(np.asarray(o.positions + o.turned, np.float64)[:, None], each)
        sine = r.rope_table if r.rope_sine is None else r.rope_sine
        tables = r.rope_table(cos * factor), sine(sin * factor)
        return usual_form(o, replace(r, rope_table=lambda _: tables[0], rope_sine=lambda _: tables[1]))

    return form


def with_angles(angles: Callable[[Array, Array], Array]) -> Form:
    """Return q or k turned by other angles [T, R'/2] of (positions, radians each)."""

    def tables_of(p: Array, each: Array) -> tuple[Array, Array]:
        x = angles(p, each)
        return np.cos(x), np.sin(x)

    return with_tables(tables_of)


def exchange_sines(p: Array, each: Array) -> tuple[Array, Array]:
    """Return the sines for cosines, and the other way round."""
    return np.sin(p * each), np.cos(p * each)


def turned_values(o: Inputs, r: Rounding) -> Array:
    """Return values [T, G, K] that are turned as keys are, and rounded before and after."""
    frequencies = rope_frequencies(o.config, o.layer, o.lengths)
    return r.rows(rope(usual_form(o, r), o.positions + o.turned, frequencies, r))


def stop_positions(last: int) -> Form:
    """Return q or k at positions that stay at ``last``."""
    return at_positions(lambda at: np.minimum(at, last))


def again(period: int) -> Form:
    """Return q or k at positions that start again at ``period``."""
    return at_positions(lambda at: at % period)
