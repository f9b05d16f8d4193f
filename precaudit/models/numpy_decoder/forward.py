"""The whole model over several sequences together, one layer's tensors in FP64 at a time."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import prod

import numpy as np

from precaudit.models.configs import DecoderConfig, model_tensors
from precaudit.models.numpy_decoder.context import Context
from precaudit.models.numpy_decoder.earlier import FIRST, Earlier
from precaudit.models.numpy_decoder.model import Model, all_probs, all_scores, attention
from precaudit.models.numpy_decoder.operations import operations
from precaudit.models.numpy_decoder.operators import AttentionRule
from precaudit.models.numpy_decoder.rounding import Rounding
from precaudit.numbers.arrays import Array
from precaudit.numbers.threads import WORKERS, cores, each, one_blas_thread, row_ranges
from precaudit.schema.graphs.decoder import LOGITS, POINTS, inputs_of, parts_of, present, row_shapes

Emit = Callable[[int, int | None, str, Array], None]
TOGETHER = 256  # rows for each core, that go through a matrix together
SHARE = 0.7  # of the rate of one large product, that the whole model reaches (benchmarks/main_job.py measures it)


@dataclass(frozen=True)
class Decoding:
    """Rows that attend over the cache: from ``first[i]`` on in sequence i, under ``roundings``, one for each pass."""

    first: Sequence[int]
    roundings: Sequence[Rounding]


@dataclass(frozen=True)
class Sequences:
    """Token ids of several sequences, and how they stand.

    ``lengths``: for each, how long it was when its rows were turned (schema/lengths.py; None: each as long as it is).
    ``earlier``: for each, what came before its first row (None: nothing). ``decoding``: rows that attend over the
    cache.
    """

    ids: Sequence[Array]
    lengths: Sequence[Array] | None = None
    earlier: Sequence[Earlier] | None = None
    decoding: Decoding | None = None


@dataclass(frozen=True)
class Wanted:
    """What to emit: points, layers (None: all), and for each sequence the rows whose logits are wanted."""

    points: Collection[str]
    layers: Collection[int] | None
    logit_rows: Sequence[Array]


def forward(
    model: Model,
    sequences: Sequences,
    roundings: Sequence[Rounding],
    wanted: Wanted,
    emit: Emit,
    progress: Callable[[int], None] = lambda _layer: None,
) -> None:
    """Run ``sequences`` under each rounding and emit every wanted point, on several threads at once.

    ``emit(sequence, layer, point, values)`` is called once a rounding, in the order of ``roundings`` for one place.
    Values are FP64, [rows of the sequence, …] as in docs/files.md (scores, probs: [H, T, S]; logits: the wanted
    rows). An emitted array is the caller's. Rows of many sequences go through each matrix together, and a layer's
    tensors are widened once for all roundings and sequences.
    """
    batches, decoding = _batches(sequences), sequences.decoding
    embedded = [model.embed(np.concatenate(sequences.ids[b.first : b.first + len(b.spans)])) for b in batches]
    states = [[r.residual(x) for x in embedded] for r in roundings]
    with one_blas_thread():
        for layer in range(model.config.layers):
            model.warm(layer)
            points = set(wanted.points) if wanted.layers is None or layer in wanted.layers else set()
            for n, rounding in enumerate(roundings):
                for k, batch in enumerate(batches):

                    def at_layer(i: int, point: str, values: Array, first: int = batch.first, at: int = layer) -> None:
                        emit(first + i, at, point, values)

                    cached = None if decoding is None else decoding.roundings[n]
                    here = replace(model.context(layer, batch.positions, rounding, batch.turned), first=batch.row)
                    states[n][k] = _layer(here, states[n][k], batch, cached, points, at_layer)
            progress(layer)
        for made, rounding in zip(states, roundings, strict=True):
            for x, batch in zip(made, batches, strict=True):
                _outside(model, batch, x, rounding, wanted, emit)


@dataclass(frozen=True)
class Batch:
    """Sequences, from number ``first`` on, whose rows go through each matrix together.

    ``spans``: the rows of each; ``positions``, ``turned`` [T]: of every row, and how long its sequence was when it was
    turned; ``earlier``: what came before each; ``decoded``: from which row on each attends over the cache, if any does.
    ``row``: the number of their first row among those of all sequences.
    """

    first: int
    spans: list[slice]
    positions: Array
    turned: Array
    earlier: Sequence[Earlier]
    decoded: Sequence[int] = ()
    row: int = 0


def divide_sequences(sizes: Sequence[int]) -> list[range]:
    """Return which sequences of so many rows go through a matrix together, in their order.

    It depends on nothing but the rows and for how many cores work is split: neither do bits.
    """
    found, first, rows = [], 0, 0
    for i, n in enumerate(sizes):
        if rows and rows + n > TOGETHER * cores():
            found.append(range(first, i))
            first, rows = i, 0
        rows += n
    return [*found, range(first, len(sizes))] if sizes else []


def _batches(sequences: Sequences) -> list[Batch]:
    """Return the batches of sequences."""
    sizes, lengths = [len(s) for s in sequences.ids], sequences.lengths
    before = [FIRST] * len(sizes) if sequences.earlier is None else sequences.earlier
    decoded = () if sequences.decoding is None else sequences.decoding.first
    positions = [e.start + e.turned + np.arange(n) for e, n in zip(before, sizes, strict=True)]
    turned = lengths if lengths is not None else [np.full(n, n) for n in sizes]
    found = []
    for some in divide_sequences(sizes):
        mine = slice(some.start, some.stop)
        edges = np.concatenate([[0], np.cumsum(sizes[mine])]).astype(int)
        spans = [slice(int(a), int(b)) for a, b in pairwise(edges)]
        rows = np.concatenate(positions[mine]), np.concatenate(turned[mine])
        found.append(Batch(some.start, spans, *rows, before[mine], decoded[mine], sum(sizes[: some.start])))
    return found


def seconds_for(config: DecoderConfig, tokens: int) -> float:
    """Return about how long FP64 takes for so many tokens here: its layers' products, at a rate measured once."""
    weights = sum(prod(shape) for name, shape in model_tensors(config).items() if name.startswith("model.layers."))
    return 2.0 * weights * tokens / (SHARE * _product_rate())


@cache
def _product_rate() -> float:
    """Return how many operations of a large FP64 product a second has on all cores."""
    x = np.ones((1024, 1024))
    took = []
    with one_blas_thread():
        for _ in range(3):
            began = time.perf_counter()
            each(lambda: x @ x, [()] * WORKERS)
            took.append(time.perf_counter() - began)
    return WORKERS * 2 * len(x) ** 3 / min(took)


def _layer(
    context: Context,
    x: Array,
    batch: Batch,
    cached: Rounding | None,
    points: set[str],
    emit: Callable[[int, str, Array], None],
) -> Array:
    """Emit one layer's points and return its output; ``cached``: the rounding of rows that attend over the cache."""
    stream, before, mix, after = rows_of_layer(context.config)
    values = {stream: x}
    inputs, (weighed, scored) = POINTS[mix].inputs, parts_of(mix)
    _chain(context, values, before, {*inputs, *points})
    values[mix] = np.empty(values[inputs[0]].shape)
    rule = AttentionRule.of(context.config, context.layer)
    assert context.layer is not None
    for i, (span, earlier) in enumerate(zip(batch.spans, batch.earlier, strict=True)):
        if context.layer in earlier.mixed:
            values[mix][span] = earlier.mixed[context.layer]
            continue
        (q, k, v), at = (values[name][span] for name in inputs), context.positions[span] - earlier.turned
        k, v = earlier.before(context.layer, k, v)
        parts = [(slice(None), context.rounding, k, v)]
        if cached is not None:
            first, r = batch.decoded[i], cached
            parts = [(slice(first), context.rounding, k, v), (slice(first, None), r, r.cache(k), r.cache(v))]
        made: dict[str, list[Array]] = {scored: [], weighed: []}
        for rows, r, keys, vals in parts:
            if not len(q[rows]):
                continue
            values[mix][span][rows] = attention(q[rows], keys, vals, at[rows], rule, r)
            if points & set(made):
                made[scored].append(all_scores(q[rows], keys, rule, r))
            if weighed in points:
                made[weighed].append(all_probs(made[scored][-1], at[rows], rule.window, r))
        for name in points & set(made):
            emit(i, name, np.concatenate(made[name], axis=1))
    _chain(context, values, after, {after[-1], *points})
    found = [(i, point, values[point][span]) for point in points & set(values) for i, span in enumerate(batch.spans)]
    each(emit, found)
    return values[after[-1]]


@cache
def rows_of_layer(config: DecoderConfig) -> tuple[str, tuple[str, ...], str, tuple[str, ...]]:
    """Return a layer's operations: the stream it is handed, those before attention, its result, and those after."""
    rows = [POINTS[p] for p in present(config.sparse) if POINTS[p].per_layer and not POINTS[p].state]
    mix = next(i for i, p in enumerate(rows) if p.kind == "mix")
    names = [p.name for p in rows]
    return names[0], tuple(p.name for p in rows[1:mix] if not p.attends), names[mix], tuple(names[mix + 1 :])


def _chain(context: Context, values: dict[str, Array], chain: Sequence[str], kept: Collection[str]) -> None:
    """Evaluate a chain of row-wise operations, each thread its own rows; the points ``kept`` go into ``values``."""
    table = operations(context.config)
    known = dict(values)
    n = len(context.positions)
    shapes = row_shapes(context.config)
    values.update({point: np.empty((n, *shapes[point])) for point in chain if point in kept})

    def rows(a: int, b: int) -> None:
        own = {name: x[a:b] for name, x in known.items()}
        here = context.rows(a, b)
        for point in chain:
            if POINTS[point].within is not None and point not in kept:
                continue
            inputs = (own[name] for name in inputs_of(point, context.config.sparse))
            made = {name: own[name] for name in parts_of(point) if name in own}
            out = values[point][a:b] if point in kept else None
            own[point] = table[point](replace(here, out=out), *inputs, **made)
            if out is not None and not np.may_share_memory(own[point], out):
                out[:] = own[point]

    each(rows, row_ranges(n, context.config.width))


def _outside(model: Model, batch: Batch, x: Array, rounding: Rounding, wanted: Wanted, emit: Emit) -> None:
    context = model.context(None, batch.positions, rounding)
    (normed,) = POINTS[LOGITS].inputs
    h = operations(model.config)[normed](context, x)
    if normed in wanted.points:
        for i, span in enumerate(batch.spans, batch.first):
            emit(i, None, normed, h[span])
    if LOGITS in wanted.points:
        asked = wanted.logit_rows[batch.first : batch.first + len(batch.spans)]
        rows = np.concatenate([span.start + np.asarray(r, int) for span, r in zip(batch.spans, asked, strict=True)])
        logits = model.logits(h[rows], [rounding])[0]
        edges = np.cumsum([0, *(len(r) for r in asked)])
        each(emit, [(batch.first + i, None, LOGITS, logits[a:b]) for i, (a, b) in enumerate(pairwise(edges))])
