"""What may have been done instead of projections, RoPE on them, the MLP, the residual sums and logits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from precaudit.arrays import Array, rounder
from precaudit.configs import DecoderConfig
from precaudit.graphs.point import Point
from precaudit.mutations.forms import Form, Inputs, Weight, constant, fed, finished, holding, moved, plain
from precaudit.mutations.rotation import (
    cosines_in,
    interleaved,
    no_rope,
    positions_in,
    shifted,
    sines_in,
    tables_in,
    with_frequencies,
)
from precaudit.mutations.variants import NARROW, STORED, Variant, at, cut, first, roundings_of, stored, sums
from precaudit.numpy_decoder.operators import NARROW_CONSTANTS
from precaudit.numpy_decoder.rounding import FP64, Rounding
from precaudit.policies import Policy

semantics = partial(Variant, kind="semantics")
CALLED = {
    "silu": "silu", "gelu_tanh": "gelu with tanh", "gelu": "exact gelu", "quick_gelu": "quick gelu, x·σ(1.702 x)",
    "relu": "relu", "hard_silu": "hard silu", "identity": "no activation", "sigmoid": "sigmoid", "tanh": "tanh",
    "relu_squared": "relu squared", "mish": "mish",
}  # fmt: skip


def renamed(names: dict[str, str]) -> Form:
    """Return the operation with tensors exchanged by parts of their names."""

    def tensors(o: Inputs, weight: Weight) -> Weight:
        return lambda name: weight(".".join(names.get(part, part) for part in name.split(".")))

    return holding(tensors)


def of_layer(other: int) -> Form:
    """Return the operation with another layer's tensors; its window and RoPE stay."""

    def tensors(o: Inputs, weight: Weight) -> Weight:
        beside = replace(o.model, _layer=None, _held={})
        return beside.context(other, o.positions, FP64).weight

    return holding(tensors)


def biases(factor: float) -> Form:
    """Return the operation with its biases times a factor."""

    def tensors(o: Inputs, weight: Weight) -> Weight:
        def found(name: str) -> Array | None:
            x = weight(name)
            return x * factor if x is not None and name.endswith(".bias") else x

        return found

    return holding(tensors)


def other_layers(config: DecoderConfig, layer: int | None) -> Iterator[Variant]:
    """Yield the operation with every other layer's tensors."""
    for other in range(config.layers) if layer is not None else ():
        if other != layer:
            yield semantics(
                f"weights of layer {other}", says=f"layer {other}'s weights are used", form=of_layer(other), last=True,
            )  # fmt: skip


def projection_variants(row: Point, policy: Policy, config: DecoderConfig) -> Iterator[Variant]:
    """Yield variants of a product with a matrix."""
    yield from stored(row.place, getattr(policy, row.format))
    yield from cut(row.place, getattr(policy, row.format))
    if row.biased(config):
        yield semantics("bias left out", says="the bias is left out", form=biases(0.0))
        yield semantics("bias twice", says="the bias is added twice", form=biases(2.0))
    if row.activates(config):
        yield from _activations(row, config)
        for name in NARROW:
            says = f"the logistic function, tanh or erf in {CALLED[config.activation]} is rounded to {name}"
            yield Variant(f"activation's curve in {name}", "format", says, change=at(curve=rounder(name)))
    if row.place == "proj" and config.residual_scale != 1.0:
        yield semantics(
            "residual factor left out", says="the factor on what is added is left out",
            form=constant(residual_scale=1.0),
        )  # fmt: skip
        yield from roundings_of("residual factor", config.residual_scale, lambda x: constant(residual_scale=x))
    yield from sums(row)


def _up() -> Iterator[Variant]:
    """Yield what may be done to up before it is multiplied."""
    ways: dict[str, tuple[str, Callable[[Array], Array]]] = {
        "up left out": ("up is left out", np.ones_like), "up plus one": ("1 is added to up", lambda x: x + 1),
    }  # fmt: skip
    for name, (says, change) in ways.items():
        yield semantics(name, says=says, form=hooked("up", change), last=True)


def hooked(place: str, change: Callable[[Array], Array]) -> Form:
    """Return the operation with what a place gives changed."""

    def form(o: Inputs, r: Rounding) -> Array:
        usual = getattr(r, place)
        return plain(o, at(**{place: lambda x: change(usual(x))})(r))

    return form


def _activations(row: Point, config: DecoderConfig) -> Iterator[Variant]:
    usual = config.activation
    for name in CALLED:
        if name != usual:
            yield semantics(
                f"activation {CALLED[name]}", says=f"{CALLED[name]} in place of {CALLED[usual]}",
                form=constant(activation=name),
            )  # fmt: skip
    if "up" in {place for part in row.inside for place in part.places}:
        yield from _up()
    yield semantics(
        "gate and up exchanged", says="gate and up are exchanged",
        form=renamed({"gate_proj": "up_proj", "up_proj": "gate_proj"}),
    )  # fmt: skip


def narrow_constants(config: DecoderConfig) -> Iterator[Variant]:
    """Yield an activation whose constants are held in a narrow format: what is seen in FP64 and not under rounding."""
    if config.activation == "gelu_tanh":
        for name, key in NARROW_CONSTANTS.items():
            says = f"the constants of {CALLED[config.activation]} are held in {name}"
            yield Variant(f"activation's constants in {name}", "format", says, constant(activation=key))


def rotation_variants(config: DecoderConfig, layer: int | None) -> Iterator[Variant]:
    """Yield variants of RoPE in a layer's q and k."""
    for by in (1, -1):
        yield semantics(f"positions {by:+d}", says=f"RoPE takes positions off by {by:+d}", form=shifted(by))
    yield semantics("positions -1, at least 0", says="RoPE takes positions off by -1, 0 at 0", form=shifted(-1, 0))
    yield semantics("pairs interleaved", says="RoPE rotates pairs (2i, 2i + 1)", form=interleaved())
    yield semantics(
        "pairs interleaved, left in halves",
        says="RoPE rotates pairs (2i, 2i + 1) and leaves their first dimensions before their second",
        form=interleaved(replaced=False),
    )
    yield semantics("no RoPE", says="RoPE is left out", form=no_rope())
    yield semantics("RoPE twice", says="RoPE is applied twice", form=moved(lambda at: at * 2), last=True)
    yield semantics(
        "RoPE turned back", says="RoPE turns the other way: sin has the other sign", form=moved(np.negative), last=True
    )
    for name in STORED[2:]:
        says = f"RoPE's tables are rounded to {name}"
        yield Variant(f"RoPE tables in {name}", "format", says, change=tables_in(rounder(name)), last=True)
    local = config.local_rope_theta is not None and config.window_of(layer) is not None  # never stretched
    if config.rope_scaling is not None and not local:
        yield semantics(
            "RoPE not stretched", says="RoPE's scaling is left out", form=constant(rope_scaling=None)
        )  # fmt: skip
    for name in NARROW:
        narrow = rounder(name)
        yield Variant(
            f"RoPE tables in {name}", "format", f"RoPE's tables are rounded to {name}", change=tables_in(narrow)
        )
        for what, half in (("sines", sines_in), ("cosines", cosines_in)):
            yield Variant(
                f"RoPE {what} in {name}", "format", f"RoPE's {what} alone are rounded to {name}", change=half(narrow)
            )  # fmt: skip
        yield Variant(
            f"RoPE frequencies in {name}", "format", f"RoPE's frequencies are rounded to {name}",
            with_frequencies(narrow),
        )  # fmt: skip
        yield Variant(f"positions in {name}", "format", f"RoPE takes positions rounded to {name}", positions_in(narrow))


def residual_variants(announced: str) -> Iterator[Variant]:
    """Yield variants of the sums into the residual stream."""
    for name in STORED:
        says = f"the sum is rounded to {name} before it is stored"
        yield Variant(f"residual in {name}", "format", says, change=first("residual", name))
    yield from cut("residual", announced)
    yield semantics("addend dropped", says="the addend is left out", form=weighted(1.0, 0.0))
    yield semantics("addend twice", says="the addend is added twice", form=weighted(1.0, 2.0))
    yield semantics("addend subtracted", says="the addend is subtracted", form=weighted(1.0, -1.0))
    yield semantics("stream twice", says="the residual stream is counted twice", form=weighted(2.0, 1.0))
    yield semantics("stream dropped", says="the residual stream is left out", form=weighted(0.0, 1.0))


def weighted(*factors: float) -> Form:
    """Return the operation with its inputs times factors."""
    return fed(lambda o, r: tuple(f * x for f, x in zip(factors, o.values, strict=True)))


def logit_variants(row: Point, policy: Policy, config: DecoderConfig) -> Iterator[Variant]:
    """Yield variants of the output matrix, its factor and cap."""
    yield from stored(row.place, policy.logits)
    yield from cut(row.place, policy.logits)
    if config.logit_scale != 1.0:
        yield semantics("logit factor left out", says="the logits' factor is left out", form=constant(logit_scale=1.0))
        yield from roundings_of("logit factor", config.logit_scale, lambda x: constant(logit_scale=x))
    yield semantics("log-probabilities", says="logits less the log of their exponentials' sum", form=_log_softmax)
    yield semantics(
        "maximum subtracted",
        says="every row's maximum is subtracted",
        form=finished(lambda o, y: y - y.max(-1, keepdims=True)),
    )
    if config.logit_cap is not None:
        yield semantics("cap left out", says="logits are not capped", form=constant(logit_cap=None))
        yield from roundings_of("cap", config.logit_cap, lambda x: constant(logit_cap=x))
    yield from sums(row)


def _log_softmax(o: Inputs, r: Rounding) -> Array:
    def change(_: Inputs, y: Array) -> Array:
        top = y.max(axis=-1, keepdims=True)
        return np.asarray(y - top - np.log(np.exp(y - top).sum(axis=-1, keepdims=True)))

    return finished(change)(o, r)
