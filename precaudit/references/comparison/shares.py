"""The records of a selection as pieces, of a layer and some prompts: by threads, by processes, or by a cluster.

Where prompts are many and their tensors small it is Python that takes the time, which threads do not share: there
processes of this machine make the pieces unless another executor is asked for. The records and their order are those
of one process.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import msgspec

from precaudit.models.checkpoints import Checkpoint, open_checkpoint
from precaudit.numbers import threads
from precaudit.numbers.executors import Executor, executor
from precaudit.progress import Advance
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.comparison.against import place_errors
from precaudit.references.comparison.cache_state import state_errors
from precaudit.references.comparison.selected import selects_sums
from precaudit.references.textbook.handover import POINT
from precaudit.references.textbook.pieces import Execution
from precaudit.references.textbook.reference import Textbook
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.places import Place
from precaudit.schema.policies import declared_policy
from precaudit.schema.records.comparisons import Selected
from precaudit.schema.records.errors import ErrorRecord

MANY = 4_000  # tensors from which starting processes pays: each costs 1 ms or more
TENSOR = 1000  # elements that take about as long as a tensor takes besides; shares need be equal in the large only
MOST = 0.6  # of all work that one process may have
WEIGHTS = 1 << 30  # bytes of a layer in FP64 that all processes hold where nobody asked for them
PIECES = 3  # for each slot: where one is slow, or dies, others have not long to wait


class PromptRecords(msgspec.Struct, frozen=True):
    """A prompt's records of a group of points: a layer's, or those after all layers."""

    group: int
    prompt: str
    records: list[ErrorRecord]


class LocalPiece(NamedTuple):
    """Groups of points, counted by layer (the last: those after all layers), and prompts."""

    groups: range
    prompts: tuple[str, ...]

    @property
    def text(self) -> str:
        """What it is of, in words."""
        groups = ", ".join(str(i) for i in self.groups)
        return f"points of layer {groups} (after the last: the output), {', '.join(self.prompts[:3])}"


@dataclass(frozen=True)
class LocalPieces:
    """What pieces share: the reference, and what is selected."""

    book: Textbook
    selected: Selected


def open_weights(run: Run, source: str) -> Checkpoint:
    """Return the model of a run from where it lies, as the run's policy holds it."""
    return open_checkpoint(source, run.record.model.allowed).under(declared_policy(run.record))


def layer_errors(book: Textbook, selected: Selected, execution: Execution) -> list[ErrorRecord]:
    """Return local, accum, state and forward records, in each process one layer's tensors in memory at a time."""
    parts = divide_prompts(book.recorded, selected)
    if not execution.executor.here or len(parts) < 2:
        made = _made_by(execution.executor, book, selected, execution.tell)
    else:
        with executor(len(parts)) as processes:
            made = _made_by(processes, book, selected, execution.tell, parts)
    found = {(m.group, m.prompt): m.records for m in made}
    groups = range(len(selected.layers) + 1)
    return [e for group in groups for prompt in selected.prompts for e in found[group, prompt]]


def _made_by(
    executor: Executor,
    book: Textbook,
    selected: Selected,
    tell: Advance,
    parts: list[tuple[str, ...]] | None = None,
) -> list[PromptRecords]:
    """Return what pieces give; ``parts``: which prompts go together."""
    pieces = [LocalPiece(range(len(selected.layers) + 1), selected.prompts)]
    pieces = pieces if executor.here else divide_locals(selected, executor.slots, parts)
    shared = LocalPieces(book if executor.here else book.of_prompts(selected.prompts), selected)
    return [m for made in executor.map(make_records, shared, pieces, tell, "local errors") for m in made]


def divide_locals(selected: Selected, slots: int, parts: list[tuple[str, ...]] | None = None) -> list[LocalPiece]:
    """Return pieces of a layer each, of some prompts where layers alone are too few."""
    groups = len(selected.layers) + 1
    if parts is None:
        n = min(len(selected.prompts), -(-PIECES * slots // groups))
        parts = [selected.prompts[i::n] for i in range(n)]
    return [LocalPiece(range(i, i + 1), prompts) for i, prompts in product(range(groups), parts)]


def divide_prompts(recorded: Recorded, selected: Selected) -> list[tuple[str, ...]]:
    """Return which prompts go together, in as many processes as are worth starting: of equal work, one a core.

    All go together where tensors are few or large, or most of the work is one prompt's: threads share that better.
    """
    config, together = recorded.config, [selected.prompts]
    chosen = [p for p in recorded.run.points if p.prompt in selected.prompts and p.layer in (None, *selected.layers)]
    if len(chosen) < MANY or sum(prod(p.shape) for p in chosen) > threads.INLINE * len(chosen) or not sys.executable:
        return together
    work = dict.fromkeys(selected.prompts, 0)
    for p in chosen:
        work[p.prompt] += TENSOR + prod(p.shape)
    n = min(threads.WORKERS, len(work), WEIGHTS * config.layers // (8 * config.parameters))
    if n < 2:
        return together
    loads, where = [0] * n, {}
    for prompt in sorted(work, key=lambda p: -work[p]):
        where[prompt] = least = loads.index(min(loads))
        loads[least] += work[prompt]
    if max(loads) > MOST * sum(loads):
        return together
    return [tuple(p for p in selected.prompts if where[p] == i) for i in range(n)]


def make_records(shared: LocalPieces, piece: LocalPiece, tell: Advance) -> list[PromptRecords]:
    """Return the records of a piece, layer by layer."""
    return list(_one_by_one(shared.book, shared.selected, piece, tell))


def _one_by_one(book: Textbook, selected: Selected, piece: LocalPiece, tell: Advance) -> Iterator[PromptRecords]:
    """Yield the records of each prompt."""
    recorded = book.recorded
    caches = [p for p in POINTS if POINTS[p].state and p in {*recorded.requested.points, *recorded.requested.support}]
    groups: list[int | None] = [*selected.layers, None]
    for i in piece.groups:
        layer = groups[i]
        tell(i, len(groups), "local errors " + ("after the layers" if layer is None else f"of layer {layer}"))
        book.warm(layer)
        for prompt in piece.prompts:
            yield PromptRecords(i, prompt, list(_of_prompt(book, selected, caches, prompt, layer)))


def _of_prompt(
    book: Textbook, selected: Selected, caches: list[str], prompt: str, layer: int | None
) -> Iterator[ErrorRecord]:
    for phase in selected.phases:
        for point in selected.points:
            if POINTS[point].per_layer == (layer is not None) and not POINTS[point].state:
                yield from place_errors(book, [Place(prompt, phase, 0, layer, point)])
        if layer is not None and POINT in selected.points:
            yield from book.handover_records(Place(prompt, phase, 0, layer, POINT))
        if selects_sums(book.recorded.requested, selected.points):
            yield from book.sums(prompt, phase, layer)
        if phase == "decode" and layer is not None:
            for cache in caches:
                yield from state_errors(book.recorded, Place(prompt, phase, 0, layer, cache))
