"""A decoder-only transformer, readable top to bottom. Every tap is a row of the table in docs/files.md.

Every operation runs under the name of the point it makes (``jax.named_scope``), which compiled instructions carry.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax import named_scope as scope
from jax.ad_checkpoint import checkpoint_name as tap

from precaudit.models.configs import DecoderConfig
from precaudit.models.jax_decoder.arithmetic import Arithmetic, dot
from precaudit.models.jax_decoder.family import fused_widths
from precaudit.models.jax_decoder.integers import IntegerMatrix, IntegerRows, integer_product
from precaudit.models.jax_decoder.parts import Parts, near, soft_cap

Cache = dict[str, Any]
Layer = dict[str, jax.Array]


@dataclass(frozen=True)
class Step:
    """What all layers of one call share.

    ``cos``, ``sin``: RoPE's tables [B, T, R/2] of full layers and, where they have their own, of windowed ones;
    ``masks``: of full and windowed layers; ``slots``: cache slots of the new positions, None in prefill.
    """

    cos: list[jax.Array]
    sin: list[jax.Array]
    masks: list[jax.Array]
    slots: jax.Array | None


def turned_at(table: jax.Array, positions: jax.Array) -> jax.Array:
    """Return the rows [B, T, R/2] of a table [P, R/2], or of each sequence's own [B, P, R/2], at positions [B, T]."""
    return table[positions] if table.ndim == 2 else jnp.take_along_axis(table, positions[..., None], axis=1)


@dataclass(frozen=True)
class RowReduction:
    """``reduce(logits [B, N, V], given [B, N])``, of N rows at a time.

    At most ``block``, which divides the number of rows where that is larger.
    """

    given: jax.Array
    reduce: Callable[[jax.Array, jax.Array], jax.Array]
    block: int


@dataclass(frozen=True)
class Decoder:
    """A configuration, an arithmetic and the parts; methods are pure functions of parameters and tokens.

    ``unroll``: write the scan over layers out as that many copies at a time. ``remat``: rematerialise
    layers under a gradient. ``raised``: layers that compute in another arithmetic; the one after the last is the final
    norm with the logits.
    """

    config: DecoderConfig
    arithmetic: Arithmetic
    parts: Parts
    unroll: int = 1
    remat: bool = False
    raised: tuple[tuple[int, ...], Arithmetic] | None = None

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache: k and v [L, B, S, G, K] in the cache's format, int8 with a scale for every row."""
        c = self.config
        shape = (c.layers, batch, capacity, c.kv_heads, c.head_dim)
        a = self.arithmetic
        if jnp.issubdtype(a.kv_cache, jnp.integer):
            return {name: IntegerRows.empty(shape, a.activations) for name in ("k", "v")}
        return {name: jnp.zeros(shape, a.kv_cache) for name in ("k", "v")}

    def prefill(
        self,
        params: dict[str, Any],
        tables: tuple[jax.Array, jax.Array],
        tokens: jax.Array,
        starts: jax.Array,
        logit_rows: jax.Array,
        cache: Cache | None,
    ) -> tuple[jax.Array, Cache | None]:
        """Run tokens [B, T] from slot 0; return logits [B, R, V] at ``logit_rows`` [B, R], and the filled cache.

        ``starts`` [B]: slots of left padding; right padding needs no mark, since no earlier position sees it.
        """
        batch, length = tokens.shape
        rows = jnp.broadcast_to(jnp.arange(length), (batch, length))
        step = self._step(tables, rows, starts, length, None)
        x, cache = self._layers(params, tokens, step, cache)
        return self._logits(params, x, logit_rows), cache

    def of_rows(
        self,
        params: dict[str, Any],
        tables: tuple[jax.Array, jax.Array],
        tokens: jax.Array,
        starts: jax.Array,
        logit_rows: jax.Array,
        made: RowReduction,
    ) -> jax.Array:
        """Prefill tokens [B, T]; return what a reduction makes of logits [B, R] at ``logit_rows`` [B, R]."""
        batch, length = tokens.shape
        rows = jnp.broadcast_to(jnp.arange(length), (batch, length))
        x, _ = self._layers(params, tokens, self._step(tables, rows, starts, length, None), None)
        n = min(made.block, logit_rows.shape[1])
        parts = [jnp.moveaxis(y.reshape(batch, -1, n), 1, 0) for y in (logit_rows, made.given)]
        out = lax.map(lambda p: made.reduce(self._logits(params, x, p[0]), p[1]), parts)
        return jnp.moveaxis(out, 0, 1).reshape(batch, -1)

    def decode(
        self,
        params: dict[str, Any],
        tables: tuple[jax.Array, jax.Array],
        tokens: jax.Array,
        starts: jax.Array,
        slots: jax.Array,
        cache: Cache,
    ) -> tuple[jax.Array, Cache]:
        """Run one token per sequence, tokens [B] at cache slots [B]; return logits [B, 1, V] and the cache."""
        rows = slots[:, None]
        step = self._step(tables, rows, starts, cache["k"].shape[2], slots)
        x, cache = self._layers(params, tokens[:, None], step, cache)
        return self._logits(params, x, jnp.zeros_like(rows)), cache

    def _step(
        self,
        tables: tuple[jax.Array, jax.Array],
        rows: jax.Array,
        starts: jax.Array,
        keys: int,
        slots: jax.Array | None,
    ) -> Step:
        positions = jnp.maximum(rows - starts[:, None], 0)
        cos, sin = ([turned_at(kind, positions) for kind in table] for table in tables)
        mask = self.parts.mask(rows, keys, starts)
        masks = [mask] if self.config.window is None else [mask, mask & near(rows, keys, self.config.window)]
        return Step(cos, sin, masks, slots)

    def _of(self, layer: jax.Array, kinds: list[jax.Array]) -> jax.Array:
        """Choose a layer's mask or table: that of full layers, or of windowed ones."""
        full = self.config.full_layers
        if len(kinds) == 1 or not full:
            return kinds[-1]
        return jnp.where(jnp.isin(layer, jnp.asarray(full, jnp.int32)), kinds[0], kinds[1])

    def _layers(self, params: dict[str, Any], tokens: jax.Array, step: Step, cache: Any) -> tuple[jax.Array, Any]:
        with scope("resid_in"):
            embed = params["embed"]
            x = embed.rows(tokens) if isinstance(embed, IntegerMatrix) else embed[tokens]
            if self.config.embed_scale != 1.0:
                x = x.astype(jnp.float32) * jnp.float32(self.config.embed_scale)
            x = x.astype(self.arithmetic.residual)

        def body(carry: Any, xs: Any) -> tuple[Any, None]:
            (x, cache), (weights, layer) = carry, xs
            if self.raised is None:
                return self._layer(x, cache, weights, layer, step), None
            return self._raised_layer(x, cache, weights, layer, step), None

        body = jax.checkpoint(body) if self.remat else body
        indices = jnp.arange(self.config.layers, dtype=jnp.int32)
        (x, cache), _ = lax.scan(body, (x, cache), (params["layers"], indices), unroll=self.unroll)
        return x, cache

    def _layer(self, x: jax.Array, cache: Any, w: Layer, layer: jax.Array, step: Step) -> tuple[jax.Array, Any]:
        parts, a = self.parts, self.arithmetic
        x = tap(x, "resid_in")
        with scope("attn_norm"):
            h = tap(self._norm(x, w, "attn_norm"), "attn_norm")
        out, cache = self._attention(h, cache, w, layer, step)
        with scope("attn_proj"):
            proj = parts.project(out.reshape(*x.shape[:2], -1), w["wo"], w.get("bo"), a)
            proj = tap(self._to_residual(proj, w, "attn_post"), "attn_proj")
        with scope("resid_mid"):
            x = tap(x + proj.astype(a.residual), "resid_mid")
        with scope("mlp_norm"):
            h = tap(self._norm(x, w, "mlp_norm"), "mlp_norm")
        y = self._experts(h, w) if self.config.sparse else self._dense(h, w)
        with scope("mlp_out"):
            mlp = tap(self._to_residual(y, w, "mlp_post"), "mlp_out")
        with scope("resid_out"):
            return tap(x + mlp.astype(a.residual), "resid_out"), cache

    def _dense(self, h: jax.Array, w: Layer) -> jax.Array:
        parts, a = self.parts, self.arithmetic
        cut = self._cut("gate_up", h, w)
        with scope("gate_out"):
            gate = cut["gate"] if cut else parts.project(h, w["gate"], w.get("bgate"), a)
        with scope("mlp_act"):
            up = cut["up"] if cut else parts.project(h, w["up"], w.get("bup"), a)
            act = tap(parts.activate(gate, up, a), "mlp_act")
        with scope("mlp_out"):
            return parts.project(act, w["down"], w.get("bdown"), a)

    def _experts(self, h: jax.Array, w: Layer) -> jax.Array:
        """Run every expert on every token and add what the chosen ones say, in float32."""
        parts, a, c = self.parts, self.arithmetic, self.config
        with scope("router"):
            logits = tap(parts.project(h, w["router"], None, replace(a, activations=a.router)), "router")
        with scope("experts"):
            weights = tap(parts.route(logits, c.experts_used, c.renormalise, a), "experts")

        def add(total: jax.Array, expert: Any) -> tuple[jax.Array, None]:
            first, down, weight = expert
            cut = self._cut("gate_up", h, first) or {n: parts.project(h, x, None, a) for n, x in first.items()}
            act = parts.activate(cut["gate"], cut["up"], a)
            y = parts.project(act, down, None, a)
            return total + weight[..., None].astype(jnp.float32) * y.astype(jnp.float32), None

        first = {n: w[f"expert_{n}"] for n in ("gate", "up", "gate_up") if f"expert_{n}" in w}
        each = (first, w["expert_down"], jnp.moveaxis(weights, -1, 0))
        with scope("mlp_out"):
            total, _ = lax.scan(add, jnp.zeros(h.shape, jnp.float32), each)
            return total.astype(a.activations)

    def _norm(self, x: jax.Array, w: Layer, name: str) -> jax.Array:
        """Normalise x; where the family has no such norm, only round it."""
        if name not in w:
            return x.astype(self.arithmetic.activations)
        weight, offset = w[name], self.config.norm_offset
        weight = weight.astype(self.arithmetic.norm) + offset if offset else weight
        return self.parts.norm(x, weight, self.config.norm_eps, self.arithmetic)

    def _to_residual(self, y: jax.Array, w: Layer, post: str) -> jax.Array:
        """Return a projection as it is added to the residual: after a norm, times a factor."""
        if post in w:
            y = self._norm(y, w, post)
        scale = self.config.residual_scale
        return y if scale == 1.0 else (y.astype(jnp.float32) * jnp.float32(scale)).astype(y.dtype)

    def _raised_layer(self, x: jax.Array, cache: Any, w: Layer, layer: jax.Array, step: Step) -> tuple[jax.Array, Any]:
        """Run a layer, in the other arithmetic where it is a raised one; what it hands on has the usual formats."""
        assert self.raised is not None
        at, arithmetic = self.raised
        wide = replace(self, arithmetic=arithmetic, raised=None)

        def raised_layer() -> tuple[jax.Array, Any]:
            weights = {name: t.astype(arithmetic.activations) for name, t in w.items()}
            y, filled = wide._layer(x.astype(arithmetic.residual), cache, weights, layer, step)
            return y.astype(x.dtype), filled

        chosen = jnp.isin(layer, jnp.asarray(at, jnp.int32))
        return lax.cond(chosen, raised_layer, lambda: self._layer(x, cache, w, layer, step))

    def _attention(self, h: jax.Array, cache: Any, w: Layer, layer: jax.Array, step: Step) -> tuple[jax.Array, Any]:
        parts, a, c = self.parts, self.arithmetic, self.config
        cut = self._cut("qkv", h, w)
        with scope("q"):
            q = self._rotated_rows("q", h, w, layer, step, cut)
        with scope("k"):
            k = self._rotated_rows("k", h, w, layer, step, cut)
        with scope("v"):
            v = cut["v"] if cut else parts.project(h, w["wv"], w.get("bv"), a)
            v = tap(v.reshape(*h.shape[:2], -1, c.head_dim), "v")
        if cache is not None:
            with scope("k_cache"):
                k_cache = parts.cache_write(cache["k"], layer, k, step.slots)
            with scope("v_cache"):
                cache = {"k": k_cache, "v": parts.cache_write(cache["v"], layer, v, step.slots)}
        if step.slots is not None:
            a = a.for_decode()
            q = q.astype(a.activations)
            with scope("k_cache"):
                k = tap(parts.cache_read(cache["k"], layer), "k_cache").astype(a.activations)
            with scope("v_cache"):
                v = tap(parts.cache_read(cache["v"], layer), "v_cache").astype(a.activations)
        if a.attention != "naive":
            with scope("attn_out"):
                kernel = {"sdpa": parts.sdpa, "flash": parts.flash}[a.attention]
                out = kernel(q, k, v, self._of(layer, step.masks), c.score_scale, c.score_cap, a)
                return tap(out, "attn_out"), cache
        with scope("scores"):
            scores = parts.scores(q, k, c.score_scale, a)
            scores = tap(scores if c.score_cap is None else soft_cap(scores, c.score_cap), "scores")
        with scope("probs"):
            probs = tap(parts.softmax(scores, self._of(layer, step.masks), a), "probs")
        with scope("attn_out"):
            return tap(parts.attend(probs, v, a), "attn_out"), cache

    def _cut(self, name: str, h: jax.Array, w: Layer) -> dict[str, jax.Array]:
        """Return projections of h [B, T, D] cut out of one product, by name; none where weights are held apart."""
        if name not in w:
            return {}
        sizes = fused_widths(self.config)[name]
        with scope(name):
            y = self.parts.project(h, w[name], w.get(f"b{name}"), self.arithmetic)
            return dict(zip(sizes, self.parts.cut(y, tuple(sizes.values())), strict=True))

    def _rotated_rows(
        self, name: str, h: jax.Array, w: Layer, layer: jax.Array, step: Step, cut: dict[str, jax.Array]
    ) -> jax.Array:
        """Return the rows of q or k [B, T, H, K]: projected, normalised where the family does, turned by RoPE."""
        parts, a, c = self.parts, self.arithmetic, self.config
        x = cut[name] if cut else parts.project(h, w[f"w{name}"], w.get(f"b{name}"), a)
        if c.qk_norm == "row":
            x = self._norm(x, w, f"{name}_norm")
        x = x.reshape(*h.shape[:2], -1, c.head_dim)
        if c.qk_norm == "head":
            x = self._norm(x, w, f"{name}_norm")
        return tap(parts.rope(x, self._of(layer, step.cos), self._of(layer, step.sin), a), name)

    @staticmethod
    def _head(params: dict[str, Any]) -> list[tuple[str, Any]]:
        return [(n, w) for n, w in params.items() if n in ("final_norm", "lm_head" if "lm_head" in params else "embed")]

    def _logits(self, params: dict[str, Any], x: jax.Array, logit_rows: jax.Array) -> jax.Array:
        if self.raised is not None and self.config.layers in self.raised[0]:
            wide = self.raised[1]
            head = {n: w if isinstance(w, IntegerMatrix) else w.astype(wide.activations) for n, w in self._head(params)}
            return replace(self, arithmetic=wide, raised=None)._logits(head, x, logit_rows)
        a, c, head = self.arithmetic, self.config, params.get("lm_head", params["embed"])
        with scope("final_norm"):
            h = tap(self._norm(x, params, "final_norm"), "final_norm")
        with scope("logits"):
            h = jnp.take_along_axis(h, logit_rows[:, :, None], axis=1)
            integers = isinstance(head, IntegerMatrix)
            y = integer_product(h, head, a.logits, a) if integers else dot(h, head, (2, 1), a.logits, a)
            if c.logit_scale != 1.0:
                y = (y.astype(jnp.float32) * jnp.float32(c.logit_scale)).astype(a.logits)
            return tap(y if c.logit_cap is None else soft_cap(y, c.logit_cap), "logits")
