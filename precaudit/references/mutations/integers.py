"""What may go wrong with integers and scales: of a layer's projections, and of the rows they read."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from precaudit.models.checkpoints.quantised import PROJECTIONS
from precaudit.models.configs import DecoderConfig
from precaudit.numbers.arrays import Array, identity, rounder
from precaudit.numbers.formats import INTEGERS, Integers
from precaudit.numbers.integers import ROWS, dequantise, quantise
from precaudit.references.mutations.forms import Form, Weight, quantiser, with_tensors
from precaudit.references.mutations.variants import Variant, at
from precaudit.schema.graphs.point import Point
from precaudit.schema.policies import Policy

Held = Callable[[Array, Array], tuple[Array, Array]]  # integers [G, N, n] and scales [G, N] to others


def integer_variants(row: Point, policy: Policy, config: DecoderConfig) -> Iterator[Variant]:
    """Yield other integers and scales of a layer's projections, and other quantisation of what they read."""
    if not row.projects:
        return
    if policy.weights not in INTEGERS:
        yield from _not_announced(policy)
        return
    to = INTEGERS[policy.weights]
    for zero in (1, -1):
        says = f"integers of weights are read wrong by {zero:+d}"
        yield _integer_variant(f"zero-point of weights wrong by {zero:+d}", says, to, partial(_add_zero_point, zero))
    for name, says, values in (
        ("integers one nearer to zero", "every integer of weights is read one nearer to zero", _nearer),
        ("integers exchanged in pairs", "integers 2i and 2i + 1 of a row stand in each other's place", _in_pairs),
    ):
        yield _integer_variant(name, says, to, values, last=True)
    says = "integers of weights are read without their sign"
    yield _integer_variant("integers without sign", says, to, partial(_drop_sign, to.bits), last=True)
    yield from _scales(to, config)
    for name in ("bfloat16", "float16"):
        yield _integer_variant(
            f"scales of weights in {name}", f"scales are rounded to {name}", to, partial(_narrow, name)
        )
    if policy.projection_inputs == "int8":
        yield Variant("inputs not quantised", "quantisation", "products read activations", change=at(operand=identity))
        says = "what is multiplied has one scale for all tokens"
        yield Variant("inputs with one scale", "quantisation", says, change=at(operand=_as_one))


def _scales(to: Integers, config: DecoderConfig) -> Iterator[Variant]:
    """Yield scales [G, N] of another group or channel, one for all, and none."""
    widest = max(config.width, config.heads * config.head_dim, config.mlp_width)
    if to.group is not None and widest > to.group:
        for by in (1, -1):
            says = f"scales of weights are those of the group {'before' if by > 0 else 'after'}"
            yield _integer_variant(f"group scales shifted by {by:+d}", says, to, partial(_roll_scales, by))
        says = "every group of weights has the scale of the first"
        yield _integer_variant("scales of the first group", says, to, _of_first, last=True)
    for by in (1, -1):
        says = f"scales of weights are those of the output channel {'before' if by > 0 else 'after'}"
        yield _integer_variant(
            f"channel scales shifted by {by:+d}", says, to, partial(_roll_scales, by, axis=1), last=True
        )
    for name, says, change in (
        ("largest scale for all", "all weights have the largest of the scales", _largest),
        ("first scale for all", "all weights have the scale of the first output channel", _first_channel),
        ("scales omitted", "integers of weights are not multiplied by their scales", np.ones_like),
    ):
        yield _integer_variant(name, says, to, partial(_change_scales, change), last=True)


def clip_integers(to: Integers, most: float) -> Form:
    """Return the operation with integers of weights of at most ``most`` in size."""
    return _holding(to, lambda values, scales: (values.clip(-most, most), scales))


def _not_announced(policy: Policy) -> Iterator[Variant]:
    """Yield weights with a scale an output channel, and inputs with one a token, in integers that nothing announces."""
    for bits in (8, 4):
        says = f"weights are quantised to {bits} bits, one scale an output channel"
        yield Variant(f"weights in int{bits}", "quantisation", says, with_tensors(partial(_in_bits, bits)))
        if policy.projection_inputs != "int8":
            says = f"what is multiplied is quantised to {bits} bits, one scale a token"
            yield Variant(f"inputs in int{bits}", "quantisation", says, change=at(operand=quantiser(bits)))


def _in_bits(bits: int, weight: Weight) -> Weight:
    def lookup(name: str) -> Array | None:
        w = weight(name)
        return w if w is None or not name.endswith(PROJECTIONS) else quantiser(bits)(w)

    return lookup


def _integer_variant(name: str, says: str, to: Integers, change: Held, last: bool = False) -> Variant:
    return Variant(name, "quantisation", says, _holding(to, change), last=last)


def _holding(to: Integers, change: Held) -> Form:
    """Return the operation with other integers and scales; those of scale · integer are the integers and the scale."""

    def tensors(weight: Weight) -> Weight:
        def lookup(name: str) -> Array | None:
            w = weight(name)
            if w is None or not name.endswith(PROJECTIONS):
                return w
            return dequantise(*change(*quantise(w, to)), w.shape[1])

        return lookup

    return with_tensors(tensors)


def _add_zero_point(zero: int, values: Array, scales: Array) -> tuple[Array, Array]:
    return values.astype(np.int16) + zero, scales


def _nearer(values: Array, scales: Array) -> tuple[Array, Array]:
    return values - np.sign(values), scales


def _in_pairs(values: Array, scales: Array) -> tuple[Array, Array]:
    """Return the two halves of every byte in the other order; an odd row as it is."""
    if values.shape[-1] % 2:
        return values, scales
    return values.reshape(*values.shape[:-1], -1, 2)[..., ::-1].reshape(values.shape), scales


def _roll_scales(by: int, values: Array, scales: Array, axis: int = 0) -> tuple[Array, Array]:
    return values, np.roll(scales, by, axis=axis)


def _of_first(values: Array, scales: Array) -> tuple[Array, Array]:
    return values, np.broadcast_to(scales[:1], scales.shape)


def _change_scales(change: Callable[[Array], Array], values: Array, scales: Array) -> tuple[Array, Array]:
    return values, change(scales)


def _largest(scales: Array) -> Array:
    return np.full_like(scales, scales.max(initial=0.0))


def _first_channel(scales: Array) -> Array:
    return np.broadcast_to(scales[:, :1], scales.shape)


def _drop_sign(bits: int, values: Array, scales: Array) -> tuple[Array, Array]:
    """Return integers of two's complement read without their sign."""
    wide = values.astype(np.int16)
    return np.where(wide < 0, wide + 2**bits, wide), scales


def _narrow(name: str, values: Array, scales: Array) -> tuple[Array, Array]:
    return values, rounder(name)(scales.astype(np.float64))


def _as_one(x: Array) -> Array:
    """Return x with one scale for all of it."""
    scale = np.abs(x).max(initial=0.0) / ROWS.most
    return np.asarray(np.rint(x / scale) * scale) if scale > 0 else x
