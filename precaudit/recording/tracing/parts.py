"""From one call's arrays over several processes to the parts of recorded tensors that lie here: nothing is gathered."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from precaudit.interpreters.jaxpr.keys import key_bits, on_host
from precaudit.interpreters.jaxpr.narrow import NarrowBits
from precaudit.numbers.arrays import Array
from precaudit.recording.runs.arrays import TENSORS, Part, WrittenArray, cell_of
from precaudit.recording.runs.point_lines import SharedTensor
from precaudit.recording.runs.several import SharedWriter
from precaudit.recording.runs.step_rows import LogitsCall, step_records
from precaudit.recording.tracing.recording import CallOutputs, Recording, recorded_index
from precaudit.schema.coverage import ExpectedTensor
from precaudit.schema.graphs.decoder import LOGITS, POINTS
from precaudit.schema.records.runs import PromptRecord

Wanted = Sequence[int | range | list[int]]  # of each axis of an array: one index, or those that are kept, ascending


@dataclass(frozen=True)
class Spread:
    """An array over processes: its shape and format, where each part of all begins and its size, and those here."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    every: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    here: tuple[Part, ...]

    @classmethod
    def of(cls, x: object, first: bool) -> "Spread":
        """Return where an array lies; what every process holds whole is the first's."""
        if isinstance(x, NarrowBits):
            bits = cls.of(x.bits, first)
            here = tuple(replace(part, values=part.values.view(x.dtype)) for part in bits.here)
            return replace(bits, dtype=np.dtype(x.dtype), here=here)
        x = key_bits(x)
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            whole = np.asarray(x)
            at = (0,) * whole.ndim
            return cls(whole.shape, whole.dtype, ((at, whole.shape),), (Part(at, whole),) if first else ())
        places = {_place(index, x.shape) for index in x.sharding.devices_indices_map(x.shape).values()}
        held = [part for part in x.addressable_shards if part.replica_id == 0]
        here = tuple(Part(_place(part.index, x.shape)[0], np.asarray(part.data)) for part in held)
        return cls(x.shape, np.dtype(x.dtype), tuple(sorted(places)), here)

    def written(self, name: str, wanted: Wanted) -> WrittenArray:
        """Return what is written here of some of its elements, an array of the axes of which more than one is kept."""
        shape = tuple(len(w) for w in wanted if not isinstance(w, int))
        starts = [at for start, size in self.every if (at := _cut(start, size, wanted)[0]) is not None]
        parts = []
        for part in self.here:
            at, index = _cut(part.start, part.values.shape, wanted)
            if at is not None:
                parts.append(Part(at, np.asarray(part.values[tuple(index)], order="C")))
        return WrittenArray(name, shape, self.dtype.name, cell_of(shape, starts), tuple(parts))

    def whole(self, name: str) -> WrittenArray:
        """Return what is written here of all of it."""
        return self.written(name, [range(n) for n in self.shape])


def gathered(x: object) -> Array:
    """Return an array whole, on every process; all have to call this in the same order."""
    return on_host(x.bits).view(x.dtype) if isinstance(x, NarrowBits) else on_host(x)


def record_parts(whole: Recording, writer: SharedWriter) -> None:
    """Write the parts of a call's tensors that lie here, and, of the first process, its steps. ``logits``: gathered."""
    call, first = whole.call, writer.hosts.first
    taps = {name: Spread.of(x, first) for name, x in call.taps.items()}
    slots = {layer: i for i, layer in enumerate(whole.layers)}
    tensors, arrays = [], []
    for b, prompt in enumerate(whole.prompts):
        values = call.logits[b, : len(call.rows[b])]
        for e in whole.entries[b]:
            if e.point != LOGITS and e.source not in taps and POINTS[e.source].within is not None:
                continue
            tensor = _tensor(e, prompt, call)
            name = f"{tensor.file.removeprefix(TENSORS + '/')}/{tensor.key}"
            if e.point == LOGITS:
                array = Spread.of(values, first).whole(name)
            else:
                array = taps[e.source].written(name, _wanted(e, b, slots, call, taps[e.source].shape))
            tensors.append(tensor)
            arrays.append(array)
        if whole.steps:
            made, tokens = (
                LogitsCall(prompt.id, call.phase, call.step, len(prompt.tokens) - 1),
                np.asarray(call.tokens[b]),
            )
            writer.steps(step_records(made, call.rows[b], tokens.tolist(), values))
    if tensors:
        writer.write_parts(tensors, arrays)


def _tensor(e: ExpectedTensor, prompt: PromptRecord, call: CallOutputs) -> SharedTensor:
    return SharedTensor(e.layer, e.point, e.axes, e.positions, e.support, prompt.id, call.phase, call.step)


def _wanted(
    e: ExpectedTensor, b: int, slots: dict[int, int], call: CallOutputs, shape: tuple[int, ...]
) -> list[int | range | list[int]]:
    """Return what of a tap [L', B, …], or [B, …] outside layers, is recorded of a prompt."""
    gathered_rows = not e.summed and e.point in call.capture.gathered
    index = recorded_index(e, int(call.starts[b]), gathered_rows)
    lead: list[int | range | list[int]] = [b] if e.layer is None else [slots[e.layer], b]
    if e.summed:
        lead, index = [range(shape[0]), b], index[1:]
    found = [range(n)[i] if isinstance(i, slice) else i for i, n in zip(index, shape[len(lead) :], strict=True)]
    return [*lead, *found]


def _place(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    each = [i.indices(n) for i, n in zip(index, shape, strict=True)]
    return tuple(a for a, _, _ in each), tuple(b - a for a, b, _ in each)


def _cut(start: Sequence[int], size: Sequence[int], wanted: Wanted) -> tuple[tuple[int, ...] | None, list[Any]]:
    """Return where a part begins among what is wanted, None where it holds none, and which elements these are."""
    at, index = list[int](), list[Any]()
    for a, n, w in zip(start, size, wanted, strict=True):
        if isinstance(w, int):
            if not a <= w < a + n:
                return None, []
            index.append(w - a)
            continue
        low, high = np.searchsorted(np.asarray(w), (a, a + n)).tolist()
        if low == high:
            return None, []
        at.append(low)
        rows = np.asarray(w[low:high]) - a
        index.append(slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) == rows[-1] - rows[0] + 1 else rows)
    return tuple(at), index
