"""Forward errors: the candidate against FP64 of the whole model on the same tokens, and an emulated policy's size."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from precaudit.caching import prune
from precaudit.errors import UserError
from precaudit.models.numpy_decoder.forward import Wanted, seconds_for
from precaudit.models.numpy_decoder.model import Model
from precaudit.numbers.arrays import Array, widen
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.textbook.pieces import ExactPieces, Execution, divide_forward, keep_exact
from precaudit.references.textbook.pooled import emulate
from precaudit.references.textbook.whole import Sequenced, Whole, sequence_of
from precaudit.schema.graphs.decoder import LOGITS, POINTS
from precaudit.schema.lengths import telling
from precaudit.schema.metrics.logits import distribution
from precaudit.schema.metrics.rows import measure_rows
from precaudit.schema.metrics.sizes import Difference, norm, ratio
from precaudit.schema.places import Place
from precaudit.schema.policies import held_weights, recorded_policy
from precaudit.schema.records.base import json_number
from precaudit.schema.records.comparisons import Selected
from precaudit.schema.records.errors import ErrorRecord, ForwardError
from precaudit.schema.selection import PHASES


def reference_values(recorded: Recorded, model: Model, selected: Selected, root: Path, execution: Execution) -> Whole:
    """Compute, or find in the cache, FP64 values of a selection's prompts, and emulate the policy over the whole model.

    ``model`` attends as the policy's mask says, and is emulated so; FP64 values are of the recorded configuration.
    ``root``: where references are kept, by the hash of the tensors' values.
    """
    policy = recorded_policy(recorded.run.record)
    weights = f"{recorded.run.record.model.sha256}:{held_weights(policy)}"
    exact = model if model.config == recorded.config else Model(recorded.config, model.read)
    layers, rows = selected.layers, {p: recorded.logit_rows(p) for p in selected.prompts}
    whole = Whole({}, rows, exact.config.vocab)
    first: dict[tuple[Any, ...], Sequenced] = {}
    for prompt, phase in product(selected.prompts, PHASES):
        own = sequence_of(recorded, prompt, phase)
        told = telling(exact.config, own.lengths)
        same = (own.tokens, rows[prompt].tobytes(), None if told is None else told.tobytes())
        sequence = whole.alike[prompt, phase] = first.setdefault(same, own)
        if sequence not in whole.places:
            whole.places[sequence] = own.place(root, weights, exact.config)
    wanted = [p for p in selected.points if not POINTS[p].state]
    wanted += [] if LOGITS in wanted else [LOGITS]
    names = [(at, p) for p in wanted for at in (layers if POINTS[p].per_layer else (None,))]
    absent = [s for s in whole.distinct if any(whole.of(s, at, name) is None for at, name in names)]

    def want(chosen: list[Sequenced]) -> Wanted:
        return Wanted(set(wanted), set(layers), [rows[s.prompt] for s in chosen])

    if absent:
        fed = sum(len(s.tokens) for s in absent)
        seconds = seconds_for(exact.config, 1000)
        takes = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        what = f"FP64 reference of {fed:,} tokens (about {takes} per 1,000)"
        shared = ExactPieces(exact, absent, want(absent), {s: whole.places[s] for s in absent}, what)
        _keep(whole, shared, execution)
    for place in whole.places.values():
        place.touch()

    whole.wanted = want(whole.distinct)
    emulate(whole, model, recorded, policy, None, execution)
    prune(root, {p.folder for p in whole.places.values()})
    return whole


def _keep(whole: Whole, shared: ExactPieces, execution: Execution) -> None:
    """Have FP64 of sequences made and kept; raises UserError where who made it keeps it elsewhere than is read here."""
    executor = execution.executor
    pieces = divide_forward(shared.sequences, executor.slots)
    made = executor.map(keep_exact, shared, pieces, execution.tell, shared.what)
    for sequence, place in zip(shared.sequences, (p for places in made for p in places), strict=True):
        whole.places[sequence] = place
        if whole.of(sequence, None, LOGITS) is None:
            raise UserError(f"{place.folder}: workers keep FP64 elsewhere; all of them need one PRECAUDIT_CACHE")


def forward_errors(recorded: Recorded, whole: Whole, place: Place) -> Iterator[ErrorRecord]:
    """Yield the forward records of one point of one phase (all its steps)."""
    run = recorded.run.record.id
    reference = whole.values(place.prompt, place.phase, place.layer, place.point)
    for step in recorded.steps(place.phase):
        stored = recorded.tensor(place.prompt, place.phase, step, place.layer, place.point)
        if stored is None or reference is None:
            continue
        here = place._replace(step=step)
        rows = _rows(recorded, here)
        known = (
            np.isin(rows, whole.rows[place.prompt]) if place.point == LOGITS else rows < _length(reference, place.point)
        )
        if not known.all():
            yield here.record(ForwardError, run, "fp64", missing="steps.jsonl lacks the tokens fed up to here")
            continue
        index = np.searchsorted(whole.rows[place.prompt], rows) if place.point == LOGITS else rows
        if POINTS[place.point].over_keys:
            values = np.asarray(reference[:, rows, : stored.shape[2]])
        else:
            values = np.asarray(reference[index])
        d, numbers = measure_rows(stored, values, place.point, rows, recorded.config.window_of(place.layer))
        energy, chances = whole.energy(place)
        emulated = float(np.sqrt(energy[index].sum()))
        numbers |= {
            "ratio": json_number(ratio(norm(d.error), emulated)),
            "noise": json_number(ratio(emulated, norm(d.reference))),
        }
        numbers["slices"] = _scopes(numbers["scopes"], d, energy[index], rows, place.point)
        if chances is not None:
            numbers["distribution"] = distribution(widen(stored), values, rows, chances[index])
        yield here.record(ForwardError, run, "fp64", **numbers)


def _scopes(scopes: dict[str, Any], d: Difference, energy: Array, rows: Any, point: str) -> dict[str, int]:
    """Add the worst token's and head's ratio to a record's scopes; return how many there are.

    Noise of a slice is that of the draws there and, as they are few, the tensor's relative noise: √(e + (ρ‖r‖)²).
    """
    error, power = (np.einsum("thk,thk->th", x, x) for x in (d.error, d.reference))
    rho = ratio(float(energy.sum()), float(power.sum())) if power.any() else 0.0
    slices = {}
    for name, axis in (("token", 1), ("head", 0)):
        if name == "head" and not POINTS[point].heads:
            continue
        top, noise = error.sum(axis=axis), energy.sum(axis=axis) + rho * power.sum(axis=axis)
        with np.errstate(divide="ignore", invalid="ignore"):
            sizes = np.where(top == 0, 0.0, np.sqrt(top / noise))
        if sizes.size:
            i = int(np.argmax(sizes))
            scopes.setdefault(name, {})["ratio"] = (json_number(sizes[i]), int(rows[i]) if name == "token" else i)
            slices[name] = sizes.size
    return slices


def _length(reference: Array, point: str) -> int:
    return reference.shape[POINTS[point].axes.index("T")]


def _rows(recorded: Recorded, place: Place) -> Any:
    from precaudit.recording.runs.positions import unpack_positions

    return unpack_positions(recorded.index[place])
