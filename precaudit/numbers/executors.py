"""Who makes the pieces of a large task: this process with its threads, other processes of this machine, or a cluster.

A function gets what all pieces share and one piece, both of which can be pickled, and returns what can be. Whoever
makes a piece splits rows for as many cores as the process that asked, so that the bits are the same.
"""

import os
import pickle
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from precaudit.errors import UserError
from precaudit.numbers.allocation import peak_memory
from precaudit.numbers.bytes_text import bytes_text
from precaudit.numbers.threads import alone, cores, one_blas_thread
from precaudit.progress import Advance, silent

Work = Callable[[Any, Any, Advance], Any]  # of what is shared, a piece, and what is told of its progress
_here = threading.local()  # what the pieces share that this thread makes: unpickled once


class Executor(Protocol):
    """Makes pieces and returns what they give, in their order."""

    @property
    def peaks(self) -> dict[str, int]:
        """The most resident memory in bytes that each other process has held which made a piece, by its name."""
        ...

    @property
    def slots(self) -> int:
        """How many pieces are made at once."""
        ...

    @property
    def here(self) -> bool:
        """Whether this process makes them, with all of its threads."""
        ...

    def map(
        self, function: Work, shared: Any, pieces: Sequence[Any], tell: Advance = silent, what: str = ""
    ) -> list[Any]:
        """Return ``function(shared, piece, tell)`` of every piece; raises what one of them raises."""
        ...


@dataclass(frozen=True)
class Threads:
    """One piece after another is made in this process."""

    peaks: dict[str, int] = field(default_factory=dict)
    slots, here = 1, True

    def map(
        self,
        function: Work,
        shared: Any,
        pieces: Sequence[Any],
        tell: Advance = silent,
        what: str = "",  # noqa: ARG002 a piece tells of itself
    ) -> list[Any]:
        """Return what the pieces give."""
        return [function(shared, piece, tell) for piece in pieces]


@dataclass(frozen=True)
class Errand:
    """A function and what its pieces share, for another process; for how many cores rows are split; NumPy's state."""

    function: Work
    shared: Any
    cores: int
    errors: Any

    @classmethod
    def pickled(cls, function: Work, shared: Any) -> bytes:
        """Return the errand of this thread, as another process reads it."""
        return pickle.dumps(cls(function, shared, cores(), np.geterr()), pickle.HIGHEST_PROTOCOL)


class Weighed(NamedTuple):
    """What a piece gave, the process that made it, and the most bytes which that has held."""

    result: Any
    process: str
    peak: int

    @classmethod
    def here(cls, result: Any) -> "Weighed":
        """Return a result of this process."""
        return cls(result, f"{platform.node()} {os.getpid()}", peak_memory())

    def note(self, peaks: dict[str, int]) -> Any:
        """Return the result; note what its process held."""
        peaks[self.process] = max(self.peak, peaks.get(self.process, 0))
        return self.result


def make_piece(key: str, errand: bytes, piece: Any) -> Any:
    """Return what a piece gives; ``key``: the name of the errand, which this thread reads once."""
    if getattr(_here, "key", None) != key:
        _here.key, _here.errand = "", None  # one errand is held, not two
        _here.errand = pickle.loads(errand)
        _here.key = key
    mine: Errand = _here.errand
    with alone(mine.cores), one_blas_thread(), np.errstate(**mine.errors):
        return mine.function(mine.shared, piece, silent)


WAVE = 32  # pieces for each slot that are given out before what they gave is taken


def in_waves(executor: Executor, function: Work, shared: Any, pieces: Sequence[Any], tell: Advance) -> Iterator[Any]:
    """Yield what pieces give, in their order; of many only some are in memory at once, of this process's one."""
    size = 1 if executor.here else WAVE * executor.slots
    for first in range(0, len(pieces), size):
        some = pieces[first : first + size]

        def advance(done: int, _total: int, what: str, before: int = first) -> None:
            tell(before + done, len(pieces), what)

        yield from executor.map(function, shared, some, advance, "pieces")


@contextmanager
def executor(jobs: int = 1, scheduler: str | None = None, memory: int | None = None) -> Iterator[Executor]:
    """Yield what makes pieces: ``jobs`` processes of this machine, or the cluster whose scheduler is at an address.

    ``memory``: the most bytes that each of several processes may hold.
    """
    if memory is not None:
        _check_memory(jobs, scheduler, memory)
    if scheduler is not None:
        if jobs > 1:
            raise UserError("--scheduler takes the workers that are there; leave out --jobs")
        from precaudit.numbers.cluster import open_cluster

        with open_cluster(scheduler) as cluster:
            yield cluster
    elif jobs > 1:
        from precaudit.numbers.processes import Processes

        processes = Processes(jobs, memory)
        try:
            yield processes
        finally:
            processes.close()
    else:
        yield Threads()


def _check_memory(jobs: int, scheduler: str | None, memory: int) -> None:
    """Raise UserError where processes of so much memory each cannot be had."""
    if scheduler is not None:
        raise UserError("--memory is for --jobs; a cluster's workers have their own: dask worker --memory-limit 4GB")
    if jobs < 2:
        raise UserError("--memory is what each process of --jobs may hold; give --jobs 2 or more")
    if not peak_memory(os.getpid()):
        raise UserError("--memory: this system does not say how much memory another process holds; leave it out")
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if jobs * memory > whole:
        raise UserError(
            f"--jobs {jobs} processes of --memory {bytes_text(memory)} are more than the {bytes_text(whole)} of this "
            "machine; give fewer, or less"
        )
