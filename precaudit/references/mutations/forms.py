"""Formulas people get wrong: the textbook operation on recorded inputs with one thing changed.

Nothing here computes what ``numpy_decoder`` computes: a form changes the configuration, a tensor, an input, the
positions, the scores or the result, and calls the one implementation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.models.numpy_decoder.context import Context
from precaudit.models.numpy_decoder.model import Model, all_probs, all_scores, attention
from precaudit.models.numpy_decoder.operations import operations
from precaudit.models.numpy_decoder.operators import AttentionRule, attend
from precaudit.models.numpy_decoder.rounding import Rounding
from precaudit.numbers.arrays import Array
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.graphs.point import Point
from precaudit.schema.metrics.rows import unseen

Weight = Callable[[str], Array | None]


def same_tensors(weight: Weight) -> Weight:
    """Return a layer's tensors as they are."""
    return weight


@dataclass(frozen=True)
class Inputs:
    """What an operation read: its rows at ``positions`` [T], for attention q [T, H, K], k and v [S, G, K].

    ``last``: the keys and values of the last row where they differ from those of the rows before (decode);
    ``tensors``: what is done to the layer's tensors; ``probs`` [H, T, S]: what attn_out is made from in place of q, k;
    ``lengths`` [T]: how long the sequence was when each row was turned (precaudit/schema/lengths.py);
    ``start``: the slot of the first key; ``turned``: by so much more than its position RoPE turns every row.
    """

    model: Model
    layer: int | None
    point: str
    positions: Array
    values: tuple[Array, ...]
    last: tuple[Array, ...] = ()
    tensors: Callable[[Weight], Weight] = same_tensors
    probs: Array | None = None
    lengths: Array | None = None
    start: int = 0
    turned: int = 0

    @property
    def row(self) -> Point:
        """What is known of the operation."""
        return POINTS[self.point]

    @property
    def config(self) -> DecoderConfig:
        """The model's configuration."""
        return self.model.config

    def context(self, rounding: Rounding) -> Context:
        """Return the context of the layer's operations."""
        c = self.model.context(self.layer, self.positions + self.turned, rounding, self.lengths)
        return replace(c, weight=self.tensors(c.weight))

    def rows(self, some: slice) -> "Inputs":
        """Return the same for some rows; keys and values stay whole."""
        first = self.values[0][:, some] if self.row.kind == "softmax" else self.values[0][some]
        others = self.values[1:] if self.row.reads_keys else tuple(x[some] for x in self.values[1:])
        whole = some.stop is None or some.stop >= len(self.positions)
        return replace(
            self,
            positions=self.positions[some],
            values=(first, *others),
            last=self.last if whole else (),
            probs=None if self.probs is None else self.probs[:, some],
            lengths=None if self.lengths is None else self.lengths[some],
        )


Form = Callable[[Inputs, Rounding], Array]


def usual_form(o: Inputs, r: Rounding) -> Array:
    """Return the operation as it should be."""
    rule = AttentionRule.of(o.config, o.layer)
    if o.row.kind == "score":
        return all_scores(o.values[0], o.values[1], rule, r)
    if o.row.kind == "softmax":
        return all_probs(o.values[0], o.positions, rule.window, r)
    if o.row.kind == "mix":
        q, k, v = o.values
        if o.probs is None:
            return attention(q, k, v, o.positions, rule, r)
        pairs = zip(o.probs, key_head_of(o, q.shape[1]), strict=True)
        return np.stack([r.attn_out(r.dot(p[:, : len(v)], v[:, g])) for p, g in pairs], axis=1)
    if o.row.kind == "head":
        return o.model.logits(o.values[0], [r])[0]
    return o.model.apply(o.point, o.context(r), o.values)


def evaluate_form(form: Form, o: Inputs, r: Rounding) -> Array:
    """Return what a form makes of all rows; the last one may have read other keys."""
    out = form(replace(o, last=()), r)
    if o.last:
        end = replace(o.rows(slice(len(o.positions) - 1, None)), last=())
        out[-1:] = form(replace(end, values=(end.values[0], *o.last)), r)
    return out


def with_config(change: Callable[[DecoderConfig, int | None], dict[str, Any]], then: Form = usual_form) -> Form:
    """Return the operation under a configuration with ``change(config, layer)`` replaced."""

    def form(o: Inputs, r: Rounding) -> Array:
        other = msgspec.structs.replace(o.config, **change(o.config, o.layer))
        return then(replace(o, model=replace(o.model, config=other)), r)

    return form


def constant(**fields: Any) -> Form:
    """Return the operation under a configuration with these fields."""
    return with_config(lambda *_: fields)


def with_tensors(tensors: Callable[[Weight], Weight], then: Form = usual_form) -> Form:
    """Return the operation with other tensors in the layer."""
    return lambda o, r: then(replace(o, tensors=lambda weight: tensors(o.tensors(weight))), r)


def on_inputs(values: Callable[[Inputs], tuple[Array, ...]], then: Form = usual_form) -> Form:
    """Return the operation on other inputs."""
    return lambda o, r: then(replace(o, values=values(o)), r)


def at_positions(positions: Callable[[Array], Array], then: Form = usual_form) -> Form:
    """Return the operation at other positions: those RoPE turns by, or those the mask goes by."""
    return lambda o, r: then(replace(o, positions=positions(o.positions)), r)


def key_head_of(o: Inputs, heads: int) -> Array:
    """Return which key head [H] every query head reads."""
    return np.arange(heads) // (heads // o.values[1].shape[1])


def on_scores(change: Callable[[Inputs, Array], Array]) -> Form:
    """Return probabilities or attention's output with the scores [H, T, S] changed before softmax."""

    def form(o: Inputs, r: Rounding) -> Array:
        if o.row.kind == "softmax":
            return usual_form(replace(o, values=(change(o, o.values[0]),)), r)
        q, k, v = o.values
        rule = AttentionRule.of(o.config, o.layer)
        s = change(o, all_scores(q, k, rule, r))
        heads = enumerate(key_head_of(o, q.shape[1]))
        return np.stack([attend(s[h], v[:, g], o.positions, rule.window, r) for h, g in heads], axis=1)

    return form


# scores with −inf where a key is not seen [H, T, S] → weights that sum to 1
Softmax = Callable[[Array], Array]


# (scores [H, T, S], which keys are not seen [T, S]) → weights, before they are stored
Weights = Callable[[Array, Array], Array]


def weighing(softmax: Softmax) -> Form:
    """Return probabilities or attention's output with another softmax."""
    return weighted_by(lambda s, hidden: softmax(np.where(hidden, -np.inf, s)))


def weighted_by(weights: Weights) -> Form:
    """Return probabilities or attention's output with other weights."""

    def form(o: Inputs, r: Rounding) -> Array:
        s = o.values[0]
        if o.row.kind != "softmax":
            s = all_scores(s, o.values[1], AttentionRule.of(o.config, o.layer), r)
        hidden = unseen(np.asarray(o.positions), s.shape[2], o.config.window_of(o.layer))
        with np.errstate(all="ignore"):
            p = r.probs(weights(s, hidden))
        if o.row.kind == "softmax":
            return p
        groups = enumerate(key_head_of(o, len(p)))
        return np.stack([r.attn_out(r.dot(p[h], o.values[2][:, g])) for h, g in groups], axis=1)

    return form


def on_result(change: Callable[[Array], Array], twice: bool = False, then: Form = usual_form) -> Form:
    """Return the operation with its result changed before it is stored; ``twice``: it was rounded once before."""

    def form(o: Inputs, r: Rounding) -> Array:
        store = o.row.place
        out = then(o, r if twice else r.eliding((store,)))
        rounded: Array = getattr(r, store)(change(out))
        return rounded

    return form


def at_place(place: str, change: Callable[[Array], Array]) -> Form:
    """Return the operation with what a place gives changed."""

    def form(o: Inputs, r: Rounding) -> Array:
        usual = getattr(r, place)
        changed: dict[str, Any] = {place: lambda x: change(usual(x))}
        return usual_form(o, replace(r, **changed))

    return form


def normalising(scale: Callable[[Array, float, int], Array]) -> Form:
    """Return a norm, or an operation with norms inside, whose 1/rms is ``scale(mean of squares, eps, D)``."""

    def form(o: Inputs, r: Rounding) -> Array:
        eps, width = o.config.norm_eps, norm_width(o)

        def place(found: Array) -> Array:
            with np.errstate(all="ignore"):
                return r.norm_scale(scale(np.maximum(found**-2.0 - eps, 0.0), eps, width))

        return usual_form(o, replace(r, norm_scale=place))

    return form


def norm_width(o: Inputs) -> int:
    """Return how many elements a norm inside a point's operation takes the mean of."""
    if o.row.rotates:
        heads = o.config.heads if "H" in o.row.axes else o.config.kv_heads
        return o.config.head_dim * (heads if o.config.qk_norm == "row" else 1)
    return o.config.width


def normalised_by(scale: Callable[[Array, float], Array]) -> Form:
    """Return a norm of its input x [T, D] whose 1/rms is ``scale(x, eps)`` [T]."""

    def form(o: Inputs, r: Rounding) -> Array:
        with np.errstate(all="ignore"):
            factor = r.norm_scale(scale(o.values[0], o.config.norm_eps))
        operation = operations(o.config)[o.point]
        return operation(o.context(replace(r, norm_scale=lambda _s: factor)), *o.values)

    return form


def quantiser(bits: int) -> Callable[[Array], Array]:
    """Return symmetric integer quantisation of rows [..., K] with one scale each, max|x| / (2^(bits−1) − 1)."""
    most = 2 ** (bits - 1) - 1

    def change(x: Array) -> Array:
        scale = np.abs(x).max(axis=-1, keepdims=True) / most
        return np.asarray(np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)) * scale)

    return change
