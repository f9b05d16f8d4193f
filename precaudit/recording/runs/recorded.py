"""What a run recorded, put together the way comparisons need it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import TypeVar

import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.numbers.arrays import Array, widen
from precaudit.numbers.formats import FORMATS
from precaudit.numbers.integers import InRows
from precaudit.numbers.row_sums import RowSums, concatenate_sums, of_rows, of_words
from precaudit.recording.runs.positions import positions_of, unpack_positions
from precaudit.recording.runs.reader import Run
from precaudit.schema.coverage import (
    HASH_FORMAT,
    SUMS,
    config_of,
    decode_steps_of,
    expected_tensors,
    misfit,
    point_format,
)
from precaudit.schema.graphs.decoder import CACHES, POINTS
from precaudit.schema.places import Place
from precaudit.schema.policies import declared_policy
from precaudit.schema.records.devices import device_kind
from precaudit.schema.records.runs import PointRecord, Requested

Call = tuple[str, int]
T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """A point's rows of one phase of one prompt, decode's steps joined along T.

    ``values`` in the recorded format; ``positions`` [T]; ``steps``: (step, slice of rows).
    """

    values: Array
    positions: Array
    steps: tuple[tuple[int, slice], ...]

    def at(self, positions: Array) -> Array:
        """Return the rows at ``positions``, all of which are there."""
        if len(positions) == len(self.positions) and (positions == self.positions).all():
            return self.values
        return self.values[np.searchsorted(self.positions, positions)]


@dataclass(frozen=True)
class Recorded:
    """A run's tensors by prompt, phase, step, layer and point.

    ``misfits``: those of another shape or other positions than requested, and what is wrong; nothing reads them.
    ``hashed``: caches of which the hashes of rows were recorded. ``summed``: sums of rows (numbers/row_sums.py).
    """

    run: Run
    index: dict[Place, PointRecord]
    misfits: dict[Place, str]
    config: DecoderConfig
    hashed: dict[Place, PointRecord] = field(default_factory=dict)
    summed: dict[Place, PointRecord] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> "Recorded":
        """Index a run."""
        config = config_of(run.record.model.config)
        asked = run.record.requested
        planned = {Place(p.id, *e.key): e for p in run.prompts.values() for e in expected_tensors(asked, len(p.tokens))}
        index: dict[Place, PointRecord] = {}
        hashed: dict[Place, PointRecord] = {}
        summed: dict[Place, PointRecord] = {}
        misfits: dict[Place, str] = {}
        for p in run.points:
            key = Place.of(p)
            if key in planned:
                problem = misfit(planned[key], positions_of(p), p.shape, config)
                if problem is None:
                    e = planned[key]
                    (summed if e.summed else hashed if e.hashed else index)[key] = p
                else:
                    misfits[key] = problem.text
        return cls(run, index, misfits, config, hashed, summed)

    def of_prompts(self, prompts: Collection[str]) -> "Recorded":
        """Return the tensors of some prompts, with no file open, wherever a process stands that reads them."""

        def own(of: dict[Place, T]) -> dict[Place, T]:
            return {place: x for place, x in of.items() if place.prompt in prompts}

        points = [p for p in self.run.points if p.prompt in prompts]
        run = replace(self.run, folder=self.run.folder.absolute(), points=points, _files={}, _mapped=set())
        index, misfits, hashed, summed = own(self.index), own(self.misfits), own(self.hashed), own(self.summed)
        return replace(self, run=run, index=index, misfits=misfits, hashed=hashed, summed=summed)

    @property
    def requested(self) -> Requested:
        """What the run was asked to record."""
        return self.run.record.requested

    def steps(self, phase: str) -> Sequence[int]:
        """The steps a phase has."""
        return decode_steps_of(self.requested) if phase == "decode" else range(1)

    def tensor(self, prompt: str, phase: str, step: int, layer: int | None, point: str) -> Array | None:
        """Return one recorded tensor, or None where it was not recorded."""
        record = self.index.get(Place(prompt, phase, step, layer, point))
        return None if record is None else self.run.tensor(record)

    def rows_of(self, prompt: str, phase: str, step: int, layer: int | None, point: str) -> Array | None:
        """Return the positions of one recorded tensor, or None where it was not recorded."""
        record = self.index.get(Place(prompt, phase, step, layer, point))
        return None if record is None else unpack_positions(record)

    def hashes(self, prompt: str, step: int, layer: int, cache: str) -> Array | None:
        """Return the recorded hashes [S, LANES] of a cache's rows at a decode step, or None."""
        record = self.hashed.get(Place(prompt, "decode", step, layer, cache))
        return None if record is None or record.dtype != HASH_FORMAT else self.run.tensor(record)

    def row_sums(self, prompt: str, phase: str, layer: int | None, point: str) -> RowSums | None:
        """Return sums of a point's rows of a phase, recorded or of recorded rows; None where any step lacks them."""
        if (whole := self.rows(prompt, phase, layer, point)) is not None:
            return of_rows(whole.values, whole.positions)
        if layer is None or layer not in self.requested.layers:
            return None
        found: list[RowSums] = []
        for step in self.steps(phase):
            record = self.summed.get(Place(prompt, phase, step, None, point + SUMS))
            if record is None or record.dtype != HASH_FORMAT:
                if self.run.record.finished is None and found:
                    break  # the run was cut off here
                return None
            words = self.run.tensor(record)[self.requested.layers.index(layer)]
            found.append(of_words(words, unpack_positions(record), POINTS[point].over_keys))
        return concatenate_sums(found)

    def batch_of(self, prompt: str) -> tuple[str, ...]:
        """Return the prompts that ran together with one, itself included, as far as the run holds them."""
        asked = self.requested.prompts
        first = asked.index(prompt) // self.requested.batch * self.requested.batch
        return tuple(p for p in asked[first : first + self.requested.batch] if p in self.run.prompts)

    def turned_of(self, prompt: str) -> int:  # noqa: ARG002 of a view of a program's run it is the prompt's
        """Return by how much more than its position RoPE turns every row of a prompt: 0 in a model's run."""
        return 0

    def start_of(self, prompt: str) -> int:
        """Return the slot of a prompt's first token: how far its batch padded it on the left."""
        if self.requested.pad != "left" or prompt not in self.requested.prompts:
            return 0
        lengths = {p: len(self.run.prompts[p].tokens) for p in self.batch_of(prompt)}
        return max(lengths.values()) - lengths[prompt]

    def rows(self, prompt: str, phase: str, layer: int | None, point: str) -> Rows | None:
        """Return a point's rows of a phase (axis T first); None where any step lacks them."""
        values: list[Array] = []
        positions: list[Array] = []
        steps: list[tuple[int, slice]] = []
        first = 0
        for step in self.steps(phase):
            record = self.index.get(Place(prompt, phase, step, layer, point))
            if record is None:
                if self.run.record.finished is None and values:
                    break  # the run was cut off here
                return None
            values.append(self.run.tensor(record))
            positions.append(unpack_positions(record))
            steps.append((step, slice(first, first + len(positions[-1]))))
            first = steps[-1][1].stop
        if len(values) == 1:
            return Rows(values[0], positions[0], tuple(steps))
        return Rows(np.concatenate(values), np.concatenate(positions), tuple(steps))

    def expected_cache(self, prompt: str, layer: int, cache: str, step: int) -> Array | None:
        """Return what a cache at ``step`` has to give: the rows earlier calls recorded, as it holds them."""
        rows = self.cached_rows(prompt, layer, cache, step)
        if rows is None:
            return None
        held = (self.index.get(Place(prompt, "decode", s, layer, cache)) for s in (step, 0))
        names = [record.dtype for record in held if record is not None]
        return self._as_cached(rows, names[0] if names else point_format(declared_policy(self.run.record), cache))

    def other_cache(self, rows: Array, name: str) -> tuple[Array, Array] | None:
        """Return what a cache narrower than its rows may give of them, too, in format ``name``; and where.

        A device that is no CPU divides less exactly, and may convert what it has not rounded before: what is at a tie
        may be rounded the other way. None where that is not so.
        """
        if device_kind(self.run.record.device) == "cpu":
            return None
        if self.run.record.policy["kv_cache"] == "int8":
            other, near = InRows(stored=name).otherwise(widen(rows))
            return other.astype(FORMATS[name].dtype), near
        if FORMATS[name].dtype.itemsize > 1 or rows.dtype.itemsize == 1:
            return None
        wide, one = widen(rows), rows.astype(FORMATS[name].dtype)
        beside = [(one.view(np.uint8) + np.uint8(step)).view(one.dtype) for step in (1, 255)]
        ties = [np.abs(widen(x) - wide) == np.abs(wide - widen(one)) for x in beside]
        near = (ties[0] | ties[1]) & (widen(one) != wide)
        return np.where(ties[0], beside[0], beside[1]), near

    def cached_rows(self, prompt: str, layer: int, cache: str, step: int) -> Array | None:
        """Return the rows earlier calls recorded for a cache at ``step``: prefill's, then each decode step's."""
        point = {c: row for row, c in CACHES.items()}[cache]
        n = len(self.run.prompts[prompt].tokens)
        before = self.tensor(prompt, "prefill", 0, layer, point)
        steps = [s for s in self.steps("decode") if s <= step]
        made = [self.tensor(prompt, "decode", s, layer, point) for s in steps]
        if before is None or len(before) != n or any(m is None for m in made):
            return None
        if len(steps) > 1 and steps[-1] - steps[0] >= len(steps):  # of a dump that lacks a step between
            return None
        return np.concatenate([before[: n - 1 + (steps or [1])[0]], *(m for m in made if m is not None)])

    def expected_rows(self, prompt: str, layer: int, cache: str) -> Array | None:
        """Return the expected rows of a cache at the last step whose row was recorded: those before are its first."""
        point = {c: row for row, c in CACHES.items()}[cache]
        steps = takewhile(lambda s: (prompt, "decode", s, layer, point) in self.index, count())
        last = max(steps, default=None)
        return None if last is None else self.expected_cache(prompt, layer, cache, last)

    def keys_read(self, prompt: str, layer: int, cache: str) -> tuple[Array, Array] | None:
        """Return what decode attention read: (rows during the steps before the last, rows at the last step).

        Between decode0 and the last step the cache was not recorded: decode0's cache and the rows made since.
        """
        point = {c: row for row, c in CACHES.items()}[cache]
        last = self.requested.decode_steps
        if self.requested.calls:  # of a dump, which tells what was written alone
            every = self.expected_cache(prompt, layer, cache, last)
            return None if every is None else (every, every)
        first = self.tensor(prompt, "decode", 0, layer, cache)
        final = self.tensor(prompt, "decode", last, layer, cache)
        made = [self.tensor(prompt, "decode", s, layer, point) for s in range(1, last + 1)]
        if first is None or final is None or any(m is None for m in made):
            return None
        rows = [m for m in made if m is not None]
        read = np.concatenate([first, *(self._as_cached(m, first.dtype.name) for m in rows)])
        return self._as_kept(read, final, rows), final

    def _as_kept(self, read: Array, final: Array, made: list[Array]) -> Array:
        """Return rows that were read, the last of them of ``made``: what is at a tie there as the last step has it."""
        if not made or (known := self.other_cache(np.concatenate(made), read.dtype.name)) is None:
            return read
        other, near = known
        start = len(read) - len(other)
        rows = min(len(read), len(final)) - start
        kept = near[:rows] & (final[start : start + rows] == other[:rows])
        read[start : start + rows] = np.where(kept, other[:rows], read[start : start + rows])
        return read

    def _as_cached(self, rows: Array, name: str) -> Array:
        """Return what is read of rows that a cache holds, in format ``name``."""
        if self.run.record.policy["kv_cache"] == "int8":
            return InRows(stored=name)(widen(rows)).astype(FORMATS[name].dtype)
        return rows if rows.dtype.name == name else rows.astype(FORMATS[name].dtype)

    def fed_tokens(self, prompt: str) -> tuple[int, ...]:
        """Return the prompt's tokens and those fed after it, as far as the run went."""
        tokens = dict(enumerate(self.run.prompts[prompt].tokens))
        for s in self.run.steps:
            if s.prompt == prompt:
                tokens.setdefault(s.position, s.token)
        return tuple(tokens[i] for i in takewhile(tokens.__contains__, count()))

    def logit_rows(self, prompt: str) -> Array:
        """Return the positions any phase has logits of."""
        return np.unique([s.position for s in self.run.steps if s.prompt == prompt]).astype(np.int64)
