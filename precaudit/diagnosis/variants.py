"""What diagnosis tries on an operation: other formats, sums, formulas and states, each with the class it stands for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from precaudit.configs import DecoderConfig
from precaudit.diagnosis.forms import (
    NORMS,
    PROJECTIONS,
    Attention,
    Flash,
    Form,
    activated,
    normed,
    plain,
    projected,
    quantised,
    rotated,
    summed,
)
from precaudit.formats import FORMATS, Array, rounder
from precaudit.numpy_decoder.accumulation import accumulating, pairwise
from precaudit.numpy_decoder.rounding import Rounding
from precaudit.policies import Policy

Class = Literal["rounding", "format", "quantisation", "semantics", "state"]
NARROW = ("bfloat16", "float16")
STORED = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Variant:
    """``form`` of an operation under ``change`` of the policy's rounding; ``says``: what it means in words."""

    name: str
    kind: Class
    says: str
    form: Form = plain
    change: Callable[[Rounding], Rounding] = lambda r: r


def _at(**places: Any) -> Callable[[Rounding], Rounding]:
    return lambda r: replace(r, **places)


def variants(point: str, policy: Policy, config: DecoderConfig, layer: int | None) -> Iterator[Variant]:
    """Yield what may have been done instead of a point's operation under a policy; of equals the first is named."""
    layers, windowed = config.layers, config.window_of(layer) is not None
    yield Variant("as announced", "rounding", "the announced policy")
    if point in ("scores", "probs", "attn_out"):
        yield from _attention(point, policy, windowed)
    if point in ("q", "k"):
        yield from _rotation()
    if point in NORMS:
        yield from _norm()
    if point in PROJECTIONS or point in NORMS:
        places = ("rows", "proj", "norm")
        yield from _stored(places, policy.activations)
        for other in range(layers) if layer is not None else ():
            if other != layer:
                yield Variant(
                    f"weights of layer {other}", "semantics", f"layer {other}'s weights are used", projected(other)
                )
    if point == "mlp_act":
        yield Variant("other activation", "semantics", "gelu in place of silu, or silu of gelu", activated("other"))
        yield Variant("gate and up exchanged", "semantics", "gate and up are exchanged", activated("exchanged"))
        yield from _stored(("mlp_act",), policy.activations)
    if point in ("resid_mid", "resid_out"):
        for name in STORED:
            yield Variant(
                f"residual in {name}",
                "format",
                f"the sum is rounded to {name} before it is stored",
                plain,
                _first("residual", name),
            )
        yield Variant("addend dropped", "semantics", "the addend is left out", summed((1.0, 0.0)))
        yield Variant("addend twice", "semantics", "the addend is added twice", summed((1.0, 2.0)))
        yield Variant("stream dropped", "semantics", "the residual stream is left out", summed((0.0, 1.0)))
    if point == "logits":
        yield from _stored(("logits",), policy.logits)
    if point in ("scores", "attn_out", "q", "k", "v", "attn_proj", "mlp_act", "mlp_out", "logits"):
        yield from _sums(point)


def _sums(point: str) -> Iterator[Variant]:
    """Yield sums in other formats and orders; in float32 every order is honest."""
    for name in (*NARROW, "float32"):
        kind: Class = "rounding" if name == "float32" else "format"
        orders = {
            f"sums in {name}": (f"sums are rounded to {name} term by term", accumulating(name)),
            f"sums in {name}, pairwise": (f"sums are rounded to {name}, pair by pair", pairwise(name)),
            f"sums in {name}, blocks of 128": (
                f"sums are rounded to {name} every 128 terms", accumulating(f"{name}/128"),
            ),
        }  # fmt: skip
        for order, (says, dot) in orders.items():
            yield Variant(order, kind, says, plain, _at(dot=dot))
        if point == "attn_out":
            for block in (64, 128):
                yield Variant(
                    f"flash, blocks of {block}, in {name}", kind,
                    f"blocks of {block} keys under a running maximum, their sums kept in {name}",
                    Flash(block=block, total=rounder(name)),
                )  # fmt: skip


def _first(place: str, name: str) -> Callable[[Rounding], Rounding]:
    """Round to ``name`` before a place rounds as it does."""
    narrow = rounder(name)

    def change(r: Rounding) -> Rounding:
        then = getattr(r, place)
        changed: dict[str, Any] = {place: lambda x: then(narrow(x))}
        return replace(r, **changed)

    return change


def _stored(places: tuple[str, ...], announced: str) -> Iterator[Variant]:
    """Yield results rounded to a narrower format than announced."""
    for name in STORED:
        if FORMATS[name].unit_roundoff > FORMATS[announced].unit_roundoff:

            def change(r: Rounding, name: str = name) -> Rounding:
                for place in places:
                    r = _first(place, name)(r)
                return r

            yield Variant(f"stored in {name}", "format", f"results are rounded to {name}", plain, change)


def _attention(point: str, policy: Policy, windowed: bool) -> Iterator[Variant]:
    form = partial(Variant, kind="semantics")
    for name in (*NARROW, "float32"):
        narrow = rounder(name)
        if point != "probs" and name != policy.scores:
            yield Variant(f"scores in {name}", "format", f"scores are rounded to {name}", change=_at(scores=narrow))
            yield Variant(
                f"scores and products in {name}", "format", f"q·k is rounded to {name}, and again after the scale",
                change=_at(score_dot=narrow, scores=narrow),
            )  # fmt: skip
        if point != "scores" and name != policy.probs:
            yield Variant(
                f"probabilities in {name}",
                "format",
                f"probabilities are rounded to {name}",
                Attention(),
                _at(probs=narrow),
            )
        if point != "scores" and name != policy.softmax:
            yield Variant(f"softmax in {name}", "format", f"softmax is computed in {name}", _softmax(name))
    if point == "attn_out":
        yield from _stored(("attn_out",), policy.attn_out)
        for name in ("float8_e4m3fn", "float8_e5m2"):
            if name != policy.kv_cache:
                yield Variant(
                    f"keys and values in {name}",
                    "format",
                    f"keys and values are rounded to {name}",
                    Attention(key=rounder(name)),
                )
        for bits in (8, 4):
            yield Variant(
                f"keys and values in int{bits}", "format", f"keys and values are quantised to {bits} bits",
                Attention(key=quantised(bits)),
            )  # fmt: skip
    if point != "probs":
        yield Variant(
            "scale before the product", "format", "q is scaled and rounded before q·k", Attention(before=True)
        )
        yield form(
            "scale 1/√(K+1)",
            says="scores are scaled by 1/√(K+1)",
            form=Attention(lambda k: float(np.sqrt(k / (k + 1)))),
        )
        yield form(
            "scale twice", says="the scale 1/√K is applied twice", form=Attention(lambda k: 1 / float(np.sqrt(k)))
        )
        yield form("scale left out", says="the scale 1/√K is left out", form=Attention(lambda k: float(np.sqrt(k))))
        yield form(
            "heads interleaved",
            says="query head h reads key head h mod G, not h // (H/G)",
            form=Attention(interleaved=True),
        )
    if point != "scores" and windowed:
        yield form("window one short", says="a row sees one key too few of its window", form=Attention(window=-1))
        yield form("window one long", says="a row sees one key more than its window", form=Attention(window=1))
        yield form("no window", says="a row sees every key before it", form=Attention(unlimited=True))
    if point != "scores":
        yield form("mask one ahead", says="every row sees one key past its own", form=Attention(ahead=1))
        yield form("mask one short", says="no row sees its own key", form=Attention(ahead=-1))
        yield form("maximum not subtracted", says="softmax subtracts no maximum", form=Attention(maximum=False))


def _softmax(name: str) -> Form:
    """Softmax whose shifted scores, exponentials, sum and quotient are rounded to ``name``."""
    narrow = rounder(name)

    @dataclass(frozen=True)
    class Narrow(Attention):
        def weights(self, s: Array, hidden: Array, r: Rounding) -> Array:
            s = np.where(hidden, -np.inf, narrow(s))
            with np.errstate(all="ignore"):
                e = narrow(np.exp(narrow(s - s.max(axis=1, keepdims=True))))
                return narrow(e / narrow(e.sum(axis=1, keepdims=True)))

    return Narrow()


def _rotation() -> Iterator[Variant]:
    for shift in (1, -1):
        yield Variant(f"positions {shift:+d}", "semantics", f"RoPE takes positions off by {shift:+d}", rotated(shift))
    yield Variant("pairs interleaved", "semantics", "RoPE rotates pairs (2i, 2i + 1)", rotated(interleaved=True))
    yield Variant("no RoPE", "semantics", "RoPE is left out", rotated(off=True))
    for name in NARROW:
        narrow = rounder(name)
        yield Variant(
            f"RoPE tables in {name}", "format", f"RoPE's tables are rounded to {name}", plain, _at(rope_table=narrow)
        )


def _norm() -> Iterator[Variant]:
    def mean_square(x: Array) -> Array:
        return np.asarray(np.einsum("td,td->t", x, x) / x.shape[1])

    def root(x: Array, e: float) -> Array:
        return np.asarray(1 / np.sqrt(mean_square(x) + e))

    made = {
        "epsilon outside the root": (
            "epsilon is added to the root", normed(lambda x, e: 1 / (np.sqrt(mean_square(x)) + e)),
        ),
        "epsilon left out": ("epsilon is left out", normed(lambda x, e: 1 / np.sqrt(mean_square(x)))),
        "mean for mean square": (
            "the mean is taken for the mean square", normed(lambda x, e: 1 / np.sqrt(x.mean(axis=1) + e)),
        ),
        "mean of sizes": (
            "the mean of |x| is taken for the root mean square", normed(lambda x, e: 1 / (np.abs(x).mean(axis=1) + e)),
        ),
        "centred": (
            "the mean is removed, as layer norm does", normed(lambda x, e: 1 / np.sqrt(x.var(axis=1) + e), center=True),
        ),
        "weight plus one": ("1 is added to the weight", normed(root, offset=1.0)),
    }  # fmt: skip
    for name, (says, form) in made.items():
        yield Variant(name, "semantics", says, form)
    for name in NARROW:
        narrow = rounder(name)

        def inside(o: Any, r: Rounding, narrow: Any = narrow) -> Array:
            squares = narrow(np.einsum("td,td->t", *(narrow(o.values[0]),) * 2) / o.values[0].shape[1])
            scaled = normed(lambda x, e: narrow(1 / narrow(np.sqrt(squares + e))))
            return scaled(o, r)

        yield Variant(f"norm in {name}", "format", f"the norm is computed in {name}", inside)
