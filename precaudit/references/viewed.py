"""A program's run as its textbook sees it: recorded values by sequence, phase, step, layer and point of the family.

The first call is ``prefill`` where it has several rows. Calls of one row each are ``decode`` steps, counted as the
program's calls are. They read the keys and values of the rows before them. Whatever makes an operation of a model's run
again makes these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from precaudit.numbers.arrays import Array
from precaudit.recording.runs.programs import Opened
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.formula import Stored, stored_sequences
from precaudit.references.mapped import MappedTextbook, Pair
from precaudit.references.sequences import Tokens
from precaudit.schema.graphs.decoder import CACHES, POINTS
from precaudit.schema.places import Place
from precaudit.schema.policies import Policy, announced_policy, load_policy
from precaudit.schema.records.manifests import SCHEMA
from precaudit.schema.records.runs import ModelRecord, PointRecord, PromptRecord, Requested, RunRecord, Stats

AS_STORED = "as stored"
NO_STATS = Stats(min=0.0, max=0.0, mean=0.0, rms=0.0, nan=0, inf=0)


class ViewedRun(Run):
    """A run whose tensors are in memory, by the key of their record."""

    def __init__(self, opened: Opened, record: RunRecord, prompts: dict[str, PromptRecord]) -> None:
        super().__init__(opened.folder, record, prompts, [], [])
        self.arrays: dict[str, Array] = {}

    def tensor(self, record: PointRecord) -> Array:
        """Return a tensor."""
        return self.arrays[record.key]


@dataclass(frozen=True)
class Viewed(Recorded):
    """A case of a program's run by the places of its textbook.

    ``pairs``: whose value is at a layer and point: of keys or values that the map does not show, the cache in which a
    call wrote them; ``edges``: the position of the first row of each call, by prompt,
    and the one after the last; ``kept``: keys and values of rows before the first, by prompt, layer and point;
    ``turned``: by how much more than its position RoPE turns every row of a prompt.
    """

    pairs: dict[tuple[int | None, str], Pair] = field(default_factory=dict)
    edges: dict[str, Array] = field(default_factory=dict)
    kept: dict[tuple[str, int, str], Array] = field(default_factory=dict)
    turned: dict[str, int] = field(default_factory=dict)

    def turned_of(self, prompt: str) -> int:
        """Return by how much more than its position RoPE turns every row of a prompt."""
        return self.turned[prompt]

    def steps(self, phase: str) -> Sequence[int]:
        """The steps a phase has: a call each, of decode from 1 on after a prefill, since no token is decoded twice."""
        first = int("prefill" in self.requested.phases)
        return range(first, self.requested.decode_steps + 1) if phase == "decode" else range(1)

    def keys_read(self, prompt: str, layer: int, cache: str) -> tuple[Array, Array] | None:
        """Return the keys or values that decode steps read: what calls up to the last made, or the cache there."""
        last = self.requested.decode_steps
        held = self.tensor(prompt, "decode", last, layer, cache)
        every = held if held is not None else self.cached_rows(prompt, layer, cache, last)
        return None if every is None else (every, every)

    def cached_rows(self, prompt: str, layer: int, cache: str, step: int) -> Array | None:
        """Return the rows that calls up to ``step`` recorded for a cache; None where one did not."""
        point = {c: row for row, c in CACHES.items()}[cache]
        calls = [("prefill", 0)] if "prefill" in self.requested.phases else []
        calls += [("decode", s) for s in self.steps("decode") if s <= step]
        before = None if calls[0][0] == "prefill" else self.kept.get((prompt, layer, point))  # else among its rows
        made = [before, *(self.tensor(prompt, *call, layer, point) for call in calls)]
        rows = [m for m in made if m is not None]
        return np.concatenate(rows) if sum(map(len, rows)) == self.edges[prompt][step + 1] else None

    def calls(self, place: Place, positions: Array) -> Iterator[tuple[int, slice]]:
        """Yield each call with the rows of it among ``positions``, ascending, of a place's phase."""
        ends = np.searchsorted(positions, self.edges[place.prompt])
        for call, (a, b) in enumerate(pairwise(int(i) for i in ends)):
            if a < b:
                yield call, slice(a, b)

    def places(self) -> Iterator[tuple[Pair, Place]]:
        """Yield every pair with its first place of each phase; a cache is read in decode."""
        for (layer, point), pair in self.pairs.items():
            for phase in (p for p in self.requested.phases if p == "decode" or not POINTS[point].state):
                yield pair, Place(self.requested.prompts[0], phase, self.steps(phase)[0], layer, point)


def view_case(opened: Opened, book: MappedTextbook, case: str) -> Viewed:
    """Return a case of a program's run as its textbook sees it.

    Its policy is what the program announces, or else what its stored formats say, with float32 inside. Calls that are
    not of one row each are one prefill with the first. Keys and values that came before the first row are read with
    those of the rows; where they are not known, nothing that reads keys can be made.
    """
    stored = stored_sequences(opened, book, case)
    ends = [*(at.start for at in stored.calls), stored.calls[-1].stop]
    first, later = _rows_of_calls(stored)
    if later - {1} or 0 in first:
        stored = stored._replace(calls=[slice(stored.calls[0].start, stored.calls[-1].stop)], keyed={}, caches={})
    names = [case if len(stored.sequences) == 1 else f"{case}, row {b}" for b in range(len(stored.sequences))]
    prompts = {
        name: PromptRecord(name, "", (*(0,) * s.earlier.start, *map(int, s.ids[: _of_call(s, stored.calls, 0)[1]])))
        for name, s in zip(names, stored.sequences, strict=True)
    }
    points = tuple(dict.fromkeys(p.point for p in stored.pairs))
    asked = Requested(
        prompts=tuple(names),
        layers=tuple(range(book.config.layers)),
        points=points,
        support=(),
        phases=_phases(first, len(stored.calls)),
        positions=None,
        every_logit=True,
        decode_steps=len(stored.calls) - 1,
        batch=len(names),
        pad="right",
        tokens_from=None,
    )
    announced = opened.record.policy
    policy = announced_policy(announced) if announced is not None else stored_policy(stored)
    record = _record(opened, book, policy, asked)
    run = ViewedRun(opened, record, prompts)
    edges = {n: s.earlier.start + np.searchsorted(s.rows, ends) for n, s in zip(names, stored.sequences, strict=True)}
    pairs = {(p.layer, p.point): p for p in stored.pairs}
    kept = {
        (name, layer, point): x
        for name, s in zip(names, stored.sequences, strict=True)
        for layer, both in s.earlier.kept.items()
        for point, x in zip(CACHES, both, strict=True)
    }
    turned = {name: s.earlier.turned for name, s in zip(names, stored.sequences, strict=True)}
    found = Viewed(run, {}, {}, book.config, pairs=pairs, edges=edges, kept=kept, turned=turned)
    for pair in stored.pairs:
        for place, values, positions in _cut(stored, found, pair):
            _hold(found, run, place, values, positions)
    for (layer, point), pair in list(pairs.items()):
        if POINTS[point].state and (layer, made := POINTS[point].inputs[0]) not in pairs:
            pairs[layer, made] = pair._replace(point=made)
            for place, values, positions in _written(stored, found, pair, made):
                _hold(found, run, place, values, positions)
    return found


def stored_policy(stored: Stored) -> Policy:
    """Return the policy that a program's stored formats say: float32 inside its operations, and float32 sums."""
    formats = {p.point: x.dtype.name for p, x in stored.seen.items()}
    formats |= {p.point: x.dtype.name for p, (x, *_) in stored.keyed.items()}
    stores = (name for point, name in formats.items() if POINTS[point].format == "activations")
    common = next(stores, next(iter(formats.values())))
    base = load_policy("bf16")
    changed = {key: common for key, name in asdict(base).items() if name == "bfloat16"}
    changed |= {POINTS[point].format: name for point, name in formats.items()}
    changed |= {POINTS[p.point].format: x.dtype.name for p, (x, *_) in stored.caches.items()}
    return replace(base, **{k: v for k, v in changed.items() if k != "name"}, name=AS_STORED)


def _rows_of_calls(stored: Stored) -> tuple[set[int], set[int]]:
    """Return how many rows of a sequence the first call holds, and the later ones."""
    first = {_of_call(s, stored.calls, 0)[1] for s in stored.sequences}
    return first, {_of_call(s, stored.calls, c)[1] for s in stored.sequences for c in range(1, len(stored.calls))}


def _phases(first: set[int], calls: int) -> tuple[str, ...]:
    """Return the phases of so many calls, the first of which holds these numbers of rows."""
    if calls > 1 and first == {1}:
        return ("decode",)
    return ("prefill", "decode") if calls > 1 else ("prefill",)


def _of_call(s: Tokens, calls: Sequence[slice], call: int) -> tuple[int, int]:
    """Return which of a sequence's rows a call holds: the first, and how many."""
    a, b = (int(i) for i in np.searchsorted(s.rows, (calls[call].start, calls[call].stop)))
    return a, b - a


def _cut(stored: Stored, found: Viewed, pair: Pair) -> Iterator[tuple[Place, Array, Array]]:
    """Yield (place, values, positions) of a pair, of every sequence and call."""
    row = POINTS[pair.point]
    for b, (name, s) in enumerate(zip(found.requested.prompts, stored.sequences, strict=True)):
        for call in range(len(stored.calls)):
            first, n = _of_call(s, stored.calls, call)
            if not n:  # a row of the batch that is padding throughout
                continue
            phase = "prefill" if call == 0 and "prefill" in found.requested.phases else "decode"
            place = Place(name, phase, call, pair.layer, pair.point)
            positions = s.positions[first : first + n]
            keys = s.earlier.start + first + n
            if row.state:
                if phase == "decode":
                    yield place, stored.caches[pair][call][b, s.lead : s.lead + keys], np.arange(keys)
                continue
            if row.over_keys:
                at = s.rows[first : first + n] - stored.calls[call].start
                yield place, stored.keyed[pair][call][b][:, at, s.lead : s.lead + keys], positions
                continue
            values = stored.seen[pair][b, s.rows[first : first + n]]
            if phase == "prefill" and pair.layer is not None and (name, pair.layer, pair.point) in found.kept:
                before = found.kept[name, pair.layer, pair.point].astype(values.dtype)
                values, positions = np.concatenate([before, values]), np.arange(keys)
            yield place, values, positions


def _written(stored: Stored, found: Viewed, pair: Pair, point: str) -> Iterator[tuple[Place, Array, Array]]:
    """Yield (place, values, positions) of the rows that every call wrote into a cache."""
    for b, (name, s) in enumerate(zip(found.requested.prompts, stored.sequences, strict=True)):
        for call in range(len(stored.calls)):
            first, n = _of_call(s, stored.calls, call)
            phase = "prefill" if call == 0 and "prefill" in found.requested.phases else "decode"
            start = (
                0
                if phase == "prefill" and pair.layer is not None and (name, pair.layer, point) in found.kept
                else (s.earlier.start + first)
            )
            if n:
                at = np.arange(start, s.earlier.start + first + n)
                yield Place(name, phase, call, pair.layer, point), stored.caches[pair][call][b, s.lead + at], at


def _hold(found: Viewed, run: ViewedRun, place: Place, values: Array, positions: Array) -> None:
    key = f"{place.prompt}/{place.phase}/{place.step}/{place.layer}/{place.point}"
    run.arrays[key] = values
    found.index[place] = PointRecord(
        prompt=place.prompt,
        phase=place.phase,
        step=place.step,
        layer=place.layer,
        point=place.point,
        axes=tuple(POINTS[place.point].axes),
        shape=values.shape,
        dtype=values.dtype.name,
        positions=(int(positions[0]), int(positions[-1]) + 1),
        rows="range",
        file="",
        key=key,
        hash="",
        support=False,
        stats=NO_STATS,
    )


def _record(opened: Opened, book: MappedTextbook, policy: Policy, asked: Requested) -> RunRecord:
    of = opened.record
    config: dict[str, Any] = msgspec.to_builtins(book.config)
    model = ModelRecord(id=of.program, reference=of.program, sha256=of.weights, config=config)
    return RunRecord(
        schema=SCHEMA,
        id=of.id,
        model=model,
        policy=asdict(policy),
        requested=asked,
        device=of.device,
        versions=of.versions,
        xla_flags=of.xla_flags,
        commit=of.commit,
        command=of.command,
        started=of.started,
        program="other",
        finished=of.finished,
    )
