"""Formulas with one free number: the number is taken from the recorded values, and said with what is nearest to it.

The fewest digits that close as well are taken. A fitted number replaces an exact formula only if it leaves a quarter or
less of what that leaves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.rounding import Rounding
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import Integers
from precaudit.references.mutations.attention import scaled_by, seeing, weakly_masked
from precaudit.references.mutations.forms import (
    Form,
    Inputs,
    at_place,
    at_positions,
    constant,
    on_inputs,
    on_scores,
    usual_form,
    with_config,
)
from precaudit.references.mutations.integers import clip_integers
from precaudit.references.mutations.minimising import logarithmic
from precaudit.references.mutations.operands import scaled_weights
from precaudit.references.mutations.products import weight_inputs
from precaudit.references.mutations.rotation import again, base_of, shift_positions, stop_positions, with_base
from precaudit.references.mutations.variants import Variant
from precaudit.schema.digits import digits

SINKS = 4  # first keys that every row sees beside its window (Xiao et al. 2024, StreamingLLM)
AHEAD = "number of keys past the row's own"


@dataclass(frozen=True)
class Fit:
    """A number ``what`` of a formula: ``form`` takes it, ``grid`` is where it is looked for, ascending.

    ``announced``: what it should be, None where the formula has no such number; ``whole``: it is an integer;
    ``known``: values people take for it by mistake, and what they are. ``last``: it is looked for only where no part of
    the result is scaled.
    """

    what: str
    form: Callable[[float], Form]
    grid: tuple[float, ...]
    announced: float | None
    whole: bool = False
    known: tuple[tuple[str, float], ...] = ()
    source: str = "the configuration says"
    last: bool = False

    def variant(self, x: float) -> Variant:
        """Return the operation with the number at ``x``."""
        should = (
            "there is none in the configuration"
            if self.announced is None
            else (f"{self.source} {digits(self.announced, 6)}")
        )
        says = f"{self.what} is {digits(x, 6)}, {should}{self.nearest(x)}"
        ahead = int(x) if self.what == AHEAD else 0
        return Variant(
            f"{self.what} {digits(x, 6)}", "semantics", says, self.form(x), fitted=True, ahead=ahead, number=x
        )

    def nearest(self, x: float) -> str:
        """Return the known value within 0.1 %, in words."""
        if not self.known:
            return ""
        found = [name for name, value in self.known if abs(x - value) <= 1e-3 * abs(value)]
        return f"; nearest known: {found[0] if found else 'none'}"


def fits(o: Inputs, weights: Integers | None = None, held: str = "float32") -> Iterator[Fit]:
    """Yield the numbers a point's operation may have got wrong.

    ``weights``: the integers that they are in, None where they are in none; ``held``: the format of those that are not.
    """
    c, layer = o.config, o.layer
    if weights is not None and o.row.projects:
        most = tuple(float(x) for x in np.unique(np.geomspace(1, weights.most, 24).astype(int)))
        yield Fit(
            "largest integer of weights",
            partial(clip_integers, weights),
            most,
            float(weights.most),
            whole=True,
            source="the format has",
        )
    if o.row.reads_keys:
        k = c.head_dim
        known = (("1/√K", 1.0), ("1/K", k**-0.5), ("1/√D", (k / c.width) ** 0.5), ("1/√(K+1)", (k / (k + 1)) ** 0.5))
        source = 1.0 / (c.score_scale * k**0.5)
        yield Fit(
            "scale × √K" if c.query_scale is None else "scale over the configuration's",
            scaled_by,
            logarithmic(1 / 64, 64, 49),
            1.0,
            known=tuple((n, v * source) for n, v in known),
            source="it should be",
        )
        dimensions = tuple(float(x) for x in np.unique(np.geomspace(1, k, 24).astype(int)))
        yield Fit(
            "dimensions of a head that are multiplied",
            lambda x: on_inputs(partial(_narrower, int(x))),
            dimensions,
            float(k),
            whole=True,
        )
        yield Fit("score cap", lambda x: constant(score_cap=x), logarithmic(0.5, 1000, 45), c.score_cap)
    if o.row.weighs:
        yield from _windows(o)
    if o.row.kind == "mix" and o.probs is None:
        grid = tuple(float(x) for x in range(1, 11))
        yield Fit(
            "significant bits of values",
            lambda x: on_inputs(partial(_cut_values, int(x))),
            grid,
            53.0,
            whole=True,
            source="FP64 has",
        )
    if o.row.norm(c) is not None:
        yield Fit("epsilon", lambda x: constant(norm_eps=x), logarithmic(1e-12, 1, 49), c.norm_eps)
    if o.row.rotates:
        yield from _rotations(c, layer, int(o.positions[-1]))
    if o.row.place == "proj" and c.residual_scale != 1.0:
        yield Fit("residual factor", lambda x: constant(residual_scale=x), logarithmic(1e-3, 1e3, 61), c.residual_scale)
    if o.row.activates(c) and c.activation == "silu":
        beta = logarithmic(1 / 8, 8, 25)
        yield Fit("beta of the activation, x·σ(βx),", _swish, beta, 1.0, source="it should be")
    clip = logarithmic(1e-2, 1e3, 61)
    # where the product is normalised a factor is an epsilon over its square, and that is told as one
    if weights is None and (o.row.projects or o.row.kind == "head") and not o.row.normalises_inside(c):
        form = partial(_scaled_weights, held)
        yield Fit("factor on the weights", form, logarithmic(1 / 64, 64, 49), 1.0, source="it should be", last=True)
    if o.row.kind == "gate" and o.row.within is None:
        yield Fit("largest of up", lambda x: at_place("up", partial(_clip, x)), clip, None)
    if o.row.projects or o.row.place == "proj":
        yield Fit("largest of what is multiplied", lambda x: at_place("operand", partial(_clip, x)), clip, None)
    if o.row.kind == "sum":
        roots = (("1/√2", 0.5**0.5), ("√2", 2**0.5))
        for what, times in (("stream", lambda x: weight_inputs(x, 1.0)), ("addend", lambda x: weight_inputs(1.0, x))):
            yield Fit(
                f"factor on the {what}", times, logarithmic(1 / 64, 64, 49), 1.0, known=roots, source="it should be"
            )
    if o.row.kind == "softmax":
        grid = logarithmic(1 / 16, 16, 49)
        yield Fit("factor on the scores", lambda x: on_scores(lambda _o, s: s * x), grid, 1.0, source="it should be")
    if o.row.kind == "head":
        grid = logarithmic(1e-3, 1e3, 61)
        yield Fit(
            "logit scale",
            lambda x: constant(logit_scale=x),
            grid,
            c.logit_scale,
            known=(("1/√D", c.width**-0.5),),
        )
        yield Fit("logit cap", lambda x: constant(logit_cap=x), logarithmic(0.5, 1000, 45), c.logit_cap)


def _narrower(size: int, o: Inputs) -> tuple[Array, ...]:
    """Return queries that are zero from a dimension on."""
    q = o.values[0].copy()
    q[..., size:] = 0.0
    return (q, *o.values[1:])


def _scaled_weights(held: str, factor: float) -> Form:
    return scaled_weights(factor, held)


def _clip(most: float, x: Array) -> Array:
    return np.clip(x, -most, most)


def _windows(o: Inputs) -> Iterator[Fit]:
    window = o.config.window_of(o.layer)
    top = int(o.positions[-1]) + 1
    grid = tuple(float(x) for x in np.unique(np.geomspace(1, max(top, 2), 24).astype(int)))
    yield Fit(
        "window",
        lambda x: constant(window=int(x), full_layers=()),
        grid,
        None if window is None else float(window),
        whole=True,
    )
    slots = tuple(float(x) for x in np.unique(np.geomspace(1, max(top - 1, 2), 24).astype(int)))
    yield Fit(
        "first key attended to",
        lambda x: on_scores(partial(_hidden, slice(0, int(x)))),
        slots,
        0.0,
        whole=True,
        source="it should be",
    )
    yield Fit(
        "number of keys attended to",
        lambda x: on_scores(partial(_hidden, slice(int(x), None))),
        slots,
        float(top),
        whole=True,
        source="there are",
    )
    if window is None:
        form = partial(_seeing, _beside_sinks)
        yield Fit(f"window beside the first {SINKS} keys", form, grid, None, whole=True)
    for what, hidden, grid, usual in (
        ("size of documents that do not attend to each other", _in_documents, slots, float(top)),
        ("stride of the keys a row attends to", _stride_mask, tuple(float(x) for x in range(1, 9)), 1.0),
    ):
        form = partial(_seeing, hidden)
        yield Fit(what, form, grid, usual, whole=True, source="it should be")
    yield Fit("what masked scores are lowered by", weakly_masked, logarithmic(0.5, 1e5, 31), None)
    offsets = tuple(float(x) for x in range(-min(top - 1, 8), 9) if x)
    yield Fit(AHEAD, lambda x: seeing(int(x)), offsets, 0.0, whole=True, source="it should be")


def _hidden(some: slice, o: Inputs, s: Array) -> Array:
    """Return scores [H, T, S] without some keys, as another row's padding hides them; a row keeps its last key."""
    s = s.copy()
    kept = np.minimum(np.asarray(o.positions), s.shape[2] - 1)
    own = s[:, np.arange(len(kept)), kept].copy()
    s[:, :, some] = -np.inf
    s[:, np.arange(len(kept)), kept] = own
    return s


def _seeing(hidden: Callable[[int, Array, Array], Array], x: float) -> Form:
    """Return the operation with keys hidden by a whole number."""
    return on_scores(partial(_unseen, partial(hidden, int(x))))


def _unseen(hidden: Callable[[Array, Array], Array], o: Inputs, s: Array) -> Array:
    """Return scores [H, T, S] without keys that are ``hidden`` of (rows [T, 1], keys [S]); a row keeps its own."""
    rows, keys = np.minimum(np.asarray(o.positions), s.shape[2] - 1)[:, None], np.arange(s.shape[2])
    return np.where(hidden(rows, keys) & (keys != rows), -np.inf, s)


def _beside_sinks(window: int, rows: Array, keys: Array) -> Array:
    return np.asarray((rows - keys >= window) & (keys >= SINKS))


def _in_documents(size: int, rows: Array, keys: Array) -> Array:
    return np.asarray(rows // size != keys // size)


def _stride_mask(step: int, rows: Array, keys: Array) -> Array:
    return np.asarray((rows - keys) % step != 0)


def _cut_values(bits: int, o: Inputs) -> tuple[Array, ...]:
    """Return values that keep their first significant bits and are zero below."""
    q, k, v = o.values
    mantissa, exponent = np.frexp(v)
    return q, k, np.ldexp(np.trunc(np.ldexp(mantissa, bits)), exponent - bits)


def _rotations(config: DecoderConfig, layer: int | None, last: int) -> Iterator[Fit]:
    base = base_of(config, layer)
    usual = (1e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 8e6, 1e7)
    grid = tuple(sorted({*logarithmic(1e2, 1e8, 121), *usual}))

    def with_rope_base(x: float) -> Form:
        return with_config(partial(_base_fields, x))

    yield Fit("RoPE base", with_rope_base, grid, base)
    times = logarithmic(1 / 64, 64, 49)
    yield Fit("factor on positions", lambda x: at_positions(lambda p: p * x), times, 1.0, source="it should be")
    slots = tuple(float(x) for x in np.unique(np.geomspace(1, max(last, 2), 24).astype(int)))
    yield Fit("last position", lambda x: stop_positions(int(x)), slots, float(last), whole=True, source="there are")
    yield Fit(
        "positions start again at",
        lambda x: again(int(x)),
        (*slots, last + 1.0),
        last + 1.0,
        whole=True,
        source="there are",
    )
    far = sorted({*range(-64, 65), *(s * 2**n for n in range(7, 16) for s in (-1, 1)), *range(-last, last)} - {0})
    yield Fit(
        "offset of positions",
        lambda x: shift_positions(int(x)),
        tuple(map(float, far[:: max(1, len(far) // 512)])),
        0.0,
        whole=True,
        source="it should be",
    )


def _base_fields(x: float, config: DecoderConfig, layer: int | None) -> dict[str, float]:
    return with_base(config, layer, x)


def _swish(beta: float) -> Form:
    """Return the operation with x · σ(βx) (Ramachandran et al. 2017) for silu, which is it with β = 1."""

    def form(o: Inputs, r: Rounding) -> Array:
        def gate(x: Array) -> Array:
            return np.asarray(beta * r.gate(x))

        def silu(y: Array) -> Array:
            return r.silu(y / beta)

        return usual_form(o, replace(r, gate=gate, silu=silu))

    return form
