"""A recorded point as an operation that can be made again from its recorded inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from precaudit.comparison.recorded import Recorded, Rows
from precaudit.comparison.rows import Place
from precaudit.formats import Array, widen
from precaudit.numpy_decoder.magnitudes import attended, normalised, rowwise, scored
from precaudit.numpy_decoder.model import Model, all_probs, all_scores, attention_variants
from precaudit.numpy_decoder.operators import Rule
from precaudit.numpy_decoder.rounding import Rounding, sharing_products
from precaudit.points import CACHES, POINTS, inputs_of

Evaluate = Callable[[Sequence[Rounding]], list[Array]]
Magnitude = Callable[[float], Array]


@dataclass(frozen=True)
class Operation:
    """One point of one phase ready to be judged: its recorded rows, and how to make them again.

    ``inputs``: in FP64, in the order of the point's inputs. ``evaluate`` runs the operation under roundings;
    ``fused`` the same on summands a compiler may not have rounded; ``magnitude(u)`` returns |A|·|B| of every element,
    for roundings of unit roundoff u inside; ``window``: keys a row of the layer sees, None all.
    """

    run: str
    place: Place
    part: Rows
    positions: Array
    inputs: tuple[Array, ...]
    evaluate: Evaluate
    magnitude: Magnitude
    fused: Evaluate | None = None
    window: int | None = None

    @property
    def axes(self) -> str:
        """The point's axes."""
        return POINTS[self.place.point].axes

    @property
    def stored(self) -> Array:
        """The recorded values of the rows that can be made again."""
        return self.part.values if "S" in self.axes else self.part.at(self.positions)


def prepare(recorded: Recorded, model: Model, place: Place, part: Rows) -> Operation | None:
    """Return the operation behind recorded rows, ready to be evaluated; None where its inputs were not recorded."""
    found = _evaluation(recorded, model, place, part)
    if found is None:
        return None
    positions, inputs, evaluate, magnitude = found
    fused = _fused_residual(recorded, model, place, positions)
    window = model.config.window_of(place.layer)
    return Operation(recorded.run.record.id, place, part, positions, inputs, evaluate, magnitude, fused, window)


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
    if place.point in ("scores", "probs", "attn_out"):
        return _attention(recorded, Rule.of(model.config, place.layer), place, part)
    layer = place.layer
    if place.point == "final_norm":
        inputs = [recorded.rows(place.prompt, place.phase, model.config.layers - 1, "resid_out")]
    else:
        inputs = [
            recorded.rows(place.prompt, place.phase, layer, name)
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
    values = [widen(rows.at(positions)) for rows in present]

    def evaluate(roundings: Sequence[Rounding]) -> list[Array]:
        if place.point == "logits":
            return model.logits(values[0], roundings)
        shared = sharing_products(roundings)
        return [model.apply(place.point, model.context(layer, positions, r), values) for r in shared]

    return positions, tuple(values), evaluate, lambda u: rowwise(place.point, model, layer, values)


def _fused_residual(recorded: Recorded, model: Model, place: Place, positions: Array) -> Evaluate | None:
    """Return mlp_norm of resid_in + attn_proj as it was before it was rounded to resid_mid, where both were recorded.

    A compiler that fuses the sum with the norm may never round it (docs/design.md §7, 2).
    """
    if place.point != "mlp_norm":
        return None
    parts = [recorded.rows(place.prompt, place.phase, place.layer, name) for name in ("resid_in", "attn_proj")]
    if any(p is None or len(np.setdiff1d(positions, p.positions)) for p in parts):
        return None
    total = sum(widen(p.at(positions)) for p in parts if p is not None)
    return lambda roundings: [
        model.apply("mlp_norm", model.context(place.layer, positions, r), [np.asarray(total)]) for r in roundings
    ]


def _attention(recorded: Recorded, rule: Rule, place: Place, part: Rows) -> Evaluation | None:
    prompt, phase, layer = place.prompt, place.phase, place.layer
    assert layer is not None
    if place.point == "probs":
        return _softmax(recorded, rule.window, place, part)
    q = recorded.rows(prompt, phase, layer, "q")
    keys = _keys(recorded, place, "k")
    values = _keys(recorded, place, "v") if place.point == "attn_out" else keys
    if q is None or keys is None or values is None:
        return None
    positions = np.intersect1d(part.positions, q.positions)
    if not len(positions):
        return None
    queries = widen(q.at(positions))
    k, v = [widen(x) for x in keys], [widen(x) for x in values]

    if place.point == "scores":
        width = part.values.shape[2]
        source = (k[-1] if len(k) > 1 and width == len(k[-1]) else k[0])[:width]
        return (
            positions, (queries, source), lambda roundings: [all_scores(queries, source, rule, r) for r in roundings],
            lambda u: scored(queries, source, rule),
        )  # fmt: skip

    def evaluate(roundings: Sequence[Rounding]) -> list[Array]:
        out = attention_variants(queries, k[0], v[0], positions, rule, roundings)
        if len(k) > 1 and not (np.array_equal(k[0], k[1]) and np.array_equal(v[0], v[1])):
            last = attention_variants(queries[-1:], k[1], v[1], positions[-1:], rule, roundings)
            for whole, row in zip(out, last, strict=True):
                whole[-1:] = row
        return out

    return positions, (queries, k[0], v[0]), evaluate, lambda u: attended(queries, k[0], v[0], positions, rule, u)


def _keys(recorded: Recorded, place: Place, point: str) -> list[Array] | None:
    """Return [rows] attention saw in a prefill; [before the last step, at the last step] in decode."""
    assert place.layer is not None
    if place.phase == "decode":
        read = recorded.keys_read(place.prompt, place.layer, CACHES[point])
        return None if read is None else list(read)
    rows = recorded.rows(place.prompt, place.phase, place.layer, point)
    return None if rows is None or len(rows.positions) <= rows.positions[-1] else [rows.values]


def _softmax(recorded: Recorded, window: int | None, place: Place, part: Rows) -> Evaluation | None:
    record = part.steps[0][0] if place.phase == "decode" else 0
    s = recorded.tensor(place.prompt, place.phase, record, place.layer, "scores")
    if s is None or s.shape != part.values.shape:
        return None
    wide = widen(s)
    at = part.positions
    return (
        at, (wide,), lambda roundings: [all_probs(wide, at, window, r) for r in roundings],
        lambda u: normalised(wide, at, window),
    )  # fmt: skip
