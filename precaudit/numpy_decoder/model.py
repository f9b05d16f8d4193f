"""A model's tensors in FP64, one layer at a time, and every operation on given inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from precaudit.arrays import Array, identity, release, widen
from precaudit.configs import EMBEDDING, HEAD, DecoderConfig, expected_tensors
from precaudit.lengths import telling
from precaudit.numpy_decoder.context import Context
from precaudit.numpy_decoder.operations import operations
from precaudit.numpy_decoder.operators import Rule, attend, capped, scaled, scores, softmax
from precaudit.numpy_decoder.rounding import Rounding
from precaudit.threads import INLINE, each, row_ranges, widened

BLOCK = 128  # query rows of one attention job: causal blocks skip the keys after them
VOCAB_BLOCK = 2048
Attend = Callable[[Array, Array, Array, int | None, Rounding], Array]
Softmax = Callable[[Array, Array, int | None, Rounding], Array]


@dataclass
class Model:
    """Reads tensors by name and keeps one layer's in FP64.

    ``config`` and ``read`` may be all there is to a model: attention alone needs no tensor.
    """

    config: DecoderConfig
    read: Callable[[str], Array]
    _layer: int | None = None
    _held: dict[str, Array] = field(default_factory=dict)

    def context(self, layer: int | None, positions: Array, rounding: Rounding, lengths: Array | None = None) -> Context:
        """Return the context of a layer's operations (None: those outside layers) on rows of sequences.

        ``lengths`` [T]: how long each row's sequence was when it was turned (precaudit/lengths.py).
        """
        if layer != self._layer:
            self._held, self._layer = {}, layer
        expected = expected_tensors(self.config)

        def weight(name: str) -> Array | None:
            full = name if layer is None else f"model.layers.{layer}.{name}"
            if full not in expected:
                return None
            if full not in self._held:
                stored = self.read(full)
                self._held[full] = widened(stored)
                release(stored)
            return self._held[full]

        return Context(self.config, weight, positions, rounding, layer, telling(self.config, lengths))

    def warm(self, layer: int) -> None:
        """Widen a layer's tensors before threads ask for them."""
        context = self.context(layer, np.zeros(0), Rounding())
        prefix = f"model.layers.{layer}."
        for name in expected_tensors(self.config):
            if name.startswith(prefix):
                context.weight(name.removeprefix(prefix))

    def embed(self, tokens: Array) -> Array:
        """Return the embedding rows of token ids [T] in FP64 [T, D], times the family's factor."""
        table = self.read(EMBEDDING)
        rows = widened(np.ascontiguousarray(table[tokens]))
        release(table)
        return rows if self.config.embed_scale == 1.0 else rows * self.config.embed_scale

    def logits(
        self, final_norm: Array, roundings: Sequence[Rounding], of: Callable[[Array], Array] = identity
    ) -> list[Array]:
        """Return final_norm [T, D] · of(output matrix)ᵀ [T, V] under each rounding, those with one ``dot`` sharing it.

        Scaled and capped as the family does, unless ``of`` makes it a sum of sizes.
        The matrix is widened a block of rows at a time, and kept as it is stored until a layer is asked for.
        """
        head = self._output_matrix()
        outs = [np.empty((len(final_norm), self.config.vocab)) for _ in roundings]
        scale, cap = self.config.logit_scale, self.config.logit_cap if of is identity else None

        def block(i: int) -> None:
            w, products = of(widen(np.ascontiguousarray(head[i : i + VOCAB_BLOCK]))), {}
            for out, r in zip(outs, roundings, strict=True):
                if r.dot not in products:
                    products[r.dot] = r.dot(final_norm, w.T)
                y = products[r.dot]
                if scale != 1.0 or cap is not None:
                    y = capped(r.logits(y) * scale, cap)
                out[:, i : i + VOCAB_BLOCK] = r.logits(y)

        each(block, [(i,) for i in range(0, self.config.vocab, VOCAB_BLOCK)])
        release(head)
        return outs

    def _output_matrix(self) -> Array:
        name = EMBEDDING if self.config.tied else HEAD
        if self._layer is not None:
            self._held, self._layer = {}, None
        key = f"{name} as stored"
        if key not in self._held:
            self._held[key] = self.read(name)
        return self._held[key]

    def apply(self, point: str, context: Context, inputs: Sequence[Array]) -> Array:
        """Return the operation behind ``point`` (attention and logits aside), rows split over threads."""
        operation = operations(self.config)[point]
        ranges = row_ranges(len(inputs[0]), inputs[0][:1].size)
        if len(ranges) == 1:
            return operation(context, *inputs)
        self._touch(point, context, inputs)

        def part(a: int, b: int) -> Array:
            return operation(context.rows(a, b), *(x[a:b] for x in inputs))

        return np.concatenate(each(part, ranges))

    def _touch(self, point: str, context: Context, inputs: Sequence[Array]) -> None:
        """Run the operation on one row, so that threads find its tensors widened."""
        one = replace(context.rows(0, 1), rounding=Rounding())
        operations(self.config)[point](one, *(x[:1] for x in inputs))


def attention(q: Array, k: Array, v: Array, positions: Array, rule: Rule, rounding: Rounding) -> Array:
    """Return attention's output [T, H, K] for q [T, H, K] at ascending ``positions`` [T] over k, v [S, G, K].

    Key s stands at position s; a row sees the keys up to its own position, the last ``rule.window`` of them.
    """
    return attention_variants(q, k, v, positions, rule, (rounding,))[0]


def attention_variants(
    q: Array, k: Array, v: Array, positions: Array, rule: Rule, roundings: Sequence[Rounding], inner: Attend = attend
) -> list[Array]:
    """Return ``attention`` under several roundings; those that make the product q · kᵀ alike share it.

    ``inner``: how one head's output is made from its scores, as ``attend`` does.
    """
    outs = [np.empty(q.shape) for _ in roundings]
    group = q.shape[1] // k.shape[1]

    def block(a: int, b: int, heads: Sequence[int]) -> None:
        first = 0 if rule.window is None else max(0, int(positions[a]) - rule.window + 1)
        first -= first % BLOCK  # a whole number of blocks of keys, where attention runs over them
        keys, products = int(positions[b - 1]) + 1, {}
        values = together([v[first:keys, h // group] for h in heads])
        for out, r in zip(outs, roundings, strict=True):
            product = r.score_product or r.dot
            if product not in products:
                products[product] = together([product(q[a:b, h], k[first:keys, h // group].T) for h in heads])
            made = inner(scaled(products[product], rule, r), values, positions[a:b] - first, rule.window, r)
            for h, y in zip(heads, made if len(heads) > 1 else [made], strict=True):
                out[a:b, h] = y

    every = range(q.shape[1])
    few = inner is attend and len(q) * len(every) * len(k) < INLINE
    groups = [every] if few else [[h] for h in every]
    jobs = [(i, min(len(q), i + BLOCK), heads) for i in range(0, len(q), BLOCK) for heads in groups]
    each(block, jobs[::-1], len(q) * len(every) * len(k))
    return outs


def together(heads: list[Array]) -> Array:
    """Return the only array as it is, several as one with the heads first."""
    return heads[0] if len(heads) == 1 else np.stack(heads)


def all_scores(q: Array, k: Array, rule: Rule, rounding: Rounding) -> Array:
    """Return scores [H, T, S] of every query with every key, masked or not."""
    group, every = q.shape[1] // k.shape[1], range(q.shape[1])
    out = np.empty((len(every), q.shape[0], k.shape[0]))
    if out.size < INLINE:
        return scaled(np.stack([rounding.dot(q[:, h], k[:, h // group].T) for h in every]), rule, rounding)

    def head(h: int) -> None:
        out[h] = scores(q[:, h], k[:, h // group], rule, rounding)

    each(head, [(h,) for h in every])
    return out


def all_probs(s: Array, positions: Array, window: int | None, rounding: Rounding, inner: Softmax = softmax) -> Array:
    """Return probabilities [H, T, S] from scores [H, T, S], each head's as ``inner`` makes them."""
    if inner is softmax and s.size < INLINE:
        return softmax(s, positions, window, rounding)
    out = np.empty(s.shape)

    def head(h: int) -> None:
        out[h] = inner(s[h], positions, window, rounding)

    each(head, [(h,) for h in range(len(s))], s.size)
    return out
