"""The records of a selection layer by layer: by several processes where prompts are many and their tensors small.

There it is Python that takes the time, which threads do not share. Each process takes its share of the prompts; the
records and their order are those of one process.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from math import prod
from queue import SimpleQueue
from subprocess import PIPE
from threading import Thread
from typing import BinaryIO, cast

import msgspec
import numpy as np

from precaudit.errors import UserError
from precaudit.models.checkpoints import Checkpoint, open_checkpoint
from precaudit.numbers import threads
from precaudit.progress import Advance, silent
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.comparison.against import place_errors
from precaudit.references.comparison.cache_state import state_errors
from precaudit.references.comparison.selected import selects_sums
from precaudit.references.textbook.handover import POINT
from precaudit.references.textbook.reference import Textbook
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.places import Place
from precaudit.schema.policies import declared_policy
from precaudit.schema.records.comparisons import Selected
from precaudit.schema.records.errors import ErrorRecord

MANY = 4_000  # tensors from which starting processes pays: each costs 1 ms or more
TENSOR = 1000  # elements that take about as long as a tensor takes besides; shares need be equal in the large only
MOST = 0.6  # of all work that one process may have
WEIGHTS = 1 << 30  # bytes of a layer in FP64 that all processes hold
SIZE = 8  # bytes that say how long a message is
RUN = "from precaudit.references.comparison.shares import work; work()"


class ShareResult(msgspec.Struct, frozen=True):
    """What a process made: a prompt's records of a group of points (a layer's, or those after all); or what broke."""

    group: int
    prompt: str
    records: list[ErrorRecord]
    broken: str | None = None


class NotStarted(Exception):
    """No process can be started here."""


DECODER = msgspec.msgpack.Decoder(ShareResult)


@dataclass(frozen=True)
class ProcessShare:
    """What a process is given: a textbook without its model's tensors, and where they are (None: not at hand)."""

    book: Textbook
    selected: Selected
    source: str | None


def open_weights(run: Run, source: str) -> Checkpoint:
    """Return the model of a run from where it lies, as the run's policy holds it."""
    return open_checkpoint(source, run.record.model.allowed).under(declared_policy(run.record))


def layer_errors(book: Textbook, selected: Selected, source: str | None, tell: Advance) -> list[ErrorRecord]:
    """Return local, accum, state and forward records, one layer's tensors in memory at a time.

    ``source``: where the weights lie, for processes that read them themselves.
    """
    parts = divide_prompts(book.recorded, selected)
    share = ProcessShare(book, selected, source)
    try:
        made = list(_one_by_one(book, selected, tell) if len(parts) < 2 else _in_processes(share, parts, tell))
    except NotStarted:
        made = list(_one_by_one(book, selected, tell))
    found = {(m.group, m.prompt): m.records for m in made}
    groups = range(len(selected.layers) + 1)
    return [e for group in groups for prompt in selected.prompts for e in found[group, prompt]]


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


def _one_by_one(book: Textbook, selected: Selected, tell: Advance) -> Iterator[ShareResult]:
    """Yield the records of each prompt, layer by layer."""
    recorded = book.recorded
    caches = [p for p in POINTS if POINTS[p].state and p in {*recorded.requested.points, *recorded.requested.support}]
    groups: list[int | None] = [*selected.layers, None]
    for i, layer in enumerate(groups):
        tell(i, len(groups), "local errors " + ("after the layers" if layer is None else f"of layer {layer}"))
        book.warm(layer)
        for prompt in selected.prompts:
            yield ShareResult(i, prompt, list(_of_prompt(book, selected, caches, prompt, layer)))


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


def _in_processes(share: ProcessShare, parts: list[tuple[str, ...]], tell: Advance) -> Iterator[ShareResult]:
    """Yield what processes make of parts of a share's prompts; raises what one of them raises."""
    total = (len(share.selected.layers) + 1) * len(share.selected.prompts)
    arrived: SimpleQueue[ShareResult | Exception] = SimpleQueue()
    with ExitStack() as stack:
        for prompts in parts:
            stack.enter_context(_process(_cut(share, prompts), arrived))
        for done in range(total):
            tell(done, total, f"local errors, {len(parts)} processes")
            made = arrived.get()
            if isinstance(made, Exception):
                raise made
            yield made


def _cut(share: ProcessShare, prompts: tuple[str, ...]) -> ProcessShare:
    """Return what is needed of some prompts."""
    selected = msgspec.structs.replace(share.selected, prompts=prompts)
    return replace(share, book=share.book.of_prompts(prompts), selected=selected)


@contextmanager
def _process(share: ProcessShare, arrived: "SimpleQueue[ShareResult | Exception]") -> Iterator[None]:
    """Run a process that makes a share, and hand on what it made; it ends with the block.

    It finds modules where this one does (-P: not where it happens to stand).
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    left = (len(share.selected.layers) + 1) * len(share.selected.prompts)
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", RUN], stdin=PIPE, stdout=PIPE, stderr=errors, env=environment
            )
        except OSError as error:
            raise NotStarted from error
        sink, source = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)

        def read_messages(left: int = left) -> None:
            while len(size := source.read(SIZE)) == SIZE:
                message = source.read(n := int.from_bytes(size))
                if len(message) < n:
                    break
                made = DECODER.decode(message)
                arrived.put(made if made.broken is None else UserError(made.broken))
                left -= 1
            if left:
                code = process.wait()
                errors.seek(0)
                text = errors.read().decode(errors="replace")
                arrived.put(RuntimeError(f"a process of compare ended with {code}\n{text}"))

        reader = Thread(target=read_messages, daemon=True)
        reader.start()
        try:
            with suppress(BrokenPipeError), sink:
                pickle.dump(share, sink)
            yield
        finally:
            process.kill()
            process.wait()
            reader.join()
            source.close()


@np.errstate(all="ignore")  # as compare
def work() -> None:
    """Make the share that stands on standard input, and write what is made to standard output: a process's whole life.

    The pickle is the one the parent process wrote.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no message
    share: ProcessShare = pickle.load(sys.stdin.buffer)
    book = share.book
    threads.alone()
    try:
        if share.source is not None:
            book = book.reading(open_weights(book.recorded.run, share.source))
        with threads.one_blas_thread():
            for made in _one_by_one(book, share.selected, silent):
                _write(out, made)
    except UserError as error:
        _write(out, ShareResult(0, "", [], str(error)))
    except BrokenPipeError:
        os._exit(1)  # the parent is gone


def _write(out: BinaryIO, made: ShareResult) -> None:
    message = msgspec.msgpack.encode(made)
    out.write(len(message).to_bytes(SIZE) + message)
    out.flush()
