"""Formulas people get wrong, in NumPy: each an operation on recorded inputs with one thing changed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from precaudit.formats import Array, identity
from precaudit.numpy_decoder.families import Context
from precaudit.numpy_decoder.model import Model
from precaudit.numpy_decoder.operators import (
    ACTIVATIONS,
    Rule,
    capped,
    gelu_tanh,
    rope,
    rope_frequencies,
    scaled,
    silu,
)
from precaudit.numpy_decoder.rounding import Rounding

NORMS = ("attn_norm", "mlp_norm", "final_norm")
PROJECTIONS = {"v": "self_attn.v_proj", "attn_proj": "self_attn.o_proj", "mlp_out": "mlp.down_proj"}


@dataclass(frozen=True)
class Inputs:
    """What an operation read: its rows at ``positions`` [T], for attention q [T, H, K], k and v [S, G, K]."""

    model: Model
    layer: int | None
    point: str
    positions: Array
    values: tuple[Array, ...]

    def context(self, rounding: Rounding) -> Context:
        """Return the context of the layer's operations."""
        return self.model.context(self.layer, self.positions, rounding)


Form = Callable[[Inputs, Rounding], Array]


@dataclass(frozen=True)
class Attention:
    """Attention with one thing changed.

    ``scale``: factor on the scale by head dimension; ``ahead``: keys seen past the row's own (−1: its own not);
    ``window``: keys more in the window, ``unlimited``: no window;
    ``interleaved``: query head h reads key head h mod G instead of h // (H/G); ``maximum``: subtracted before exp;
    ``key``: what is done to the keys and values first; ``before``: q is scaled and rounded before the product.
    """

    scale: Callable[[int], float] = lambda k: 1.0
    ahead: int = 0
    window: int = 0
    unlimited: bool = False
    interleaved: bool = False
    maximum: bool = True
    key: Callable[[Array], Array] = identity
    before: bool = False

    def __call__(self, o: Inputs, r: Rounding) -> Array:
        """Return scores [H, T, S], probs [H, T, S] or attn_out [T, H, K] of recorded inputs."""
        rule = Rule.of(o.model.config, o.layer)
        hide = partial(self.hidden, rule, o.positions)
        if o.point == "probs":
            return np.stack([r.probs(self.weights(s.copy(), hide(s.shape[1]), r)) for s in o.values[0]])
        q, k = o.values[0], self.key(o.values[1])
        groups = k.shape[1]
        found = []
        for h in range(q.shape[1]):
            g = h % groups if self.interleaved else h // (q.shape[1] // groups)
            other = replace(rule, scale=rule.scale * self.scale(q.shape[2]))
            if self.before:
                s = r.scores(capped(r.dot(r.rows(q[:, h] * other.scale), k[:, g].T), rule.cap))
            else:
                s = scaled(r.dot(q[:, h], k[:, g].T), other, r)
            if o.point == "attn_out":
                s = self.attend(s, self.key(o.values[2])[:, g], hide(s.shape[1]), r)
            found.append(s)
        return np.stack(found, axis=1) if o.point == "attn_out" else np.stack(found)

    def hidden(self, rule: Rule, positions: Array, keys: int) -> Array:
        """Return where [T, S] a row does not see a key."""
        at, s = np.asarray(positions)[:, None], np.arange(keys)[None, :]
        behind = s > at + self.ahead
        if rule.window is None or self.unlimited:
            return np.asarray(behind)
        return np.asarray(behind | (s <= at - rule.window - self.window))

    def attend(self, s: Array, v: Array, hidden: Array, r: Rounding) -> Array:
        """Return one head's output [T, K] from its scores [T, S] and values [S, K]."""
        return r.attn_out(r.dot(r.probs(self.weights(s, hidden, r)), v))

    def weights(self, s: Array, hidden: Array, r: Rounding) -> Array:
        """Return softmax over the keys a row sees, its sum not yet rounded."""
        s = np.where(hidden, -np.inf, s)
        with np.errstate(all="ignore"):
            if not self.maximum:
                return _unshifted(s.astype(np.float32))
            e = r.exponential(np.exp(r.shifted(s - s.max(axis=1, keepdims=True))))
            return e / e.sum(axis=1, keepdims=True)


def _unshifted(s: Array) -> Array:
    """Return softmax of float32 scores without their maximum: exp overflows above 88.7, where FP64 would not.

    XLA multiplies by the sum's reciprocal and flushes it to zero below the smallest normal number.
    """
    e = np.exp(s)
    inverse = np.float32(1) / e.sum(axis=1, keepdims=True)
    inverse = np.where(np.abs(inverse) < np.finfo(np.float32).tiny, np.float32(0), inverse)
    return np.asarray(e * inverse, np.float64)


@dataclass(frozen=True)
class Flash(Attention):
    """Attention a block of keys at a time with a running maximum (Dao et al. 2022, algorithm 1).

    Exponentials are rounded as probabilities before they are normalised; ``total`` rounds the running output and sum.
    """

    block: int = 128
    total: Callable[[Array], Array] = identity

    def attend(self, s: Array, v: Array, hidden: Array, r: Rounding) -> Array:
        """Return one head's output [T, K] from its scores [T, S] and values [S, K]."""
        s = np.where(hidden, -np.inf, s)
        top, mass = np.full((len(s), 1), -np.inf), np.zeros((len(s), 1))
        out = np.zeros((len(s), v.shape[1]))
        for i in range(0, s.shape[1], self.block):
            part = s[:, i : i + self.block]
            new = np.maximum(top, part.max(axis=1, keepdims=True))
            with np.errstate(invalid="ignore"):
                shrink = np.where(np.isfinite(top), np.exp(top - new), 0.0)
                e = np.where(np.isfinite(part), np.exp(part - new), 0.0)
            mass = self.total(mass * shrink + e.sum(axis=1, keepdims=True))
            out = self.total(out * shrink + r.dot(r.probs(e), v[i : i + self.block]))
            top = new
        with np.errstate(invalid="ignore"):
            return r.attn_out(out / mass)


def quantised(bits: int) -> Callable[[Array], Array]:
    """Return symmetric integer quantisation of rows [..., K] with one scale each, max|x| / (2^(bits−1) − 1)."""
    most = 2 ** (bits - 1) - 1

    def change(x: Array) -> Array:
        scale = np.abs(x).max(axis=-1, keepdims=True) / most
        return np.asarray(np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)) * scale)

    return change


def rotated(shift: int = 0, interleaved: bool = False, off: bool = False) -> Form:
    """Return q or k with RoPE at other positions, in the interleaved layout of pairs (2i, 2i + 1), or without it."""

    def form(o: Inputs, r: Rounding) -> Array:
        c = o.context(r)
        if not off and not interleaved:
            moved = np.maximum(o.positions + shift, 0)
            return o.model.apply(o.point, replace(c, positions=moved), o.values)
        bare = o.model.apply(o.point, replace(c, positions=np.zeros_like(o.positions)), o.values)
        if off:
            return bare
        speed, factor = rope_frequencies(c.config, c.layer)
        order = np.stack([np.arange(len(speed)) * 2, np.arange(len(speed)) * 2 + 1]).reshape(-1)
        order = np.concatenate([order, np.arange(2 * len(speed), bare.shape[-1])])
        turned = rope(bare[..., order], o.positions, (speed, factor), r)
        out = np.empty_like(turned)
        out[..., order] = turned
        return r.rows(out)

    return form


def normed(scale: Callable[[Array, float], Array], offset: float = 0.0, center: bool = False) -> Form:
    """Return a norm with 1/rms = ``scale(x, eps)`` [T]; ``offset`` is added to the weight, ``center``: mean removed."""

    def form(o: Inputs, r: Rounding) -> Array:
        c = o.context(r)
        x = o.values[0]
        names = {"attn_norm": c.config.norm_names.attn, "mlp_norm": c.config.norm_names.mlp, "final_norm": "model.norm"}
        name = names[o.point]
        if name is None:
            return plain(o, r)
        with np.errstate(all="ignore"):
            factor = r.norm_scale(scale(x, c.config.norm_eps))
        x = x - x.mean(axis=1, keepdims=True) if center else x
        weight = c.tensor(f"{name}.weight") + c.config.norm_offset + offset
        return r.norm(r.norm_inner(x * factor[:, None]) * weight)

    return form


def projected(layer: int) -> Form:
    """Return a projection with another layer's weights."""

    def form(o: Inputs, r: Rounding) -> Array:
        other = replace(o, layer=layer)
        return plain(other, r)

    return form


def activated(form: str) -> Form:
    """Return the MLP's activation with gelu for silu or the other way round, or gate and up exchanged."""

    def change(o: Inputs, r: Rounding) -> Array:
        c = o.context(r)
        gate, up = (r.gate(r.dot(o.values[0], c.tensor(f"mlp.{n}_proj.weight").T)) for n in ("gate", "up"))
        act = ACTIVATIONS[c.config.activation]
        if form == "exchanged":
            gate, up = up, gate
        else:
            act = silu if act is gelu_tanh else gelu_tanh
        return r.mlp_act(r.silu(act(gate)) * up)

    return change


def summed(weights: Sequence[float]) -> Form:
    """Return the residual as weights · (stream, addend)."""

    def form(o: Inputs, r: Rounding) -> Array:
        stream, addend = o.values
        return r.residual(weights[0] * stream + weights[1] * addend)

    return form


def plain(o: Inputs, r: Rounding) -> Array:
    """Return the operation as it should be."""
    if o.point in ("scores", "probs", "attn_out"):
        return Attention()(o, r)
    if o.point == "logits":
        return o.model.logits(o.values[0], [r])[0]
    return o.model.apply(o.point, o.context(r), o.values)
