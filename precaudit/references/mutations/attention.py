"""What may have been done instead of attention: other scales, masks, heads, softmaxes and formats."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.rounding import Rounding
from precaudit.numbers.arrays import Array, identity, rounder
from precaudit.numbers.formats import EIGHT_BITS, FORMATS
from precaudit.references.mutations.exponentials import (
    POLYNOMIALS,
    SCHRAUDOLPH,
    by_bits,
    by_polynomial,
    replace_exponential,
)
from precaudit.references.mutations.flash import narrow_softmax, not_rescaled, without_shift
from precaudit.references.mutations.forms import (
    Form,
    Inputs,
    at_positions,
    constant,
    on_inputs,
    on_result,
    quantiser,
    usual_form,
    weighing,
    weighted_by,
    with_config,
)
from precaudit.references.mutations.storing import FEW, to_bits
from precaudit.references.mutations.variants import NARROW, Variant, at, cut, roundings_of, stored, sums
from precaudit.schema.graphs.point import Point
from precaudit.schema.policies import FLASH_BLOCK, Policy

semantics = partial(Variant, kind="semantics")


def variants_of_attention(row: Point, policy: Policy, config: DecoderConfig, layer: int | None) -> Iterator[Variant]:
    """Yield variants of scores, probs or attn_out."""
    if row.reads_keys:
        yield from _score_formats(policy)
        yield from _scales(config)
        yield from _caps(config)
    if row.weighs:
        yield from _softmaxes(policy)
        yield from masks(config.window_of(layer))
        yield from _window_elsewhere(config, layer)
    if row.kind == "mix":
        yield from stored(row.place, policy.attn_out)
        yield semantics(
            "heads averaged", says="every head holds the mean of all", form=on_result(_mean, True), last=True
        )
    else:
        yield from stored(row.place, policy.format_of(row.format), EIGHT_BITS)
    yield from cut(row.place, policy.format_of(row.format))
    if row.kind == "score":
        yield semantics(
            "linear biases", says="2^(−8h/H) for each key between is subtracted from scores of head h (ALiBi)",
            form=_linear, last=True,
        )  # fmt: skip
    if row.kind == "softmax":
        for steps in (127, 128, 255, 256):
            rounds = partial(_in_steps, steps)
            says = f"probabilities are multiples of 1/{steps}"
            yield Variant(
                f"probabilities in steps of 1/{steps}", "quantisation", says, form=on_result(rounds), last=True
            )  # fmt: skip
    if row.kind == "mix":
        for name, says, form in not_rescaled(FLASH_BLOCK) if policy.attention == "flash" else ():
            yield semantics(name, says=says, form=form)
        yield from _cache_variants(policy)
    if row.reads_keys:
        yield from sums(row)


def _mean(out: Array) -> Array:
    return np.broadcast_to(out.mean(axis=1, keepdims=True), out.shape)


def _in_steps(steps: int, p: Array) -> Array:
    return np.rint(p * steps) / steps


def _linear(o: Inputs, r: Rounding) -> Array:
    """Return scores [H, T, S] less a bias that grows with distance (Press et al. 2022, ALiBi)."""

    def add_slopes(s: Array) -> Array:
        heads = s.shape[0]
        slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
        far = np.asarray(o.positions)[:, None] - np.arange(s.shape[2])
        return np.asarray(s - slopes[:, None, None] * far)

    return on_result(add_slopes)(o, r)


def _score_formats(policy: Policy) -> Iterator[Variant]:
    for name in (*NARROW, "float32"):
        if name != policy.scores:
            narrow = rounder(name)
            yield Variant(f"scores in {name}", "format", f"scores are rounded to {name}", change=at(scores=narrow))
            yield Variant(
                f"scores and products in {name}", "format", f"q·k is rounded to {name}, and again after the scale",
                change=at(score_dot=narrow, scores=narrow),
            )  # fmt: skip


def scaled_by(factor: float) -> Form:
    """Return the operation with another factor on its scale."""
    return with_config(lambda c, _layer: {"query_scale": c.score_scale * factor})


def _scaled_before(o: Inputs, r: Rounding) -> Array:
    """Return scores of q that is scaled and rounded."""
    q = r.rows(o.values[0] * o.config.score_scale)
    return constant(query_scale=1.0)(replace(o, values=(q, *o.values[1:])), r)


def _interleave_heads(o: Inputs) -> tuple[Array, ...]:
    """Return keys and values so that query head h reads head h mod G."""
    q, *others = o.values
    order = np.arange(q.shape[1]) % others[0].shape[1]
    return (q, *(x[:, order] for x in others))


def _scales(config: DecoderConfig) -> Iterator[Variant]:
    k, scale = config.head_dim, config.score_scale
    yield Variant("scale before the product", "format", "q is scaled and rounded before q·k", _scaled_before)
    yield semantics(
        "scale 1/√(K+1)", says="scores are scaled by 1/√(K+1)", form=constant(query_scale=(k + 1) ** -0.5),
    )  # fmt: skip
    if config.query_scale is not None:
        yield semantics("scale 1/K", says="scores are scaled by 1/K", form=constant(query_scale=1 / k))
        yield semantics(
            "scale 1/√K", says="scores are scaled by 1/√K, not by the configuration's factor",
            form=constant(query_scale=k**-0.5),
        )  # fmt: skip
    yield semantics("scale twice", says="the scale is applied twice", form=scaled_by(scale))
    yield semantics("scale omitted", says="the scale is omitted", form=constant(query_scale=1.0))
    yield from roundings_of("scale", scale, lambda x: constant(query_scale=x))
    if config.heads != config.kv_heads > 1:
        yield semantics(
            "heads interleaved",
            says="query head h reads key head h mod G, not h // (H/G)",
            form=on_inputs(_interleave_heads),
        )
    yield from _operands(config)


def _operands(config: DecoderConfig) -> Iterator[Variant]:
    """Yield other keys and values than were recorded: of other heads, of the next slot, in fewer bits."""
    heads: dict[str, tuple[str, Any]] = {
        "reversed": ("are in reverse order", lambda x: x[:, ::-1]),
        "shifted": ("are those of the head before", lambda x: np.roll(x, 1, axis=1)),
        "all the first": ("are all the first", lambda x: np.repeat(x[:, :1], x.shape[1], axis=1)),
    }  # fmt: skip
    which = {"query": (0,), "key": (1,), "value": (2,), "key and value": (1, 2)}
    for what, where in which.items():
        for name, (says, change) in heads.items() if (config.heads if where == (0,) else config.kv_heads) > 1 else ():
            yield semantics(
                f"{what} heads {name}", says=f"{what} heads {says}", form=_change_inputs(where, change), last=True
            )
        for by, side in ((1, "before"), (-1, "after")) if where != (0,) else ():
            says = f"{what} rows are those of the slot {side}"
            moved_by = partial(np.roll, shift=by, axis=0)
            yield semantics(
                f"{what} rows shifted by {by:+d}", says=says, form=_change_inputs(where, moved_by), last=True
            )
    sides = {"query": (0,), "key": (1,), "query and key": (0, 1), "value": (2,), "query, key and value": (0, 1, 2)}
    casts = {f"in {name}": (f"rounded to {name}", rounder(name)) for name in EIGHT_BITS}
    casts |= {f"cut to {bits} bits": (f"cut to {bits} bits of a mantissa", to_bits(bits)) for bits in FEW}
    casts |= {f"in int{bits}": (f"quantised to {bits} bits, one scale a row", quantiser(bits)) for bits in (8, 4)}
    for (side, where), (name, (says, cast)) in product(sides.items(), casts.items()):
        is_ = "is" if len(where) == 1 else "are"
        yield Variant(f"{side} {name}", "format", f"{side} {is_} {says}", _change_inputs(where, cast), last=True)


def _caps(config: DecoderConfig) -> Iterator[Variant]:
    cap = config.score_cap
    if cap is None:
        return
    yield semantics("cap omitted", says="scores are not capped", form=constant(score_cap=None))
    yield from roundings_of("cap", cap, lambda x: constant(score_cap=x))


def _softmaxes(policy: Policy) -> Iterator[Variant]:
    for name in (*NARROW, "float32"):
        narrow = rounder(name)
        if name != policy.probs:
            yield Variant(
                f"probabilities in {name}", "format", f"probabilities are rounded to {name}", change=at(probs=narrow)
            )  # fmt: skip
        if name != policy.softmax:
            yield Variant(
                f"softmax in {name}", "format", f"softmax is computed in {name}",
                weighing(narrow_softmax(narrow, narrow)),
            )  # fmt: skip
            yield Variant(
                f"softmax in {name}, summed term by term", "format",
                f"softmax is computed in {name}, its sums rounded term by term",
                weighing(narrow_softmax(narrow, narrow, one_by_one=True)), last=True,
            )  # fmt: skip
            yield Variant(
                f"softmax in {name}, sums of unrounded exponentials", "format",
                f"softmax is computed in {name}, its sums of exponentials before they are rounded",
                weighing(narrow_softmax(narrow, narrow, fused=True)), last=True,
            )  # fmt: skip
            yield Variant(
                f"softmax in {name}, sums in float32", "format",
                f"softmax is computed in {name}, its sums in float32", weighing(narrow_softmax(narrow, identity)),
            )  # fmt: skip
            yield Variant(
                f"exponentials in {name}", "format", f"softmax's exponentials are rounded to {name}",
                change=at(exponential=narrow),
            )  # fmt: skip
    for name, coefficients in POLYNOMIALS.items():
        yield semantics(
            f"exp by {name}", says=f"softmax's exp is 2^n times {name}",
            change=at(exponential=replace_exponential(by_polynomial(coefficients))),
        )  # fmt: skip
    for name, shift in SCHRAUDOLPH.items():
        yield semantics(
            f"exp by Schraudolph's bits, {name}", says=f"softmax's exp is Schraudolph's, shifted for {name}",
            change=at(exponential=replace_exponential(by_bits(shift))),
        )  # fmt: skip
    for count in (1, 2):
        yield semantics(
            f"{count} added to the sum", says=f"{count} is added to softmax's sum",
            form=weighing(partial(_with_sink, count)),
        )  # fmt: skip
    yield semantics("base 2", says="softmax takes powers of 2, not of e", form=weighing(_powers_of_two))
    ways: dict[str, tuple[str, bool, Any]] = {
        "no mask": ("rows attend to every key that was recorded", False, 0.0),
        "masked after softmax": ("probabilities are masked after softmax, and not normalised again", True, 0.0),
    }  # fmt: skip
    for name, (says, after, by) in ways.items():
        yield semantics(name, says=says, form=weakly_masked(by, after), last=True)
    for axis, what in ((0, "heads"), (1, "rows")):
        says = f"softmax is over {what}, not over keys"
        yield semantics(f"softmax over {what}", says=says, form=weighing(partial(_over, axis)), last=True)
    yield semantics("maximum not subtracted", says="softmax subtracts no maximum", form=weighing(without_shift))


def _with_sink(count: int, s: Array) -> Array:
    top = s.max(axis=-1, keepdims=True)
    e = np.exp(s - top)
    return np.asarray(e / (e.sum(axis=-1, keepdims=True) + count))


def _powers_of_two(s: Array) -> Array:
    e = np.exp2(s - s.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def _over(axis: int, s: Array) -> Array:
    top = s.max(axis=axis, keepdims=True)
    e = np.exp(s - np.where(np.isfinite(top), top, 0.0))
    total = e.sum(axis=axis, keepdims=True)
    return np.asarray(e / np.where(total > 0, total, 1.0))


def weakly_masked(by: float, after: bool = False) -> Form:
    """Return probabilities or attention's output where ``by`` is subtracted from scores that are masked.

    ``after``: they are masked by zeros after softmax.
    """

    def weights(s: Array, hidden: Array) -> Array:
        y = np.where(hidden, s - by, s)
        e = np.exp(y - y.max(axis=-1, keepdims=True))
        p = e / e.sum(axis=-1, keepdims=True)
        return np.where(hidden, 0.0, p) if after else p

    return weighted_by(weights)


def wider_window(by: int, then: Form = usual_form) -> Form:
    """Return the operation with a window of ``by`` keys more, where there is one."""
    return with_config(lambda c, _layer: {"window": None if c.window is None else max(c.window + by, 1)}, then)


def seeing(ahead: int) -> Form:
    """Return the operation with every row seeing this many keys past its own, as far back as it should.

    Windows count from the row's last key, so they grow along; NaN where no row sees any.
    """

    def form(o: Inputs, r: Rounding) -> Array:
        window = o.config.window_of(o.layer)
        if o.positions[-1] + ahead < 0 or (window is not None and window + ahead < 1):
            return np.full_like(usual_form(o, r), np.nan)
        return at_positions(lambda p: np.maximum(p + ahead, -1), wider_window(ahead))(o, r)

    return form


def masks(window: int | None) -> Iterator[Variant]:
    """Yield other masks."""
    yield semantics("mask one ahead", says="every row attends to one key past its own", form=seeing(1), ahead=1)
    yield semantics("mask one short", says="no row attends to its own key", form=seeing(-1))
    yield semantics(
        "mask one short but for the first row",
        says="no row attends to its own key but the first, which attends to no other",
        form=at_positions(lambda p: np.maximum(p - 1, 0)),
        last=True,
    )
    if window is None:
        return
    if window > 1:
        yield semantics(
            "window one short", says="a row attends to one key too few of its window", form=wider_window(-1)
        )
    yield semantics("window one long", says="a row attends to one key more than its window", form=wider_window(1))
    yield semantics("no window", says="a row attends to every key before it", form=constant(window=None))


def _window_elsewhere(config: DecoderConfig, layer: int | None) -> Iterator[Variant]:
    """Yield the window that other layers have, in a layer that has none."""
    others = {w for i in range(config.layers) if (w := config.window_of(i)) is not None}
    if config.window_of(layer) is None:
        for window in sorted(others):
            form = constant(window=window, full_layers=())
            yield semantics(
                "window of other layers", says=f"a row attends to {window} keys, as in other layers", form=form
            )


def _cache_variants(policy: Policy) -> Iterator[Variant]:
    stores = {"keys and values": (1, 2), "keys": (1,), "values": (2,), "queries": (0,)}
    for what, which in stores.items():
        for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
            if policy.kv_cache != "int8" and FORMATS[name].unit_roundoff > FORMATS[policy.kv_cache].unit_roundoff:
                yield Variant(
                    f"{what} in {name}", "format", f"{what} are rounded to {name}", _change_inputs(which, rounder(name))
                )
        for bits in (8, 4):
            yield Variant(
                f"{what} in int{bits}", "format", f"{what} are quantised to {bits} bits",
                _change_inputs(which, quantiser(bits)),
            )  # fmt: skip


def _change_inputs(which: tuple[int, ...], change: Any) -> Form:
    return on_inputs(lambda o: tuple(change(x) if i in which else x for i, x in enumerate(o.values)))
