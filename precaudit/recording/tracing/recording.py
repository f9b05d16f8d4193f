"""From one call's arrays on the device to files: batch and padding removed, statistics, top-k."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.numbers.row_hashes import row_hashes
from precaudit.recording.runs.point_lines import Tensor
from precaudit.recording.runs.step_rows import LogitsCall, step_records
from precaudit.recording.runs.writer import RunWriter
from precaudit.recording.tracing.programs import Capture
from precaudit.schema.coverage import ExpectedTensor
from precaudit.schema.graphs.decoder import LOGITS, POINTS
from precaudit.schema.records.runs import PromptRecord


@dataclass(frozen=True)
class CallOutputs:
    """What one program call gave, for every prompt b of a batch.

    ``rows[b]``: positions of the logits rows; ``tokens[b]``: the tokens fed there; ``starts[b]``: left padding;
    ``taps``: {point: [L', B, …] or [B, …]}; ``logits`` [B, R, V].
    """

    phase: str
    step: int
    capture: Capture
    starts: Array
    rows: tuple[tuple[int, ...], ...]
    tokens: Any
    taps: dict[str, Any]
    logits: Any


@dataclass(frozen=True)
class Recording:
    """What is kept of a call: ``entries[b]`` of every prompt b, its layers, and whether its logits rows are steps."""

    call: CallOutputs
    prompts: tuple[PromptRecord, ...]
    entries: tuple[tuple[ExpectedTensor, ...], ...]
    layers: tuple[int, ...]
    steps: bool


def record(whole: Recording, writer: RunWriter) -> None:
    """Write a call's tensors and steps (on the writer's thread: waits for the device)."""
    call = whole.call
    host = {name: np.asarray(x) for name, x in call.taps.items()}
    logits, tokens = np.asarray(call.logits), [np.asarray(t) for t in call.tokens]
    slots = {layer: i for i, layer in enumerate(whole.layers)}
    for b, prompt in enumerate(whole.prompts):
        values = logits[b, : len(call.rows[b])]
        tensors = []
        for e in whole.entries[b]:
            if e.point == LOGITS:
                x = values
            elif e.source not in host and POINTS[e.source].within is not None:
                continue
            elif e.summed:
                x = unpad(host[e.source][:, b], e, int(call.starts[b]), gathered=False)
            else:
                tap = host[e.point] if e.layer is None else host[e.point][slots[e.layer]]
                x = unpad(tap[b], e, int(call.starts[b]), e.point in call.capture.gathered)
                if e.hashed and e.point not in call.capture.hashed:
                    x = row_hashes(x)
            tensors.append(Tensor(e.layer, e.point, e.axes, e.positions, x, e.support))
        if whole.steps:
            made = LogitsCall(prompt.id, call.phase, call.step, len(prompt.tokens) - 1)
            writer.steps(step_records(made, call.rows[b], tokens[b].tolist(), values))
        if tensors:
            writer.tensors(prompt.id, call.phase, call.step, tensors)


def unpad(x: Array, e: ExpectedTensor, start: int, gathered: bool) -> Array:
    """Return the rows one entry records of ``x``, one prompt's tap: axis T as recorded, axis S its real keys."""
    for axis, index in enumerate(recorded_index(e, start, gathered)):
        x = x[(slice(None),) * axis + (index,)]
    return x


def recorded_index(e: ExpectedTensor, start: int, gathered: bool) -> list[slice | list[int]]:
    """Return what an entry records on each axis of one prompt's tap."""
    found = []
    for name in e.axes:
        index: slice | list[int] = slice(None)
        if name == "S":
            index = slice(start, start + e.keys)
        elif name == "T" and e.phase != "decode":
            whole = len(e.positions) == e.keys
            index = slice(start, start + e.keys) if whole else [start + p for p in e.positions]
            if gathered:
                index = slice(0, len(e.positions))
        found.append(index)
    return found
