"""What a product with a matrix reads instead: weights and inputs in few bits, and weights in another layout."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.rounding import FP64, Cast, Rounding
from precaudit.numbers.arrays import Array, rounder
from precaudit.numbers.formats import EIGHT_BITS, FORMATS, INTEGERS
from precaudit.references.mutations.forms import Form, Inputs, Weight, at_place, usual_form, with_tensors
from precaudit.references.mutations.storing import FEW, to_bits
from precaudit.references.mutations.variants import NARROW, Variant, at
from precaudit.schema.digits import digits
from precaudit.schema.graphs.point import Point
from precaudit.schema.policies import Policy

SCALES = {"a scale a row": -1, "one scale": None, "a scale a column": 0}  # the axis whose largest value a scale is of

semantics = partial(Variant, kind="semantics", last=True)


def integers(bits: int, axis: int | None) -> Cast:
    """Return symmetric quantisation with scales max|x| / (2^(bits−1) − 1) along an axis, of all where None.

    In float32 and by reciprocals, as XLA divides by a constant and by what it broadcasts: quotients of weights in
    bfloat16 often lie near a tie, and fall as its do.
    """
    inverse = np.float32(1 / (2 ** (bits - 1) - 1))

    def change(x: Array) -> Array:
        x = x.astype(np.float32)
        scale = np.abs(x).max(axis=axis, keepdims=True, initial=0.0) * inverse
        per = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        return (np.rint(x * per) * scale).astype(np.float64)

    return change


def grouped_cast(bits: int, size: int) -> Cast:
    """Return quantisation with a scale for every ``size`` columns; as by row where they do not divide."""

    def change(x: Array) -> Array:
        if x.shape[-1] % size:
            return integers(bits, -1)(x)
        return integers(bits, -1)(x.reshape(*x.shape[:-1], -1, size)).reshape(x.shape)

    return change


def reading(change: Cast, then: Form = usual_form) -> Form:
    """Return the operation with other matrices [N, in]: a layer's, or that of logits."""

    def tensors(weight: Weight) -> Weight:
        def lookup(name: str) -> Array | None:
            w = weight(name)
            return w if w is None or w.ndim != 2 else change(w)

        return lookup

    inside = with_tensors(tensors, then)

    def form(o: Inputs, r: Rounding) -> Array:
        if o.row.kind != "head":
            return inside(o, r)
        model = o.model

        def read_changed(name: str) -> Array:
            w = np.asarray(model.read(name)).astype(np.float64)
            return change(w) if w.ndim == 2 else w

        return then(replace(o, model=replace(model, read=read_changed, _layer=None, _held={})), r)

    return form


def operand_variants(row: Point, policy: Policy, config: DecoderConfig) -> Iterator[Variant]:
    """Yield products of other operands: weights, what they multiply, and both."""
    if policy.weights in INTEGERS or policy.projection_inputs == "int8":
        return
    yield from _formats(row, policy, config)
    yield from _layouts(row, config)


def _formats(row: Point, policy: Policy, config: DecoderConfig) -> Iterator[Variant]:
    stored, then = rounder(policy.activations), f"stored as {policy.activations}"
    for width in (8, 4):
        for how, axis in SCALES.items():
            says = f"weights are quantised to {width} bits, {how}"
            whole = integers(width, axis)
            if axis != -1 or row.kind == "head":  # of layers' rows: ``integer_variants``
                yield _weights(f"weights in int{width}, {how}", says, whole, "quantisation")
            if policy.activations != "float32":
                says = f"{says}, and {then}"
                yield _weights(
                    f"weights in int{width}, {how}, {then}", says, partial(_then, whole, stored), "quantisation"
                )
            if axis is None and row.kind != "head":
                says = f"what weights multiply is quantised to {width} bits, {how}"
                yield _inputs(f"inputs in int{width}, {how}", says, integers(width, axis), "quantisation")
            if axis != 0 and row.kind != "head" and policy.activations != "float32":
                says = f"what weights multiply is quantised to {width} bits, {how}, and {then}"
                held = partial(_then, integers(width, axis), stored)
                yield _inputs(f"inputs in int{width}, {how}, {then}", says, held, "quantisation")
    widths = (config.width, config.heads * config.head_dim, config.mlp_width)
    for size in (n for n in (32, 128) if all(n < w and w % n == 0 for w in widths)):
        says = f"weights are quantised to 4 bits, a scale for {size} columns"
        yield _weights(f"weights in int4, groups of {size}", says, grouped_cast(4, size), "quantisation")
        if policy.activations != "float32":
            says = f"{says}, and {then}"
            held = partial(_then, grouped_cast(4, size), stored)
            yield _weights(f"weights in int4, groups of {size}, {then}", says, held, "quantisation")
    narrower = [n for n in (*NARROW, *EIGHT_BITS) if FORMATS[n].precision < FORMATS[policy.activations].precision]
    casts = {name: rounder(name) for name in narrower}
    for name, cast in casts.items():
        yield _weights(f"weights in {name}", f"weights are rounded to {name}", cast, "format")
        if row.kind != "head":
            yield _inputs(f"inputs in {name}", f"what weights multiply is rounded to {name}", cast, "format")
        if row.kind != "head" and name != "float16":  # which has all bits of weights that bfloat16 has
            yield Variant(
                f"products of {name}",
                "format",
                f"weights and what they multiply are rounded to {name}",
                reading(cast),
                at(operand=cast),
                last=True,
            )
    for bits in FEW:
        if bits + 1 < FORMATS[policy.activations].precision:
            yield _weights(
                f"weights cut to {bits} bits", f"weights have {bits} bits of mantissa", to_bits(bits), "format"
            )


def _weights(name: str, says: str, cast: Cast, kind: str) -> Variant:
    return Variant(name, kind, says, reading(cast), last=True)  # type: ignore[arg-type]


def _inputs(name: str, says: str, cast: Cast, kind: str) -> Variant:
    return Variant(name, kind, says, usual_form, at(operand=cast), last=True)  # type: ignore[arg-type]


def _layouts(row: Point, config: DecoderConfig) -> Iterator[Variant]:
    """Yield matrices whose rows and columns lie otherwise, or are not all there."""
    ways: dict[str, tuple[str, Cast]] = {
        "weights transposed": ("matrices are read transposed", _transpose),
        "weights negated": ("matrices have the other sign", np.negative),
        "halves of rows exchanged": ("the halves of a matrix's rows are exchanged", partial(_halves, axis=0)),
        "halves of columns exchanged": ("the halves of a matrix's columns are exchanged", partial(_halves, axis=1)),
        "second half of the sum omitted": ("the second half of a matrix's columns is omitted", partial(_half, 1)),
        "first half of the sum omitted": ("the first half of a matrix's columns is omitted", partial(_half, 0)),
        "rows shifted by one": ("a matrix's rows are those before", partial(np.roll, shift=1, axis=0)),
        "rows shifted by minus one": ("a matrix's rows are those after", partial(np.roll, shift=-1, axis=0)),
        "columns reversed": ("a matrix's columns are in reverse order", _reverse),
    }
    if row.axes in ("THK", "TGK"):
        says = "rows of a matrix lie in the order [K, H] in place of [H, K]"
        ways["rows as [K, H]"] = (says, partial(_by_heads, config.head_dim))
        says = "rows of a matrix in the order [K, H] are read as [H, K]"
        ways["rows of [K, H] as [H, K]"] = (says, partial(_by_dimensions, config.head_dim))
    for name, (says, change) in ways.items():
        yield semantics(name, says=says, form=reading(change))
    for one, two in (("q_proj", "k_proj"), ("k_proj", "v_proj"), ("q_proj", "o_proj"), ("gate_proj", "up_proj")):
        yield semantics(
            f"{one} and {two} exchanged", says=f"{one} and {two} are exchanged", form=_exchange_tensors(one, two)
        )


def _then(first: Cast, second: Cast, w: Array) -> Array:
    return second(first(w))


def _by_heads(size: int, w: Array) -> Array:
    return w.reshape(size, -1, w.shape[1]).swapaxes(0, 1).reshape(w.shape)


def _by_dimensions(size: int, w: Array) -> Array:
    return w.reshape(-1, size, w.shape[1]).swapaxes(0, 1).reshape(w.shape)


def _transpose(w: Array) -> Array:
    return w.T if w.shape[0] == w.shape[1] else w


def _reverse(w: Array) -> Array:
    return w[:, ::-1]


def _halves(w: Array, axis: int) -> Array:
    return np.roll(w, w.shape[axis] // 2, axis=axis)


def _half(which: int, w: Array) -> Array:
    out, middle = w.copy(), w.shape[1] // 2
    out[:, middle:] *= 1 - which
    out[:, :middle] *= which
    return out


def _exchange_tensors(one: str, two: str) -> Form:
    """Return the operation with two tensors of one shape exchanged, as it is where they have not one."""
    names = {one: two, two: one}

    def tensors(weight: Weight) -> Weight:
        def lookup(name: str) -> Array | None:
            own = weight(name)
            other = weight(".".join(names.get(part, part) for part in name.split(".")))
            return other if own is not None and other is not None and own.shape == other.shape else own

        return lookup

    return with_tensors(tensors)


def scaled_weights(factor: float, dtype: str) -> Form:
    """Return the operation with matrices times a factor, held in a format."""
    narrow = rounder(dtype)
    return reading(lambda w: narrow(w * factor))


MOST_CHANNELS = 4  # output channels that are hit, up to which one row or weight of a matrix is looked for


def single_weights(o: Inputs, left: Array) -> Iterator[Variant]:
    """Yield a product without one of its inputs, or with one row of its matrix zero, or one weight another.

    ``left`` [T, H, K]: what the announced policy leaves. Which one is that which explains most of it.
    """
    if not o.row.projects or len(o.values) != 1:
        return
    x, d = (y.reshape(len(left), -1) for y in (o.values[0], left))
    matrices = _matrices(o)
    if len(matrices) != 1 or (w := matrices[0]).shape != (d.shape[1], x.shape[1]):
        return
    power = (d * d).sum(axis=0)
    if o.row.norm(o.config) is None and not o.row.rotates:
        # without input j: −x_j w_j; what stays of ‖d‖² is ‖d‖² − 2⟨d, −x_j w_j⟩ + ‖x_j‖² ‖w_j‖²
        gain = 2 * ((x.T @ d) * w.T).sum(axis=1) + (x * x).sum(axis=0) * (w * w).sum(axis=0)
        j = int(np.argmin(gain))
        says = f"column {j} of the matrix is zero: input channel {j}"
        yield semantics(
            f"weights of input {j} zeroed", says=says, form=at_place("operand", partial(_without, j)), fitted=True
        )
        n = int(np.argmax(power))
        along = x.T @ d[:, n]
        size = (x * x).sum(axis=0)
        j = int(np.argmax(along**2 / np.where(size > 0, size, np.inf)))
        by = float(along[j] / size[j]) if size[j] else 0.0
        if w[n, j] and by:
            factor = float(f"{1 + by / w[n, j]:.3g}")
            says = f"weight [{n}, {j}] of the matrix is times {digits(factor, 6)}"
            yield semantics(
                f"one weight × {digits(factor, 6)}", says=says, form=reading(partial(_one, n, j, factor)), fitted=True
            )
    order = np.argsort(-power)[:MOST_CHANNELS] if o.row.rotates else ()
    for n in map(int, order):
        says = f"row {n} of the matrix is zero: output channel {n}"
        yield semantics(f"weights of channel {n} zeroed", says=says, form=reading(partial(_row_zero, n)), fitted=True)


def _matrices(o: Inputs) -> list[Array]:
    """Return the matrices that an operation reads."""
    read: dict[str, Array] = {}

    def tensors(weight: Weight) -> Weight:
        def lookup(name: str) -> Array | None:
            w = weight(name)
            if w is not None and w.ndim == 2:
                read[name] = w
            return w

        return lookup

    with_tensors(tensors)(replace(o, last=()), FP64)
    return list(read.values())


def _without(j: int, x: Array) -> Array:
    x = x.copy()
    x[:, j] = 0.0
    return x


def _one(n: int, j: int, factor: float, w: Array) -> Array:
    w = w.copy()
    w[n, j] *= factor
    return w


def _row_zero(n: int, w: Array) -> Array:
    w = w.copy()
    w[n] = 0.0
    return w
