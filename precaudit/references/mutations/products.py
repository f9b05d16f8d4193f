"""What may have been done instead of projections, RoPE on them, the MLP, the residual sums and logits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.operators import NARROW_CONSTANTS
from precaudit.models.numpy_decoder.rounding import FP64, Rounding
from precaudit.numbers.arrays import Array, rounder
from precaudit.references.mutations.forms import (
    Form,
    Inputs,
    Weight,
    at_place,
    constant,
    on_inputs,
    on_result,
    usual_form,
    with_tensors,
)
from precaudit.references.mutations.rotation import (
    turned_values,
)
from precaudit.references.mutations.variants import NARROW, STORED, Variant, at, cut, first, roundings_of, stored, sums
from precaudit.schema.graphs.point import Point
from precaudit.schema.places import spans
from precaudit.schema.policies import Policy

semantics = partial(Variant, kind="semantics")
CALLED = {
    "silu": "silu",
    "gelu_tanh": "gelu with tanh",
    "gelu": "exact gelu",
    "quick_gelu": "quick gelu, x·σ(1.702 x)",
    "relu": "relu",
    "hard_silu": "hard silu",
    "identity": "no activation",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "relu_squared": "relu squared",
    "mish": "mish",
}


def rename_tensors(names: dict[str, str]) -> Form:
    """Return the operation with tensors exchanged by parts of their names."""

    def tensors(weight: Weight) -> Weight:
        return lambda name: weight(".".join(names.get(part, part) for part in name.split(".")))

    return with_tensors(tensors)


def of_layer(other: int) -> Form:
    """Return the operation with another layer's tensors; its window and RoPE stay."""

    def form(o: Inputs, r: Rounding) -> Array:
        beside = replace(o.model, _layer=None, _held={})
        return with_tensors(lambda _: beside.context(other, o.positions, FP64).weight)(o, r)

    return form


def biases(factor: float) -> Form:
    """Return the operation with its biases times a factor."""

    def tensors(weight: Weight) -> Weight:
        def lookup(name: str) -> Array | None:
            x = weight(name)
            return x * factor if x is not None and name.endswith(".bias") else x

        return lookup

    return with_tensors(tensors)


def other_layers(config: DecoderConfig, layer: int | None) -> Iterator[Variant]:
    """Yield the operation with every other layer's tensors."""
    for other in range(config.layers) if layer is not None else ():
        if other != layer:
            yield semantics(
                f"weights of layer {other}",
                says=f"layer {other}'s weights are used",
                form=of_layer(other),
                last=True,
            )


def projection_variants(row: Point, policy: Policy, config: DecoderConfig) -> Iterator[Variant]:
    """Yield variants of a product with a matrix."""
    yield from stored(row.place, policy.format_of(row.format))
    yield from cut(row.place, policy.format_of(row.format))
    if row.cache and not row.rotates:
        yield from value_variants()
    if row.adds_bias(config):
        yield semantics("bias omitted", says="the bias is omitted", form=biases(0.0))
        yield semantics("bias twice", says="the bias is added twice", form=biases(2.0))
    if row.activates(config):
        yield from _activations(row, config)
        for name in NARROW:
            says = f"the logistic function, tanh or erf in {CALLED[config.activation]} is rounded to {name}"
            yield Variant(f"activation's curve in {name}", "format", says, change=at(curve=rounder(name)))
            narrow, whole = rounder(name), f"{CALLED[config.activation]} is computed in {name}"
            yield Variant(f"activation in {name}", "format", whole, change=at(gate=narrow, curve=narrow), last=True)
            if config.activation == "silu":
                yield Variant(
                    f"activation in {name}, step by step",
                    "format",
                    f"{whole}: x / (1 + exp(−x)), each step rounded",
                    change=at(gate=narrow, curve=partial(_logistic, narrow)),
                    last=True,
                )
    if row.place == "proj" and config.residual_scale != 1.0:
        yield semantics(
            "residual factor omitted",
            says="the factor on what is added is omitted",
            form=constant(residual_scale=1.0),
        )
        yield from roundings_of("residual factor", config.residual_scale, lambda x: constant(residual_scale=x))
    yield from sums(row)


def _logistic(narrow: Callable[[Array], Array], sigma: Array) -> Array:
    """Return σ = 1 / (1 + e) with e = exp(−x) and the sum rounded, of σ in FP64; the quotient is rounded later."""
    with np.errstate(divide="ignore"):
        return np.asarray(1 / narrow(1 + narrow(1 / sigma - 1)))


def _up() -> Iterator[Variant]:
    """Yield what may be done to up before it is multiplied."""
    ways: dict[str, tuple[str, Callable[[Array], Array]]] = {
        "up omitted": ("up is omitted", np.ones_like),
        "up plus one": ("1 is added to up", lambda x: x + 1),
    }
    for name, (says, change) in ways.items():
        yield semantics(name, says=says, form=at_place("up", change), last=True)


def _activations(row: Point, config: DecoderConfig) -> Iterator[Variant]:
    usual = config.activation
    for name in CALLED:
        if name != usual:
            yield semantics(
                f"activation {CALLED[name]}",
                says=f"{CALLED[name]} in place of {CALLED[usual]}",
                form=constant(activation=name),
            )
    if "up" in {place for part in row.inside for place in part.places}:
        yield from _up()
    yield semantics(
        "gate and up exchanged",
        says="gate and up are exchanged",
        form=rename_tensors({"gate_proj": "up_proj", "up_proj": "gate_proj"}),
    )


def narrow_constants(config: DecoderConfig) -> Iterator[Variant]:
    """Yield an activation whose constants are held in a narrow format: what is seen in FP64 and not under rounding."""
    if config.activation == "gelu_tanh":
        for name, key in NARROW_CONSTANTS.items():
            says = f"the constants of {CALLED[config.activation]} are stored in {name}"
            yield Variant(f"activation's constants in {name}", "format", says, constant(activation=key))


def value_variants() -> Iterator[Variant]:
    """Yield what may have been done to values."""
    yield semantics("RoPE on values", says="values are turned by RoPE, as keys are", form=turned_values, last=True)


def route_variants(config: DecoderConfig) -> Iterator[Variant]:
    """Yield variants of the choice of experts and their weights."""
    says = "weights of the chosen experts are " + ("not made to sum to 1" if config.renormalise else "made to sum to 1")
    name = "weights not normalised" if config.renormalise else "weights normalised"
    yield semantics(name, says=says, form=constant(renormalise=not config.renormalise))
    for used in range(1, min(config.experts, 2 * config.experts_used) + 1):
        if used != config.experts_used:
            says = f"a token has {used} of {config.experts} experts, the configuration says {config.experts_used}"
            yield semantics(f"{used} experts for {config.experts_used}", says=says, form=constant(experts_used=used))


def residual_variants(announced: str) -> Iterator[Variant]:
    """Yield variants of the sums into the residual stream."""
    for name in STORED:
        says = f"the sum is rounded to {name} before it is stored"
        yield Variant(f"residual in {name}", "format", says, change=first("residual", name))
    yield from cut("residual", announced)
    yield semantics("addend dropped", says="the addend is omitted", form=weight_inputs(1.0, 0.0))
    yield semantics("addend twice", says="the addend is added twice", form=weight_inputs(1.0, 2.0))
    yield semantics("addend subtracted", says="the addend is subtracted", form=weight_inputs(1.0, -1.0))
    for i, what in enumerate(("stream", "addend")) if announced != "float32" else ():
        says = f"the {what} is added twice: to the sum once more, after it was rounded"
        yield semantics(f"{what} added again", says=says, form=partial(_again, i), last=True)
    yield semantics("stream twice", says="the residual stream is counted twice", form=weight_inputs(2.0, 1.0))
    yield semantics("stream dropped", says="the residual stream is omitted", form=weight_inputs(0.0, 1.0))


def _again(which: int, o: Inputs, r: Rounding) -> Array:
    return usual_form(replace(o, values=(usual_form(o, r), o.values[which])), r)


def addend_left_out(o: Inputs, candidate: Array) -> Iterator[Variant]:
    """Yield the sum without its addend in the tokens whose rows [T, 1, D] are the stream's, bit for bit."""
    if o.row.kind != "sum":
        return
    stream, addend = o.values
    gone = (candidate[:, 0] == stream).all(axis=1) & addend.any(axis=1)
    if gone.any() and not gone.all():
        tokens = tuple(int(i) for i in np.asarray(o.positions)[gone])
        told = f"token{'s' if len(tokens) > 1 else ''} {spans(tokens)}"
        form = on_inputs(partial(_without, frozenset(tokens)))
        yield semantics(
            f"addend omitted in {told}", says=f"nothing is added in {told}", form=form, fitted=True, carries=False
        )


def _without(tokens: frozenset[int], o: Inputs) -> tuple[Array, ...]:
    gone = np.isin(np.asarray(o.positions), list(tokens))
    return (o.values[0], np.where(gone[:, None], 0.0, o.values[1]))


def weight_inputs(*factors: float) -> Form:
    """Return the operation with its inputs times factors."""
    return on_inputs(lambda o: tuple(f * x for f, x in zip(factors, o.values, strict=True)))


def logit_variants(row: Point, policy: Policy, config: DecoderConfig) -> Iterator[Variant]:
    """Yield variants of the output matrix, its factor and cap."""
    yield from stored(row.place, policy.logits)
    yield from cut(row.place, policy.logits)
    if config.logit_scale != 1.0:
        yield semantics("logit factor omitted", says="the logits' factor is omitted", form=constant(logit_scale=1.0))
        yield from roundings_of("logit factor", config.logit_scale, lambda x: constant(logit_scale=x))
    yield semantics("log-probabilities", says="logits less the log of their exponentials' sum", form=_log_softmax)
    yield semantics(
        "maximum subtracted",
        says="every row's maximum is subtracted",
        form=on_result(lambda y: y - y.max(-1, keepdims=True)),
    )
    if config.logit_cap is not None:
        yield semantics("cap omitted", says="logits are not capped", form=constant(logit_cap=None))
        yield from roundings_of("cap", config.logit_cap, lambda x: constant(logit_cap=x))
    yield from sums(row)


def _log_softmax(o: Inputs, r: Rounding) -> Array:
    def change(y: Array) -> Array:
        top = y.max(axis=-1, keepdims=True)
        return np.asarray(y - top - np.log(np.exp(y - top).sum(axis=-1, keepdims=True)))

    return on_result(change)(o, r)
