"""What a product with a matrix reads instead: weights and inputs in few bits, and weights in another layout."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from precaudit.arrays import Array, rounder
from precaudit.configs import DecoderConfig
from precaudit.formats import EIGHT_BITS, FORMATS, INTEGERS
from precaudit.graphs.point import Point
from precaudit.mutations.forms import Form, Inputs, Weight, holding, plain
from precaudit.mutations.storing import FEW, to_bits
from precaudit.mutations.variants import NARROW, Variant, at
from precaudit.numpy_decoder.rounding import Cast, Rounding
from precaudit.policies import Policy

SCALES = {"a scale a row": -1, "one scale": None, "a scale a column": 0}  # the axis whose largest value a scale is of

semantics = partial(Variant, kind="semantics", last=True)


def integers(bits: int, axis: int | None) -> Cast:
    """Return symmetric quantisation with scales max|x| / (2^(bits−1) − 1) along an axis, of all where None.

    In float32, as programs make it: quotients of weights in bfloat16 often lie near a tie, and fall as its do.
    """

    def change(x: Array) -> Array:
        x = x.astype(np.float32)
        scale = np.abs(x).max(axis=axis, keepdims=True, initial=0.0) / np.float32(2 ** (bits - 1) - 1)
        ratio = np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)
        return (np.rint(ratio) * scale).astype(np.float64)

    return change


def grouped(bits: int, size: int) -> Cast:
    """Return quantisation with a scale for every ``size`` columns; as by row where they do not divide."""

    def change(x: Array) -> Array:
        if x.shape[-1] % size:
            return integers(bits, -1)(x)
        return integers(bits, -1)(x.reshape(*x.shape[:-1], -1, size)).reshape(x.shape)

    return change


def reading(change: Cast, then: Form = plain) -> Form:
    """Return the operation with other matrices [N, in]: a layer's, or that of logits."""

    def tensors(o: Inputs, weight: Weight) -> Weight:
        def found(name: str) -> Array | None:
            w = weight(name)
            return w if w is None or w.ndim != 2 else change(w)

        return found

    inside = holding(tensors, then)

    def form(o: Inputs, r: Rounding) -> Array:
        if o.row.kind != "head":
            return inside(o, r)
        model = o.model

        def read(name: str) -> Array:
            w = np.asarray(model.read(name)).astype(np.float64)
            return change(w) if w.ndim == 2 else w

        return then(replace(o, model=replace(model, read=read, _layer=None, _held={})), r)

    return form


def operand_variants(row: Point, policy: Policy, config: DecoderConfig) -> Iterator[Variant]:
    """Yield products of other operands: weights, what they multiply, and both."""
    if policy.weights in INTEGERS or policy.projection_inputs == "int8":
        return
    yield from _formats(row, policy, config)
    yield from _layouts()


def _formats(row: Point, policy: Policy, config: DecoderConfig) -> Iterator[Variant]:
    stored = rounder(policy.activations)
    for width in (8, 4):
        for how, axis in SCALES.items():
            says = f"weights are quantised to {width} bits, {how}"
            whole = integers(width, axis)
            if axis != -1 or row.kind == "head":  # of layers' rows: ``integer_variants``
                yield _weights(f"weights in int{width}, {how}", says, whole, "quantisation")
            if policy.activations != "float32":
                says = f"{says}, and held as {policy.activations}"
                yield _weights(
                    f"weights in int{width}, {how}, held", says, partial(_then, whole, stored), "quantisation"
                )
            if axis is None and row.kind != "head":
                says = f"what weights multiply is quantised to {width} bits, {how}"
                yield _inputs(f"inputs in int{width}, {how}", says, integers(width, axis), "quantisation")
    widths = (config.width, config.heads * config.head_dim, config.mlp_width)
    for size in (n for n in (32, 128) if all(n < w and w % n == 0 for w in widths)):
        says = f"weights are quantised to 4 bits, a scale for {size} columns"
        yield _weights(f"weights in int4, groups of {size}", says, grouped(4, size), "quantisation")
        if policy.activations != "float32":
            says = f"{says}, and held as {policy.activations}"
            held = partial(_then, grouped(4, size), stored)
            yield _weights(f"weights in int4, groups of {size}, held", says, held, "quantisation")
    narrower = [n for n in (*NARROW, *EIGHT_BITS) if FORMATS[n].precision < FORMATS[policy.activations].precision]
    casts = {name: rounder(name) for name in narrower}
    for name, cast in casts.items():
        yield _weights(f"weights in {name}", f"weights are rounded to {name}", cast, "format")
        if row.kind != "head":
            yield _inputs(f"inputs in {name}", f"what weights multiply is rounded to {name}", cast, "format")
        if row.kind != "head" and name != "float16":  # which has all bits of weights that bfloat16 has
            yield Variant(
                f"products of {name}", "format", f"weights and what they multiply are rounded to {name}",
                reading(cast), at(operand=cast), last=True,
            )  # fmt: skip
    for bits in FEW:
        if bits + 1 < FORMATS[policy.activations].precision:
            yield _weights(
                f"weights cut to {bits} bits", f"weights have {bits} bits of mantissa", to_bits(bits), "format"
            )


def _weights(name: str, says: str, cast: Cast, kind: str) -> Variant:
    return Variant(name, kind, says, reading(cast), last=True)  # type: ignore[arg-type]


def _inputs(name: str, says: str, cast: Cast, kind: str) -> Variant:
    return Variant(name, kind, says, plain, at(operand=cast), last=True)  # type: ignore[arg-type]


def _layouts() -> Iterator[Variant]:
    """Yield matrices whose rows and columns lie otherwise, or are not all there."""
    ways: dict[str, tuple[str, Cast]] = {
        "weights transposed": ("matrices are read transposed", _transposed),
        "weights negated": ("matrices have the other sign", np.negative),
        "halves of rows exchanged": ("the halves of a matrix's rows are exchanged", partial(_halves, axis=0)),
        "halves of columns exchanged": ("the halves of a matrix's columns are exchanged", partial(_halves, axis=1)),
        "second half of the sum left out": ("the second half of a matrix's columns is left out", partial(_half, 1)),
        "first half of the sum left out": ("the first half of a matrix's columns is left out", partial(_half, 0)),
        "rows shifted by one": ("a matrix's rows are those before", partial(np.roll, shift=1, axis=0)),
        "rows shifted by minus one": ("a matrix's rows are those after", partial(np.roll, shift=-1, axis=0)),
        "columns reversed": ("a matrix's columns are in reverse order", _reversed),
    }  # fmt: skip
    for name, (says, change) in ways.items():
        yield semantics(name, says=says, form=reading(change))
    for one, two in (("q_proj", "k_proj"), ("k_proj", "v_proj"), ("q_proj", "o_proj"), ("gate_proj", "up_proj")):
        yield semantics(f"{one} and {two} exchanged", says=f"{one} and {two} are exchanged", form=_exchanged(one, two))


def _then(first: Cast, second: Cast, w: Array) -> Array:
    return second(first(w))


def _transposed(w: Array) -> Array:
    return w.T if w.shape[0] == w.shape[1] else w


def _reversed(w: Array) -> Array:
    return w[:, ::-1]


def _halves(w: Array, axis: int) -> Array:
    return np.roll(w, w.shape[axis] // 2, axis=axis)


def _half(which: int, w: Array) -> Array:
    out, middle = w.copy(), w.shape[1] // 2
    out[:, middle:] *= 1 - which
    out[:, :middle] *= which
    return out


def _exchanged(one: str, two: str) -> Form:
    """Return the operation with two tensors of one shape exchanged, as it is where they have not one."""
    names = {one: two, two: one}

    def tensors(o: Inputs, weight: Weight) -> Weight:
        def found(name: str) -> Array | None:
            own = weight(name)
            other = weight(".".join(names.get(part, part) for part in name.split(".")))
            return other if own is not None and other is not None and own.shape == other.shape else own

        return found

    return holding(tensors)
