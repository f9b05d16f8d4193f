"""Formulas people get wrong, in NumPy: each an operation on recorded inputs with one thing changed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from precaudit.formats import Array, identity
from precaudit.numpy_decoder.families import Context
from precaudit.numpy_decoder.model import Model
from precaudit.numpy_decoder.operators import rope, silu
from precaudit.numpy_decoder.rounding import Rounding

QUERY = {"q": "self_attn.q_proj", "k": "self_attn.k_proj"}
NORMS = {
    "attn_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight",
    "final_norm": "model.norm.weight",
}  # fmt: skip
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

    ``scale``: factor on 1/√K by head dimension; ``ahead``: keys seen past the row's own (−1: its own not);
    ``interleaved``: query head h reads key head h mod G instead of h // (H/G); ``maximum``: subtracted before exp;
    ``key``: what is done to the keys and values first; ``before``: q is scaled and rounded before the product.
    """

    scale: Callable[[int], float] = lambda k: 1.0
    ahead: int = 0
    interleaved: bool = False
    maximum: bool = True
    key: Callable[[Array], Array] = identity
    before: bool = False

    def __call__(self, o: Inputs, r: Rounding) -> Array:
        """Return scores [H, T, S], probs [H, T, S] or attn_out [T, H, K] of recorded inputs."""
        if o.point == "probs":
            return np.stack([r.probs(self.weights(s.copy(), o.positions, r)) for s in o.values[0]])
        q, k = o.values[0], self.key(o.values[1])
        groups = k.shape[1]
        found = []
        for h in range(q.shape[1]):
            g = h % groups if self.interleaved else h // (q.shape[1] // groups)
            scale = self.scale(q.shape[2]) / np.sqrt(q.shape[2])
            if self.before:
                s = r.scores(r.dot(r.rows(q[:, h] * scale), k[:, g].T))
            else:
                s = r.scores(r.score_dot(r.dot(q[:, h], k[:, g].T)) * scale)
            found.append(self.attend(s, self.key(o.values[2])[:, g], o.positions, r) if o.point == "attn_out" else s)
        return np.stack(found, axis=1) if o.point == "attn_out" else np.stack(found)

    def attend(self, s: Array, v: Array, positions: Array, r: Rounding) -> Array:
        """Return one head's output [T, K] from its scores [T, S] and values [S, K]."""
        return r.attn_out(r.dot(r.probs(self.weights(s, positions, r)), v))

    def weights(self, s: Array, positions: Array, r: Rounding) -> Array:
        """Return softmax over the keys a row sees, its sum not yet rounded."""
        last = np.asarray(positions)[:, None] + self.ahead
        hidden = np.arange(s.shape[1])[None, :] > last
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

    def attend(self, s: Array, v: Array, positions: Array, r: Rounding) -> Array:
        """Return one head's output [T, K] from its scores [T, S] and values [S, K]."""
        hidden = np.arange(s.shape[1])[None, :] > np.asarray(positions)[:, None] + self.ahead
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
        y = r.dot(o.values[0], c.tensor(f"{QUERY[o.point]}.weight").T)
        bias = c.weight(f"{QUERY[o.point]}.bias")
        x = r.linear(y if bias is None else r.linear(y) + bias).reshape(len(y), -1, c.config.head_dim)
        if off:
            return r.rows(x)
        if interleaved:
            half = x.shape[-1] // 2
            order = np.stack([np.arange(half) * 2, np.arange(half) * 2 + 1]).reshape(-1)
            turned = rope(x[..., order], o.positions, c.config.rope_theta, r)
            out = np.empty_like(turned)
            out[..., order] = turned
            return r.rows(out)
        return r.rows(rope(x, np.maximum(o.positions + shift, 0), c.config.rope_theta, r))

    return form


def normed(scale: Callable[[Array, float], Array], offset: float = 0.0, center: bool = False) -> Form:
    """Return a norm with 1/rms = ``scale(x, eps)`` [T]; ``offset`` is added to the weight, ``center``: mean removed."""

    def form(o: Inputs, r: Rounding) -> Array:
        c = o.context(r)
        x = o.values[0]
        with np.errstate(all="ignore"):
            factor = r.norm_scale(scale(x, c.config.norm_eps))
        x = x - x.mean(axis=1, keepdims=True) if center else x
        return r.norm(r.norm_inner(x * factor[:, None]) * (c.tensor(NORMS[o.point]) + offset))

    return form


def projected(layer: int) -> Form:
    """Return a projection with another layer's weights."""

    def form(o: Inputs, r: Rounding) -> Array:
        other = replace(o, layer=layer)
        return plain(other, r)

    return form


def activated(form: str) -> Form:
    """Return the MLP's activation with gelu for silu, or gate and up exchanged."""

    def gelu(x: Array) -> Array:
        return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))

    def change(o: Inputs, r: Rounding) -> Array:
        c = o.context(r)
        gate, up = (r.gate_up(r.dot(o.values[0], c.tensor(f"mlp.{n}_proj.weight").T)) for n in ("gate", "up"))
        if form == "exchanged":
            gate, up = up, gate
        return r.mlp_act(r.silu((gelu if form == "gelu" else silu)(gate)) * up)

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
