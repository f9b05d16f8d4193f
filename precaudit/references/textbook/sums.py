"""Operations that were not recorded, by sums of their rows: what they are, and what its inputs say they have to be.

A sum with random signs of what roundings leave, e, is of the size of ‖e‖. For the residual stream ‖e‖ is that of one
rounding of the sum and one of what was added, u·‖x‖ / √3 each (an error uniform within half a unit in the last place is
at most that); for an operation whose inputs are recorded whole it is what the policy's emulation leaves of FP64.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from precaudit.models.numpy_decoder.honest import RowExecution, on_single_rows
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import formula_rounding, of_policy
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.numbers.row_sums import RowSums, hashes_of, sums_of
from precaudit.recording.runs.recorded import Recorded, Rows
from precaudit.references.textbook.handover import POINT as HANDED
from precaudit.references.textbook.handover import embed_rows
from precaudit.references.textbook.local import not_emulated
from precaudit.references.textbook.operations import prepare
from precaudit.references.textbook.units import policy_at, tpu_chooses, why_undecided
from precaudit.references.textbook.unrecorded import UnrecordedRows, before_norm, made_through
from precaudit.schema.coverage import HASH_FORMAT, is_handed_on, point_format, summed_places, unrecorded_path
from precaudit.schema.graphs.decoder import POINTS, STREAM, inputs_of
from precaudit.schema.metrics.rows import unseen, zero_masked
from precaudit.schema.metrics.sizes import norm, ratio
from precaudit.schema.places import Place, row_spans
from precaudit.schema.policies import Policy
from precaudit.schema.records.base import json_number
from precaudit.schema.records.devices import device_kind
from precaudit.schema.records.errors import ErrorRecord, StateError, SumError

SINGLE = FORMATS["float32"].unit_roundoff
DRAWS, MORE_DRAWS = (0, 1), tuple(range(2, 8))
FAR = 2.0  # of ‖e‖, beyond which one sum of 20 lies
ROOT = np.sqrt(3)  # of an error that is uniform within ±a, a is ROOT times its root mean square


class Expected(NamedTuple):
    """What rows have to sum up to [T, LANES] and the size of what rounding leaves of each, ‖e‖ [T].

    ``since``: the first of several operations that were made again.
    """

    positions: Array
    sums: Array
    noise: Array
    since: str | None = None


def sum_errors(recorded: Recorded, model: Model, weights: bool, policy: Policy, handed: Place) -> Iterator[ErrorRecord]:
    """Yield the records of one layer and phase that sums of rows tell, all steps together, and what it was handed.

    ``handed``: where that is; its layer is None for what comes after all of them.
    """
    phase, layer = handed.phase, handed.layer
    asked, run, config = recorded.requested, recorded.run.record.id, recorded.config
    if not asked.row_sums:
        return
    if HANDED not in asked.points and is_handed_on(asked, phase, 0, layer):
        yield from _handover_records(recorded, model, weights, policy, handed)
    for at, point in summed_places(asked, config.layers, config.sparse, phase):
        if at != layer:
            continue
        here = handed._replace(point=point)
        found = _told_by(recorded, here)
        if found is None:
            if POINTS[point].within is None:  # a program need not show what lies within an operation
                yield here.record(SumError, run, "summands", missing="requested, not in the run")
            continue
        expected = _expect(recorded, model, weights, policy, here, found)
        if isinstance(expected, str):
            yield here.record(SumError, run, "summands", unknown=expected)
        elif len(expected.positions):
            yield _judge(here, run, found, expected)


def _told_by(recorded: Recorded, place: Place) -> RowSums | None:
    """Return the sums that tell of a place: its own, or of a norm those of the rows that it was made of."""
    point = POINTS[place.point].inputs[0] if _backwards(recorded, place) else place.point
    last = recorded.config.layers - 1 if place.layer is None and POINTS[point].per_layer else place.layer
    return recorded.row_sums(place.prompt, place.phase, last, point)


def _backwards(recorded: Recorded, place: Place) -> bool:
    """Whether a norm is judged by what it was made of, whose rows were not recorded."""
    row = POINTS[place.point]
    return row.kind == "norm" and not {*recorded.requested.points, *recorded.requested.support}.issuperset(row.inputs)


def _expect(
    recorded: Recorded, model: Model, weights: bool, policy: Policy, place: Place, found: RowSums
) -> Expected | str:
    """Return what a place's rows have to sum up to, or why that is not known."""
    row, asked, sparse = POINTS[place.point], recorded.requested, recorded.config.sparse
    if row.kind == "sum":
        return _residual_sums(recorded, policy, place, found) or "the sums of its inputs were not recorded"
    if row.tensors and not weights:
        return "weights"
    between = (
        () if row.kind in ("score", "norm") else unrecorded_path(place.point, {*asked.points, *asked.support}, sparse)
    )
    for name in (*(between or ()), place.point):
        here = place._replace(point=name)
        lacking = not_emulated(policy, name, place.phase == "decode", device_kind(recorded.run.record.device))
        if lacking or (lacking := why_undecided(recorded, policy, here)):
            return f"no emulation of {lacking}"
    if _backwards(recorded, place):
        made = _sums_before_norm(recorded, model, policy, place, found)
    elif between:
        made = _made_through(recorded, model, policy, place, found)
    else:
        made = _operation_sums(recorded, model, policy, place, found)
    return made or "inputs were not recorded"


def _handover_records(
    recorded: Recorded, model: Model, weights: bool, policy: Policy, place: Place
) -> Iterator[ErrorRecord]:
    """Compare hashes of the rows entering a layer with those of the rows that left the one before, or embeddings."""
    assert place.layer is not None
    run, reference = recorded.run.record.id, STREAM if place.layer else "embedding"
    found = recorded.row_sums(place.prompt, place.phase, place.layer, place.point)
    if found is None:
        yield place.record(StateError, run, reference, missing="requested, not in the run")
        return
    if place.layer:
        before = recorded.row_sums(place.prompt, place.phase, place.layer - 1, STREAM)
        same = None if before is None else before.at(found.positions)
        wanted = None if same is None else same.hashes
    else:
        tokens = np.asarray(recorded.fed_tokens(place.prompt))
        known = weights and found.positions.max() < len(tokens)
        stored = point_format(policy, place.point)
        wanted = hashes_of(embed_rows(model, tokens[found.positions], stored)) if known else None
    if wanted is None:
        why = f"the {STREAM} rows were not recorded" if place.layer else "weights"
        yield place.record(StateError, run, reference, unknown=why)
        return
    different = found.positions[(found.hashes != wanted).any(axis=1)]
    yield place.record(
        StateError,
        run,
        reference,
        dtype=HASH_FORMAT,
        n=len(wanted),
        mismatched=len(different),
        rows=row_spans(different) or None,
    )


def _residual_sums(recorded: Recorded, policy: Policy, place: Place, found: RowSums) -> Expected | None:
    """Return what the residual stream has to sum up to: its summands."""
    assert place.layer is not None
    names = inputs_of(place.point, recorded.config.sparse)
    parts = [recorded.row_sums(place.prompt, place.phase, place.layer, name) for name in names]
    parts = [None if p is None else p.at(found.positions) for p in parts]
    if (stream := parts[0]) is None or (more := parts[1]) is None:
        return None
    own, other = (FORMATS[point_format(policy, name)].unit_roundoff for name in (place.point, names[1]))
    rounded = np.hypot(own * found.sizes, max(own, other) * more.sizes) / ROOT
    width = recorded.config.width
    taken = np.sqrt(
        sum((_summation_loss(x, width) ** 2 for x in (found, stream, more)), np.zeros(len(found.positions)))
    )
    return Expected(found.positions, stream.sums + more.sums, np.hypot(rounded, taken))


def _summation_loss(rows: RowSums, terms: int) -> Array:
    """Return the size of what sums taken in float32 lose [T]: partial sums are at most of the size of the row."""
    return np.zeros(len(rows.sizes)) if rows.exact else SINGLE * np.sqrt(terms) * rows.sizes


def _sums_before_norm(
    recorded: Recorded, model: Model, policy: Policy, place: Place, found: RowSums
) -> Expected | None:
    """Return what the rows that a recorded norm was made of have to sum up to."""
    rows = recorded.rows(place.prompt, place.phase, place.layer, place.point)
    stream = None if rows is None else before_norm(recorded, model, policy, place, rows.positions)
    if rows is None or stream is None or (sizes := found.at(rows.positions)) is None:
        return None
    own = POINTS[place.point].inputs[0]
    u = FORMATS[point_format(policy, own)].unit_roundoff  # the norm may read the row before it was rounded
    width = recorded.config.width
    noise = np.hypot(_size(stream.spread), u * sizes.sizes) / ROOT
    noise = np.hypot(noise, SINGLE * np.sqrt(width) * sizes.sizes)
    return Expected(rows.positions, sums_of(stream.rows, rows.positions), noise)


def _made_through(recorded: Recorded, model: Model, policy: Policy, place: Place, found: RowSums) -> Expected | None:
    """Return what an operation has to sum up to that others, not recorded, lie before.

    What one rounding makes most of may be far less than usual in two draws: rows that are far off have more of them.
    """
    made = made_through(recorded, model, policy, place, found.positions, DRAWS)
    if made is None:
        return None
    size, sums, noise = _size(made.rows), sums_of(made.rows, found.positions), _noise(made)
    noise = np.maximum(noise, np.median(_over(noise, size)) * size)
    floor = SINGLE * np.sqrt(recorded.config.mlp_width) * size
    far = np.abs(found.sums - sums).max(axis=1) > FAR * np.hypot(noise, floor)
    if far.any():
        more = made_through(recorded, model, policy, place, found.positions[far], MORE_DRAWS)
        assert more is not None
        noise[far] = np.maximum(noise[far], _noise(more))
    return Expected(found.positions, sums, np.hypot(noise, floor), made.since)


def _noise(made: UnrecordedRows) -> Array:
    """Return the largest ‖e‖ [T] of draws."""
    return np.max([_size(y - made.rows) for y in made.draws], axis=0)


def _over(a: Array, b: Array) -> Array:
    """Return a / b [T]; 0 where b is."""
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def _operation_sums(recorded: Recorded, model: Model, policy: Policy, place: Place, found: RowSums) -> Expected | None:
    """Return what an operation on recorded inputs has to sum up to; None where inputs were not recorded."""
    device, decode = device_kind(recorded.run.record.device), place.phase == "decode"
    row, here = POINTS[place.point], policy_at(recorded, policy, place)
    wide = row.over_keys and decode and policy.decode_attention == "float32"
    stored = "float32" if wide else point_format(policy, place.point)
    settled = tpu_chooses(recorded, policy, place)
    ways = on_single_rows(of_policy(here, decode), row, stored, policy.scores, RowExecution(device, decode, settled))
    roundings = [formula_rounding(here), *ways.values()]
    parts = []
    for rows, keys in _parts(place, found.positions):
        shape = (recorded.config.heads, len(rows), keys) if row.over_keys else (len(rows), recorded.config.width)
        part = Rows(np.zeros(shape, FORMATS[stored].dtype), rows, ((0, slice(0, len(rows))),))
        operation = prepare(recorded, model, place, part)
        if operation is None or len(operation.positions) < len(rows):
            return None
        grids = [_rows(y, row.over_keys, rows) for y in operation.run(operation.inputs, roundings, None)]
        noise = np.max([_size(y - grids[0]) for y in grids[1:]], axis=0)
        if stored == "float32":
            noise = np.hypot(noise, SINGLE * _size(_rows(operation.magnitude(SINGLE), row.over_keys, rows)))
        if row.kind == "norm":  # it may read the row before it was rounded
            noise = np.hypot(noise, FORMATS[point_format(policy, row.inputs[0])].unit_roundoff * _size(grids[0]) / ROOT)
        taken = SINGLE * np.sqrt(grids[0][0].size) * _size(grids[0])
        parts.append((rows, sums_of(grids[0], rows), np.hypot(noise, taken)))
    positions, sums, noises = (np.concatenate(x) for x in zip(*parts, strict=True))
    return Expected(positions, sums, noises)


def _parts(place: Place, positions: Array) -> Iterator[tuple[Array, int]]:
    """Yield rows that read the same keys, and how many keys there are: decode's last step has a cache of its own."""
    last = int(positions[-1]) + 1
    if place.phase != "decode" or not POINTS[place.point].over_keys or len(positions) < 2:
        yield positions, last
        return
    yield positions[:-1], last - 1
    yield positions[-1:], last


def _rows(made: Array, keyed: bool, positions: Array) -> Array:
    """Return an operation's result as rows [T, …], 0 where a key comes after the row."""
    if not keyed:
        return made.reshape(len(made), -1)
    return zero_masked(made.transpose(1, 0, 2), unseen(positions, made.shape[2], None)[:, None, :])


def _size(rows: Array) -> Array:
    """Return ‖row‖ [T]."""
    return np.sqrt((rows.reshape(len(rows), -1) ** 2).sum(axis=1))


def _judge(place: Place, run: str, found: RowSums, expected: Expected) -> ErrorRecord:
    """Return a record: how far sums are from what they have to be, in units of what rounding leaves."""
    same = found.at(expected.positions)
    assert same is not None
    found, finite = same, np.isfinite(same.sums).all(axis=1) & np.isfinite(same.sizes)
    error = found.sums - expected.sums
    known = np.isfinite(expected.sums).all(axis=1)
    rows = finite & known
    if not rows.any():
        why = {"nonfinite": int((~finite & known).sum())} if known.any() else {"unknown": "its inputs are not finite"}
        return place.record(SumError, run, "summands", **why)
    error, noise, meant = error[rows], expected.noise[rows, None], expected.sums[rows]
    units = np.where(error == 0, 0.0, np.abs(error) / np.where(noise > 0, noise, np.finfo(float).tiny))
    worst = int(units.max(axis=1).argmax())
    numbers: dict[str, Any] = {
        "n": units.size,
        "nonfinite": int((~finite & known).sum()),
        "ratio": json_number(np.sqrt((units**2).mean())),
        "gain": json_number((error * meant).sum() / ((meant**2).sum() or 1.0)),
        "rel_l2": json_number(ratio(norm(error), norm(meant))),
        "scopes": {"token": {"ratio": (json_number(units[worst].max()), int(found.positions[rows][worst]))}},
        "slices": {"token": units.size},
        "inherits": expected.since,
    }
    return place.record(SumError, run, "summands", **numbers)
