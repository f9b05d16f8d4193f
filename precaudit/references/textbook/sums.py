"""Operations that were not recorded, by sums of their rows: what they are, and what its inputs say they have to be.

A sum with random signs of what roundings leave, e, is of the size of ‖e‖. For the residual stream ‖e‖ is that of one
rounding of the sum and one of what was added, u·‖x‖ / √3 each (an error uniform within half a unit in the last place is
at most that); for an operation whose inputs are recorded whole it is what the policy's emulation leaves of FP64.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from precaudit.arrays import Array
from precaudit.coverage import HASH_FORMAT, judged_by_sums, point_format
from precaudit.formats import FORMATS
from precaudit.graphs.decoder import POINTS, STREAM, inputs_of
from precaudit.metrics.rows import unseen, visible
from precaudit.metrics.sizes import norm, ratio
from precaudit.numpy_decoder.honest import on_single_rows
from precaudit.numpy_decoder.model import Model
from precaudit.numpy_decoder.rounding import formula, of_policy
from precaudit.places import Place, row_spans
from precaudit.policies import Policy
from precaudit.records import ErrorRecord, device_kind, number
from precaudit.references.textbook.handover import POINT as HANDED
from precaudit.references.textbook.handover import embedded, handed
from precaudit.references.textbook.local import not_emulated
from precaudit.references.textbook.operations import prepare
from precaudit.references.textbook.units import chosen, policy_at, undecided
from precaudit.row_sums import RowSums, hashes_of, sums_of
from precaudit.runs.recorded import Recorded, Rows

SINGLE = FORMATS["float32"].unit_roundoff


class Expected(NamedTuple):
    """What rows have to sum up to [T, LANES] and the size of what rounding leaves of each, ‖e‖ [T]."""

    positions: Array
    sums: Array
    noise: Array


def sum_errors(
    recorded: Recorded, model: Model, weights: bool, policy: Policy, prompt: str, phase: str, layer: int
) -> Iterator[ErrorRecord]:
    """Yield the records of one layer and phase that sums of rows tell, all steps together, and what it was handed."""
    asked, run = recorded.requested, recorded.run.record.id
    if not asked.row_sums:
        return
    if HANDED not in asked.points and handed(recorded, layer):
        yield from _handed(recorded, model, weights, policy, Place(prompt, phase, 0, layer, HANDED))
    for point in judged_by_sums({*asked.points, *asked.support}, recorded.config.sparse):
        here = Place(prompt, phase, 0, layer, point)
        found = recorded.row_sums(prompt, phase, layer, point)
        if found is None:
            if POINTS[point].within is None:  # a program need not show what lies within an operation
                yield here.record("sums", run, "summands", missing="requested, not in the run")
            continue
        expected = _expected(recorded, model, weights, policy, here, found)
        if isinstance(expected, str):
            yield here.record("sums", run, "summands", unknown=expected)
        else:
            yield _judged(here, run, found, expected)


def _expected(
    recorded: Recorded, model: Model, weights: bool, policy: Policy, place: Place, found: RowSums
) -> Expected | str:
    """Return what a place's rows have to sum up to, or why that is not known."""
    row, decode = POINTS[place.point], place.phase == "decode"
    if row.kind == "sum":
        return _added(recorded, policy, place, found) or "the sums of its inputs were not recorded"
    if row.tensors and not weights:
        return "weights"
    lacking = not_emulated(policy, place.point, decode, device_kind(recorded.run.record.device))
    if lacking or (lacking := undecided(recorded, policy, place)):
        return f"no emulation of {lacking}"
    return _made(recorded, model, policy, place, found) or "inputs were not recorded"


def _handed(recorded: Recorded, model: Model, weights: bool, policy: Policy, place: Place) -> Iterator[ErrorRecord]:
    """Compare hashes of the rows entering a layer with those of the rows that left the one before, or embeddings."""
    assert place.layer is not None
    run, reference = recorded.run.record.id, STREAM if place.layer else "embedding"
    found = recorded.row_sums(place.prompt, place.phase, place.layer, place.point)
    if found is None:
        yield place.record("state", run, reference, missing="requested, not in the run")
        return
    if place.layer:
        before = recorded.row_sums(place.prompt, place.phase, place.layer - 1, STREAM)
        same = None if before is None else before.at(found.positions)
        wanted = None if same is None else same.hashes
    else:
        tokens = np.asarray(recorded.fed_tokens(place.prompt))
        known = weights and found.positions.max() < len(tokens)
        stored = point_format(policy, place.point)
        wanted = hashes_of(embedded(model, tokens[found.positions], stored)) if known else None
    if wanted is None:
        why = f"the {STREAM} rows were not recorded" if place.layer else "weights"
        yield place.record("state", run, reference, unknown=why)
        return
    different = found.positions[(found.hashes != wanted).any(axis=1)]
    yield place.record(
        "state", run, reference, dtype=HASH_FORMAT, n=len(wanted), mismatched=len(different),
        rows=row_spans(different) or None,
    )  # fmt: skip


def _added(recorded: Recorded, policy: Policy, place: Place, found: RowSums) -> Expected | None:
    """Return what the residual stream has to sum up to: its summands."""
    assert place.layer is not None
    names = inputs_of(place.point, recorded.config.sparse)
    parts = [recorded.row_sums(place.prompt, place.phase, place.layer, name) for name in names]
    parts = [None if p is None else p.at(found.positions) for p in parts]
    if (stream := parts[0]) is None or (more := parts[1]) is None:
        return None
    own, other = (FORMATS[point_format(policy, name)].unit_roundoff for name in (place.point, names[1]))
    rounded = np.hypot(own * found.sizes, max(own, other) * more.sizes) / np.sqrt(3)
    width = recorded.config.width
    taken = np.sqrt(sum((_taken(x, width) ** 2 for x in (found, stream, more)), np.zeros(len(found.positions))))
    return Expected(found.positions, stream.sums + more.sums, np.hypot(rounded, taken))


def _taken(rows: RowSums, terms: int) -> Array:
    """Return the size of what sums taken in float32 lose [T]: partial sums are at most of the size of the row."""
    return np.zeros(len(rows.sizes)) if rows.exact else SINGLE * np.sqrt(terms) * rows.sizes


def _made(recorded: Recorded, model: Model, policy: Policy, place: Place, found: RowSums) -> Expected | None:
    """Return what an operation on recorded inputs has to sum up to; None where inputs were not recorded."""
    device, decode = device_kind(recorded.run.record.device), place.phase == "decode"
    row, here = POINTS[place.point], policy_at(recorded, policy, place)
    wide = row.keyed and decode and policy.decode_attention == "float32"
    stored = "float32" if wide else point_format(policy, place.point)
    settled = chosen(recorded, policy, place)
    ways = on_single_rows(of_policy(here, decode), row, stored, policy.scores, device, decode, settled)
    roundings = [formula(here), *ways.values()]
    parts = []
    for rows, keys in _parts(recorded, place, found.positions):
        shape = (recorded.config.heads, len(rows), keys) if row.keyed else (len(rows), recorded.config.width)
        part = Rows(np.zeros(shape, FORMATS[stored].dtype), rows, ((0, slice(0, len(rows))),))
        operation = prepare(recorded, model, place, part)
        if operation is None or len(operation.positions) < len(rows):
            return None
        grids = [_rows(y, row.keyed, rows) for y in operation.run(operation.inputs, roundings, None)]
        noise = np.max([_size(y - grids[0]) for y in grids[1:]], axis=0)
        if stored == "float32":
            noise = np.hypot(noise, SINGLE * _size(_rows(operation.magnitude(SINGLE), row.keyed, rows)))
        taken = SINGLE * np.sqrt(grids[0][0].size) * _size(grids[0])
        parts.append(Expected(rows, sums_of(grids[0], rows), np.hypot(noise, taken)))
    return Expected(*(np.concatenate(x) for x in zip(*parts, strict=True)))


def _parts(recorded: Recorded, place: Place, positions: Array) -> Iterator[tuple[Array, int]]:
    """Yield rows that read the same keys, and how many keys there are: decode's last step has a cache of its own."""
    last = int(positions[-1]) + 1
    if place.phase != "decode" or not POINTS[place.point].keyed or len(positions) < 2:
        yield positions, last
        return
    yield positions[:-1], last - 1
    yield positions[-1:], last


def _rows(made: Array, keyed: bool, positions: Array) -> Array:
    """Return an operation's result as rows [T, …], 0 where a key comes after the row."""
    if not keyed:
        return made.reshape(len(made), -1)
    return visible(made.transpose(1, 0, 2), unseen(positions, made.shape[2], None)[:, None, :])


def _size(rows: Array) -> Array:
    """Return ‖row‖ [T]."""
    return np.sqrt((rows.reshape(len(rows), -1) ** 2).sum(axis=1))


def _judged(place: Place, run: str, found: RowSums, expected: Expected) -> ErrorRecord:
    """Return a record: how far sums are from what they have to be, in units of what rounding leaves."""
    error, finite = found.sums - expected.sums, np.isfinite(found.sums).all(axis=1) & np.isfinite(found.sizes)
    known = np.isfinite(expected.sums).all(axis=1)
    rows = finite & known
    if not rows.any():
        why = {"nonfinite": int((~finite & known).sum())} if known.any() else {"unknown": "its inputs are not finite"}
        return place.record("sums", run, "summands", **why)
    error, noise, meant = error[rows], expected.noise[rows, None], expected.sums[rows]
    units = np.where(error == 0, 0.0, np.abs(error) / np.where(noise > 0, noise, np.finfo(float).tiny))
    worst = int(units.max(axis=1).argmax())
    numbers: dict[str, Any] = {
        "n": units.size, "nonfinite": int((~finite & known).sum()), "ratio": number(np.sqrt((units**2).mean())),
        "gain": number((error * meant).sum() / ((meant**2).sum() or 1.0)),
        "rel_l2": number(ratio(norm(error), norm(meant))),
        "scopes": {"token": {"ratio": (number(units[worst].max()), int(found.positions[rows][worst]))}},
        "slices": {"token": units.size},
    }  # fmt: skip
    return place.record("sums", run, "summands", **numbers)
