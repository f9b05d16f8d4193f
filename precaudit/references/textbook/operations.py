"""A recorded point as an operation that can be made again from its recorded inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from precaudit.models.numpy_decoder.honest import Form
from precaudit.models.numpy_decoder.magnitudes import (
    attention_magnitude,
    probability_magnitude,
    rowwise,
    score_magnitude,
)
from precaudit.models.numpy_decoder.model import AttentionRows, Model, all_probs, all_scores, attend_variants
from precaudit.models.numpy_decoder.operators import AttentionRule, attend, softmax
from precaudit.models.numpy_decoder.rounding import Rounding, sharing_products
from precaudit.numbers.arrays import Array, widen
from precaudit.recording.runs.recorded import Recorded, Rows
from precaudit.schema.graphs.decoder import CACHES, POINTS, inputs_of
from precaudit.schema.graphs.point import Point
from precaudit.schema.lengths import row_lengths
from precaudit.schema.metrics.rows import masked_elements, zero_masked
from precaudit.schema.places import Place

Magnitude = Callable[[float], Array]


class Evaluate(Protocol):
    """Runs an operation on ``inputs`` (as Operation's) under roundings, in a form (None: the textbook's)."""

    def __call__(self, inputs: Sequence[Array], roundings: Sequence[Rounding], form: Form | None) -> list[Array]:
        """Return one array a rounding."""


@dataclass(frozen=True)
class Operation:
    """One point of one phase ready to be judged: its recorded rows, and how to make them again.

    ``inputs``: in FP64, in the order of the point's inputs. ``run`` runs the operation; ``magnitude(u)`` returns
    |A|·|B| of every element, for roundings of unit roundoff u inside; ``window``: keys a row of the layer sees, None
    all; ``last``: keys and values that the last row of attn_out read, where decode read others there; ``start``: the
    slot of the sequence's first key, after padding on the left; ``lengths``: how long the sequence was when each row
    was turned (precaudit/schema/lengths.py); ``turned``: by so much more than its position RoPE turns every row.
    """

    id: str
    place: Place
    part: Rows
    positions: Array
    inputs: tuple[Array, ...]
    run: Evaluate
    magnitude: Magnitude
    window: int | None = None
    last: tuple[Array, ...] = ()
    start: int = 0
    lengths: Array | None = None
    turned: int = 0

    @property
    def row(self) -> Point:
        """What is known of the operation."""
        return POINTS[self.place.point]

    @property
    def axes(self) -> str:
        """The point's axes."""
        return self.row.axes

    @property
    def stored(self) -> Array:
        """The recorded values of the rows that can be made again; 0 where scores are masked."""
        return zero_masked(self.part.values, self._hidden) if "S" in self.axes else self.part.at(self.positions)

    @cached_property
    def _hidden(self) -> Array | None:
        """Where [1, T, S] the point's elements are masked."""
        if self.row.kind != "score":
            return None
        hidden = masked_elements(self.place.point, self.positions, self.part.values.shape[2], self.window)
        return None if hidden is None else hidden.transpose(1, 0, 2)

    def evaluate(
        self, roundings: Sequence[Rounding], inputs: Sequence[Array] | None = None, form: Form | None = None
    ) -> list[Array]:
        """Return the operation on its recorded inputs, or others, under roundings; 0 where scores are masked."""
        made = self.run(self.inputs if inputs is None else inputs, roundings, form)
        return [zero_masked(y, self._hidden) for y in made]


def prepare(recorded: Recorded, model: Model, place: Place, part: Rows) -> Operation | None:
    """Return the operation behind recorded rows, ready to be evaluated; None where its inputs were not recorded."""
    found = _evaluation(recorded, model, place, part)
    if found is None:
        return None
    window, last = model.config.window_of(place.layer), _last_read(recorded, place, found[1])
    start, lengths = recorded.start_of(place.prompt), lengths_at(recorded, place, found[0])
    turned = recorded.turned_of(place.prompt)
    return Operation(recorded.run.record.id, place, part, *found, window, last, start, lengths, turned)


def lengths_at(recorded: Recorded, place: Place, positions: Array) -> Array | None:
    """Return how long the sequence was when its rows at ``positions`` were turned; None where that changes nothing."""
    scaling = recorded.config.rope_scaling
    if scaling is None or not scaling.by_length:
        return None
    n, total = len(recorded.run.prompts[place.prompt].tokens), len(recorded.fed_tokens(place.prompt))
    return row_lengths(place.phase, n, total, 1 + int(positions[-1]))[positions]


def parts(recorded: Recorded, place: Place) -> list[Rows]:
    """Return the rows to judge together: a phase's; for points over keys, whose width grows, each step's."""
    if place.phase == "decode" and "S" in POINTS[place.point].axes:
        parts = []
        for step in recorded.steps("decode"):
            values = recorded.tensor(place.prompt, "decode", step, place.layer, place.point)
            if values is not None:
                n = len(recorded.run.prompts[place.prompt].tokens)
                parts.append(Rows(values, np.asarray([n - 1 + step]), ((step, slice(0, 1)),)))
        return parts
    rows = recorded.rows(place.prompt, place.phase, place.layer, place.point)
    return [] if rows is None else [rows]


Evaluation = tuple[Array, tuple[Array, ...], Evaluate, Magnitude]


def _evaluation(recorded: Recorded, model: Model, place: Place, part: Rows) -> Evaluation | None:
    """Return Operation's positions, inputs, evaluate and magnitude; None where inputs were not recorded."""
    row = POINTS[place.point]
    if row.attends:
        return _attention(recorded, AttentionRule.of(model.config, place.layer), place, part)
    layer = place.layer
    last = model.config.layers - 1 if layer is None else layer
    inputs = [
        recorded.rows(place.prompt, place.phase, last if POINTS[name].per_layer else None, name)
        for name in inputs_of(place.point, model.config.sparse)
    ]
    if any(i is None for i in inputs):
        return None
    present = [i for i in inputs if i is not None]
    positions = part.positions
    for rows in present:
        positions = np.intersect1d(positions, rows.positions)
    if not len(positions):
        return None
    values = tuple(widen(rows.at(positions)) for rows in present)
    lengths = lengths_at(recorded, place, positions)
    turned = positions + recorded.turned_of(place.prompt)
    return positions, values, *_on_rows(model, place.point, layer, turned, values, lengths)


def _on_rows(
    model: Model,
    point: str,
    layer: int | None,
    positions: Array,
    values: Sequence[Array],
    lengths: Array | None = None,
) -> tuple[Evaluate, Magnitude]:
    """Return how an operation on rows is made again, and the sizes of its terms."""

    def run(inputs: Sequence[Array], roundings: Sequence[Rounding], form: Form | None) -> list[Array]:
        summed = with_form_sums(roundings, form)
        if POINTS[point].kind == "head":
            return model.logits(inputs[0], summed)
        shared = sharing_products(summed)
        return [model.apply(point, model.context(layer, positions, r, lengths), inputs) for r in shared]

    return run, lambda _u: rowwise(point, model, layer, values)


def with_form_sums(roundings: Sequence[Rounding], form: Form | None) -> list[Rounding]:
    """Return the roundings with a form's sums."""
    if form is None or form.dot is None:
        return list(roundings)
    return [replace(r, dot=form.dot) for r in roundings]


def _attention(recorded: Recorded, rule: AttentionRule, place: Place, part: Rows) -> Evaluation | None:
    prompt, phase, layer = place.prompt, place.phase, place.layer
    assert layer is not None
    row = POINTS[place.point]
    if row.kind == "softmax":
        return _softmax(recorded, rule.window, place, part)
    q = recorded.rows(prompt, phase, layer, row.inputs[0])
    keys = keys_of(recorded, place, row.inputs[1])
    values = keys_of(recorded, place, row.inputs[2]) if row.kind == "mix" else keys
    if q is None or keys is None or values is None:
        return None
    positions = np.intersect1d(part.positions, q.positions)
    if not len(positions):
        return None
    queries = widen(q.at(positions))
    k, v = [widen(x) for x in keys], [widen(x) for x in values]

    if row.kind == "score":
        width = part.values.shape[2]
        source = (k[-1] if len(k) > 1 and width == len(k[-1]) else k[0])[:width]

        def score(inputs: Sequence[Array], roundings: Sequence[Rounding], form: Form | None) -> list[Array]:
            return [all_scores(inputs[0], inputs[1], rule, r) for r in with_form_sums(roundings, form)]

        return positions, (queries, source), score, lambda _u: score_magnitude(queries, source, rule)

    run = _mixing(rule, positions, k, v, recorded.start_of(prompt))
    return positions, (queries, k[0], v[0]), run, lambda u: attention_magnitude(queries, k[0], v[0], positions, rule, u)


def _mixing(rule: AttentionRule, positions: Array, k: Sequence[Array], v: Sequence[Array], start: int) -> Evaluate:
    """Return how attention's output is made again; of two keys and values the last row read the second.

    ``start``: the slot of the first key.
    """

    def run(inputs: Sequence[Array], roundings: Sequence[Rounding], form: Form | None) -> list[Array]:
        q, summed = inputs[0], [r.starting(start) for r in with_form_sums(roundings, form)]
        inner = attend if form is None else form.attend
        out = attend_variants(AttentionRows(q, inputs[1], inputs[2], positions), rule, summed, inner)
        if len(k) > 1 and not (np.array_equal(k[0], k[1]) and np.array_equal(v[0], v[1])):
            last = attend_variants(AttentionRows(q[-1:], k[1], v[1], positions[-1:]), rule, summed, inner)
            for whole, row in zip(out, last, strict=True):
                whole[-1:] = row
        return out

    return run


def keys_of(recorded: Recorded, place: Place, point: str) -> list[Array] | None:
    """Return [rows] attention saw in a prefill; [before the last step, at the last step] in decode."""
    assert place.layer is not None
    if place.phase == "decode":
        read = recorded.keys_read(place.prompt, place.layer, CACHES[point])
        return None if read is None else list(read)
    rows = recorded.rows(place.prompt, place.phase, place.layer, point)
    return None if rows is None or len(rows.positions) <= rows.positions[-1] else [rows.values]


def _last_read(recorded: Recorded, place: Place, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the keys and values of a decode's last step where they are not those of the steps before."""
    row = POINTS[place.point]
    if place.phase != "decode" or row.kind != "mix":
        return ()
    found = [keys_of(recorded, place, name) for name in row.inputs[1:]]
    last = tuple(widen(x[-1]) for x in found if x is not None)
    return () if all(map(np.array_equal, last, inputs[1:])) else last


def _softmax(recorded: Recorded, window: int | None, place: Place, part: Rows) -> Evaluation | None:
    record = part.steps[0][0] if place.phase == "decode" else 0
    (scored_by,) = POINTS[place.point].inputs
    s = recorded.tensor(place.prompt, place.phase, record, place.layer, scored_by)
    if s is None or s.shape != part.values.shape:
        return None
    wide = widen(s)
    at = part.positions

    def run(inputs: Sequence[Array], roundings: Sequence[Rounding], form: Form | None) -> list[Array]:
        inner = softmax if form is None else form.softmax
        return [all_probs(inputs[0], at, window, r, inner) for r in roundings]

    return at, (wide,), run, lambda _u: probability_magnitude(wide, at, window)
