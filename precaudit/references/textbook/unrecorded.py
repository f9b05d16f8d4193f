"""Operations of a layer whose inputs were not recorded, made from the nearest rows that were.

What enters a layer is recorded, or is what its norm was made of: x = y / w · √(mean(x²) + ε), the mean being that of
the row's recorded length. From there on every operation is made again, in FP64 and as the policy rounds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from precaudit.models.numpy_decoder.honest import RowExecution, on_single_rows
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import Rounding, formula_rounding, of_policy, redrawn, single_precision_dot
from precaudit.numbers.arrays import Array, widen
from precaudit.numbers.formats import FORMATS
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.textbook.operations import lengths_at
from precaudit.references.textbook.units import policy_at, tpu_chooses
from precaudit.schema.coverage import point_format, unrecorded_path
from precaudit.schema.graphs.decoder import POINTS, inputs_of
from precaudit.schema.places import Place
from precaudit.schema.policies import Policy
from precaudit.schema.records.devices import device_kind


class Stream(NamedTuple):
    """Rows [T, D] of the residual stream in FP64, and how far each element may be off."""

    rows: Array
    spread: Array

    def drawn(self, seed: int) -> Array:
        """Return the rows with other errors of that size."""
        return self.rows + self.spread * np.random.default_rng(seed).uniform(-1.0, 1.0, self.rows.shape)


def before_norm(recorded: Recorded, model: Model, policy: Policy, place: Place, positions: Array) -> Stream | None:
    """Return what the recorded rows of a norm [T, D] were made of; None where they or their lengths were not recorded.

    Where a weight is 0 nothing is known of an element: they share what the known ones lack of the row's length.
    """
    (source,), layer = POINTS[place.point].inputs, place.layer
    at = model.config.layers - 1 if layer is None else layer
    rows = recorded.rows(place.prompt, place.phase, layer, place.point)
    entering = recorded.row_sums(place.prompt, place.phase, at, source)
    if rows is None or entering is None or not np.isin(positions, rows.positions).all():
        return None
    if (entering := entering.at(positions)) is None:
        return None
    y, name = widen(rows.at(positions)), POINTS[place.point].norm(model.config)
    if name is None:
        return Stream(y, np.zeros_like(y))
    config = model.config
    weight = model.context(layer, positions, Rounding()).tensor(f"{name}.weight") + config.norm_offset
    scale = np.sqrt(entering.sizes**2 / config.width + config.norm_eps)
    known = weight != 0
    x = np.where(known, y / np.where(known, weight, 1.0), 0.0) * scale[:, None]
    roundings = 1 if config.norm_once else 2
    spread = np.abs(x) * FORMATS[point_format(policy, place.point)].unit_roundoff * np.sqrt(roundings)
    if not known.all():
        lost = np.sqrt(np.maximum(entering.sizes**2 - (x**2).sum(axis=1), 0.0) / (~known).sum())
        spread = np.where(known, spread, np.sqrt(3) * lost[:, None])
    return Stream(x, spread)


class UnrecordedRows(NamedTuple):
    """Rows [T, D] of an operation in FP64, and as a policy rounds them under several draws of its errors.

    ``since``: the first operation that was made again.
    """

    rows: Array
    draws: tuple[Array, ...]
    since: str


def made_through(
    recorded: Recorded, model: Model, policy: Policy, place: Place, positions: Array, seeds: Iterable[int]
) -> UnrecordedRows | None:
    """Return an operation's rows at ``positions`` where others, not recorded, lie before; None without their inputs.

    ``seeds``: of the draws; of 0 the policy's own roundings.
    """
    config, asked = recorded.config, recorded.requested
    between = unrecorded_path(place.point, {*asked.points, *asked.support}, config.sparse)
    if not between or place.layer is None:
        return None
    names = (*between, place.point)
    known: dict[str, Stream] = {}
    since = between[0]
    for name in {i for n in names for i in inputs_of(n, config.sparse)}.difference(between):
        rows = recorded.rows(place.prompt, place.phase, place.layer, name)
        if rows is not None and np.isin(positions, rows.positions).all():
            known[name] = Stream(wide := widen(rows.at(positions)), np.zeros_like(wide))
            continue
        norm = next((p.name for p in POINTS.values() if p.kind == "norm" and p.per_layer and p.inputs == (name,)), None)
        if norm is None:
            return None
        stream = before_norm(recorded, model, policy, place._replace(point=norm), positions)
        if stream is None:
            return None
        known[name], since = stream, norm
    here = {n: place._replace(point=n) for n in names}
    policies = {n: policy_at(recorded, policy, at) for n, at in here.items()}
    device, decode = device_kind(recorded.run.record.device), place.phase == "decode"
    ways = _ways(policies, [RowExecution(device, decode, tpu_chooses(recorded, policy, at)) for at in here.values()])
    turned, lengths = positions + recorded.turned_of(place.prompt), lengths_at(recorded, place, positions)
    of = partial(_made_again, model, place.layer, turned, lengths)
    given = {seed: {n: x.drawn(seed) for n, x in known.items()} for seed in seeds}
    draws = tuple(of(given[seed], _redrawn(way, seed)) for way in ways for seed in given)
    exact = {n: x.rows for n, x in known.items()}
    return UnrecordedRows(of(exact, {n: formula_rounding(p) for n, p in policies.items()}), draws, since)


def _made_again(
    model: Model,
    layer: int,
    positions: Array,
    lengths: Array | None,
    known: Mapping[str, Array],
    roundings: Mapping[str, Rounding],
) -> Array:
    """Return the rows [T, D] of the last operation of ``roundings``, each on the way under its own."""
    made, name = dict(known), ""
    for name, rounding in roundings.items():
        inputs = [made[i] for i in inputs_of(name, model.config.sparse)]
        made[name] = model.apply(name, model.context(layer, positions, rounding, lengths), inputs)
    return made[name].reshape(len(positions), -1)


def _ways(policies: Mapping[str, Policy], executed: Sequence[RowExecution]) -> Iterator[dict[str, Rounding]]:
    """Yield how a policy rounds operations, in every way that a device has for products of one row.

    Sums are those of float32 in one order or another: in whatever order, they err as much.
    """
    each = {
        n: on_single_rows(of_policy(p, e.decode), POINTS[n], point_format(p, n), p.scores, e)
        for (n, p), e in zip(policies.items(), executed, strict=True)
    }
    for way in {w: None for found in each.values() for w in found}:
        made = {n: found.get(way, found[()]) for n, found in each.items()}
        yield {n: replace(r, dot=single_precision_dot) if r.dot is np.matmul else r for n, r in made.items()}


def _redrawn(roundings: Mapping[str, Rounding], seed: int) -> dict[str, Rounding]:
    """Return the same with other rounding errors of the same size; itself of seed 0."""
    return {name: redrawn(r, seed and 100 * seed + i) for i, (name, r) in enumerate(roundings.items())}
