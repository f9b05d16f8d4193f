"""Weights held as integers: scales, groups, zero points, halves of a byte."""

from typing import Any

import jax.numpy as jnp

from exams.cells.cell import MIDDLE, Cell
from exams.cells.changes import in_part, in_weight, in_weights
from exams.cells.rounded import narrow
from precaudit.models.jax_decoder.integers import IntegerMatrix, integer_product
from precaudit.models.jax_decoder.parts import project


def scales(change: Any) -> Any:
    """Other scales [G, N]."""
    return lambda w: IntegerMatrix(w.values, change(w.scales), w.width)


def values(change: Any) -> Any:
    """Other integers [G, N, n], in the format that all layers' are held in."""

    def other(w: IntegerMatrix) -> IntegerMatrix:
        held = jnp.iinfo(w.values.dtype)
        return IntegerMatrix(change(w.values.astype(jnp.int32)).clip(held.min, held.max), w.scales, w.width)

    return other


def wider(name: str, change: Any) -> Any:
    """Other integers that need more bits than a layer's are held in."""

    def of_all(layers: dict[str, Any]) -> dict[str, Any]:
        w = layers[name]
        held = w.values.astype(jnp.int8)
        return {name: IntegerMatrix(held.at[MIDDLE].set(change(held[MIDDLE])), w.scales, w.width)}

    return in_weights(of_all)


def nibbles(v: Any) -> Any:
    """Pairs exchanged: the two halves of a byte in the other order."""
    return v.reshape(*v.shape[:-1], -1, 2)[..., ::-1].reshape(v.shape)


def unsigned(v: Any) -> Any:
    """Four bits read without their sign."""
    return jnp.where(v < 0, v + 16, v)


def by_tensor(x: Any, w: Any, bias: Any, a: Any) -> Any:
    """Inputs quantised by the largest value of all rows."""
    y = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(y)) / 127
    return project((jnp.round(y / scale) * scale).astype(x.dtype), w, bias, a)


def not_quantised(x: Any, w: Any, _bias: Any, a: Any) -> Any:
    return integer_product(x, w, a.activations, a, False)


W8, W4, W8A8 = (("weights", "int8"),), (("weights", "int4/128"),), (("weights", "int8"), ("projection_inputs", "int8"))
POLICY = ("bf16",)
P, D, Q, V = ("attn_proj",), ("mlp_out",), ("q",), ("v",)
QUANTISED = tuple(
    Cell(f"integers: {name}", origin, points, names, change, policies=POLICY, settings=settings)
    for name, origin, points, names, change, settings in (
        ("scales of the next row", "scale index off by one", P, "scale|channel",
         in_weight("wo", scales(lambda s: jnp.roll(s, 1, axis=-1))), W8),
        ("scale of the largest row for all", "scale by tensor for scale by row", P, "scale|tensor",
         in_weight("wo", scales(lambda s: jnp.full_like(s, s.max()))), W8),
        ("scales × 127/128", "128 levels for 127", D, "0\\.992|127|128",
         in_weight("down", scales(lambda s: s * (127 / 128))), W8),
        ("scales in bfloat16", "scales stored narrow", D, "scale.*bfloat16|bfloat16.*scale|bfloat16",
         in_weight("down", scales(narrow)), W8),
        ("scales omitted", "integers multiplied as they are", V, "scale", in_weight("wv", scales(jnp.ones_like)), W8),
        ("zero point 1", "asymmetric for symmetric", Q, "zero.?point|offset|\\+ 1",
         in_weight("wq", values(lambda v: v + 1)), W8),
        ("toward zero", "truncated for rounded", Q, "toward zero|trunc|one integer|nearer to zero",
         in_weight("wq", values(lambda v: v - jnp.sign(v))), W8),
        ("groups' scales exchanged", "group index off by one", D, "group|scale",
         in_weight("down", scales(lambda s: jnp.roll(s, 1, axis=0))), W4),
        ("halves of a byte exchanged", "nibbles in the other order", D, "nibble|pairs|order|exchanged",
         in_weight("down", values(nibbles)), W4),
        ("four bits without sign", "unsigned for signed nibbles", D, "sign", wider("down", unsigned), W4),
        ("scale of the first group for all", "group size not read", D, "group|scale",
         in_weight("down", scales(lambda s: jnp.broadcast_to(s[:1], s.shape))), W4),
        ("inputs by tensor", "static scale for a row's", D, "tensor|scale|int8", in_part("project", by_tensor, 6),
         W8A8),
        ("inputs not quantised", "weight-only kernel chosen", D, "not quantised|int8|inputs",
         in_part("project", not_quantised, 6), W8A8),
        ("clipped at 100", "clipping range of a calibration", Q, "clip|clamp|100|largest",
         in_weight("wq", values(lambda v: v.clip(-100, 100))), W8),
    )
)  # fmt: skip
