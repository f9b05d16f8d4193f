"""A model's tensors in FP64, one layer at a time, and every operation on given inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from precaudit.models.configs import EMBEDDING, HEAD, DecoderConfig, model_tensors
from precaudit.models.numpy_decoder.context import Context
from precaudit.models.numpy_decoder.operations import operations
from precaudit.models.numpy_decoder.operators import AttentionRule, attend, scale_scores, scores, soft_cap, softmax
from precaudit.models.numpy_decoder.passes import Dot
from precaudit.models.numpy_decoder.rounding import Rounding
from precaudit.numbers.arrays import Array, identity, release, widen
from precaudit.numbers.threads import INLINE, cores, each, row_ranges, to_float64
from precaudit.schema.lengths import telling

BLOCK = 128  # query rows of one attention job: causal blocks skip the keys after them
VOCAB_BLOCK = 2048
JOBS = 4  # for each worker: where there are fewer, each head is a job of its own
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

    def __reduce__(self) -> "tuple[type[Model], tuple[DecoderConfig, Callable[[str], Array]]]":
        """Another process reads tensors itself."""
        return type(self), (self.config, self.read)

    def context(self, layer: int | None, positions: Array, rounding: Rounding, lengths: Array | None = None) -> Context:
        """Return the context of a layer's operations (None: those outside layers) on rows of sequences.

        ``lengths`` [T]: how long each row's sequence was when it was turned (precaudit/schema/lengths.py).
        """
        if layer != self._layer:
            self._held, self._layer = {}, layer
        expected = model_tensors(self.config)

        def weight(name: str) -> Array | None:
            full = name if layer is None else f"model.layers.{layer}.{name}"
            if full not in expected:
                return None
            if full not in self._held:
                self._widen([full])
            return self._held[full]

        return Context(self.config, weight, positions, rounding, layer, telling(self.config, lengths))

    def warm(self, layer: int) -> None:
        """Widen a layer's tensors before threads ask for them."""
        self.context(layer, np.zeros(0), Rounding())
        names = (name for name in model_tensors(self.config) if name.startswith(f"model.layers.{layer}."))
        self._widen([name for name in names if name not in self._held])

    def _widen(self, names: Sequence[str]) -> None:
        stored = [self.read(name) for name in names]
        self._held |= dict(zip(names, to_float64(*stored), strict=True))
        for x in stored:
            release(x)

    def embed(self, tokens: Array) -> Array:
        """Return the embedding rows of token ids [T] in FP64 [T, D], times the family's factor."""
        table = self.read(EMBEDDING)
        (rows,) = to_float64(np.ascontiguousarray(table[tokens]))
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
                    y = soft_cap(r.logits(y) * scale, cap)
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


def attention(q: Array, k: Array, v: Array, positions: Array, rule: AttentionRule, rounding: Rounding) -> Array:
    """Return attention's output [T, H, K] for q [T, H, K] at ascending ``positions`` [T] over k, v [S, G, K].

    Key s stands at position s; a row sees the keys up to its own position, the last ``rule.window`` of them.
    """
    return attend_variants(AttentionRows(q, k, v, positions), rule, (rounding,))[0]


class AttentionRows(NamedTuple):
    """Queries [T, H, K] at ascending positions [T], keys and values [S, G, K]."""

    q: Array
    k: Array
    v: Array
    positions: Array


def attend_variants(
    given: AttentionRows, rule: AttentionRule, roundings: Sequence[Rounding], inner: Attend = attend
) -> list[Array]:
    """Return ``attention`` under several roundings; those that make the product q · kᵀ alike share it.

    ``inner``: how one head's output is made from its scores, as ``attend`` does.
    """
    q, k, v, positions = given
    outs = [np.empty(q.shape) for _ in roundings]
    group, every = q.shape[1] // k.shape[1], range(q.shape[1])

    def block(a: int, b: int, heads: Sequence[int]) -> None:
        first = 0 if rule.window is None else max(0, int(positions[a]) - rule.window + 1)
        first -= first % BLOCK  # a whole number of blocks of keys, where attention runs over them
        mine = slice(heads[0], heads[-1] + 1)
        here = slice(first, int(positions[b - 1]) + 1), slice(heads[0] // group, heads[-1] // group + 1)
        queries, keys, products = q[a:b, mine].transpose(1, 0, 2), k[here], {}
        values = for_heads(v[here].transpose(1, 0, 2), len(heads))
        for out, r in zip(outs, roundings, strict=True):
            product = r.score_product or r.dot
            if product not in products:
                products[product] = head_scores(product, queries, keys)
            read = values, positions[a:b] - first, rule.window, r
            own = product is np.matmul and len(roundings) == 1  # not another's: other products may keep what they made
            if own and inner is attend and rule.only_scales(r):
                made = attend(products[product], *read, rule.scale)
            else:
                made = inner(scale_scores(products[product], rule, r), *read)
            out[a:b, mine] = made.swapaxes(0, 1) if len(heads) > 1 else made[:, None]

    blocks = [(i, min(len(q), i + BLOCK)) for i in range(0, len(q), BLOCK)]
    shared = [[h] for h in every]
    if inner is attend and len(q) * len(every) * len(k) < INLINE:
        shared = [list(every)]
    elif inner is attend and len(blocks) * k.shape[1] >= JOBS * cores():
        shared = [list(every[i : i + group]) for i in every[::group]]
    jobs = [(*rows, heads) for rows in blocks for heads in shared]
    each(block, jobs[::-1], len(q) * len(every) * len(k))
    return outs


def head_scores(product: Dot, q: Array, k: Array) -> Array:
    """Return q · kᵀ [H, T, S] of heads q [H, T, K] over k [S, G, K] by ``product``; [T, S] of one head."""
    if len(q) == 1:
        return product(q[0], k[:, 0].T)
    if product is not np.matmul:
        return np.stack([product(*pair) for pair in zip(q, for_heads(k.transpose(1, 2, 0), len(q)), strict=True)])
    groups = q.reshape(k.shape[1], -1, *q.shape[1:])  # one call for all: threads wait for each other between calls
    return (groups @ k.transpose(1, 2, 0)[:, None]).reshape(*q.shape[:2], len(k))


def for_heads(x: Array, heads: int) -> Array:
    """Return what belongs to each head: x [G, …], of which a group of heads shares each; x[0] for one head."""
    if heads == 1:
        return x[0]
    shared = np.broadcast_to(x[:, None], (len(x), heads // len(x), *x.shape[1:]))
    return shared.reshape(heads, *x.shape[1:])


def all_scores(q: Array, k: Array, rule: AttentionRule, rounding: Rounding) -> Array:
    """Return scores [H, T, S] of every query with every key, masked or not."""
    group, every = q.shape[1] // k.shape[1], range(q.shape[1])
    out = np.empty((len(every), q.shape[0], k.shape[0]))
    if out.size < INLINE:
        return scale_scores(np.stack([rounding.dot(q[:, h], k[:, h // group].T) for h in every]), rule, rounding)

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
